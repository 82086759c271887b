"""Tests that the wrong sign of one pre-activation near zero is detected and corrected."""

from dataclasses import replace

import pytest
import torch
from generators import seed_default
from torch import Tensor, nn

from attacker.attacks.closed_form.rgap.recursion import (
    DEFAULT_RGAP,
    PAPER_RGAP,
    Point,
    build_equations,
    solve_last_layer,
    solve_layer,
    solve_layers,
)
from attacker.attacks.closed_form.rgap.signs import compute_root_mean_square, find_doubtful_signs, flip_outputs
from attacker.attacks.networks.activations import RELU, leaky_relu
from attacker.attacks.networks.chain import read_chain
from fedsim.models import find_loss

F64 = torch.float64
Tensors = dict[str, Tensor]


class Seen:
    """A network with many surplus equations, two examples, and their gradients."""

    def __init__(self, slope: float = 0.2, noise: float = 0.0) -> None:
        with seed_default(3):
            model = nn.Sequential(
                nn.Conv2d(2, 8, 3, stride=2, padding=1),
                nn.LeakyReLU(slope),
                nn.Conv2d(8, 10, 3, padding=1),
                nn.LeakyReLU(slope),
                nn.Flatten(),
                nn.Linear(160, 3),
            ).double()
        rng = torch.Generator().manual_seed(5)
        self.x, self.chain = torch.rand(2, 2, 8, 8, generator=rng, dtype=F64), read_chain(model, (2, 8, 8))
        self.weights = {name: p.detach()[None] for name, p in model.named_parameters()}
        losses = [find_loss("cross_entropy")(model(x[None]), torch.tensor([1])) for x in self.x]
        grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        exact = {name: torch.stack([g[i] for g in grads]) for i, name in enumerate(self.weights)}
        self.gradient = {
            name: g + noise * g.square().mean().sqrt() * torch.randn(g.shape, generator=rng, dtype=F64)
            for name, g in exact.items()
        }
        self.outputs = model[3](model[2](model[1](model[0](self.x)))).detach()

    def start(self) -> Point:
        return solve_last_layer(self.chain, self.weights, self.gradient, "cross_entropy")[0]

    def spoilt(self, at: tuple[int, ...]) -> Point:
        """Return a state of R-GAP in which one value of the first example has the wrong sign."""
        point = self.start()
        f = point.f.reshape(self.outputs.shape).clone()
        f[at] = -1e-9 * f[at].sign()
        return replace(point, f=f)

    def nearest(self) -> tuple[int, ...]:
        """Return the index of the first example's value that is nearest to zero."""
        place = int(self.outputs[0].abs().argmin())
        return (0, *(int(i) for i in torch.unravel_index(torch.tensor(place), self.outputs.shape[1:])))


def measure_error(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().flatten(1).mean(dim=1)


def test_flipping_negates_the_pre_activation_and_undoes_itself() -> None:
    f = torch.tensor([[2.0, -0.4, 1e-3, -1e-3]], dtype=F64)
    leaky = leaky_relu(0.2)
    other = flip_outputs(leaky, f)
    assert torch.allclose(leaky.inverse(other), -leaky.inverse(f))
    assert torch.allclose(flip_outputs(leaky, other), f)


def test_flipping_a_relu_output_gives_zero_or_a_tiny_value() -> None:
    f = torch.tensor([[2.0, 0.0, 1e-3, 0.0]], dtype=F64)
    other = flip_outputs(RELU, f)
    assert torch.equal(other[0, [0, 2]], torch.zeros(2, dtype=F64))
    assert ((other[0, [1, 3]] > 0) & (other[0, [1, 3]] < 1e-6)).all()


def test_root_mean_square_is_computed_per_problem() -> None:
    f = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert torch.allclose(compute_root_mean_square(f), torch.tensor([[12.5**0.5], [2**0.5]]))


def test_wrong_sign_is_found_among_all_values() -> None:
    s = Seen()
    point = s.spoilt(s.nearest())
    system, target = build_equations(s.chain, s.weights, s.gradient, point)
    x = solve_layer(s.chain, s.weights, s.gradient, point, replace(DEFAULT_RGAP, mended=False)).f
    f, below = (t.reshape(s.outputs.shape) for t in (point.f, point.gradient))
    every = torch.ones_like(f, dtype=torch.bool)
    assert find_doubtful_signs(system, target, x, f, below, every)[:1].nonzero().tolist() == [list(s.nearest())]
    assert not find_doubtful_signs(system, target, x, f, below, ~every).any()
    spared = every.clone()
    spared[s.nearest()] = False
    assert not find_doubtful_signs(system, target, x, f, below, spared)[s.nearest()]


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_one_wrong_sign_is_corrected(noise: float) -> None:
    s = Seen(noise=noise)
    spoilt = s.spoilt(s.nearest())
    whole = solve_layers(s.chain, s.weights, s.gradient, s.start())
    mended = solve_layers(s.chain, s.weights, s.gradient, spoilt)
    left = solve_layers(s.chain, s.weights, s.gradient, spoilt, replace(DEFAULT_RGAP, mended=False))
    assert measure_error(left.f, s.x)[0] > 1e4 * measure_error(whole.f, s.x)[0]
    moved = s.outputs[s.nearest()].square()  # more than its sign was changed
    assert measure_error(mended.f, s.x)[0] < 10 * measure_error(whole.f, s.x)[0] + moved
    assert torch.allclose(mended.f[1], whole.f[1], atol=1e-8)  # its signs were right
    assert mended.residual[0] < 1e-2 * left.residual[0]


def test_paper_mode_does_not_correct_signs() -> None:
    s = Seen()
    point = s.spoilt(s.nearest())
    paper = solve_layer(s.chain, s.weights, s.gradient, point, PAPER_RGAP)
    assert paper.residual[0] > 1e-5


def test_correcting_signs_does_not_increase_the_error_with_noise() -> None:
    s = Seen(noise=1e-3)
    mended, left = (
        solve_layers(s.chain, s.weights, s.gradient, s.start(), rgap)
        for rgap in (DEFAULT_RGAP, replace(DEFAULT_RGAP, mended=False))
    )
    assert (measure_error(mended.f, s.x) <= measure_error(left.f, s.x) * 1.01).all()

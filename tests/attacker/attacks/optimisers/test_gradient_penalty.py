"""Tests of the optimiser that penalises the norm of the loss's gradient."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import SGD, Adam
from attacker.attacks.optimisers.gradient_penalty import GradientPenalty
from attacker.attacks.optimisers.lbfgs import LBFGS

CURVATURE = torch.tensor([[1.0, 4.0], [0.5, 3.0]], dtype=torch.float64)


def evaluate(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient and value of the sum of c z^2 / 2, with other curvatures c for each row."""
    return CURVATURE[: len(z)] * z, 0.5 * (CURVATURE[: len(z)] * z.square()).sum(dim=1)


def test_the_step_follows_the_gradient_of_the_penalised_loss() -> None:
    """The reference differentiates L + weight * r * |dL/dz| by autograd; for a quadratic L, the approximation errs by O(r^2)."""
    z, distance, weight, rate = torch.tensor([[1.0, -2.0], [0.3, 0.7]], dtype=torch.float64), 1e-5, 0.8, 1e5
    stepper = GradientPenalty(inner=SGD(learning_rate=rate, momentum=0.0), weight=weight, distance=distance).start()
    up = stepper.step(z, *evaluate(z), 0.0)
    moved = stepper.step(up, *evaluate(up), 0.0)
    leaf = z.clone().requires_grad_()
    slope = CURVATURE * leaf
    (penalty,) = torch.autograd.grad(slope.norm(dim=1).sum(), leaf)
    length = distance * 2**0.5
    torch.testing.assert_close((z - moved) / rate, slope.detach() + weight * length * penalty, rtol=0, atol=1e-9)
    assert float((penalty.abs() * length).min()) > 1e-7
    torch.testing.assert_close(up - z, length * torch.nn.functional.normalize(slope.detach(), dim=1))


def test_a_stepper_resumes_between_both_evaluations_and_drops_rows() -> None:
    settings, z = GradientPenalty(inner=Adam(), weight=0.5, distance=0.1), torch.ones(2, 2, dtype=torch.float64)
    first = settings.start()
    z = first.step(first.step(z, *evaluate(z), 0.0), *evaluate(z), 0.0)
    up = first.step(z, *evaluate(z), 0.0)
    again = settings.start()
    again.load(first.get_state())
    whole = first.step(up, *evaluate(up), 0.0)
    again.keep(torch.tensor([0]))
    gradient, loss = evaluate(up)
    torch.testing.assert_close(again.step(up[:1], gradient[:1], loss[:1], 0.0), whole[:1])
    assert not set(first.get_state()) & {"from", "slope", "height"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"weight": 0.0, "distance": 1.0}, "weight .* got 0.0"),
        ({"weight": 1.5, "distance": 1.0}, "weight .* got 1.5"),
        ({"weight": 0.5, "distance": 0.0}, "distance .* got 0.0"),
        ({"inner": LBFGS(), "weight": 0.5, "distance": 1.0}, "once per iteration, such as Adam, got LBFGS"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradientPenalty(**{"inner": Adam(), **arguments})

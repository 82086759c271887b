"""Tests that explicit gradient formulas and their vector-Jacobian products agree with autograd for each problem."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from observations import observe_steps
from torch import Tensor, nn

from attacker.attacks import Case, cpl
from attacker.attacks.gradients import adjoints as written_out
from attacker.attacks.gradients.adjoints import Adjoints, build_adjoints
from attacker.attacks.gradients.convolutions import is_small
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.layer_weights import weigh_by_depth
from attacker.attacks.matching.loss.view import View
from attacker.attacks.matching.objectives import absolute, cosine, euclidean
from attacker.attacks.networks.activations import TANH
from attacker.attacks.networks.chain import Chain
from attacker.attacks.optimisers.first_order import SGD
from attacker.attacks.simulation.gradients import build_gradient
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

Weights = dict[str, Tensor]
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "sigmoid": ("lenet_dlg", {}, (3, 9, 14), 4),
    "tanh": ("lenet_dlg", {"activation": "tanh", "channels": 5}, (2, 7, 8), 3),
    "relu": ("lenet_cpl", {"activation": "relu"}, (1, 8, 8), 3),
    "leaky relu": ("lenet_cpl", {"activation": "leaky_relu"}, (3, 9, 8), 2),
    "without images": ("mlp", {"hidden": [5, 4]}, (7,), 3),
    "logistic": ("cnn6", {}, (3, 8, 8), 2),
}


def build_model(name: str) -> tuple[nn.Module, DataSpec, str, Weights]:
    """Return a model with its data, its loss, and weights in double precision."""
    kind, arguments, shape, classes = NETWORKS[name]
    loss = "logistic" if name == "logistic" else "cross_entropy"
    data = DataSpec(shape=shape, num_classes=classes, mean=(0.4,), std=(0.5,))
    model = models.build(ModelSpec(name=kind, arguments=arguments), data).eval()
    return model, data, loss, {name: p.detach().double() for name, p in model.named_parameters()}


def draw_candidates(data: DataSpec, count: int, soft: bool, problems: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(4)
    x = torch.rand(problems, count, *data.shape, generator=rng, dtype=torch.double)
    if soft:
        return x, torch.rand(problems, count, data.num_classes, generator=rng, dtype=torch.double).softmax(dim=-1)
    return x, torch.randint(data.num_classes, (problems, count), generator=rng)


def build_written(model: nn.Module, data: DataSpec, loss: str, weights: Weights) -> Adjoints:
    found = build_adjoints(model, data, loss, weights)
    assert found is not None
    return found


def compute_by_autograd(
    model: nn.Module, data: DataSpec, loss: str, weights: Weights, x: Tensor, y: Tensor, v: Callable[[str, int], Tensor]
) -> tuple[list[Weights], list[Tensor]]:
    """Compute by autograd the gradient of each problem, and the derivatives by x and soft y of its product with v."""
    gradients, slopes = [], []
    for i, problem in enumerate(zip(x, y, strict=True)):
        searched = [t.clone().requires_grad_() for t in problem if t.is_floating_point()]
        found = build_gradient(model, data, loss)(weights, searched[0], searched[1] if len(searched) > 1 else problem[1])
        product = torch.stack([(g * v(name, i)).sum() for name, g in found.items()]).sum()
        slopes.append(torch.autograd.grad(product, searched))
        gradients.append({name: g.detach() for name, g in found.items()})
    return gradients, [torch.stack(s) for s in zip(*slopes, strict=True)]


def agree(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).norm() <= 1e-11 * theirs.norm())


@pytest.mark.parametrize(("count", "soft"), [(1, False), (3, True)])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_vector_jacobian_products_agree_with_autograd(name: str, count: int, soft: bool) -> None:
    model, data, loss, weights = build_model(name)
    x, y = draw_candidates(data, count, soft)
    rng = torch.Generator().manual_seed(5)
    v = {key: torch.randn(len(x), *w.shape, generator=rng, dtype=torch.double) for key, w in weights.items()}
    expected, slopes = compute_by_autograd(model, data, loss, weights, x, y, lambda key, i: v[key][i])
    ours = build_written(model, data, loss, weights)
    found, back = ours(data.normalise(x), y)
    for i, one in enumerate(expected):
        shaped = ours.restore_shapes({key: g[i] for key, g in found.items()})
        assert set(shaped) == set(weights)
        assert all(agree(shaped[key], one[key]) for key in weights)
    rows = [ours.lay_out({key: t[i] for key, t in v.items()}) for i in range(len(x))]
    of_x, *of_y = back({key: torch.stack([row[key] for row in rows]) for key in weights})
    assert agree(of_x, slopes[0] * 0.5)  # by the network's input, which is (x - 0.4) / 0.5
    assert len(of_y) == soft
    assert all(agree(*pair) for pair in zip(of_y, slopes[1:], strict=True))


def test_memory_layout_of_gradients_is_undone_by_restoring_shapes() -> None:
    ours, rng = build_written(*build_model("sigmoid")), torch.Generator().manual_seed(0)
    gradient = {name: torch.rand(w.shape, generator=rng) for name, w in build_model("sigmoid")[3].items()}
    assert ours.lay_out(gradient)["0.weight"].shape == (12, 5, 5, 3)
    again = ours.restore_shapes(ours.lay_out(gradient))
    assert all(torch.equal(again[name], g) for name, g in gradient.items())


class Idle(nn.Module):
    """A model with a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused = nn.Linear(6, 3), nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def test_unused_parameter_has_a_gradient_of_zeros() -> None:
    model = Idle().eval()
    found, _ = build_written(model, DataSpec(shape=(6,), num_classes=3), "cross_entropy", dict(model.state_dict()))(
        torch.rand(2, 1, 6), torch.tensor([[0], [1]])
    )
    assert torch.equal(found["unused"], torch.zeros(2, 2, 2))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("resnet20_4", {}), ("lenet_dlg", {"pooling": "max"}), ("lenet_dlg", {"pooling": "mean"}), ("vgg7", {})],
)
def test_unsupported_networks_have_no_explicit_gradient(name: str, arguments: dict[str, Any]) -> None:
    data = DataSpec(shape=(3, 32, 32), num_classes=10)
    model = models.build(ModelSpec(name=name, arguments=arguments), data).eval()
    assert build_adjoints(model, data, "cross_entropy", dict(model.named_parameters())) is None


def test_convolution_is_small_below_a_number_of_multiplications() -> None:
    assert is_small((12, 12, 5, 5), (12, 32, 32))
    assert not is_small((64, 64, 3, 3), (64, 32, 32))


def attack_of(**settings: Any) -> GradientMatching:
    return cpl(init="uniform").copy_with(optimiser=SGD(learning_rate=0.01, momentum=0.5), steps=3, **settings)


@pytest.fixture
def explicit_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make `torch.compile` return its argument, and count the evaluations of explicit formulas."""
    times: list[int] = []
    whole: Callable[[View], Adjoints | None] = vars(View)["written"].func

    def noted(view: View) -> Adjoints | None:
        found = whole(view)
        times.append(found is not None)
        return found

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(View, "written", property(noted))
    return times


@pytest.mark.parametrize(
    ("settings", "defense", "steps"),
    [
        ({"distance": euclidean}, "", 1),
        ({"distance": cosine, "layers": weigh_by_depth(5.0)}, "", 2),
        ({"distance": absolute, "rule": None}, "prune(0.3)", 1),
        ({"distance": euclidean, "robust": 0.1, "rule": None}, "", 2),
    ],
    ids=["one example", "weighed layers", "a defense and soft labels", "a robust loss of two steps"],
)
def test_compiled_search_agrees_with_the_plain_one(
    settings: dict[str, Any], defense: str, steps: int, explicit_evaluations: list[int]
) -> None:
    data, model = DataSpec(shape=(1, 8, 8), num_classes=3), ModelSpec(name="lenet_dlg")
    rng = torch.Generator().manual_seed(0)
    cases = []
    for i in range(2):
        batches = [(torch.rand(2, 1, 8, 8, generator=rng), torch.tensor([i, 2])) for _ in range(steps)]
        cases.append(Case((observe_steps(*batches, model=model, data=data, defense=defense, client=f"c{i}"),)))
    attack = attack_of(**settings)
    found = attack(cases, rng=torch.Generator().manual_seed(1))
    assert not explicit_evaluations
    again = attack.copy_with(compiled=True)(cases, rng=torch.Generator().manual_seed(1))
    assert explicit_evaluations
    assert all(explicit_evaluations)
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one.x, other.x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-4, atol=1e-6)
        assert not torch.equal(one.loss[0], one.loss[-1])


def test_explicit_gradient_that_disagrees_with_autograd_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explicit gradients and their derivatives are compared with PyTorch once per network."""
    data = DataSpec(shape=(5,), num_classes=3)

    def found() -> Adjoints | None:
        model = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)).eval()
        return build_adjoints(model, data, "cross_entropy", {name: p.detach() for name, p in model.named_parameters()})

    assert found() is not None
    own = written_out.read_chain

    def misread(model: nn.Module, shape: tuple[int, ...]) -> Chain:
        first, *others = own(model, shape).layers
        return Chain((replace(first, activation=TANH), *others))

    monkeypatch.setattr(written_out, "read_chain", misread)
    assert found() is None
    assert "so autograd is used" in caplog.text

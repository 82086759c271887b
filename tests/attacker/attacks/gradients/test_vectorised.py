"""Tests that batched gradients of many problems, and their derivatives, equal those of each problem alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks.gradients.convolutions import (
    ConvolutionSetting,
    Geometry,
    compute_weight_gradients,
    convolve,
    convolve_by_library,
    to_channels_last,
)
from attacker.attacks.gradients.layer_gradients import compute_convolution_weight_gradients
from attacker.attacks.gradients.vectorised import PerProblem, StackedGradients, build_per_problem, join_problems, split_problems
from attacker.attacks.simulation.gradients import build_gradient
from defenses.rules import Weights
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "lenet_dlg": ({}, (3, 9, 14), 4),
    "lenet_cpl": ({}, (1, 8, 8), 3),
    "mlp": ({"hidden": [5, 4]}, (7,), 3),
    "cnn6": ({}, (3, 8, 8), 2),
    "resnet20_4": ({}, (3, 8, 8), 10),
    "torchvision": ({"architecture": "shufflenet_v2_x0_5"}, (3, 32, 32), 3),
}


def build_model(name: str, arguments: dict[str, Any], shape: tuple[int, ...], classes: int) -> tuple[nn.Module, DataSpec, str]:
    """Return the model, its data and its loss."""
    channels = shape[0] if len(shape) == 3 else 1
    data = DataSpec(shape=shape, num_classes=classes, mean=(0.4,) * channels, std=(0.5,) * channels)
    model = models.build(ModelSpec(name=name, arguments=arguments), data).eval()
    return model, data, "logistic" if classes == 2 else "cross_entropy"


def convert_to_double(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and buffers in double precision; the buffers differ from those of a new model."""
    rng = torch.Generator().manual_seed(3)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    buffers = {name: b.double() + torch.rand(b.shape, generator=rng) for name, b in model.named_buffers() if b.ndim}
    return weights, buffers


def draw_candidates(data: DataSpec, count: int, soft: bool, problems: int = 2) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(4)
    x = torch.rand(problems, count, *data.shape, generator=rng, dtype=torch.double).requires_grad_()
    if soft:
        y = torch.rand(problems, count, data.num_classes, generator=rng, dtype=torch.double).softmax(dim=-1)
        return x, y.detach().requires_grad_()
    return x, torch.randint(data.num_classes, (problems, count), generator=rng)


def build_batched(model: nn.Module, data: DataSpec, loss: str = "cross_entropy") -> PerProblem:
    gradients = build_per_problem(model, data, loss)
    assert gradients is not None
    return gradients


def compute_one_by_one(
    model: nn.Module, data: DataSpec, loss: str, weights: Weights, x: Tensor, y: Tensor, buffers: Weights
) -> dict[str, Tensor]:
    each = [build_gradient(model, data, loss)(weights, *problem, buffers) for problem in zip(x, y, strict=True)]
    return {name: torch.stack([g[name] for g in each]) for name in weights}


def stack_problems(gradients: StackedGradients) -> dict[str, Tensor]:
    return {name: torch.stack(g) if isinstance(g, tuple) else g for name, g in gradients.items()}


def agree(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).norm() <= 1e-11 * theirs.norm())


def assert_agreement(model: nn.Module, data: DataSpec, loss: str, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the batched gradients, and assert that they and a distance's slopes by x, and soft y, are those of each problem."""
    weights, buffers = convert_to_double(model)
    theirs = compute_one_by_one(model, data, loss, weights, x, y, buffers)
    ours = stack_problems(build_batched(model, data, loss)(weights, x, y, buffers))
    assert set(ours) == set(weights)
    assert all(agree(ours[key], theirs[key]) for key in weights)
    aims = {key: torch.linspace(-1, 1, w.numel(), dtype=torch.double).reshape(w.shape) for key, w in weights.items()}
    searched = [x, y] if y.is_floating_point() else [x]
    slopes = [
        torch.autograd.grad(torch.stack([(found[key] - aims[key]).square().sum() for key in aims]).sum(), searched)
        for found in (ours, theirs)
    ]
    assert all(agree(*pair) for pair in zip(*slopes, strict=True))
    return ours


@pytest.mark.parametrize(("count", "soft"), [(1, False), (3, True)])
@pytest.mark.parametrize("name", NETWORKS)
def test_batched_gradients_and_derivatives_agree_with_single_problems(name: str, count: int, soft: bool) -> None:
    model, data, loss = build_model(name, *NETWORKS[name])
    assert_agreement(model, data, loss, *draw_candidates(data, count, soft))


@pytest.mark.parametrize("problems", [1, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((5, 5), 2, (2, 2)), ((3, 4), 3, (1, 0)), ((4, 1), 1, (3, 0)), ((1, 2), 2, (0, 1))]
)
def test_small_convolutions_and_their_derivatives_agree_with_torch(
    problems: int, kernel: tuple[int, int], stride: int, padding: tuple[int, int]
) -> None:
    rng = torch.Generator().manual_seed(0)
    geometry = Geometry(kernel, stride, padding, (7, 10))
    x = torch.randn(problems * 2, 3, 7, 10, generator=rng, dtype=torch.double).requires_grad_()
    weight = torch.randn(4, 3, *kernel, generator=rng, dtype=torch.double)
    output = convolve(x, weight, geometry)
    assert torch.allclose(output, functional.conv2d(x, weight, stride=stride, padding=padding))
    assert torch.autograd.gradcheck(lambda x: convolve(x, weight, geometry), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: convolve(x, weight, geometry), x, fast_mode=True)
    g = torch.randn(output.shape, generator=rng, dtype=torch.double).requires_grad_()
    found = compute_weight_gradients(x, g, problems, geometry)
    other = compute_convolution_weight_gradients(x, g, problems, kernel, (stride, stride), padding, (1, 1), 1)
    each = [torch.nn.grad.conv2d_weight(i, weight.shape, o, stride, padding) for i, o in zip(x.split(2), g.split(2), strict=True)]
    assert torch.allclose(found, torch.stack(each))
    assert torch.allclose(torch.stack(list(other)), torch.stack(each))
    assert torch.autograd.gradcheck(lambda x, g: compute_weight_gradients(x, g, problems, geometry), (x, g), fast_mode=True)


@pytest.mark.parametrize("setting", [((2, 1), (1, 0), (1, 2), 2), ((1, 1), (2, 1), (1, 1), 1), ((3, 3), (0, 1), (2, 1), 4)])
def test_library_convolution_has_derivatives_by_images_only(setting: ConvolutionSetting) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 7, 8, generator=rng, dtype=torch.double).requires_grad_()
    weight = torch.randn(4, 4 // setting[-1], 3, 2, generator=rng, dtype=torch.double).requires_grad_()
    output = convolve_by_library(x, weight, setting)
    assert torch.equal(output, functional.conv2d(x, weight, None, *setting))
    assert torch.autograd.grad(output.sum(), weight, allow_unused=True) == (None,)
    assert torch.autograd.gradcheck(lambda x: convolve_by_library(x, weight, setting), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: convolve_by_library(x, weight, setting), x, fast_mode=True)


def test_weight_gradients_of_grouped_and_dilated_convolutions() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4, 7, 6, generator=rng, dtype=torch.double).requires_grad_()
    g = torch.randn(4, 6, 4, 4, generator=rng, dtype=torch.double).requires_grad_()
    setting = ((3, 2), (2, 1), (1, 0), (1, 2), 2)
    each = [torch.nn.grad.conv2d_weight(i, (6, 2, 3, 2), o, *setting[1:]) for i, o in zip(x.split(2), g.split(2), strict=True)]
    assert torch.allclose(torch.stack(list(compute_convolution_weight_gradients(x, g, 2, *setting))), torch.stack(each))
    assert torch.autograd.gradcheck(lambda x, g: compute_convolution_weight_gradients(x, g, 2, *setting), (x, g), fast_mode=True)


@pytest.mark.parametrize(("name", "arguments"), [("torchvision", {"architecture": "resnet18"}), ("vgg7", {})])
def test_wide_networks_are_supported(name: str, arguments: dict[str, Any]) -> None:
    model, data, loss = build_model(name, arguments, (3, 8, 8), 3)
    assert build_per_problem(model, data, loss) is not None  # the function compares batched with plain gradients


class Twice(nn.Module):
    """A network with a layer used twice, an unused layer, in-place activations, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again = nn.Conv2d(1, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1)
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu_(self.stem(x))
        y = self.again(functional.relu_(self.again(x)))
        y += x
        return self.head(torch.tanh_(y).mean(dim=(2, 3)))


class Mixed(nn.Module):
    """A network with an operation `kind` for which batched gradients are not supported; another `kind` leaves it out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(36, 3)
        self.norm = {"layer norm": nn.LayerNorm(36), "batch norm": nn.BatchNorm1d(36, track_running_stats=False)}.get(kind)
        self.scale = nn.Parameter(torch.full((36,), 2.0)) if kind == "parameter" else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        x = x if self.norm is None else self.norm(x)
        x = x if self.scale is None else x * self.scale
        x = x - x.mean(dim=0) if self.kind == "batch" else x
        logits: Tensor = functional.linear(x, 2 * self.head.weight) if self.kind == "weight" else self.head(x)
        return logits


def test_gradients_of_a_layer_used_twice_add_up() -> None:
    data = DataSpec(shape=(1, 6, 6), num_classes=3)
    ours = assert_agreement(Twice(), data, "cross_entropy", *draw_candidates(data, 2, soft=False))
    assert not ours["unused.weight"].any()


@pytest.mark.parametrize("kind", ["layer norm", "batch norm", "parameter", "batch", "weight", "nothing"])
def test_only_models_that_do_not_mix_problems_are_supported(kind: str) -> None:
    built = build_per_problem(Mixed(kind).eval(), DataSpec(shape=(1, 6, 6), num_classes=3), "cross_entropy")
    assert (built is None) == (kind != "nothing")


class Counted(Mixed):
    """A network that reads a number off its input, which `vmap` does not allow, and counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x / x.detach().max().item())


@pytest.mark.parametrize("soft", [False, True])
def test_a_model_that_vmap_cannot_map_is_called_once_per_problem(soft: bool) -> None:
    data = DataSpec(shape=(1, 6, 6), num_classes=3)
    model = Counted("layer norm").eval()
    weights, _ = convert_to_double(model)
    x, y = draw_candidates(data, 2, soft)
    theirs = compute_one_by_one(model, data, "cross_entropy", weights, x, y, {})
    gradients, wanted = build_batched(model, data), (x, y) if soft else (x,)
    before = Counted.calls
    ours = stack_problems(gradients(weights, x, y))
    slopes = torch.autograd.grad(sum(g.square().sum() for g in ours.values()), wanted)
    assert Counted.calls == before + len(x)
    assert all(agree(ours[key], theirs[key]) for key in weights)
    expected = torch.autograd.grad(sum(g.square().sum() for g in theirs.values()), wanted)
    assert all(agree(*pair) for pair in zip(slopes, expected, strict=True))


def test_single_problem_agrees_with_the_plain_gradient() -> None:
    model, data, loss = build_model("lenet_dlg", *NETWORKS["lenet_dlg"])
    assert_agreement(model, data, loss, *draw_candidates(data, 2, soft=True, problems=1))


@pytest.mark.parametrize("problems", [1, 2])
def test_no_graph_is_kept_without_need(problems: int) -> None:
    model, data, _ = build_model("lenet_cpl", *NETWORKS["lenet_cpl"])
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.rand(problems, 1, *data.shape), torch.zeros(problems, 1, dtype=torch.long)
    assert not any(g.requires_grad for g in stack_problems(build_batched(model, data)(weights, x, y)).values())
    with torch.no_grad():
        assert not any(
            g.requires_grad for g in stack_problems(build_batched(model, data)(weights, x.requires_grad_(), y)).values()
        )


def test_large_gradients_are_split_by_problem_and_small_ones_joined() -> None:
    large, _, _ = build_model("resnet20_4", {}, (3, 16, 16), 3)
    small, data, _ = build_model("lenet_dlg", {}, (3, 16, 16), 3)
    x, y = torch.rand(2, 1, *data.shape), torch.tensor([[0], [2]])
    for model, is_large in ((large, True), (small, False)):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        found = build_batched(model, data)(weights, x, y)
        assert (join_problems(found) is None) == is_large
        rows = split_problems(found)
        assert len(rows) == 2
        assert all(torch.equal(row[name], stack_problems(found)[name][i]) for i, row in enumerate(rows) for name in weights)


def test_channels_last_keeps_values_and_gives_channels_stride_one() -> None:
    t = torch.rand(2, 5, 4, 3, 2)
    assert torch.equal(to_channels_last(t), t)
    assert to_channels_last(t).stride(-3) == 1
    assert to_channels_last(t[0]).is_contiguous(memory_format=torch.channels_last)
    assert to_channels_last(t[0, 0]).is_contiguous()

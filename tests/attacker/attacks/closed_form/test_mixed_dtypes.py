"""Tests of closed forms and searches on networks whose code converts between floating dtypes, or uses sizes as numbers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks import Case, accumulate, exact
from attacker.attacks.networks.forward import run_forward_pass
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(1, 6, 6), num_classes=4)


class Perceptron(nn.Module):
    """A perceptron in float32 whose last layer has another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.dtype = nn.Linear(36, 64), nn.Linear(64, 4).to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(len(x), -1)).clamp(min=0)
        logits: Tensor = self.last(hidden.double() if self.dtype == torch.float64 else hidden.half()).float()
        return logits


class Normalised(nn.Module):
    """A convolution in float32 with group norm before a last layer in float64, which only `features` and the search attack."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(144, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(functional.silu(self.norm(self.conv(x))).flatten(1).to(dtype=torch.float64))
        return logits


def build_double() -> nn.Module:
    return Perceptron(torch.float64)


def build_half() -> nn.Module:
    return Perceptron(torch.float16)


def build_normalised() -> nn.Module:
    return Normalised()


def make_case(build: Callable[[], nn.Module], rounds: int = 1) -> tuple[Case, Tensor]:
    """Return the case of a client with two examples in each round, and the examples."""
    models.admit(name := f"{__name__}:{build.__name__}")
    x, y = torch.rand(2, *DATA.shape, generator=torch.Generator().manual_seed(4)), torch.tensor([1, 3])
    seen = observe_steps((x, y), model=ModelSpec(name=name), data=DATA)
    return Case(tuple(replace(seen, round=i + 1) for i in range(rounds))), x


@pytest.mark.parametrize(("build", "most"), [(build_double, 1e-6), (build_half, 1e-3)])
def test_linear_route_recovers_examples_of_networks_of_two_dtypes(build: Callable[[], nn.Module], most: float) -> None:
    case, x = make_case(build)
    (found,) = exact(route="linear", fallback="none")([case], rng=seeded())
    order = found.y.argsort()
    assert found.y[order].tolist() == [1, 3]
    assert float((found.x[order] - x).square().mean()) < most


@pytest.mark.parametrize("build", [build_double, build_half, build_normalised])
def test_features_are_computed_for_networks_of_two_dtypes(build: Callable[[], nn.Module]) -> None:
    (found,) = exact(route="features", fallback="none")([make_case(build)[0]], rng=seeded())
    assert found.route == "features"
    assert not any("failed" in note for note in found.notes)


def test_rounds_in_order_are_searched_for_a_network_of_two_dtypes() -> None:
    (found,) = accumulate(steps=3)([make_case(build_normalised, rounds=2)[0]], rng=seeded())
    assert float(found.loss[-1]) < float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("build", [build_double, build_half, build_normalised])
def test_code_computes_in_the_dtype_of_its_state(dtype: torch.dtype, build: Callable[[], nn.Module]) -> None:
    model = build()
    state = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    x = torch.rand(3, *DATA.shape, generator=seeded())
    found = run_forward_pass(model, state, x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), model(x).float(), atol=2e-3, rtol=1e-2)
    with torch.no_grad():
        assert run_forward_pass(model, dict(model.named_parameters()), x).dtype == model(x).dtype, "its own dtypes stay"

"""Tests that per-example gradients and clipping agree with opacus, which computes them by hooks."""

import warnings
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from defenses.per_example import dp_sgd
from defenses.rules import GradientProblem
from fedsim import models
from fedsim.models.losses import cross_entropy
from fedsim.recording import DataSpec, ModelSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus")
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = DataSpec(shape=(3, 16, 16), num_classes=5)


def network(name: str) -> nn.Module:
    return models.build(ModelSpec(name=name), DATA, seed=1)


@pytest.mark.parametrize(
    ("name", "tightness"), [("mlp", 0.5), ("lenet_cpl", 0.5), ("lenet_cpl", 2.0), ("lenet_rog", 0.9), ("resnet9_rog", 0.9)]
)
def test_the_clipped_sum_is_that_of_opacus(name: str, tightness: float) -> None:
    rng = Generator().manual_seed(2)
    x, y = torch.rand(4, *DATA.shape, generator=rng), torch.randint(5, (4,), generator=rng)
    model = network(name).eval()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    problem = GradientProblem(model, lambda weights, x: functional_call(model, dict(weights), (x,)), cross_entropy)
    lengths = [_length(dp_sgd(1e9, noise=0).gradient(problem, weights, x[i : i + 1], y[i : i + 1], rng)[0]) for i in range(4)]
    bound = tightness * sum(lengths) / 4
    ours, _ = dp_sgd(bound, noise=0).gradient(problem, weights, x, y, rng)
    theirs = _of_opacus(network(name), x, y, bound)
    assert tightness > 1 or any(length > bound for length in lengths)
    for key, g in ours.items():
        scale = float(theirs[key].abs().max())
        assert torch.allclose(g, theirs[key], rtol=1e-4, atol=1e-5 * scale), key


def _length(gradient: dict[str, Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradient.values()]).norm())


def _of_opacus(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> dict[str, Tensor]:
    wrapped: Any = GradSampleModule(model.train())
    optimiser = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=len(x)
    )
    cross_entropy(wrapped(x), y).backward()
    assert optimiser.pre_step()
    return {name.removeprefix("_module."): p.grad.clone() for name, p in wrapped.named_parameters()}

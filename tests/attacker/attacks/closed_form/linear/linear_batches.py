"""Batches of digits, networks for them, and the float32 gradients that a server would observe."""

from collections.abc import Sequence
from functools import cache

import torch
from generators import seed_default
from torch import Tensor, nn

from attacker.attacks.closed_form.linear.first_layer import recover_linear
from attacker.attacks.closed_form.linear.layer_gradient import LinearAnswer
from attacker.attacks.networks.chain import read_chain
from fedsim import models
from fedsim.data import digits
from fedsim.recording import ModelSpec

DATA = digits().spec
Tensors = dict[str, Tensor]


@cache
def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    train = digits().train
    x, y = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:size].numpy()]
    return x, y


def network(hidden: Sequence[int] = (256,), *, steps: int = 0, seed: int = 0) -> nn.Module:
    """Return a network for digits after some steps of training."""
    model = models.build(ModelSpec(name="mlp", arguments={"hidden": list(hidden)}), DATA, seed=seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(64, seed=1000 + step)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(DATA.normalise(x)), y).backward()
        optimiser.step()
    return model


def layers(width: int = 256, *, outputs: int = 10, bias: bool = True, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    with seed_default(1):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width, bias=bias), activation(), nn.Linear(width, outputs, bias=bias))


def gradient_of(model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy") -> tuple[Tensors, Tensors]:
    """Return weights and gradient in float32, by name."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    value = models.find_loss(loss)(model(DATA.normalise(x)), y)
    return weights, dict(zip(weights, torch.autograd.grad(value, list(model.parameters())), strict=True))


def recover(model: nn.Module, weights: Tensors, gradient: Tensors, examples: int | None, **settings: object) -> LinearAnswer:
    chain = read_chain(model, DATA.shape)
    return recover_linear(chain, weights, gradient, examples, torch.Generator().manual_seed(0), **settings)

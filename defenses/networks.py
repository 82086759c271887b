"""Changes of the network that reduce leakage: blocks before the last linear layer. The server knows the changed network."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from defenses.registry import Choice, Registry

MAX_BOTTLENECK = 2**16
"""Largest number of random values in a variational bottleneck."""


class StochasticModule(nn.Module):
    """Base class of modules that draw random numbers during training.

    `start_drawing` puts these modules in training mode while a client trains, even if the rest of the network is in evaluation
    mode.
    In evaluation mode these modules must draw nothing, so that held-out accuracy and simulated gradients can be reproduced.

    penalty: term that the last forward pass adds to the loss, in both modes; None if there is none or `take_penalty` took it.
    hides:   whether the class declares that the gradients of its own parameters depend more on its random draws than on the data.
    """

    penalty: Tensor | None = None
    hides: ClassVar[bool] = False


class Bottleneck(StochasticModule):
    """A variational bottleneck: maps features (N, ..., F) to features of the same shape through K random values (PRECODE).

    encoder: F -> 2K, the mean mu and softplus^-1 of the standard deviation sigma of a normal distribution.
    decoder: K -> F, of mu + sigma * epsilon; epsilon is drawn at every forward in training mode, and 0 in evaluation mode.
    penalty: beta / ln 2 * KL(N(mu, sigma^2) || N(0, 1)), summed over an example's K random values (at every
             position of `...`), mean over the batch.
    like:    tensor whose device and dtype the parameters get.
    """

    hides: ClassVar[bool] = True

    def __init__(self, features: int, *, bottleneck: int, beta: float, like: Tensor) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * bottleneck, device=like.device, dtype=like.dtype)
        self.decoder = nn.Linear(bottleneck, features, device=like.device, dtype=like.dtype)
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        mean, raw = self.encoder(x).chunk(2, dim=-1)
        std = functional.softplus(raw)
        log_std = std.clamp(min=torch.finfo(std.dtype).tiny).log()
        divergence = -0.5 * (1 + 2 * log_std - mean.square() - std.square())
        self.penalty = self.beta / math.log(2) * divergence.flatten(1).sum(dim=1).mean()
        out: Tensor = self.decoder(mean + std * torch.randn_like(std) if self.training else mean)
        return out


class Dropout(StochasticModule):
    """Dropout: features become 0 with probability p, the others are scaled by 1 / (1 - p); the identity in evaluation mode."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.p, self.training)


def precode(model: nn.Module, bottleneck: int = 256, beta: float = 0.001) -> nn.Module:
    """Return a copy of `model` with a variational bottleneck before its last linear layer.

    bottleneck: number K of random values, from 1 to 65536.
    beta:       factor of the penalty that is added to the loss: the KL divergence of the random values' distribution from the
                standard normal one, measured in bits; finite and not negative.
    Evaluation uses the mean of the random values; the released code also draws in evaluation.
    Raises ValueError if the model has no linear layer, or `bottleneck` or `beta` is out of range.
    Source: PRECODE, Scheliga et al. 2022, with the sizes of its released code.
    """
    if type(bottleneck) is not int or not 1 <= bottleneck <= MAX_BOTTLENECK:
        raise ValueError(f"precode: bottleneck must be a whole number from 1 to {MAX_BOTTLENECK}, got {bottleneck!r}")
    if not 0 <= beta < math.inf:
        raise ValueError(f"precode: beta must be finite and not negative, got {beta}")

    def make_block(head: nn.Linear) -> nn.Module:
        return Bottleneck(head.in_features, bottleneck=bottleneck, beta=beta, like=head.weight)

    return _insert_before_head(model, "bottleneck", make_block)


def dropout(model: nn.Module, p: float = 0.5) -> nn.Module:
    """Return a copy of `model` with dropout before its last linear layer.

    p: probability that a feature is dropped, in [0, 1).
    Raises ValueError if the model has no linear layer, or `p` is out of range.
    Source: Srivastava et al. 2014, section 4.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be in [0, 1), got {p}")
    return _insert_before_head(model, "dropout", lambda head: Dropout(p))


NETWORKS: Registry[Callable[..., nn.Module]] = Registry(
    "defenses.networks", {"precode": precode, "dropout": dropout}, setting="network"
)
"""Registry of functions that map a model and public arguments to a changed copy of the model."""


@dataclass(frozen=True)
class NetworkSpec(Choice):
    """Specification of a change of the network, such as `dropout(p=0.5)`; empty for none."""

    registry: ClassVar[Registry[Callable[..., nn.Module]]] = NETWORKS
    what: ClassVar[str] = "network"

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the changed copy of `model`, or `model` itself if there is no change."""
        return model if self.step is None else NETWORKS[self.step.name](model, **dict(self.step.arguments))

    def check(self) -> None:
        with torch.device("meta"):
            self.apply(nn.Linear(1, 1))

    @classmethod
    def _find_factory(cls, name: str) -> Callable[..., nn.Module]:
        return partial(NETWORKS[name], nn.Identity())  # the bound argument is not part of the signature


def start_drawing(model: nn.Module) -> None:
    """Put the random blocks of `model`, such as a bottleneck, in training mode, and leave all other modules as they are."""
    for module in model.modules():
        if isinstance(module, StochasticModule):
            module.train()


@contextmanager
def draw_at_random(model: nn.Module, rng: Generator) -> Iterator[None]:
    """Let the random blocks of `model` draw as in training within a `with` statement; all other modules stay as they are.

    rng: source of the seed of the draws. The state of PyTorch's global generators is restored.
    """
    blocks = [module for module in model.modules() if isinstance(module, StochasticModule)]
    modes = [block.training for block in blocks]
    with torch.random.fork_rng(enabled=bool(blocks)):
        if blocks:
            torch.manual_seed(int(torch.randint(2**31, (), generator=rng)))
        start_drawing(model)
        try:
            yield
        finally:
            for block, mode in zip(blocks, modes, strict=True):
                block.train(mode)


def take_penalty(model: nn.Module) -> Tensor | None:
    """Remove and return the sum of the penalties that the blocks of `model` hold: a differentiable 0-d tensor, or None.

    A block such as a variational bottleneck sets its penalty, a term of the loss, in every forward pass. The penalty is removed
    so that no autograd graph outlives its step.
    """
    total = None
    for module in model.modules():
        if isinstance(module, StochasticModule) and module.penalty is not None:
            total = module.penalty if total is None else total + module.penalty
            module.penalty = None
    return total


def find_hidden(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of all blocks that declare `StochasticModule.hides`, such as variational bottlenecks.

    The gradients of these parameters depend more on the client's random draws than on its data.
    """
    blocks = [(name, m) for name, m in model.named_modules() if isinstance(m, StochasticModule) and m.hides]
    return frozenset(
        f"{name}.{parameter}" if name else parameter for name, block in blocks for parameter, _ in block.named_parameters()
    )


def find_encoders(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of the encoders of all variational bottlenecks.

    For one example with features (1, F) in one step, the gradient of an encoder's weights is the outer product of its bias's
    gradient and the features, whatever random values the bottleneck drew.
    """
    encoders = [f"{name}.encoder" if name else "encoder" for name, m in model.named_modules() if isinstance(m, Bottleneck)]
    return frozenset(f"{encoder}.{parameter}" for encoder in encoders for parameter in ("weight", "bias"))


def find_last_linear(model: nn.Module, outputs: Sequence[int] | None = None) -> str:
    """Return the name of the last linear layer in the order of the model's modules, "" for the model itself.

    Layers count whose weight is a parameter, and not a buffer or computed from other parameters.
    outputs: if given, only layers with one of these numbers of outputs count.
    Raises ValueError if there is no such layer.
    """
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linear = [(name, module) for name, module in linear if isinstance(module.weight, nn.Parameter)]
    names: list[str] = [name for name, module in linear if outputs is None or module.out_features in outputs]
    if not names:
        size = "" if outputs is None else f" with {' or '.join(map(str, outputs))} outputs"
        raise ValueError(f"{type(model).__name__} has no linear layer{size} whose weight is a parameter; use a model with one")
    return names[-1]


def _insert_before_head(model: nn.Module, name: str, block: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    model, place = copy.deepcopy(model), find_last_linear(model)
    head = model.get_submodule(place)
    assert isinstance(head, nn.Linear)
    pair = nn.Sequential(OrderedDict([(name, block(head)), ("head", head)]))
    if not place:
        return pair
    parent, _, own = place.rpartition(".")
    setattr(model.get_submodule(parent), own, pair)
    return model

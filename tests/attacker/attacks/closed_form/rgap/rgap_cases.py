"""Examples on small networks with the gradients that a server observes, for tests of R-GAP."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attacker.attacks.closed_form.rgap.recursion import DEFAULT_RGAP, Point, RgapSettings, solve_last_layer, solve_layers
from attacker.attacks.networks.chain import Chain, read_chain
from fedsim.models import find_loss

SHAPE = (2, 6, 5)


class Seen(NamedTuple):
    """N examples with their gradients, and with separate or shared weights."""

    model: nn.Module
    chain: Chain
    x: Tensor
    y: Tensor
    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]
    loss: str

    def readings(self) -> list[Point]:
        return solve_last_layer(self.chain, self.weights, self.gradient, self.loss)

    def solve(self, point: Point, rgap: RgapSettings = DEFAULT_RGAP) -> Point:
        return solve_layers(self.chain, self.weights, self.gradient, point, rgap)

    def best(self, rgap: RgapSettings = DEFAULT_RGAP) -> Point:
        """Run R-GAP from all solutions of the last layer, and return the result nearest to the true example."""
        ends = [self.solve(point, rgap) for point in self.readings() if bool(point.head.valid.all())]
        return min(ends, key=lambda end: float(mse(end.f, self.x).max()))


def mse(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).flatten(1).square().mean(dim=1)


def gradient_of(model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor, loss: str) -> dict[str, Tensor]:
    """Return the gradient for one example (C, H, W) by the weights, by name."""
    given = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    value = find_loss(loss)(functional_call(model, given, (x[None],)), y[None])
    return dict(zip(given, torch.autograd.grad(value, list(given.values())), strict=True))


def seen(
    model: nn.Module,
    shape: tuple[int, ...] = SHAPE,
    *,
    loss: str = "cross_entropy",
    count: int = 1,
    rounded: bool = False,
    y: int = 1,
) -> Seen:
    """Return random inputs in [0, 1] with their gradients; `rounded`: compute gradients in float32."""
    dtype = torch.float32 if rounded else torch.float64
    model = model.to(dtype)
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    labels = torch.full((count,), y)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    each = [gradient_of(model, weights, x[i], labels[i], loss) for i in range(count)]
    gradient = {name: torch.stack([g[name] for g in each]).double() for name in weights}
    stacked = {name: w.double()[None] for name, w in weights.items()}
    return Seen(model, read_chain(model, shape), x.double(), labels, stacked, gradient, loss)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky": lambda: nn.LeakyReLU(0.2),
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
}
Act = Callable[[], nn.Module]


def two_convolutions(act: Act, outputs: int = 3, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 12, 3, padding=1, bias=bias), act(), nn.Conv2d(12, 24, 3, padding=1, bias=bias), act()),
        *(nn.Flatten(), nn.Linear(24 * 30, outputs, bias=bias)),
    )


def strided(act: Act) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 16, 4, stride=2, padding=2), act(), nn.Conv2d(16, 40, (3, 2), padding=(1, 0), dilation=(1, 2)), act()),
        *(nn.Flatten(), nn.Linear(40 * 4, 3)),
    )

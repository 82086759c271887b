"""LeNets of the gradient attacks DLG (Zhu et al. 2019) and CPL (Wei et al. 2020), and the variants that CPL compares."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

from fedsim.models.shapes import check_image, check_side

Option = TypeVar("Option")

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.5),
}
"""Dict from name to activation. The slope of LeakyReLU is that of CPL's public code."""

POOLINGS: Mapping[str, Callable[[], nn.Module] | None] = {
    "none": None,
    "max": lambda: nn.MaxPool2d(2),
    "mean": lambda: nn.AvgPool2d(2),
}

INITIAL_WEIGHTS = {"published": None, "uniform": True, "default": False}
"""Dict from the argument `initial` to how weights are drawn: True uniformly from (-0.5, 0.5), False by PyTorch's default.

None stands for True with the activation sigmoid, and for False with any other activation.
"""


class LeNet(nn.Sequential):
    """5x5 convolutions with padding 2, each followed by an activation, then one linear layer; for images of any size.

    strides:    one stride per convolution.
    channels:   number of channels of every convolution.
    activation: sigmoid, tanh, relu, or leaky_relu (of slope 0.5).
    pooling:    none, max, or mean. With max or mean, a convolution of stride 2 gets stride 1 and is followed by its activation
                and 2x2 pooling; the image then needs at least 2 pixels per side for one such convolution, 4 for two, and so on.
    initial:    distribution of the initial weights and biases: "uniform" from (-0.5, 0.5); "default" is PyTorch's; "published" is
                that of the papers' code, uniform for sigmoid and default for other activations. The code of CPL has one
                exception, which must be given here as arguments: for sigmoid and images of more than 32 pixels per side, it uses
                initial="default" and channels=256.
    Raises ValueError for other values of these arguments, and with pooling for images that are too small.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_classes: int,
        *,
        strides: tuple[int, ...],
        channels: int = 12,
        activation: str = "sigmoid",
        pooling: str = "none",
        initial: str = "published",
    ) -> None:
        depth, height, width = shape
        activate, pool = _find_part("activation", activation, ACTIVATIONS), _find_part("pooling", pooling, POOLINGS)
        uniform = _find_part("initial", initial, INITIAL_WEIGHTS)
        if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
            raise ValueError(f"a LeNet: channels must be a whole number above 0, got {channels!r}")
        if pool:
            check_side(shape, 2 ** strides.count(2), "a LeNet with pooling")
        layers: list[nn.Module] = []
        for stride in strides:
            pooled = pool if stride == 2 else None
            layers += [nn.Conv2d(depth, channels, kernel_size=5, stride=1 if pooled else stride, padding=2), activate()]
            if pooled:
                layers.append(pooled())
            depth, height, width = channels, _compute_side(height, stride, pooled), _compute_side(width, stride, pooled)
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels * height * width, num_classes))
        if activation == "sigmoid" if uniform is None else uniform:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.uniform_(-0.5, 0.5)


def lenet_dlg(
    shape: tuple[int, ...],
    num_classes: int,
    channels: int = 12,
    activation: str = "sigmoid",
    pooling: str = "none",
    initial: str = "published",
) -> LeNet:
    """Return a network of three convolutions and a linear layer (Zhu et al. 2019, "Deep leakage from gradients", and iDLG).

    The convolutions are 5x5, with strides 2, 2 and 1.
    channels:   number of channels of every convolution.
    activation: sigmoid, tanh, relu, or leaky_relu.
    pooling:    none, max, or mean; max and mean replace the strides.
    initial:    distribution of the initial weights and biases: uniform from (-0.5, 0.5), default (PyTorch's), or published, which
                is uniform for sigmoid and default for other activations.
    """
    return LeNet(
        check_image(shape, "a LeNet"),
        num_classes,
        strides=(2, 2, 1),
        channels=channels,
        activation=activation,
        pooling=pooling,
        initial=initial,
    )


def lenet_cpl(
    shape: tuple[int, ...],
    num_classes: int,
    channels: int = 12,
    activation: str = "sigmoid",
    pooling: str = "none",
    initial: str = "published",
) -> LeNet:
    """Return a network of four convolutions and a linear layer (Wei et al. 2020, CPL).

    The paper is "A framework for evaluating gradient leakage attacks in federated learning". The convolutions are 5x5, with
    strides 2, 2, 1 and 1.
    channels, activation, pooling, initial: as in `lenet_dlg`.
    """
    return LeNet(
        check_image(shape, "a LeNet"),
        num_classes,
        strides=(2, 2, 1, 1),
        channels=channels,
        activation=activation,
        pooling=pooling,
        initial=initial,
    )


def _compute_side(side: int, stride: int, pooled: object) -> int:
    """Return the side after a 5x5 convolution with padding 2: with stride 1 and 2x2 pooling if `pooled`, else with `stride`."""
    return side // 2 if pooled else (side - 1) // stride + 1


def _find_part(what: str, name: str, parts: Mapping[str, Option]) -> Option:
    if name not in parts:
        raise ValueError(f"a LeNet: unknown {what} {name!r}. Known: {', '.join(parts)}")
    return parts[name]

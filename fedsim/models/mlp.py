"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn


def mlp(shape: tuple[int, ...], num_classes: int, hidden: Sequence[int] = (256,)) -> nn.Sequential:
    """Linear layers with ReLU between them, for images and table rows; PyTorch's own initialisation.

    hidden: width of each hidden layer.
    """
    widths = [prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

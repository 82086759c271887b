"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from fedsim.models.shapes import check_widths


def mlp(shape: tuple[int, ...], num_classes: int, hidden: Sequence[int] = (256,)) -> nn.Sequential:
    """Return linear layers with ReLU between them, for images and table rows, with PyTorch's initialisation.

    shape: shape of one example, which is flattened. hidden: width of each hidden layer; empty for a single linear layer.
    """
    sizes = [prod(shape), *check_widths(hidden, "mlp: hidden")]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))

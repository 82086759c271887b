"""A model: a function from the public shape of the data to a PyTorch module."""

from math import prod

from torch import nn


def two_layers(shape: tuple[int, ...], num_classes: int, width: int = 12) -> nn.Sequential:
    """Return two linear layers with a sigmoid between them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.Sigmoid(), nn.Linear(width, num_classes))

"""The networks of R-GAP, an attack that solves equations layer by layer (Zhu and Blaschko 2021).

They have no biases, LeakyReLU of slope 0.2, and PyTorch's initialisation. With two classes they have a single logit, for the
logistic loss; with more, one logit per class, for cross-entropy.
"""

from itertools import pairwise
from math import prod

from torch import nn

from fedsim.models.shapes import check_image

LEAKY_SLOPE = 0.2


def cnn6(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return CNN6 of R-GAP: six convolutions and a linear layer, wide enough for R-GAP to solve for 3x32x32 images (table 1)."""
    return _make_cnn(shape, num_classes, widths=(12, 36, 36, 36, 64, 128))


def cnn6_d(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return CNN6 with 20 instead of 36 channels after its second convolution; R-GAP then lacks equations for 3x32x32 images."""
    return _make_cnn(shape, num_classes, widths=(12, 20, 36, 36, 64, 128))


def fcn3(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return FCN3 of R-GAP: linear layers of 1000, 100 and then one output per class, or one for two classes.

    LeakyReLU follows the first two layers. The network takes images and table rows, which it flattens.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise((prod(shape), 1000, 100)):
        layers += [nn.Linear(before, after, bias=False), nn.LeakyReLU(LEAKY_SLOPE)]
    return nn.Sequential(*layers, nn.Linear(100, _count_logits(num_classes), bias=False))


CNN6_KERNELS = ((4, 2, 2), (3, 2, 1), (3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 1))
"""Kernel, stride and padding of each convolution."""


def _make_cnn(shape: tuple[int, ...], num_classes: int, *, widths: tuple[int, ...]) -> nn.Sequential:
    channels, height, width = check_image(shape, "an R-GAP network with convolutions")
    layers: list[nn.Module] = []
    for after, (kernel, stride, padding) in zip(widths, CNN6_KERNELS, strict=True):
        layers += [nn.Conv2d(channels, after, kernel, stride=stride, padding=padding, bias=False), nn.LeakyReLU(LEAKY_SLOPE)]
        height, width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
        channels = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, _count_logits(num_classes), bias=False))


def _count_logits(num_classes: int) -> int:
    return 1 if num_classes == 2 else num_classes

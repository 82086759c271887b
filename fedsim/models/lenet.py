"""The sigmoid LeNets of DLG and CPL."""

import torch
from torch import nn

from fedsim.models.shapes import image


class LeNet(nn.Sequential):
    """5x5 convolutions with padding 2 and sigmoids, then one linear layer.

    strides: one a convolution. All weights and biases start uniform in (-0.5, 0.5), as in the public code of both papers.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, strides: tuple[int, ...], channels: int = 12) -> None:
        width, height, depth = shape[2], shape[1], shape[0]
        layers: list[nn.Module] = []
        for stride in strides:
            layers += [nn.Conv2d(depth, channels, kernel_size=5, stride=stride, padding=2), nn.Sigmoid()]
            depth, height, width = channels, (height - 1) // stride + 1, (width - 1) // stride + 1
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels * height * width, num_classes))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.5, 0.5)


def lenet_dlg(shape: tuple[int, ...], num_classes: int) -> LeNet:
    """Three convolutions, then a linear layer (Zhu et al. 2019, "Deep leakage from gradients", and iDLG)."""
    return LeNet(image(shape, "a LeNet"), num_classes, strides=(2, 2, 1))


def lenet_cpl(shape: tuple[int, ...], num_classes: int) -> LeNet:
    """Four convolutions, then a linear layer (Wei et al. 2020, "A framework for evaluating gradient leakage attacks")."""
    return LeNet(image(shape, "a LeNet"), num_classes, strides=(2, 2, 1, 1))

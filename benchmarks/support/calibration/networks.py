"""Small image classifiers of common kinds, for calibration and for the choice of presets.

Each function takes the shape (channels, height, width) of an image and the number of classes, and draws random weights.
"""

import torch
from torch import Tensor, nn

from fedsim.models.resnet import make_stages


def resnet8(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a residual network of three stages of one block each, of 16, 32 and 64 channels, with batch norm."""
    stem = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    stages = make_stages((1, 1, 1), (16, 32, 64), batch_norm=True, bias=False)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def residual(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a residual network of three stages of two blocks each, of 16, 32 and 64 channels, without normalisation."""
    stem = [nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU()]
    stages = make_stages((2, 2, 2), (16, 32, 64), batch_norm=False, bias=True)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def convnet(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a network of two convolutions, each with ReLU and max pooling, and two linear layers with ReLU between them."""
    channels, height, width = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU()),
        nn.Linear(64, num_classes),
    )


def strided(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a network of three convolutions with tanh, of which the first two have stride 2, and a linear layer."""
    channels, height, width = shape
    side = -(-height // 4) * -(-width // 4)
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.Conv2d(32, 16, 3, padding=1), nn.Tanh()),
        nn.Flatten(),
        nn.Linear(16 * side, num_classes),
    )


def pooled_with_norm(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a network of three convolutions, each with batch norm, ReLU and max pooling, and a linear layer.

    No calibration curve (from an attack's evidence to its confidence) was fitted on it.
    """
    channels, height, width = shape
    blocks: list[nn.Module] = []
    for before, after in ((channels, 32), (32, 64), (64, 128)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), num_classes))


def smooth(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a network of two convolutions with SiLU, average pooling and a linear layer.

    No calibration curve (from an attack's evidence to its confidence) was fitted on it.
    """
    channels, height, width = shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 24, 5, stride=2, padding=2), nn.SiLU()),
        *(nn.Conv2d(24, 24, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)),
        nn.Flatten(),
        nn.Linear(24 * (-(-height // 2) // 2) * (-(-width // 2) // 2), num_classes),
    )


class PatchEmbedding(nn.Module):
    """Linear embedding (N, T, width) of the T patches of images, with a learned position."""

    def __init__(self, shape: tuple[int, ...], *, patch: int, width: int) -> None:
        super().__init__()
        channels, height, rest = shape
        self.project = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (height // patch) * (rest // patch), width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).mT + self.position


class Attention(nn.Module):
    """One layer of a transformer: attention of four heads, then a perceptron, each behind layer norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        fed = self.before(x)
        x = x + self.attend(fed, fed, fed, need_weights=False)[0]
        return x + self.perceptron(self.after(x))


class TokenMean(nn.Module):
    """The mean over tokens: (N, T, width) becomes (N, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def transformer(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a vision transformer of two layers of width 64, with patches of 4x4 pixels."""
    layers = [PatchEmbedding(shape, patch=4, width=64), Attention(64), Attention(64)]
    return nn.Sequential(*layers, nn.LayerNorm(64), TokenMean(), nn.Linear(64, num_classes))

"""Networks in plain PyTorch that are not models of this project: published ones, and small ones with unusual constructs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class QuickstartNet(nn.Module):
    """The network of Flower's PyTorch quickstart, as its template has it ("PyTorch: A 60 Minute Blitz", before 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits


class TutorialNet(QuickstartNet):
    """The network of PyTorch's tutorial "Training a classifier"."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        logits: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return logits


class MnistNet(nn.Module):
    """The network of PyTorch's MNIST example, with dropout and log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


class RowLSTM(nn.Module):
    """An LSTM that reads the columns of a table row one after the other, and classifies the row into three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(x.unsqueeze(-1))
        logits: Tensor = self.head(out[:, -1])
        return logits


class RowMLP(nn.Sequential):
    """A perceptron with two hidden layers, dropout and an in-place ReLU, for table rows of 12 columns."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(12, 32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)
        )


class ResidualNet(nn.Module):
    """A network with a residual and a dense (concatenated) connection, group norm, batch norm and in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(16, 8, 1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.stem(x)))
        skip = x
        x = self.norm2(self.conv1(x))
        x += skip
        x = self.relu(x)
        x = self.conv2(torch.cat([x, skip], dim=1))
        x = F.relu_(x)[:, :, ::2, 1::2]
        x = F.adaptive_avg_pool2d(x, 4)
        logits: Tensor = self.head(x.reshape(x.size(0), -1))
        return logits


class AttentionNet(nn.Module):
    """A small vision transformer with a class token, whose first attention is written out and whose second is PyTorch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.project = nn.Linear(16, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = self.patches(x).view(n, 16, -1).transpose(1, 2)
        x = torch.cat([self.token.expand(n, -1, -1), x], dim=1) + self.position
        q, k, v = self.qkv(self.norm(x)).view(n, -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(dim=-1)
        x = x + self.project((weights @ v).transpose(1, 2).reshape(n, -1, 16))
        x = self.encoder(x)
        logits: Tensor = self.head(x[:, 0])
        return logits


class TiedNet(nn.Module):
    """A network that applies one convolution twice, and one weight matrix three times.

    The matrix is the weight of two linear layers, and is applied transposed between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, padding=1)
        self.shared = nn.Conv2d(6, 6, 3, padding=1)
        self.down = nn.Linear(6 * 4 * 4, 20)
        self.up = nn.Linear(96, 20)
        self.up.weight = self.down.weight
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = torch.tanh(self.shared(x)) + torch.tanh(self.shared(x.flip(-1)))
        flat = x.view(len(x), -1, 4).flatten(1)[:, : 6 * 4 * 4]
        back = F.linear(torch.sigmoid(self.down(flat)), self.down.weight.t())
        logits: Tensor = self.head(self.up(back))
        return logits


class HardNet(nn.Module):
    """A network with squeeze-and-excitation (a learned scale per channel), and the activations Hardswish and Hardsigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.Hardswish(), nn.Conv2d(4, 8, 1), nn.Hardsigmoid()
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.conv(x))
        x = x * self.scale(x)
        logits: Tensor = self.head(x.mean([2, 3]))
        return logits


class _Square(torch.autograd.Function):
    """The square as a custom autograd function without `setup_context`, which torch.func.vmap does not support."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return 2 * ctx.saved_tensors[0] * g


class OwnCodeNet(nn.Module):
    """A network with a custom autograd function, a branch on values, and a buffer that each forward pass changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 8 * 8, 24)
        self.second = nn.Linear(24, 10)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x.contiguous().view(x.size(0), -1))
        x = _Square.apply(x)
        if float(x.detach().abs().max()) > 1e6:
            x = x / 2
        logits: Tensor = self.second(x)
        return logits


class CheckpointedNet(nn.Module):
    """A network with activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Sigmoid(), nn.Conv2d(6, 6, 3, 2, padding=1), nn.Sigmoid())
        self.last = nn.Linear(6 * 4 * 4, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.conv(x))
        x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        x = checkpoint(self._apply_last, x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits

    def _apply_last(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.last(x.flatten(1)))


class OffloadedNet(nn.Module):
    """A network whose first layer keeps what its backward pass needs in the memory of the CPU (`save_on_cpu`)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 8 * 8, 24)
        self.second = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = torch.sigmoid(self.first(x.flatten(1)))
        logits: Tensor = self.second(x)
        return logits


class TwoInputNet(nn.Module):
    """A network that takes two inputs, an image and a table row."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(3 * 8 * 8, 10)
        self.row = nn.Linear(4, 10)

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        logits: Tensor = self.image(image.flatten(1)) + self.row(row)
        return logits


def alexnet() -> nn.Module:
    return _of_torchvision("alexnet")


def vgg11() -> nn.Module:
    return _of_torchvision("vgg11")


def resnet18() -> nn.Module:
    return _of_torchvision("resnet18")


def densenet121() -> nn.Module:
    return _of_torchvision("densenet121")


def mobilenet_v3_small() -> nn.Module:
    return _of_torchvision("mobilenet_v3_small")


def efficientnet_b0() -> nn.Module:
    return _of_torchvision("efficientnet_b0")


def convnext_tiny() -> nn.Module:
    return _of_torchvision("convnext_tiny")


def vit_b_16() -> nn.Module:
    return _of_torchvision("vit_b_16", image_size=32)


def _of_torchvision(name: str, **arguments: int) -> nn.Module:
    from torchvision import models

    model: nn.Module = models.get_model(name, weights=None, num_classes=10, **arguments)
    return model


SMALL_NETWORKS: dict[str, tuple[tuple[int, ...], int]] = {
    "QuickstartNet": ((3, 32, 32), 10),
    "TutorialNet": ((3, 32, 32), 10),
    "MnistNet": ((1, 28, 28), 10),
    "ResidualNet": ((3, 8, 8), 10),
    "AttentionNet": ((3, 16, 16), 10),
    "TiedNet": ((3, 8, 8), 10),
    "HardNet": ((3, 8, 8), 10),
    "OwnCodeNet": ((3, 8, 8), 10),
    "CheckpointedNet": ((3, 8, 8), 10),
    "OffloadedNet": ((3, 8, 8), 10),
    "RowLSTM": ((12,), 3),
    "RowMLP": ((12,), 3),
}
"""Input shape and number of classes of each network class here except `TwoInputNet`: attacks give a network one input."""

TORCHVISION_NETWORKS: dict[str, tuple[tuple[int, ...], int]] = {
    "resnet18": ((3, 32, 32), 10),
    "mobilenet_v3_small": ((3, 32, 32), 10),
    "densenet121": ((3, 32, 32), 10),
    "efficientnet_b0": ((3, 32, 32), 10),
    "convnext_tiny": ((3, 32, 32), 10),
    "alexnet": ((3, 64, 64), 10),
    "vgg11": ((3, 32, 32), 10),
    "vit_b_16": ((3, 32, 32), 10),
}
"""Input shape and number of classes of torchvision's classifiers, at sizes that a CPU can handle."""

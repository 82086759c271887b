"""The networks of ROG, an attack on obfuscated gradients (Yue et al. 2022).

The networks have PyTorch's initialisation and no batch norm. The paper, "Gradient obfuscation gives a false sense of security",
uses images of 128x128 pixels.
"""

from torch import nn

from fedsim.models.resnet import make_stages
from fedsim.models.shapes import check_image, check_side


def lenet_rog(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return LeNet of ROG: two 5x5 convolutions, then linear layers of 512 and `num_classes` outputs.

    The convolutions have 32 and 64 channels and biases; ReLU and 2x2 max pooling follow each. The linear layers, with a ReLU
    between them, have no biases.
    """
    channels, height, width = check_image(shape, "lenet_rog")
    check_side((channels, height, width), 4, "lenet_rog")
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(64 * (height // 4) * (width // 4), 512, bias=False), nn.ReLU()),
        nn.Linear(512, num_classes, bias=False),
    )


def vgg7(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return VGG7 of ROG: three pairs of 3x3 convolutions, then linear layers of 1024 and `num_classes` outputs.

    The pairs have 128, 256 and 512 channels, and 2x2 max pooling follows each pair. A ReLU follows every convolution and linear
    layer but the last. The convolutions have biases, and the linear layers have none.
    """
    channels, height, width = check_image(shape, "vgg7")
    check_side((channels, height, width), 8, "vgg7")
    layers: list[nn.Module] = []
    for after in (128, 256, 512):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = after
    flat = channels * (height // 8) * (width // 8)
    hidden = [nn.Linear(flat, 1024, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(1024, num_classes, bias=False))


def resnet18_rog(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return ResNet-18 of ROG: no biases, first a 7x7 convolution of stride 2, and no max pooling.

    Adaptive average pooling gives 512 channels of 8x8 values to the linear layer, whatever the size of the images.
    """
    return _make_resnet(shape, num_classes, blocks=(2, 2, 2, 2))


def resnet9_rog(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return ResNet-9 of ROG: `resnet18_rog` with one residual block instead of two per stage."""
    return _make_resnet(shape, num_classes, blocks=(1, 1, 1, 1))


def _make_resnet(shape: tuple[int, ...], num_classes: int, *, blocks: tuple[int, ...]) -> nn.Sequential:
    channels = check_image(shape, "ROG's ResNet")[0]
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False), nn.ReLU()),
        *make_stages(blocks, (64, 128, 256, 512), batch_norm=False, bias=False),
        nn.AdaptiveAvgPool2d(8),
        nn.Flatten(),
        nn.Linear(512 * 8 * 8, num_classes, bias=False),
    )

"""Residual networks for small images (He et al. 2016), with and without batch norm."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedsim.models.shapes import check_bool, check_image


class BasicBlock(nn.Module):
    """Residual block: two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes.

    batch_norm: whether batch norm follows every convolution; convolutions then have no bias.
    bias:       whether convolutions without batch norm have a bias.
    """

    def __init__(self, before: int, after: int, *, stride: int, batch_norm: bool, bias: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *make_convolution(before, after, 3, stride, batch_norm=batch_norm, bias=bias),
            nn.ReLU(),
            *make_convolution(after, after, 3, 1, batch_norm=batch_norm, bias=bias),
        )
        same = stride == 1 and before == after
        self.shortcut = nn.Sequential(
            *([] if same else make_convolution(before, after, 1, stride, batch_norm=batch_norm, bias=bias))
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def make_convolution(before: int, after: int, kernel: int, stride: int, *, batch_norm: bool, bias: bool) -> list[nn.Module]:
    """Return a convolution that keeps height and width at stride 1, followed by batch norm if requested."""
    layer = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=bias and not batch_norm)
    return [layer, nn.BatchNorm2d(after)] if batch_norm else [layer]


def make_stages(blocks: Sequence[int], widths: Sequence[int], *, batch_norm: bool, bias: bool) -> list[nn.Module]:
    """Return the stages: `blocks` residual blocks per width; each stage after the first begins with stride 2."""
    layers: list[nn.Module] = []
    before = widths[0]
    for stage, (count, after) in enumerate(zip(blocks, widths, strict=True)):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(BasicBlock(before, after, stride=stride, batch_norm=batch_norm, bias=bias))
            before = after
    return layers


def _make_resnet(
    shape: tuple[int, ...], num_classes: int, *, blocks: Sequence[int], widths: Sequence[int], batch_norm: bool
) -> nn.Sequential:
    channels = check_image(shape, "a ResNet")[0]
    model = nn.Sequential(
        *make_convolution(channels, widths[0], 3, 1, batch_norm=batch_norm, bias=True),
        nn.ReLU(),
        *make_stages(blocks, widths, batch_norm=batch_norm, bias=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], num_classes),
    )
    # without batch norm, activations would grow from block to block with these weights; PyTorch's default weights are smaller
    if batch_norm:
        for module in model.modules():
            # on the meta device, loading torch's code for normal draws takes a second
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet20_4(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a ResNet-20 of four times the width, with batch norm (Geiping et al. 2020, "Inverting gradients"; AGIC).

    It has a 3x3 stem without pooling and three stages of three blocks, of widths 64, 128 and 256. The initial weights of
    convolutions are Kaiming normal (fan out).
    """
    return _make_resnet(shape, num_classes, blocks=(3, 3, 3), widths=(64, 128, 256), batch_norm=True)


def resnet18(shape: tuple[int, ...], num_classes: int, batch_norm: bool = True) -> nn.Sequential:
    """Return a ResNet-18 for small images: 3x3 stem of stride 1, no pooling, widths 64 to 512 (He et al. 2016).

    batch_norm: False leaves out all normalisation; convolutions then have biases and PyTorch's initialisation.
    """
    norm = check_bool(batch_norm, "resnet18: batch_norm")
    return _make_resnet(shape, num_classes, blocks=(2, 2, 2, 2), widths=(64, 128, 256, 512), batch_norm=norm)

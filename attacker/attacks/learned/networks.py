"""The networks of learned priors: a U-Net, an upscaler, a convolutional autoencoder, and the critic that judges their images.

They take images (N, 3, H, W) on the scale [0, 1]. For all but the critic, which is used in training only, the sides of images
must be multiples of the network's attribute `stride`. No network has batch norm, so that the images of a batch do not interact.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.utils.parametrizations import spectral_norm

SLOPE = 0.2
"""Slope of leaky ReLUs below 0."""


class UNet(nn.Module):
    """A U-Net that adds a correction to an image (Yue et al. 2022, section 4.2, with three strided convolutions as in its code).

    width: channels at full resolution; doubled at each of the three lower ones.
    """

    stride = 8

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.enter = nn.Conv2d(3, width, 5, padding=2, padding_mode="reflect")
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 4, stride=2, padding=1) for a, b in pairwise(widths))
        self.merge = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a in widths[:-1])
        self.leave = nn.Conv2d(width + 3, 3, 3, padding=1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        levels = [activate(self.enter(x))]
        for shrink in self.down:
            levels.append(activate(shrink(levels[-1])))
        features = levels.pop()
        for enlarge, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            features = activate(merge(torch.cat([activate(enlarge(features)), levels.pop()], dim=1)))
        corrected: Tensor = x + self.leave(torch.cat([features, x], dim=1))
        return corrected


class Upscaler(nn.Module):
    """A residual dense network (Zhang et al. 2018, RDN) that shrinks images to a quarter of their sides and enlarges them again.

    It has the layers of the network in the npm package @upscalerjs/esrgan-medium, whose blocks have one convolution each. As that
    network works with values from 0 to 255, images in [0, 1] are multiplied by 255 before its layers, and the result is divided
    by 255. blocks: number of residual blocks. width: channels in them. last: channels before the nearest-neighbour enlargement.
    """

    stride = 4

    def __init__(self, blocks: int = 10, width: int = 64, last: int = 48) -> None:
        super().__init__()

        def convolve(in_channels: int, out_channels: int, side: int = 3) -> nn.Conv2d:
            return nn.Conv2d(in_channels, out_channels, side, padding=side // 2)

        self.enter = nn.ModuleList([convolve(3, width), convolve(width, width)])
        self.dense = nn.ModuleList(convolve(width, width) for _ in range(blocks))
        self.fuse = nn.ModuleList(convolve(2 * width, width, 1) for _ in range(blocks))
        self.join = nn.ModuleList([convolve(blocks * width, width, 1), convolve(width, width)])
        self.grow = nn.ModuleList([convolve(width, width, 5), convolve(width, width // 2), convolve(width // 2, last)])
        self.leave = convolve(last, 3)

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.enter[0](255 * interpolate(x, scale_factor=1 / self.stride, mode="area"))
        features, levels = self.enter[1](shallow), []
        for dense, fuse in zip(self.dense, self.fuse, strict=True):
            features = features + fuse(torch.cat([features, dense(features).relu()], dim=1))
            levels.append(features)
        features = shallow + self.join[1](self.join[0](torch.cat(levels, dim=1)))
        features = self.grow[2](self.grow[1](self.grow[0](features).relu()).relu())
        large: Tensor = self.leave(interpolate(features, scale_factor=self.stride, mode="nearest"))
        return large / 255


class Autoencoder(nn.Module):
    """A convolutional autoencoder: images (3, S, S) become latents (channels, S / factor, S / factor).

    width: channels of the first layer. factor: a power of 2, at least 2; ValueError otherwise. channels: those of the latents.
    With 8 channels and factor 4, 8 and 16, images of 128x128 pixels have 8192, 2048 and 512 latent values, as in the attack ROG
    (Yue et al. 2022).
    """

    def __init__(self, width: int = 16, factor: int = 4, channels: int = 8) -> None:
        super().__init__()
        levels = factor.bit_length() - 1
        if factor != 2**levels or levels < 1:
            raise ValueError(f"factor is the ratio of the sides of image and latent, a power of 2 from 2, got {factor}")
        self.stride, self.channels = factor, channels
        widths = [min(width * 2**level, 8 * width) for level in range(levels + 1)]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in pairwise(widths))
        self.code = nn.Conv2d(widths[-1], channels, 3, padding=1)
        self.expand = nn.Conv2d(channels, widths[-1], 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in pairwise(widths))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def encode(self, x: Tensor) -> Tensor:
        """Return the latents (N, channels, H / factor, W / factor) of images (N, 3, H, W)."""
        features = activate(self.enter(x))
        for shrink in self.down:
            features = activate(shrink(features))
        latent: Tensor = self.code(features)
        return latent

    def decode(self, z: Tensor) -> Tensor:
        """Return the images (N, 3, H, W) of latents (N, channels, H / factor, W / factor), not limited to [0, 1]."""
        features = activate(self.expand(z))
        for enlarge in reversed(self.up):
            features = activate(enlarge(interpolate(features, scale_factor=2, mode="bilinear", align_corners=False)))
        image: Tensor = 0.5 + self.leave(features)
        return image

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class PatchCritic(nn.Sequential):
    """A PatchGAN critic with spectral normalisation: maps images (N, 3, H, W) to scores (N, 1, H / 8 - 1, W / 8 - 1).

    Each score judges one of the overlapping patches of the image (Isola et al. 2017); a higher one means more like a real image.
    """

    def __init__(self, width: int = 16) -> None:
        layers: list[nn.Module] = []
        for a, b in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [spectral_norm(nn.Conv2d(a, b, 4, stride=2, padding=1)), nn.LeakyReLU(SLOPE)]
        super().__init__(*layers, spectral_norm(nn.Conv2d(4 * width, 1, 4, padding=1)))


def activate(x: Tensor) -> Tensor:
    """Return the leaky ReLU of x, with the slope SLOPE below 0."""
    return torch.nn.functional.leaky_relu(x, SLOPE)

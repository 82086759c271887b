"""Untrained networks as image priors (Ulyanov et al. 2018, "Deep image prior"; Liu et al. 2024, section 4.2 and appendix F).

The latent of an image holds the weights of a U-Net of its own, which a search optimises, and the input of this network, which the
search leaves as it is. Convolutions need smaller changes of their weights to generate smooth and repeated structures than to
generate noise, so that a search finds natural images first. Nothing is trained on any data.

The network can also be one for all images of a batch, which differ by the network's input and by a code: a random projection of
what is known of an image's features. As in the paper, whose text says no more than that features are incorporated into each
residual block, every block adds a linear map of the code to the channels between its convolutions.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import adaptive_avg_pool2d, interpolate, normalize, scaled_dot_product_attention, silu

WIDTH = 8
"""Channels at full resolution; twice as many at all lower ones. Group norm has groups of 4 channels."""
MAX_HALVINGS, MIN_SIDE = 3, 4
"""Largest number of resolutions below the first, and smallest side of an image at the lowest of them."""
ATTENTION_LEVEL = 1
"""Number of halvings after which self-attention follows the first block; the lowest resolution if there are fewer."""
NOISE_CHANNELS = 4
"""Channels of fixed noise in the network's input, besides the channels of the image to start from."""
SEED = 0
"""Seed of the initial weights and of the fixed noise, which are equal for all images; what differs is the start of the search."""
CODES = 32
"""Number of values of the code of an image's features."""
FIRST_CONTRAST = 0.1
"""Factor of the last layer's initial weights, so that a search starts near grey."""


class ResidualBlock(nn.Module):
    """Two convolutions with group norm in front, added to the input; and self-attention over all pixels if `attends`.

    codes: number of values of an image's code, a linear map of which is added after the first convolution; 0 for no code.
    """

    def __init__(self, in_channels: int, out_channels: int, *, attends: bool = False, codes: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(in_channels // 4, in_channels), nn.GroupNorm(out_channels // 4, out_channels)])
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.Conv2d(out_channels, out_channels, 3, padding=1)]
        )
        self.skip = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()
        self.query = nn.Conv2d(out_channels, 3 * out_channels, 1) if attends else None
        self.inject = nn.Linear(codes, out_channels) if codes else None

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        out: Tensor = self.convolutions[0](silu(self.norms[0](x)))
        if self.inject is not None:
            out = out + self.inject(code)[..., None, None]
        out = self.convolutions[1](silu(self.norms[1](out))) + self.skip(x)
        if self.query is None:
            return out
        query, key, value = self.query(out).flatten(2).transpose(1, 2).chunk(3, dim=2)
        attended: Tensor = scaled_dot_product_attention(query, key, value)
        mixed: Tensor = out + attended.transpose(1, 2).reshape(out.shape)
        return mixed


class PriorNetwork(nn.Module):
    """A U-Net of residual blocks: two at each resolution on the way down, and one at each on the way up.

    sides: of the images that it returns, height and width. channels: those of its input and of its output. codes: as in
    `ResidualBlock`.
    """

    def __init__(self, channels: tuple[int, int], sides: Sequence[int], *, codes: int = 0) -> None:
        super().__init__()
        self.sides = [tuple(sides)]
        while len(self.sides) <= MAX_HALVINGS and min(self.sides[-1]) >= 2 * MIN_SIDE:
            self.sides.append(tuple(-(-side // 2) for side in self.sides[-1]))
        widths = [WIDTH, *[2 * WIDTH] * (len(self.sides) - 1)]
        attending = min(ATTENTION_LEVEL, len(widths) - 1)
        self.enter = nn.Conv2d(channels[0], WIDTH, 3, padding=1)
        self.down = nn.ModuleList(
            nn.ModuleList([ResidualBlock(a, b, attends=level == attending, codes=codes), ResidualBlock(b, b, codes=codes)])
            for level, (a, b) in enumerate(zip([WIDTH, *widths], widths, strict=False))
        )
        self.up = nn.ModuleList(ResidualBlock(a + b, a, codes=codes) for a, b in pairwise(widths))
        self.leave = nn.Conv2d(WIDTH, channels[1], 3, padding=1)
        with torch.no_grad():
            self.leave.weight.mul_(FIRST_CONTRAST)
            self.leave.bias.zero_()  # type: ignore[union-attr]

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        out, seen = self.enter(x), []
        for sides, level in zip(self.sides, self.down, strict=True):
            out = out if out.shape[-2:] == sides else adaptive_avg_pool2d(out, (sides[0], sides[1]))
            for block in level:  # type: ignore[attr-defined]  # a ModuleList
                out = block(out, code)
            seen.append(out)
        out = seen.pop()
        for block in reversed(self.up):
            beside = seen.pop()
            out = block(torch.cat([beside, interpolate(out, size=beside.shape[-2:], mode="nearest")], dim=1), code)
        found: Tensor = self.leave(silu(out)).sigmoid()
        return found


class DeepPrior:
    """The map from latents to images (channels, height, width) in [0, 1], and the latents to start from.

    A latent is the vector of all weights of a `PriorNetwork`, followed by the values of an image to start from and by the code of
    its features. The network's input is this image and further channels of fixed noise, which are no part of the latent. `decode`
    detaches image and code, so that their derivatives are zero and a gradient search does not change them.
    codes: number of values of the code, 0 for none.
    """

    def __init__(self, shape: tuple[int, ...], *, codes: int = 0) -> None:
        self.shape, self.codes = shape, codes
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            network = PriorNetwork((shape[0] + NOISE_CHANNELS, shape[0]), shape[1:], codes=codes)
            self.network, self.noise = network.requires_grad_(False), torch.randn(NOISE_CHANNELS, *shape[1:])

    @cached_property
    def weights(self) -> Tensor:
        """The initial weights, (number of weights,)."""
        return torch.cat([w.flatten() for w in self.network.parameters()])

    @property
    def size(self) -> int:
        """Number of values of a latent."""
        return len(self.weights) + torch.Size(self.shape).numel() + self.codes

    def encode(self, x: Tensor) -> Tensor:
        """Return latents (N, size): the initial weights, x as the network's input, and zero codes. They do not decode to x."""
        return torch.cat([self.weights.to(x).expand(len(x), -1), x.flatten(1), x.new_zeros(len(x), self.codes)], dim=1)

    def inject(self, z: Tensor, features: Tensor) -> Tensor:
        """Return latents z (N, size) with the codes of features (N, F): random projections of their directions."""
        drawn = torch.randn(features.shape[1], self.codes, generator=torch.Generator().manual_seed(SEED))
        code = normalize(features.to(z), dim=1) @ drawn.to(z)
        return torch.cat([z[:, : self.size - self.codes], code], dim=1)

    def decode(self, z: Tensor) -> Tensor:
        """Return images (N, *shape) in [0, 1] of latents z (N, size)."""
        return vmap(self._generate)(z)

    def _generate(self, z: Tensor) -> Tensor:
        named = dict(self.network.named_parameters())
        sizes = [*(w.numel() for w in named.values()), z.shape[-1] - len(self.weights) - self.codes, self.codes]
        *parts, start, code = torch.split(z, sizes)
        weights = {name: part.reshape(w.shape) for (name, w), part in zip(named.items(), parts, strict=True)}
        entered = torch.cat([2 * start.detach().reshape(self.shape) - 1, self.noise.to(z)])
        image: Tensor = functional_call(self.network, weights, (entered[None], code.detach()[None]))
        return image[0]

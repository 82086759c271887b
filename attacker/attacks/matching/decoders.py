"""Decoders: maps from the variable that a search optimises to examples.

To add one, write a function from a `DataSpec` to a `Decoder`, and name it as `module:function` on the command line (`--set
decoder=module:function`), or as an entry point of the group `attacker.decoders` in a package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from defenses._registry import Registry
from fedsim.recording.observation import DataSpec


def _itself(z: Tensor) -> Tensor:
    return z


@dataclass(frozen=True)
class Decoder:
    """A parametrisation of examples of one shape.

    shape:   of the latent of one example.
    decode:  from latents (N, *shape) to examples (N, *data.shape). It is differentiated once by autograd, and called under `vmap`
             and `torch.func.grad`: what it does to one example must not depend on the others. Weights of its own must be on the
             device of z.
    encode:  from examples, near [0, 1], to latents that decode to about them: where a search begins.
    project: from latents to the nearest ones that a search in a box allows; where it is left out, no box is needed.
    """

    shape: tuple[int, ...]
    decode: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor] = _itself


DecoderFactory = Callable[[DataSpec], Decoder]
"""From the shape of the data to the decoder; raises ValueError, in words, for data that it cannot describe."""


def pixels(data: DataSpec) -> Decoder:
    """Examples as they are, in a box of [0, 1]."""
    return Decoder(data.shape, decode=_itself, encode=_itself, project=lambda z: z.clamp(0, 1))


def bicubic(factor: int) -> DecoderFactory:
    """Images of a `factor` times lower resolution, made larger by bicubic interpolation: none of their high frequencies.

    The box is that of the small image. The large one may leave [0, 1] at an edge, as bicubic interpolation does.
    """

    def decoder(data: DataSpec) -> Decoder:
        if not data.is_image:
            raise ValueError(f"the decoder bicubic{factor} makes images larger, and these data are rows of shape {data.shape}")
        channels, *large = data.shape
        small = [-(-side // factor) for side in large]
        return Decoder(
            (channels, *small),
            decode=lambda z: interpolate(z, size=large, mode="bicubic", align_corners=False),
            encode=lambda x: interpolate(x, size=small, mode="area"),
            project=lambda z: z.clamp(0, 1),
        )

    return decoder


EDGE = 1e-3
"""How near to 0 and 1 the box of tanh is entered: at them its latents are infinite."""


def tanh_box(data: DataSpec) -> Decoder:
    """Examples as (1 + tanh z) / 2, which cannot leave [0, 1] (Carlini & Wagner 2017, section V-B)."""
    return Decoder(
        data.shape,
        decode=lambda z: (1 + z.tanh()) / 2,
        encode=lambda x: torch.atanh(2 * x.clamp(EDGE, 1 - EDGE) - 1),
    )


NAMED: dict[str, DecoderFactory] = {"pixels": pixels, "bicubic4": bicubic(4), "tanh_box": tanh_box}
DECODERS: Registry[DecoderFactory] = Registry("attacker.decoders", NAMED)


def decoder(name: str) -> DecoderFactory:
    """Return a decoder by its name in `DECODERS`. Raises ValueError where there is none."""
    return DECODERS[name]

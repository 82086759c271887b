"""Decoders: maps from the variable that a search optimises, the latent, to examples.

To add one, write a function that takes a `DataSpec` and returns a `Decoder`. Select it on the command line with
`--set decoder=module:function`, or register it as an entry point of the group `attacker.decoders` in a package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from attacker.attacks.learned.deep_prior import CODES, DeepPrior
from attacker.attacks.learned.networks import Autoencoder
from attacker.attacks.learned.prior_file import read_prior
from attacker.attacks.matching.smooth_images import build_smooth_spread
from fedsim.recording.observation import DataSpec

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _identity(z: Tensor) -> Tensor:
    return z


@dataclass(frozen=True)
class Decoder:
    """A parametrisation of examples of one shape.

    shape:   shape of the latent of one example.
    decode:  maps latents (N, *shape) to examples (N, *data.shape). It is called under `vmap` and `torch.func.grad`, so that the
             examples of a batch must not interact; second derivatives are not needed. Weights of the decoder must be on the
             device of z.
    encode:  maps examples, approximately in [0, 1], to latents that decode approximately to them, as a starting point.
    project: maps latents to the nearest ones in the allowed box; the identity if no box is needed. A search calls it only if
             `Parametrisation.boxed` is set.
    uses_labels: whether `decode` takes the labels as a second argument: classes (N,), or probabilities of classes (N, K).
    phases:  sizes of successive parts of the latent of one example, whose shape is then (sum of the sizes,); a search changes one
             part after the other. Empty to search all of it at once.
    lengths: relative numbers of steps of the phases; empty for equal ones.
    shared:  number of values at the beginning of a latent that all examples of a search have in common; 0 for none.
    inject:  maps latents (N, *shape), and features of the last layer that were read off the gradient (N, F), to latents that hold
             these features. None if the decoder uses no features.
    """

    shape: tuple[int, ...]
    decode: Callable[..., Tensor]
    encode: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor] = _identity
    uses_labels: bool = False
    phases: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    shared: int = 0
    inject: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.shared and (self.phases or len(self.shape) != 1 or not self.shared < self.shape[0]):
            raise ValueError(
                f"a Decoder with shared={self.shared} needs shape=(size,) with a size above {self.shared}, and phases=(); got "
                f"shape={self.shape} and phases={self.phases}"
            )
        if self.lengths and (len(self.lengths) != len(self.phases) or min(self.lengths) < 1):
            raise ValueError(
                f"a Decoder with phases={self.phases} needs one length of at least 1 for each phase, got lengths={self.lengths}"
            )
        if self.phases and self.shape != (sum(self.phases),):
            raise ValueError(
                f"a Decoder with phases={self.phases} needs shape=({sum(self.phases)},), the sum of the phases, got "
                f"shape={self.shape}"
            )

    def apply(self, z: Tensor, labels: Tensor) -> Tensor:
        """Return the examples (N, *data.shape) of latents (N, *shape), and of labels if the decoder uses them."""
        return self.decode(z, labels) if self.uses_labels else self.decode(z)


DecoderFactory = Callable[[DataSpec], Decoder]
"""Maps the specification of the data to a decoder. Raises ValueError with the reason for data that it does not support."""


def pixels(data: DataSpec) -> Decoder:
    """Return the decoder whose latents are the examples themselves; searches with a box clamp them to [0, 1]."""
    return Decoder(data.shape, decode=_identity, encode=_identity, project=lambda z: z.clamp(0, 1))


def bicubic(factor: int) -> DecoderFactory:
    """Return a decoder factory whose decoder enlarges small images by bicubic interpolation, which excludes high frequencies.

    A factory returns the decoder for given data; this one raises ValueError for table rows. factor: ratio of the sides of large
    and small images; the sides of the small images are rounded up. `project` clamps the small image to [0, 1]; the large one may
    exceed that range slightly at edges.
    """

    def build(data: DataSpec) -> Decoder:
        """Return the decoder of a smaller image, enlarged by bicubic interpolation."""
        if not data.is_image:
            raise ValueError(
                f"the decoder bicubic{factor} needs images, and these data are table rows of shape {data.shape}; choose another "
                "decoder"
            )
        channels, *large = data.shape
        small = [-(-side // factor) for side in large]
        return Decoder(
            (channels, *small),
            decode=lambda z: interpolate(z, size=large, mode="bicubic", align_corners=False),
            encode=lambda x: interpolate(x, size=small, mode="area"),
            project=lambda z: z.clamp(0, 1),
        )

    return build


SCALES, SCALE_LENGTHS = (8, 4, 2, 1), (1, 2, 3, 4)
"""Ratios of the sides of images and of the small images of `coarse_to_fine`, one for each phase of a search, and the relative
lengths of these phases."""


def coarse_to_fine(data: DataSpec) -> Decoder:
    """Return the decoder of images of an eighth of the side, and of displacements at a quarter, at half and at all of it.

    All are enlarged by bicubic interpolation and added. A search has four phases, one for each of `SCALES`, of a tenth, two,
    three and four tenths of the steps: the first one finds small images, and each later one finds displacements, from 0 on,
    that are added to the images before it. Raises ValueError for table rows. `project` clamps the small images to [0, 1] and
    the displacements to [-1, 1].
    """
    if not data.is_image:
        raise ValueError(
            f"the decoder coarse_to_fine needs images, and these data are table rows of shape {data.shape}; "
            "choose another decoder"
        )
    scales = [bicubic(factor)(data) for factor in SCALES]
    sizes = tuple(torch.Size(scale.shape).numel() for scale in scales)

    def decode(z: Tensor) -> Tensor:
        latents = zip(scales, torch.split(z, list(sizes), dim=1), strict=True)
        return torch.stack([scale.decode(latent.reshape(-1, *scale.shape)) for scale, latent in latents]).sum(dim=0)

    def encode(x: Tensor) -> Tensor:
        small = scales[0].encode(x).flatten(1)
        return torch.cat([small, small.new_zeros(len(small), sum(sizes[1:]))], dim=1)

    def project(z: Tensor) -> Tensor:
        return torch.cat([z[:, : sizes[0]].clamp(0, 1), z[:, sizes[0] :].clamp(-1, 1)], dim=1)

    return Decoder((sum(sizes),), decode=decode, encode=encode, project=project, phases=sizes, lengths=SCALE_LENGTHS)


def autoencoder(path: Path) -> DecoderFactory:
    """Return a decoder factory whose decoder uses a learned autoencoder, from a file that `attacker train-prior` wrote.

    A factory returns the decoder for given data; this one raises ValueError unless the data are images of 3 channels whose sides
    the network's stride divides. Neither latents, which are those of the autoencoder, nor decoded examples are limited to a
    range.
    """
    prior = read_prior(path, "autoencoder")
    network = prior.network
    assert isinstance(network, Autoencoder)

    def build(data: DataSpec) -> Decoder:
        if not data.is_image or data.shape[0] != 3 or any(side % network.stride for side in data.shape[1:]):
            raise ValueError(
                f"the decoder {path} needs images of 3 channels whose sides {network.stride} divides, and these data have shape "
                f"{data.shape}"
            )
        shape = (network.channels, *(side // network.stride for side in data.shape[1:]))
        return Decoder(shape, decode=lambda z: place(network, z).decode(z), encode=lambda x: place(network, x).encode(x))

    build.__name__ = build.__qualname__ = str(path)  # for messages, and to tell searches apart
    return build


TANH_MARGIN = 1e-3
"""Distance from 0 and 1 to which examples are clamped before they are encoded by `tanh_box`, whose latents are infinite there."""


def tanh_box(data: DataSpec) -> Decoder:
    """Return the decoder of examples x = (1 + tanh z) / 2, which always lie in [0, 1] (Carlini & Wagner 2017, section V-B)."""
    return Decoder(
        data.shape,
        decode=lambda z: (1 + z.tanh()) / 2,
        encode=lambda x: torch.atanh(2 * x.clamp(TANH_MARGIN, 1 - TANH_MARGIN) - 1),
    )


def smooth(data: DataSpec) -> Decoder:
    """Return the decoder whose latents are independent and of variance 1 for images from the Gaussian prior of `smooth_images`.

    A step of a search therefore changes low frequencies most, and high frequencies that the gradient hardly determines stay near
    the values of the start. Decoded examples are not limited to [0, 1]. For table rows, latents are only shifted and scaled.
    """
    spread, whiten = build_smooth_spread(data), build_smooth_spread(data, inverse=True)
    return Decoder(data.shape, decode=lambda z: 0.5 + spread(z), encode=lambda x: whiten(x - 0.5))


def deep_prior(data: DataSpec) -> Decoder:
    """Return the decoder whose latents are the weights of untrained networks, one per image (`learned.deep_prior`).

    A search with it starts from the network's initial weights and not from given examples, which only become the network's input.
    Raises ValueError for table rows.
    """
    if not data.is_image:
        raise ValueError(
            f"the decoder deep_prior needs images, and these data are table rows of shape {data.shape}; choose another decoder"
        )
    prior = DeepPrior(data.shape)
    return Decoder((prior.size,), decode=prior.decode, encode=prior.encode)


def shared_prior(data: DataSpec) -> Decoder:
    """Return the decoder `deep_prior` with one network for all images of a batch, into which features are injected.

    Raises ValueError for table rows.
    """
    if not data.is_image:
        raise ValueError(
            f"the decoder shared_prior needs images, and these data are table rows of shape {data.shape}; choose another decoder"
        )
    prior = DeepPrior(data.shape, codes=CODES)
    return Decoder((prior.size,), decode=prior.decode, encode=prior.encode, shared=len(prior.weights), inject=prior.inject)


def build_decoder(factory: DecoderFactory, data: DataSpec) -> Decoder:
    """Return the decoder of `factory` for these data. Raises ValueError if the factory returns anything but a `Decoder`."""
    decoder: object = factory(data)
    if not isinstance(decoder, Decoder):
        expected = f"{Decoder.__module__}.{Decoder.__name__}"
        raise ValueError(f"{get_decoder_name(factory)}: the function must return a `{expected}`, got {type(decoder).__name__}")
    return decoder


def check_shapes(decoder: Decoder, name: str, x: Tensor) -> None:
    """Raise ValueError unless `encode`, `decode` and `project` of a decoder run on two examples and return the expected shapes.

    name: the decoder, for messages. x: examples (N, *shape) on the device of the search, of which two are tried.
    """
    example = torch.cat([x, x])[:2]
    latent, z = (2, *decoder.shape), torch.full((2, *decoder.shape), 0.5, device=x.device)
    trials = (
        ("encode", decoder.encode, example, latent),
        ("decode", lambda argument: decoder.apply(argument, torch.zeros(2, dtype=torch.long, device=x.device)), z, example.shape),
        ("project", decoder.project, z, latent),
    )
    for part, function, argument, expected in trials:
        try:
            with torch.no_grad():
                result: object = function(argument)
        except Exception as error:  # a user's decoder may fail in any way
            raise ValueError(f"{name}: {part} fails on shape {tuple(argument.shape)}: {type(error).__name__}: {error}") from error
        if not isinstance(result, Tensor) or tuple(result.shape) != tuple(expected):
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"{name}: {part} must map shape {tuple(argument.shape)} to {tuple(expected)}, got {got}")


def get_decoder_name(factory: DecoderFactory) -> str:
    """Return "decoder " with the name of the factory function, for messages."""
    return f"decoder {getattr(factory, '__name__', type(factory).__name__)}"


def place(network: AnyModule, like: Tensor) -> AnyModule:
    """Return the network on the device of `like`, to which it is moved if it is elsewhere.

    The first call must not be under torch.func's transforms, where `Module.to` crashes; `check_shapes` makes this first call
    before any search.
    """
    return network if next(network.parameters()).device == like.device else network.to(like.device)


BUILT_IN_DECODERS: dict[str, DecoderFactory] = {
    "pixels": pixels,
    "bicubic4": bicubic(4),
    "coarse_to_fine": coarse_to_fine,
    "tanh_box": tanh_box,
    "smooth": smooth,
    "deep_prior": deep_prior,
    "shared_prior": shared_prior,
}

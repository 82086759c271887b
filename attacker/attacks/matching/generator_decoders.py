"""Decoders from a learned generator: its latents, its feature maps stage after stage, or its latents and then its weights.

All start from the latents of the generator's encoder. The variables of the second and the third decoder are latents and
displacements, which are 0 at the start: of the feature maps after the first stages (Fang et al. 2023, GIFD), or of the weights of
each example's own copy of the generator (Jeon et al. 2021, GIAS). `Decoder.phases` says which part is searched when.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from attacker.attacks.learned.generator import ImageGenerator
from attacker.attacks.learned.prior_file import FILE_ENDING, read_prior
from attacker.attacks.matching.decoders import Decoder, DecoderFactory, place
from attacker.attacks.optimisers.balls import project_onto_l1_ball
from fedsim.recording.observation import DataSpec

SEARCHED_STAGES = 2
"""Number of stages whose feature maps are displaced; the feature maps of later stages have more values than images."""
FEATURE_RADIUS = 0.3
"""Largest mean absolute displacement of the feature maps after one stage in a search with `boxed`, as GIFD limits its l1 norm."""
WEIGHT_UNIT = 0.1
"""Change of a weight for a displacement of 1, relative to the root mean square of its tensor. With 0.1, searches found more than
with 0.02 on four images of the validation part of benchmarks/support/splits.py."""


def read_generator(path: Path) -> ImageGenerator:
    """Return the generator in a file that `attacker train-prior --kind generator` wrote. Raises ValueError for another file."""
    network = read_prior(path, "generator").network
    assert isinstance(network, ImageGenerator)
    return network


def latents(network: ImageGenerator, path: str) -> DecoderFactory:
    """Return the decoder factory whose variable is the generator's latent vector (Li et al. 2022, GGL, and others).

    A factory returns the decoder for given data, and raises ValueError if the generator does not fit the data. path: the
    generator's file, for messages.
    """

    def build(data: DataSpec) -> Decoder:
        _check_data(network, path, data)
        return Decoder(
            (network.latents,),
            decode=lambda z, y: place(network, z).decode(z, _match_classes(network, y)),
            encode=lambda x: place(network, x).encode(x)[0],
            uses_labels=True,
        )

    return build


def features(network: ImageGenerator, path: str) -> DecoderFactory:
    """Return the decoder factory whose variables are the latents, and then displacements of feature maps, stage after stage.

    A factory returns the decoder for given data, and raises ValueError if the generator does not fit the data. Displacements are
    added to the results of the first SEARCHED_STAGES stages. path: the generator's file, for messages.
    The decoder's box, for searches with `boxed`, is an l1 ball for each stage's displacements (Fang et al. 2023, section 3.2).
    """
    shapes = network.feature_shapes[:SEARCHED_STAGES]
    phases = (network.latents, *(torch.Size(shape).numel() for shape in shapes))

    def decode(z: Tensor, y: Tensor) -> Tensor:
        x: Tensor
        x, *moves = torch.split(z, list(phases), dim=1)
        y = _match_classes(network, y)
        for stage in range(len(network.up) + 1):
            x = place(network, z).run_stage(stage, x, y)
            if stage < len(shapes):
                x = x + moves[stage].reshape(-1, *shapes[stage])
        return x

    def project(z: Tensor) -> Tensor:
        first, *moves = torch.split(z, list(phases), dim=1)
        return torch.cat([first, *(project_onto_l1_ball(move, FEATURE_RADIUS * move.shape[1]) for move in moves)], dim=1)

    factory = _start_at_encoded(network, path, phases, decode)
    return lambda data: replace(factory(data), project=project)


def weights(network: ImageGenerator, path: str) -> DecoderFactory:
    """Return the decoder factory whose variables are the latents, and then displacements of the weights that decode them.

    A factory returns the decoder for given data, and raises ValueError if the generator does not fit the data. Each example has
    weights of its own. path: the generator's file, for messages.
    """
    trained = {name: p for name, p in network.named_parameters() if name.split(".")[0] in ("expand", "up", "leave")}
    sizes = [p.numel() for p in trained.values()]
    units = [WEIGHT_UNIT * float(p.square().mean().sqrt()) for p in trained.values()]
    decoding = _Decoding(network)

    def decode_one(z: Tensor, moves: Tensor, y: Tensor) -> Tensor:
        placed = zip(trained.items(), units, torch.split(moves, sizes), strict=True)
        moved = {f"network.{name}": p + unit * move.view_as(p) for (name, p), unit, move in placed}
        x: Tensor = functional_call(decoding, moved, (z[None], y[None]))
        return x[0]

    def decode(z: Tensor, y: Tensor) -> Tensor:
        place(network, z)
        return vmap(decode_one)(z[:, : network.latents], z[:, network.latents :], _match_classes(network, y))

    return _start_at_encoded(network, path, (network.latents, sum(sizes)), decode)


SEARCHES: Mapping[str, Callable[[ImageGenerator, str], DecoderFactory]] = {
    "latents": latents,
    "features": features,
    "weights": weights,
}
"""Functions that return a decoder factory for a generator and its path, by the variable that is optimised: the word after @ in a
name such as `generator.safetensors@features`."""


def is_generated(name: str) -> bool:
    """Return whether the name of a decoder has the form FILE.safetensors@WORD, as `find_generated` takes it."""
    return name.rpartition("@")[0].endswith(FILE_ENDING)


def find_generated(name: str) -> DecoderFactory:
    """Return the decoder factory for a name FILE@WORD: the generator's file, and the variable to optimise, one of `SEARCHES`.

    Raises ValueError for an unknown word after the @, and for a file that holds no generator.
    """
    path, _, word = name.rpartition("@")
    if word not in SEARCHES:
        raise ValueError(f"decoder {name}: unknown {word!r} after the file's name. Known: {', '.join(SEARCHES)}")
    factory = SEARCHES[word](read_generator(Path(path)), path)
    factory.__name__ = factory.__qualname__ = name  # for messages, and to tell searches apart
    return factory


def _start_at_encoded(
    network: ImageGenerator, path: str, phases: tuple[int, ...], decode: Callable[[Tensor, Tensor], Tensor]
) -> DecoderFactory:
    """Return the factory of a decoder with these phases, whose start has the encoder's latents and displacements of 0."""

    def encode(x: Tensor) -> Tensor:
        z = place(network, x).encode(x)[0]
        return torch.cat([z, z.new_zeros(len(z), sum(phases[1:]))], dim=1)

    def build(data: DataSpec) -> Decoder:
        _check_data(network, path, data)
        return Decoder((sum(phases),), decode=decode, encode=encode, uses_labels=True, phases=phases)

    return build


class _Decoding(torch.nn.Module):
    """A module whose call is the generator's `decode`, for `functional_call`."""

    def __init__(self, network: ImageGenerator) -> None:
        super().__init__()
        self.network = network

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.network.decode(z, y)


def _match_classes(network: ImageGenerator, y: Tensor) -> Tensor:
    """Return labels, or probabilities of classes, as a generator takes them: all of class 0 if it has no other class."""
    if network.classes > 1:
        return y
    return torch.ones_like(y[:, :1]) if y.ndim == 2 else torch.zeros_like(y)


def _check_data(network: ImageGenerator, path: str, data: DataSpec) -> None:
    """Raise ValueError unless the generator makes images of the data's shape, and has one class or as many as the data."""
    expected = (3, network.side, network.side)
    if not data.is_image or data.shape != expected:
        raise ValueError(f"the decoder {path} makes images of shape {expected}, and these data have shape {data.shape}")
    if network.classes not in (1, data.num_classes):
        raise ValueError(
            f"the decoder {path} knows {network.classes} classes, and these data have {data.num_classes}; train a generator on "
            "images of the same classes, or on an archive without labels"
        )

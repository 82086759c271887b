"""Lossless encodings of updates for transmission. A lossy step is a defense, not a codec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from fedsim.recording.packing import sparse, tabled
from fedsim.recording.packing.parts import TensorLike, about, check_kind, check_names, check_shape

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A client's message of one round: tensors as the codec encoded them, and the codec's name."""

    tensors: Mapping[str, Tensor]
    codec: str = "dense"


class Codec(NamedTuple):
    """A lossless encoding of an update.

    encode: maps an update to the tensors that are sent.
    decode: maps these tensors and the weights that the client started from to the update, bit for bit.
    fits:   raises ValueError where names, types and shapes of the tensors, or of those that a file declares, cannot belong to an
            update of such weights. Tensors that fit take at most a few times the memory of the weights.
    sent:   maps the tensors and the weights to a mask for each tensor of the update: which coordinates were sent. Empty for all.
    packs:  whether the tensors have other names and shapes than the update. Then `decode` raises ValueError for tensors that
            encode no update of such weights, of which it needs the shapes only.
    """

    encode: Callable[[Tensors], dict[str, Tensor]]
    decode: Callable[[Tensors, Tensors], dict[str, Tensor]]
    fits: Callable[[Mapping[str, TensorLike], Mapping[str, TensorLike]], None]
    sent: Callable[[Tensors, Tensors], dict[str, Tensor]] = lambda tensors, start: {}
    packs: bool = True


def _no_encoder(update: Tensors) -> dict[str, Tensor]:
    raise ValueError("codec 'weights' is what clients of other apps send; an update is sent as it is, with codec 'dense'")


def _difference(weights: Tensors, start: Tensors) -> dict[str, Tensor]:
    return {name: (w.double() - start[name].double()).to(w.dtype) for name, w in weights.items()}


def _same_kinds(got: Mapping[str, TensorLike], weights: Mapping[str, TensorLike]) -> None:
    check_names(got, weights)
    for name, tensor in got.items():
        with about(name):
            check_shape(tensor, weights[name])
            check_kind(tensor, weights[name])


CODECS: dict[str, Codec] = {
    "dense": Codec(dict, lambda tensors, start: dict(tensors), _same_kinds, packs=False),
    # whole weights, as plain FedAvg sends them: the client's own rounding is in them, see `Observation.rounding`
    "weights": Codec(_no_encoder, _difference, _same_kinds, packs=False),
    "sparse": Codec(sparse.encode, sparse.decode, sparse.fits, sparse.sent),
    "bits": Codec(partial(tabled.encode, most=2), partial(tabled.decode, most=2), partial(tabled.fits, most=2)),
    "levels": Codec(tabled.encode, tabled.decode, tabled.fits),
}


def codec_of(name: str) -> Codec:
    """Return the codec of that name. Raises ValueError for an unknown one."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}. Known: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def encode(update: Tensors, codec: str = "dense") -> Payload:
    """Pack `update`, by parameter name."""
    return Payload(tensors=codec_of(codec).encode(update), codec=codec)


def decode(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """Return the update in the message of a client that started from the weights `start`."""
    return codec_of(payload.codec).decode(payload.tensors, start)


def sent(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """Return by name which coordinates of the update were sent; empty where the codec sends all. start: as in `decode`."""
    return codec_of(payload.codec).sent(payload.tensors, start)

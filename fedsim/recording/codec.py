"""Lossless packing of an update for the wire. Whatever loses anything is a defense, not a codec."""

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
    """What is on the wire for one client and round: tensors as the codec laid them out, and the codec's name."""

    tensors: Mapping[str, Tensor]
    codec: str = "dense"


class Codec(NamedTuple):
    """An exact round trip between an update and what is sent.

    encode: from an update, what is sent.
    decode: from what is sent and the weights that the client started from, the update: bit for bit what was encoded.
    fits:   raises ValueError where names, types and shapes of what is sent, or of what a file claims to hold, fit no update of
            such weights. What fits takes no more memory than a few times the weights.
    sent:   from what is sent and the weights, a truth value for each coordinate of the update; empty where all were sent.
    packs:  whether something other than tensors of the update's names and shapes is sent. Then `decode` raises ValueError for
            what gives no update of such weights, of which it needs the shapes alone.
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
    """The codec of that name. Raises ValueError for an unknown one."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}. Known: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def encode(update: Tensors, codec: str = "dense") -> Payload:
    """Pack `update`, by parameter name."""
    return Payload(tensors=codec_of(codec).encode(update), codec=codec)


def decode(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """The update that was packed by a client that started from the weights `start`."""
    return codec_of(payload.codec).decode(payload.tensors, start)


def sent(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """Which coordinates of the update were sent, by name, where the codec tells; `start` as for `decode`."""
    return codec_of(payload.codec).sent(payload.tensors, start)

"""Lossless packing of an update for the wire. Whatever loses anything is a defense, not a codec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

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
    sent:   from what is sent, a truth value for each coordinate of the update; empty where all of them were sent.
    """

    encode: Callable[[Tensors], dict[str, Tensor]]
    decode: Callable[[Tensors, Tensors], dict[str, Tensor]]
    sent: Callable[[Tensors], dict[str, Tensor]]


def _no_encoder(update: Tensors) -> dict[str, Tensor]:
    raise ValueError("codec 'weights' is what clients of other apps send; an update is sent as it is, with codec 'dense'")


def _difference(weights: Tensors, start: Tensors) -> dict[str, Tensor]:
    return {name: (w.double() - start[name].double()).to(w.dtype) for name, w in weights.items()}


CODECS: dict[str, Codec] = {
    "dense": Codec(encode=dict, decode=lambda tensors, start: dict(tensors), sent=lambda tensors: {}),
    # whole weights, as plain FedAvg sends them: the client's own rounding is in them, see `Observation.rounding`
    "weights": Codec(encode=_no_encoder, decode=_difference, sent=lambda tensors: {}),
}


def _codec(name: str) -> Codec:
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}. Known: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def encode(update: Tensors, codec: str = "dense") -> Payload:
    """Pack `update`, by parameter name."""
    return Payload(tensors=_codec(codec).encode(update), codec=codec)


def decode(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """The update that was packed by a client that started from the weights `start`."""
    return _codec(payload.codec).decode(payload.tensors, start)


def sent(payload: Payload) -> dict[str, Tensor]:
    """Which coordinates of the update were sent, by name, where the codec tells."""
    return _codec(payload.codec).sent(payload.tensors)

"""Lossless packing of an update for the wire. Whatever loses anything is a defense, not a codec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What is on the wire for one client and round: tensors as the codec laid them out, and the codec's name."""

    tensors: Mapping[str, Tensor]
    codec: str = "dense"


class Codec(NamedTuple):
    """An exact round trip between an update and what is sent.

    encode, decode: inverse to each other, bit for bit.
    sent: from what is sent, a truth value for each coordinate of the update; empty where all of them were sent.
    """

    encode: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    decode: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    sent: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


CODECS: dict[str, Codec] = {"dense": Codec(encode=dict, decode=dict, sent=lambda tensors: {})}


def _codec(name: str) -> Codec:
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}. Known: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def encode(update: Mapping[str, Tensor], codec: str = "dense") -> Payload:
    """Pack `update`, by parameter name."""
    return Payload(tensors=_codec(codec).encode(update), codec=codec)


def decode(payload: Payload) -> dict[str, Tensor]:
    """The update that was packed, exactly."""
    return _codec(payload.codec).decode(payload.tensors)


def sent(payload: Payload) -> dict[str, Tensor]:
    """Which coordinates of the update were sent, by name, where the codec tells."""
    return _codec(payload.codec).sent(payload.tensors)

"""Codecs: lossless packing of an update for the wire. A lossy step is a defense, not a codec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from defenses.base import Tensors
from fedsim.recording.packing import sparse, tabled
from fedsim.recording.packing.parts import TensorLike, check_kind, check_names, check_shape, name_parameter


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The message of one client in one round: the tensors that the codec made of the update, and the codec's name."""

    tensors: Mapping[str, Tensor]
    codec: str = "dense"


class Codec(NamedTuple):
    """A lossless conversion between updates and the tensors that are sent.

    encode: returns the tensors to send for an update.
    decode: returns the update, given the sent tensors and the weights that the client started from; bit for bit what was encoded.
    fits:   raises ValueError if names, types or shapes of the sent tensors cannot belong to an update of these weights. Tensors
            that fit take at most a few times the memory of the weights.
    sent:   returns, given the sent tensors and the weights, a boolean mask of the coordinates that were sent, by
            parameter name; {} for codecs that always send all coordinates.
    packs:  whether the sent tensors differ from the update's in names or shapes. Then `decode` raises ValueError for
            invalid content, and needs only the shapes of the weights.
    """

    encode: Callable[[Tensors], dict[str, Tensor]]
    decode: Callable[[Tensors, Tensors], dict[str, Tensor]]
    fits: Callable[[Mapping[str, TensorLike], Mapping[str, TensorLike]], None]
    sent: Callable[[Tensors, Tensors], dict[str, Tensor]] = lambda tensors, start: {}
    packs: bool = True


def _refuse_update(update: Tensors) -> dict[str, Tensor]:
    raise ValueError("codec 'weights' cannot encode an update: it marks whole weights sent by other apps; use codec 'dense'")


def _subtract(weights: Tensors, start: Tensors) -> dict[str, Tensor]:
    """Return the update `weights - start`, computed in float64 and rounded to the weights' type."""
    return {name: (w.double() - start[name].double()).to(w.dtype) for name, w in weights.items()}


def _check_kinds(got: Mapping[str, TensorLike], weights: Mapping[str, TensorLike]) -> None:
    """Raise ValueError unless names and shapes are those of the weights.

    Also raises ValueError if one of a tensor and its weight is floating point and the other is not.
    """
    check_names(got, weights)
    for name, tensor in got.items():
        with name_parameter(name):
            check_shape(tensor, weights[name])
            check_kind(tensor, weights[name])


CODECS: dict[str, Codec] = {
    "dense": Codec(dict, lambda tensors, start: dict(tensors), _check_kinds, packs=False),
    # whole weights, as plain FedAvg sends them; they include the rounding of the client, see `Observation.rounding`
    "weights": Codec(_refuse_update, _subtract, _check_kinds, packs=False),
    "sparse": Codec(sparse.encode, sparse.decode, sparse.check_fit, sparse.find_sent),
    "bits": Codec(partial(tabled.encode, most=2), partial(tabled.decode, most=2), partial(tabled.check_fit, most=2)),
    "levels": Codec(tabled.encode, tabled.decode, tabled.check_fit),
}


def find_codec(name: str) -> Codec:
    """Return the codec with this name. Raises ValueError for an unknown name."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}. Known: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def encode(update: Tensors, codec: str = "dense") -> Payload:
    """Pack an update (tensors by parameter name) with a codec, and return the payload."""
    return Payload(tensors=find_codec(codec).encode(update), codec=codec)


def decode(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """Unpack a payload and return the update, given the weights `start` that the client started from."""
    return find_codec(payload.codec).decode(payload.tensors, start)


def find_sent(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """Return a boolean mask of the sent coordinates by parameter name; empty if the codec always sends all of them."""
    return find_codec(payload.codec).sent(payload.tensors, start)

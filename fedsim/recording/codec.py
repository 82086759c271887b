"""Codecs, which pack an update into tensors to send without loss. A lossy step is a defense, not a codec."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from defenses.base import Tensors
from fedsim.recording.packing import sparse, values
from fedsim.recording.packing.parts import TensorLike, check_kind, check_names, check_shape, name_parameter


@dataclass(frozen=True, kw_only=True)
class Payload:
    """An update in packed form: tensors by name, as they are sent, and the name of the codec that packed them."""

    tensors: Mapping[str, Tensor]
    codec: str = "dense"


class Codec(NamedTuple):
    """A lossless conversion between updates and the tensors that are sent.

    The codec "weights" is an exception: it cannot encode, and its decoded update, whole weights minus start, is rounded.
    encode: returns the tensors to send for an update.
    decode: returns the update, given the sent tensors and the weights that the client started from.
    fits:   raises ValueError if names, types or shapes of the sent tensors cannot belong to an update of these weights.
    sent:   returns, given the sent tensors and the weights, a boolean mask of the coordinates that were sent, by
            parameter name; {} for codecs that always send all coordinates.
    packs:  whether the sent tensors may differ from the update's in names or shapes. Then `decode` raises ValueError for
            invalid content, and needs only the shapes of the weights.
    """

    encode: Callable[[Tensors], dict[str, Tensor]]
    decode: Callable[[Tensors, Tensors], dict[str, Tensor]]
    fits: Callable[[Mapping[str, TensorLike], Mapping[str, TensorLike]], None]
    sent: Callable[[Tensors, Tensors], dict[str, Tensor]] = lambda tensors, start: {}
    packs: bool = True


def _refuse_update(update: Tensors) -> dict[str, Tensor]:
    raise ValueError("codec 'weights' cannot encode an update, because it stands for whole weights; use codec 'dense'")


def _subtract(weights: Tensors, start: Tensors) -> dict[str, Tensor]:
    """Return `weights - start` by name, computed in float64, in the type of `weights` or, for half precision, float32."""
    types = {n: torch.promote_types(w.dtype, torch.float32) if w.is_floating_point() else w.dtype for n, w in weights.items()}
    return {name: (w.double() - start[name].double()).to(types[name]) for name, w in weights.items()}


def _check_kinds(got: Mapping[str, TensorLike], weights: Mapping[str, TensorLike]) -> None:
    """Raise ValueError unless `got` has the names and shapes of `weights`.

    Also raises ValueError if a tensor is floating point and its weight is not, or the other way round.
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
    "bits": Codec(
        partial(values.encode, max_values=2), partial(values.decode, max_values=2), partial(values.check_fit, max_values=2)
    ),
    "levels": Codec(values.encode, values.decode, values.check_fit),
}


def find_codec(name: str) -> Codec:
    """Return the codec called `name`, such as "dense". Raises ValueError for an unknown name."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}. Known: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def encode(update: Tensors, codec: str = "dense") -> Payload:
    """Pack an update (tensors by parameter name) with a codec, and return the payload.

    codec: name of the codec. Raises ValueError if it is unknown, or "weights", which cannot pack updates.
    """
    return Payload(tensors=find_codec(codec).encode(update), codec=codec)


def decode(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """Return the update (tensors by parameter name) in a payload, given the weights `start` that the client started from.

    Raises ValueError if the codec is unknown or, for a codec that packs, if the tensors in the payload are not its output for an
    update of these weights. For other codecs, the caller checks the tensors with `Codec.fits`.
    """
    return find_codec(payload.codec).decode(payload.tensors, start)


def find_sent(payload: Payload, start: Tensors) -> dict[str, Tensor]:
    """Return a boolean mask of the coordinates that were sent, by parameter name; {} if the codec always sends all of them.

    For codec "sparse", these are the nonzero coordinates. start: weights that the client started from.
    """
    return find_codec(payload.codec).sent(payload.tensors, start)

"""Masked vectors, the random-looking integers that a server receives from a client under secure aggregation, in files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from fedsim.recording.packing.parts import TensorLike
from fedsim.recording.safe_files import MAX_NUMBER, shorten

MASKED_CODEC = "masked"
"""Codec and status of a row that holds a masked vector instead of an update."""
SUM_CLIENT = "sum"
"""Name in place of a client's in the row of a round's secure sum."""
EXCHANGE_NAMES = ("setup", "share", "collect", "unmask")
"""Message exchanges of one round of secure aggregation, in order."""
HEADER_WORDS = 3
"""Number of words before those of the update: number of examples, number of clipped coordinates, and 1 if any was clipped.

The sum over clients of the last word is the number of clients that clipped.
"""
KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class MaskedMessage:
    """What the server sees of one client in one round of secure aggregation.

    words:  masked vector, uint32 of shape (HEADER_WORDS + N,) for updates of N coordinates; None if the client sent none. Its
            first words hold three masked numbers: examples, clipped coordinates, and 1 if any coordinate was clipped, else 0.
    mask_key, share_key: the client's public keys of the round, 32 bytes each, for masks and for the encryption of shares.
    sealed: size in bytes of each encrypted message with shares of the client's secrets. There is one message per neighbour; the
            neighbours of a client are the clients that keep shares of its secrets.
    up, down: bytes sent by and to the client, by name of the exchange (`EXCHANGE_NAMES`); exchanges without bytes are left out.
    """

    words: Tensor | None = None
    mask_key: bytes
    share_key: bytes
    sealed: tuple[int, ...] = ()
    up: Mapping[str, int] = field(default_factory=dict)
    down: Mapping[str, int] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the fields as a dict of tensors, which can be written to a file; without "words" if there are none."""
        keys = {"mask_key": self.mask_key, "share_key": self.share_key}
        tensors = {name: torch.tensor(list(key), dtype=torch.uint8) for name, key in keys.items()}
        tensors["sealed"] = torch.tensor(self.sealed, dtype=torch.int64)
        for name, sizes in (("up", self.up), ("down", self.down)):
            tensors[name] = torch.tensor([sizes.get(exchange, 0) for exchange in EXCHANGE_NAMES])
        return tensors if self.words is None else {**tensors, "words": self.words}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "MaskedMessage":
        """Build from the output of `to_tensors`, for which the caller has called `check_fit`.

        Raises ValueError if a size in bytes in `sealed`, `up` or `down` is negative or above `MAX_NUMBER`.
        """
        for name in ("sealed", "up", "down"):
            impossible = tensors[name][(tensors[name] < 0) | (tensors[name] > MAX_NUMBER)]
            if len(impossible):
                raise ValueError(
                    f"tensor {name!r} holds the size {impossible[0].item()} of a message, which must be from 0 to {MAX_NUMBER} "
                    "bytes; copy the recording again"
                )
        up, down = (
            {exchange: size for exchange, size in zip(EXCHANGE_NAMES, tensors[name].tolist(), strict=True) if size}
            for name in ("up", "down")
        )
        return cls(
            words=tensors.get("words"),
            mask_key=bytes(tensors["mask_key"].tolist()),
            share_key=bytes(tensors["share_key"].tolist()),
            sealed=tuple(tensors["sealed"].tolist()),
            up=up,
            down=down,
        )


def check_fit(got: Mapping[str, TensorLike], weights: Mapping[str, TensorLike]) -> None:
    """Raise ValueError if names, types or shapes of a file's tensors are not those of a `MaskedMessage` for these weights.

    The tensor "words" may be missing, since a client may have sent no masked vector.
    """
    length = HEADER_WORDS + sum(prod(weight.shape) for weight in weights.values())
    expected = {
        "words": (torch.uint32, (length,)),
        "mask_key": (torch.uint8, (KEY_BYTES,)),
        "share_key": (torch.uint8, (KEY_BYTES,)),
        "up": (torch.int64, (len(EXCHANGE_NAMES),)),
        "down": (torch.int64, (len(EXCHANGE_NAMES),)),
    }
    if {*got, "words"} != {*expected, "sealed"}:
        raise ValueError(
            f"has the tensors {shorten(sorted(got), 200)}, but a file with a masked vector has {sorted({*expected, 'sealed'})}; "
            "copy the recording again"
        )
    sealed = got["sealed"]
    if sealed.dtype != torch.int64 or len(sealed.shape) != 1:
        raise ValueError(
            f"tensor 'sealed', the sizes of encrypted messages, must be a vector of int64, got {sealed.dtype} of shape "
            f"{shorten(tuple(sealed.shape))}; copy the recording again"
        )
    for name, (dtype, shape) in expected.items():
        if name in got and (got[name].dtype, tuple(got[name].shape)) != (dtype, shape):
            raise ValueError(
                f"tensor {name!r} of a masked vector must have type {dtype} and shape {shape}, got {got[name].dtype} and "
                f"{shorten(tuple(got[name].shape))}; copy the recording again"
            )

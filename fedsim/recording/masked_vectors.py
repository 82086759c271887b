"""Messages of one client under secure aggregation as the server sees them: masked vectors, public keys, and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from fedsim.recording.packing.parts import TensorLike

MASKED = "masked"
"""Codec, and status, of a row that is no update of its own: only the sum over its cohort is."""
SUM = "sum"
"""Stands for a client in the row of that sum."""
EXCHANGES = ("setup", "share", "collect", "unmask")
"""Of one round, in order."""
HEADER = 3
"""Words before those of an update: the weight, how many coordinates were clipped, and whether any was."""
KEY_BYTES = 32
MAX_NUMBER = 2**53


@dataclass(frozen=True, kw_only=True)
class Masked:
    """One client's messages in one round.

    words:  (HEADER + coordinates,) uint32, the masked vector; None where the client sent none.
    mask_key, share_key: its public keys of the round, 32 bytes each.
    sealed: sizes in bytes of the encrypted shares for its neighbours.
    up, down: bytes sent and received by exchange, for the exchanges that took place.
    """

    words: Tensor | None = None
    mask_key: bytes
    share_key: bytes
    sealed: tuple[int, ...] = ()
    up: Mapping[str, int] = field(default_factory=dict)
    down: Mapping[str, int] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return tensors by name, for a file."""
        tensors = {name: torch.tensor(list(key), dtype=torch.uint8) for name, key in self._keys().items()}
        tensors["sealed"] = torch.tensor(self.sealed, dtype=torch.int64)
        for name, sizes in (("up", self.up), ("down", self.down)):
            tensors[name] = torch.tensor([sizes.get(exchange, 0) for exchange in EXCHANGES])
        return tensors if self.words is None else {**tensors, "words": self.words}

    def _keys(self) -> dict[str, bytes]:
        return {"mask_key": self.mask_key, "share_key": self.share_key}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Masked":
        """Return the messages that `to_tensors` was called on, from tensors that `fits` accepts.

        Raises ValueError for a negative size.
        """
        for name in ("sealed", "up", "down"):
            if bool(((tensors[name] < 0) | (tensors[name] > MAX_NUMBER)).any()):
                raise ValueError(f"tensor {name!r} holds what is no size")
        up, down = (
            {exchange: size for exchange, size in zip(EXCHANGES, tensors[name].tolist(), strict=True) if size}
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


def fits(got: Mapping[str, TensorLike], weights: Mapping[str, TensorLike]) -> None:
    """Raise ValueError where names, types and shapes that a file declares are not those of a `Masked` for such weights."""
    length = HEADER + sum(prod(weight.shape) for weight in weights.values())
    expected = {
        "words": (torch.uint32, (length,)),
        "mask_key": (torch.uint8, (KEY_BYTES,)),
        "share_key": (torch.uint8, (KEY_BYTES,)),
        "up": (torch.int64, (len(EXCHANGES),)),
        "down": (torch.int64, (len(EXCHANGES),)),
    }
    if {*got, "words"} != {*expected, "sealed"}:
        raise ValueError(f"a masked vector is not made of {sorted(got)}"[:300])
    if got["sealed"].dtype != torch.int64 or len(got["sealed"].shape) != 1:
        raise ValueError("tensor 'sealed' is no list of sizes")
    for name, (dtype, shape) in expected.items():
        if name in got and (got[name].dtype, tuple(got[name].shape)) != (dtype, shape):
            raise ValueError(f"tensor {name!r} is {got[name].dtype} {tuple(got[name].shape)}, and was to be {dtype} {shape}")

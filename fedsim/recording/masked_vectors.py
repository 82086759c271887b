"""What a server sees of one client under secure aggregation: nothing but words that look random, and who talked to whom."""

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
LARGEST = 2**53


@dataclass(frozen=True, kw_only=True)
class Masked:
    """One client in one round.

    words:  (HEADER + coordinates,) uint32, the masked vector; None where it sent none.
    mask_key, share_key: its public keys of the round, 32 bytes each.
    sealed: sizes of the shares that it encrypted for its neighbours, in bytes.
    up, down: bytes on the wire by exchange, as far as it came.
    """

    words: Tensor | None = None
    mask_key: bytes
    share_key: bytes
    sealed: tuple[int, ...] = ()
    up: Mapping[str, int] = field(default_factory=dict)
    down: Mapping[str, int] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, Tensor]:
        """For a file."""
        tensors = {name: torch.tensor(list(key), dtype=torch.uint8) for name, key in self._keys().items()}
        tensors["sealed"] = torch.tensor(self.sealed, dtype=torch.int64)
        for name, sizes in (("up", self.up), ("down", self.down)):
            tensors[name] = torch.tensor([sizes.get(exchange, 0) for exchange in EXCHANGES])
        return tensors if self.words is None else {**tensors, "words": self.words}

    def _keys(self) -> dict[str, bytes]:
        return {"mask_key": self.mask_key, "share_key": self.share_key}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Masked":
        """The inverse of `to_tensors`, of what `fits`. Raises ValueError for a size that is none."""
        for name in ("sealed", "up", "down"):
            if bool(((tensors[name] < 0) | (tensors[name] > LARGEST)).any()):
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
    """Raises ValueError where what a file claims to hold has not the names, types and shapes of a `Masked` of such weights."""
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

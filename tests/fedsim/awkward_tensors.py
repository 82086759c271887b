"""Tensors with awkward values, and their comparison bit for bit."""

from typing import Any

import torch
from torch import Tensor

AWKWARD: dict[str, Tensor] = {
    "z.nan": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]),
    "a.scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "half": torch.tensor([1 / 3], dtype=torch.float16),
    "whole": torch.tensor([-(2**62)], dtype=torch.int64),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "part": torch.arange(6.0)[2:4],
}
"""Tensors that lossless storage must keep bit for bit: special values, shapes, types and views."""


def are_identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Compare bit for bit, also NaN and the sign of zero; the order of names does not count."""

    def bits(t: Tensor) -> tuple[Any, ...]:
        return t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()

    return {name: bits(t) for name, t in a.items()} == {name: bits(t) for name, t in b.items()}

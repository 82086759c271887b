"""Exact ranks by Gaussian elimination modulo a prime, for matrices of whole numbers in float64.

At random entries a rank modulo a prime is the generic one, but for a chance of about (size / PRIME), and it is never above it
(Schwartz 1980, Zippel 1979). No tolerance is needed, and no matrix is too ill-conditioned.
"""

import torch
from torch import Tensor

PRIME = 8_388_593
"""The largest below 2^23: sums of 100 products stay whole numbers in float64."""
PANEL = 64


def modulo(x: Tensor) -> Tensor:
    """Into [0, PRIME), of whole numbers below 2^53."""
    return x - PRIME * torch.floor(x / PRIME)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b."""
    total = modulo(a[..., :PANEL] @ b[..., :PANEL, :])
    for start in range(PANEL, a.shape[-1], PANEL):
        total = modulo(total + a[..., start : start + PANEL] @ b[..., start : start + PANEL, :])
    return total


def draw(*shape: int, rng: torch.Generator) -> Tensor:
    """Uniform among the numbers that are not 0."""
    return torch.randint(1, PRIME, shape, generator=rng).double()


def rank(matrix: Tensor) -> int:
    """Of a matrix of numbers in [0, PRIME)."""
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    left, found = matrix.clone(), 0
    for start in range(0, matrix.shape[1], PANEL):
        order, low, pivots = _factor(left[:, :PANEL])
        rest = left[order, PANEL:]
        for row in range(1, pivots):
            rest[row] = modulo(rest[row] - low[row, :row] @ rest[:row])
        found += pivots
        left = modulo(rest[pivots:] - low[pivots:, :pivots] @ rest[:pivots])
        if not len(left) or start + PANEL >= matrix.shape[1]:
            break
    return found


def _factor(panel: Tensor) -> tuple[Tensor, Tensor, int]:
    """The order of rows, the multiples (rows, columns) of the pivot rows that were taken off each, and the pivots' count."""
    panel, order, low = panel.clone(), torch.arange(len(panel)), torch.zeros_like(panel)
    pivots = 0
    for column in range(panel.shape[1]):
        candidates = panel[pivots:, column].nonzero()
        if not len(candidates):
            continue
        swap = [pivots, pivots + int(candidates[0])]
        for t in (panel, order, low):
            t[swap] = t[swap[::-1]]
        multiples = modulo(panel[pivots + 1 :, column] * pow(int(panel[pivots, column]), -1, PRIME))
        low[pivots + 1 :, pivots] = multiples
        panel[pivots + 1 :, column:] = modulo(panel[pivots + 1 :, column:] - multiples[:, None] * panel[pivots, column:])
        pivots += 1
        if pivots == len(panel):
            break
    return order, low, pivots


def null_space(matrix: Tensor) -> Tensor:
    """A basis, (columns, columns - rank), of what a matrix of numbers in [0, PRIME) takes to 0."""
    left, row = matrix.clone(), 0
    leading: list[int] = []
    for column in range(matrix.shape[1]):
        if row == len(left):
            break
        candidates = left[row:, column].nonzero()
        if not len(candidates):
            continue
        swap = [row, row + int(candidates[0])]
        left[swap] = left[swap[::-1]]
        left[row] = modulo(left[row] * pow(int(left[row, column]), -1, PRIME))
        multiples = left[:, column].clone()
        multiples[row] = 0
        left = modulo(left - multiples[:, None] * left[row])
        leading.append(column)
        row += 1
    free = [column for column in range(matrix.shape[1]) if column not in set(leading)]
    basis = torch.zeros(matrix.shape[1], len(free), dtype=matrix.dtype)
    basis[free] = torch.eye(len(free), dtype=matrix.dtype)
    basis[leading] = modulo(-left[:row][:, free])
    return basis

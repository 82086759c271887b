"""Exact matrix ranks by Gaussian elimination modulo a prime, for matrices of integers stored in float64.

For random entries, the rank modulo a prime is never above the generic rank, and is below it only with a probability of about
size / PRIME (Schwartz 1980, Zippel 1979). No tolerance is needed, and ill-conditioned matrices are no problem.
"""

import torch
from torch import Tensor

PRIME = 8_388_593
"""The largest prime below 2^23, so that sums of 100 products are exact in float64."""
PANEL_COLUMNS = 64
"""Number of columns that are eliminated at once."""


def reduce_modulo(x: Tensor) -> Tensor:
    """Reduce integers of magnitude below 2^53 modulo PRIME, to [0, PRIME)."""
    return x - PRIME * torch.floor(x / PRIME)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a @ b modulo PRIME, for integers in [0, PRIME)."""
    total = reduce_modulo(a[..., :PANEL_COLUMNS] @ b[..., :PANEL_COLUMNS, :])
    for start in range(PANEL_COLUMNS, a.shape[-1], PANEL_COLUMNS):
        end = start + PANEL_COLUMNS
        total = reduce_modulo(total + a[..., start:end] @ b[..., start:end, :])
    return total


def draw(*shape: int, rng: torch.Generator) -> Tensor:
    """Draw integers uniformly from [1, PRIME), as a float64 tensor of the given shape."""
    return torch.randint(1, PRIME, shape, generator=rng).double()


def compute_rank(matrix: Tensor) -> int:
    """Return the rank modulo PRIME of a matrix of integers in [0, PRIME)."""
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    left, rank = matrix.clone(), 0
    for start in range(0, matrix.shape[1], PANEL_COLUMNS):
        order, low, pivots = _factor(left[:, :PANEL_COLUMNS])
        rest = left[order, PANEL_COLUMNS:]
        for row in range(1, pivots):
            rest[row] = reduce_modulo(rest[row] - low[row, :row] @ rest[:row])
        rank += pivots
        left = reduce_modulo(rest[pivots:] - low[pivots:, :pivots] @ rest[:pivots])
        if not len(left) or start + PANEL_COLUMNS >= matrix.shape[1]:
            break
    return rank


def _factor(panel: Tensor) -> tuple[Tensor, Tensor, int]:
    """Eliminate a panel of columns modulo PRIME; return the row order, the multipliers (rows, columns), and the number of pivots.

    The row order holds the original index of each row after swaps; pivot rows come first. Entry (i, j) of the multipliers is the
    multiple of pivot row j that was subtracted from row i, in the new order.
    """
    panel, order, low = panel.clone(), torch.arange(len(panel)), torch.zeros_like(panel)
    pivots = 0
    for column in range(panel.shape[1]):
        candidates = panel[pivots:, column].nonzero()
        if not len(candidates):
            continue
        swap = [pivots, pivots + int(candidates[0])]
        for t in (panel, order, low):
            t[swap] = t[swap[::-1]]
        multiples = reduce_modulo(panel[pivots + 1 :, column] * pow(int(panel[pivots, column]), -1, PRIME))
        low[pivots + 1 :, pivots] = multiples
        panel[pivots + 1 :, column:] = reduce_modulo(panel[pivots + 1 :, column:] - multiples[:, None] * panel[pivots, column:])
        pivots += 1
        if pivots == len(panel):
            break
    return order, low, pivots


def find_null_space(matrix: Tensor) -> Tensor:
    """Return a basis (columns, columns - rank) of the null space modulo PRIME of a matrix of integers in [0, PRIME)."""
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
        left[row] = reduce_modulo(left[row] * pow(int(left[row, column]), -1, PRIME))
        multiples = left[:, column].clone()
        multiples[row] = 0
        left = reduce_modulo(left - multiples[:, None] * left[row])
        leading.append(column)
        row += 1
    free = [column for column in range(matrix.shape[1]) if column not in set(leading)]
    basis = torch.zeros(matrix.shape[1], len(free), dtype=matrix.dtype)
    basis[free] = torch.eye(len(free), dtype=matrix.dtype)
    basis[leading] = reduce_modulo(-left[:row][:, free])
    return basis

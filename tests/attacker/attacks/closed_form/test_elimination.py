"""Tests of exact ranks modulo a prime, with matrices of known rank."""

import pytest
import torch

from attacker.attacks.closed_form.rank.elimination import PRIME, compute_rank, draw, find_null_space, multiply, reduce_modulo


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("rows", "columns", "true"), [(90, 40, 25), (40, 90, 25), (64, 64, 64), (200, 129, 128), (5, 300, 5), (3, 3, 0)]
)
def test_rank_and_null_space_of_products_of_known_rank(rows: int, columns: int, true: int, rng: torch.Generator) -> None:
    matrix = multiply(draw(rows, true, rng=rng), draw(true, columns, rng=rng)) if true else torch.zeros(rows, columns).double()
    assert compute_rank(matrix) == true
    matrix[:, : columns // 2] = 0  # leading columns without a pivot
    assert compute_rank(matrix) == min(true, columns - columns // 2)
    matrix = matrix[:, torch.randperm(columns, generator=rng)]
    basis = find_null_space(matrix)
    assert basis.shape == (columns, columns - compute_rank(matrix))
    assert not multiply(matrix, basis).any()
    assert compute_rank(basis) == basis.shape[1]


def test_long_products_are_exact(rng: torch.Generator) -> None:
    a, b = draw(3, 500, rng=rng), draw(500, 2, rng=rng)
    exact = [[sum(int(p) * int(q) for p, q in zip(row, column, strict=True)) % PRIME for column in b.T] for row in a]
    assert multiply(a, b).tolist() == exact


def test_numbers_are_reduced_between_0_and_the_prime() -> None:
    numbers = torch.tensor([-1.0, 0, PRIME, 2.0**52 + 1, -(2.0**51)], dtype=torch.float64)
    assert reduce_modulo(numbers).tolist() == [int(n) % PRIME for n in numbers]


def test_nearly_dependent_rows_are_told_from_dependent_ones() -> None:
    nearly = torch.tensor([[1.0, 1], [1, 1 + 2.0**-40]], dtype=torch.float64) * 2**40
    assert compute_rank(reduce_modulo(nearly)) == 2
    assert compute_rank(reduce_modulo(torch.tensor([[3.0, 7], [6, 14]], dtype=torch.float64))) == 1

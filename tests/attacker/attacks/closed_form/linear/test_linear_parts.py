"""Tests of the detection of parallel rows, of the rank of a noisy gradient, and of the fit of a known zero pattern."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.closed_form.linear import isolation
from attacker.attacks.closed_form.linear.isolation import (
    estimate_rounding,
    find_mixtures,
    group_parallel_rows,
    select_independent,
)
from attacker.attacks.closed_form.linear.low_rank import factorise, polish
from attacker.attacks.closed_form.linear.sampling import InformativeRows, sample_directions
from attacker.attacks.closed_form.linear.zeros import Pattern, find_pattern, match_kinks, measure_agreement


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sparse_product() -> tuple[Tensor, Tensor, Tensor]:
    """Return random D, X and D X, with half of the entries of D zero."""
    d = draw(120, 5, seed=1) * (draw(120, 5, seed=2) > 0)
    x = draw(5, 30, seed=3)
    return d, x, d @ x


def test_parallel_and_antiparallel_rows_form_one_group() -> None:
    a, b, c = draw(3, 20)
    rows = torch.stack([a, -2 * a, b, 1e-4 * a, b * 3, c]).float().double()
    groups = group_parallel_rows(rows, estimate_rounding(rows), torch.ones(6, dtype=torch.bool))
    assert groups.count.tolist() == [3, 2, 1]
    assert groups.confirmed.tolist() == [True, True, False]
    for direction, true in zip(groups.directions, (a, b, c), strict=True):
        assert float(abs(direction @ true) / true.norm()) == pytest.approx(1, abs=1e-12)


def test_parallel_rows_in_two_dimensions_are_not_confirmed() -> None:
    """In two dimensions, some of a few hundred noisy rows are nearly parallel by chance, which shows nothing."""
    rows = draw(300, 2)
    groups = group_parallel_rows(rows, torch.full((300,), 1e-3, dtype=torch.float64), torch.ones(300, dtype=torch.bool))
    assert int(groups.count.max()) > 1
    assert not groups.confirmed.any()


def test_rows_that_coincide_among_many_nearly_parallel_ones_are_not_confirmed() -> None:
    """Rows along a short line between two examples are parallel by chance; those of one example are far from all others."""
    a, b = draw(2, 20).abs()
    along = torch.linspace(-1e-3, 1e-3, 60, dtype=torch.float64)[:, None]
    between = 0.5 * (a + b) + along * (a - b)
    rows = torch.cat([between, between[30:32] * (1 + 1e-9), a.expand(2, -1), b[None]])
    groups = group_parallel_rows(rows, estimate_rounding(rows), torch.ones(len(rows), dtype=torch.bool))
    assert (groups.directions[groups.confirmed] @ (a / a.norm())).tolist() == [pytest.approx(1)]
    far = (groups.directions[~groups.crowded] @ (b / b.norm())).abs().sort().values
    assert float(far[-1]) == pytest.approx(1)
    assert int((~groups.crowded).sum()) == 2  # those of a and of b


def test_mixtures_lie_between_others_that_are_not_their_copies() -> None:
    a, b, c = torch.cat([draw(3, 20).abs(), torch.ones(3, 1, dtype=torch.float64)], dim=1)
    given = torch.stack([a, 0.5 * (a + b), b, a + 1e-3 * (b - a), (a + b + c) / 3, c, 2 * a - c])
    assert find_mixtures(given).tolist() == [True, True, False, True, True, False, False]  # a lies between c and 2 a - c
    assert find_mixtures(given[:6]).tolist() == [False, True, False, False, True, False]
    assert not find_mixtures(given[:2]).any()


def test_directions_in_the_span_of_those_before_them_are_left_out() -> None:
    a, b, c = (v / v.norm() for v in draw(3, 4))
    between = (a - b) / (a - b).norm()
    assert select_independent(torch.stack([a, b, between, c])) == [0, 1, 3]


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3])
def test_rank_and_noise_are_estimated_from_the_rows(noise: float) -> None:
    d, _, rows = sparse_product()
    dead = ~d.any(dim=1)
    noisy = (rows + noise * draw(*rows.shape, seed=4)).float()
    factors = factorise(noisy)
    assert factors.rank == 5
    assert not factors.saturated
    assert not factors.live[dead].any()
    assert factors.live[~dead].double().mean() > 0.98
    if noise:
        assert float(factors.noise[~dead].median()) == pytest.approx(noise, rel=0.2)


def test_with_more_examples_than_values_the_rank_is_none_or_saturated() -> None:
    factors = factorise(draw(100, 40) @ draw(40, 10, seed=1))
    assert factors is None or factors.saturated


def test_the_true_directions_agree_with_their_examples_and_a_mixture_does_not() -> None:
    x, weight = torch.cat([draw(5, 29), torch.ones(5, 1, dtype=torch.float64)], dim=1), draw(200, 30, seed=5)
    d = draw(200, 5, seed=6) * (weight @ x.T > 0)
    factors = factorise((d @ x).float())
    forward, constant = weight @ factors.basis.T, factors.basis[:, -1]
    q = torch.linalg.inv(x @ factors.basis.T)
    assert float(measure_agreement(q, find_pattern(q, factors), forward, constant).min()) > 0.98
    mixed = q.clone()
    mixed[:, 0] += q[:, 1] * q[:, 0].norm() / q[:, 1].norm()
    score = measure_agreement(mixed, find_pattern(mixed, factors), forward, constant)
    assert float(score[:2].max()) < 0.9  # of the mixed direction, and of the example to which it is no longer orthogonal
    assert float(score[2:].min()) > 0.98


def test_sampled_direction_is_orthogonal_to_rank_minus_one_rows() -> None:
    _, _, rows = sparse_product()
    factors = factorise(rows.float())
    assert factors is not None
    space = InformativeRows.of(factors)
    q = sample_directions(space, torch.zeros(50, len(space.rows), dtype=torch.float64), torch.Generator().manual_seed(0))
    assert ((q @ space.rows.T).abs() < 1e-6).sum(dim=1).min() >= space.rank - 1


def test_a_known_pattern_gives_both_factors_up_to_noise() -> None:
    d, x, rows = sparse_product()
    noise = torch.full((len(rows),), 1e-4, dtype=torch.float64)
    noisy = rows + 1e-4 * draw(*rows.shape, seed=7)
    found, fitted, error = polish(noisy, noise, d != 0, x + 0.01 * draw(*x.shape, seed=8), rounds=20)
    assert error == pytest.approx(1, abs=0.2)
    assert not found[d == 0].any()
    scale = (fitted * x).sum(dim=1, keepdim=True) / x.square().sum(dim=1, keepdim=True)  # not determined by zeros
    assert float((fitted / scale - x).abs().max()) < 1e-3


def test_a_wrong_pattern_does_not_fit() -> None:
    d, x, rows = sparse_product()
    wrong = (d != 0) & (torch.arange(len(d))[:, None] >= 10)
    noise = torch.full((len(rows),), 1e-4, dtype=torch.float64)
    assert polish(rows, noise, wrong, x, rounds=5)[2] > 100


def test_inputs_at_a_kink_of_relu_move_to_the_observed_side_only() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(2, 6, generator=rng, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)], dim=1)
    weight = torch.randn(20, 7, generator=rng, dtype=torch.float64)
    weight[3, -1] -= weight[3] @ x[0] - 1e-9  # on by a rounding error
    z = weight @ x.T
    assert 0 < float(z[3, 0]) < 1e-8
    known = torch.ones(20, 2, dtype=torch.bool)
    as_is = z > 0
    assert torch.equal(match_kinks(x, weight, Pattern(as_is, known)), x)
    seen = as_is.clone()
    seen[3, 0] = False
    seen[5, 1] = ~seen[5, 1]  # far from its kink: not a rounding error
    moved = match_kinks(x, weight, Pattern(seen, known))
    assert float(weight[3] @ moved[0]) == pytest.approx(-float(z[3, 0]), rel=1e-3)
    assert torch.equal((weight @ moved.T > 0)[:, 0], seen[:, 0])
    assert torch.equal(moved[1], x[1])
    assert float((moved - x).abs().max()) < 1e-8


def test_close_rows_are_counted_as_by_differences_of_all_pairs() -> None:
    """Rows lie on a line at multiples of the tolerance, with either sign; the oracle forms the difference of each pair."""
    rng = torch.Generator().manual_seed(0)
    centre, step = (torch.nn.functional.normalize(torch.randn(50, dtype=torch.float64, generator=rng), dim=0) for _ in range(2))
    error = torch.full((700,), 1e-9, dtype=torch.float64)
    tolerance = float(isolation._compute_tolerance(error[0], error[0]))
    shifts = torch.randint(0, 400, (700,), generator=rng) * tolerance * 0.9
    sides = torch.randint(0, 2, (700, 1), generator=rng) * 2 - 1
    unit = torch.nn.functional.normalize(sides * (centre + shifts[:, None] * step), dim=1)
    near, close = isolation._compare_directions(unit, error)
    for i in range(0, 700, 50):
        radius = torch.minimum((unit - unit[i]).norm(dim=1), (unit + unit[i]).norm(dim=1)) / tolerance
        counts = [float(((radius > 1) & (radius <= r)).sum()) ** 2 / r for r in isolation.NEAR_RADII]
        assert torch.equal(near[i], radius <= 1)
        assert float(close[i]) == pytest.approx(max(counts), rel=0.05)

"""Tests of measures of table rows, with values by hand."""

import math

import pytest
import torch
from torch import Tensor

from attacker.scoring.measures import clean_examples, measure
from attacker.scoring.metrics import group_columns, is_recovered, measure_categorical_share, measure_continuous_error
from fedsim.recording import Column, DataSpec

AGE, PAY = Column(name="age", low=20, high=60), Column(name="pay", high=1000)
WORK = [Column(name="work", kind="categorical", category=category) for category in ("none", "state", "private")]
SEX = [Column(name="sex", kind="categorical", category=category) for category in ("f", "m")]
COLUMNS = (AGE, *WORK, *SEX, PAY)
SPEC = DataSpec(shape=(7,), num_classes=2, columns=COLUMNS)
TRUTH = torch.tensor([[0.5, 0, 1, 0, 1, 0, 0.2]])


def change_row(**values: float) -> Tensor:
    x = TRUTH.clone()
    for name, value in values.items():
        x[0, int(name.removeprefix("c"))] = value
    return x


def test_adjacent_columns_of_one_name_are_one_variable() -> None:
    assert group_columns(COLUMNS) == [(1, 2, 3), (4, 5)]
    assert group_columns([*WORK, *SEX]) == [(0, 1, 2), (3, 4)]
    assert group_columns([AGE, PAY]) == []


@pytest.mark.parametrize(
    ("x", "error", "right", "success"),
    [
        (TRUTH, 0.0, 1.0, True),
        (change_row(c0=0.549, c6=0.151), 0.049, 1.0, True),
        (change_row(c0=0.551), 0.051, 1.0, False),
        (change_row(c6=0.149), 0.051, 1.0, False),
        (change_row(c1=0.6, c2=0.61, c3=0.2), 0.0, 1.0, True),
        (change_row(c1=0.62, c2=0.61), 0.0, 0.5, False),
        (change_row(c4=0.3, c5=0.4), 0.0, 0.5, False),
        (change_row(c2=-0.2, c4=0.0, c5=0.1), 0.0, 0.0, False),
    ],
)
def test_success_needs_all_categories_and_numbers_within_a_twentieth(
    x: Tensor, error: float, right: float, success: bool
) -> None:
    assert measure_continuous_error(x, TRUTH, COLUMNS).item() == pytest.approx(error, abs=1e-6)
    assert measure_categorical_share(x, TRUTH, COLUMNS).item() == right
    assert is_recovered(x, TRUTH, SPEC).item() is success


def test_tie_of_categories_is_wrong() -> None:
    assert measure_categorical_share(torch.zeros(1, 7), TRUTH, COLUMNS).item() == 0
    assert measure_categorical_share(change_row(c1=1.0), TRUTH, COLUMNS).item() == 0.5


def test_variable_without_a_true_category_does_not_count() -> None:
    unseen = change_row(c2=0.0)
    assert measure_categorical_share(change_row(c1=9.0), unseen, COLUMNS).item() == 1
    assert measure_categorical_share(change_row(c5=9.0), unseen, COLUMNS).item() == 0
    assert is_recovered(change_row(c1=9.0), unseen, SPEC).item()
    nothing = torch.tensor([[0.5, 0, 0, 0, 0, 0, 0.2]])
    assert math.isnan(measure_categorical_share(TRUTH, nothing, COLUMNS).item())
    assert is_recovered(TRUTH, nothing, SPEC).item()
    assert not is_recovered(change_row(c0=0.9), nothing, SPEC).item()


def test_tables_of_numbers_or_categories_only() -> None:
    numbers = DataSpec(shape=(2,), num_classes=2, columns=(AGE, PAY))
    categories = DataSpec(shape=(5,), num_classes=2, columns=(*WORK, *SEX))
    x = torch.tensor([[0.1, 0.9]])
    assert math.isnan(measure_categorical_share(x, x, numbers.columns).item())
    assert math.isnan(measure_continuous_error(TRUTH[:, 1:6], TRUTH[:, 1:6], categories.columns).item())
    assert is_recovered(x, x + 0.04, numbers).item()
    assert not is_recovered(x, x + 0.06, numbers).item()
    assert is_recovered(0.4 * TRUTH[:, 1:6], TRUTH[:, 1:6], categories).item()
    assert not is_recovered(-TRUTH[:, 1:6], TRUTH[:, 1:6], categories).item()


def test_rows_are_measured_separately() -> None:
    x = torch.cat([change_row(c0=0.6), change_row(c1=2.0), TRUTH])
    rows = measure(x, TRUTH.expand(3, -1), SPEC, "no weights")
    assert [row["continuous_error"] for row in rows] == [pytest.approx(0.1), 0, 0]
    assert [row["categorical_right"] for row in rows] == [1, 0.5, 1]
    assert [row["success"] for row in rows] == [False, False, True]
    assert {(row["psnr"], row["lpips"], row["lpips_reason"]) for row in rows} == {(None, None, "not an image")}


def test_numbers_are_clamped_and_categories_are_not() -> None:
    x = change_row(c0=7.0, c2=3.0, c3=2.0, c6=-4.0)
    truth = TRUTH.clone()
    truth[0, 0], truth[0, 6] = 1.0, 0.0
    (row,) = measure(x, truth, SPEC, "no weights")
    assert (row["continuous_error"], row["categorical_right"], row["success"]) == (0, 1, True)
    assert row["mse"] == pytest.approx(1 / 7)
    assert row["mse_raw"] == pytest.approx((36 + 4 + 4 + 16) / 7)
    assert clean_examples(torch.tensor([[torch.nan, 2, torch.nan, -1, 0, 0, 5]]), SPEC).tolist() == [[0, 2, 0, -1, 0, 0, 1]]

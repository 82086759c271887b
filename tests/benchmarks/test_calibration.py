"""Tests of calibration.py: the list of nulls that it runs, and the names of the data that it attacks."""

import gzip
from pathlib import Path

from support.calibration.cases import Cell, attack_cell, draw_examples
from support.calibration.nulls import list_specs
from support.contract import Options

from attacker.attacks import ATTACKS

ADULT_CELL = Cell(attack="exact", settings={"fallback": "none"}, network="mlp", data="adult", cases=1)


def make_options(data: Path | None) -> Options:
    return Options(quick=True, json=False, data=data, device="cpu", seed=0, table=None)


def test_calibration_includes_a_null_of_every_attack() -> None:
    specs = list(list_specs(Path("candidates.npz")))
    assert {spec.name for spec in specs} == set(ATTACKS)
    assert all(spec.null and spec.build() is not None for spec in specs)


def test_rows_that_replace_a_missing_table_keep_their_name(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        found = draw_examples(ADULT_CELL, make_options(folder), part="tuning", skip=0)
        (answered,) = attack_cell(ADULT_CELL, make_options(folder), part="tuning", skip=0)
        assert (found.name, found.data.shape) == ("breast_cancer", (30,))
        assert answered.cell.data == "breast_cancer"


def test_rows_of_the_adult_table_have_its_name(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    with gzip.open(tmp_path / "adult" / "adult.csv.gz", "wt") as file:
        file.write("age,hours,label\n" + "".join(f"{20 + i},{i % 7},{'yes' if i % 3 else 'no'}\n" for i in range(40)))
    found = draw_examples(ADULT_CELL, make_options(tmp_path), part="tuning", skip=0)
    assert (found.name, found.data.shape) == ("adult", (2,))

"""Tests of the benchmarks of confidence: nulls, names of data, clients with several local batches, and the file of curves."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from support.calibration import curves
from support.calibration.cases import Cell, attack_cell, draw_examples
from support.calibration.nulls import list_specs
from support.calibration.orders import draw_cells, summarise_clients
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


def test_a_curve_replaces_that_of_its_route_and_data_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calibration.json"
    old = [{"route": "linear", "data": data, "answers": 1} for data in ("images", "rows")]
    path.write_text(json.dumps({"fitted by": "somebody", "curves": old}))
    monkeypatch.setattr(curves, "CALIBRATION_FILE", path)
    new = [{"route": "linear", "data": "rows", "answers": 2}, {"route": "layers", "data": "images", "answers": 3}]
    curves.write_curves(new)
    assert json.loads(path.read_text()) == {"fitted by": "somebody", "curves": [old[0], *new]}


def test_clients_in_an_inferred_order_share_no_examples() -> None:
    for part in ("tuning", "validation"):
        used = Counter[tuple[str, int]]()
        for _, cell, skip in draw_cells(part):
            assert cell.examples % cell.batch == 0 < cell.batch < cell.examples
            used.update((cell.data, skip + k) for k in range(cell.examples))
        assert max(used.values()) == 1


def test_bootstrap_of_the_calibration_error_draws_whole_clients() -> None:
    """All examples of a client succeed or fail together, so that the interval is far wider than that of independent examples."""
    alike = [([0.5] * 100, [bool(k % 2)] * 100) for k in range(8)]
    mixed = [([0.5] * 100, [True, False] * 50) for _ in range(8)]
    _, together = summarise_clients(alike)
    _, apart = summarise_clients(mixed)
    assert together["ece"] == apart["ece"] == apart["ece to"] == 0
    assert together["ece to"] >= 0.2
    _, sure = summarise_clients([([0.95, 0.95, float("nan"), 0.05], [True, False, True, False])])
    assert (sure["sure"], sure["sure, not recovered"], sure["undecided"], sure["undecided recovered"]) == (2, 1, 1, 1)

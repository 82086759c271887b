"""Tests that the notebooks' code cells run in order, that the last expression of some cell is shown, and no output is stored."""

import ast
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_nothing_private_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mpl.use("Agg")
    names: dict[str, Any] = {"__name__": "notebook"}
    shown = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None), f"cell {number}: clear the outputs"
        tree = ast.parse("".join(cell["source"]), f"{path.name}, cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"{path.name}, cell {number}", "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert any(text and text != "None" for text in shown)


def test_the_three_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["attack_one_gradient", "audit_a_federation", "compare_two_defenses"]

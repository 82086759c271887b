"""Tests that benchmarks draw all examples through `splits`, and report on none that was used to choose a setting."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support import splits

SCRIPTS = sorted(path for path in splits.TUNED_FILE.parent.rglob("*.py") if path.name != "splits.py")
LOADS_BY_ITSELF = re.compile(
    r'np\.load\(|numpy\.load\(|data / "(?!adult|esrgan)|datasets\.load\(f?"(npz|cifar|lfw|mnist|fashion|imagefolder)'
)
KEYS = sorted({key for keys in json.loads(splits.TUNED_FILE.read_text()).values() for key in keys})


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_no_script_loads_images_without_splits(script: Path) -> None:
    found = LOADS_BY_ITSELF.findall(script.read_text())
    assert not found, f"{script.name} loads examples by itself: draw them with splits.images"


def test_pattern_finds_direct_loading() -> None:
    assert LOADS_BY_ITSELF.search('cifar = options.data / "cifar10" / "test.npz"')
    assert LOADS_BY_ITSELF.search('datasets.load(f"npz:{path}")')
    assert LOADS_BY_ITSELF.search("with np.load(source) as archive:")


def test_examples_that_chose_a_setting_are_in_the_tuning_part() -> None:
    assert KEYS
    assert {splits.find_part(key) for key in KEYS} == {"tuning"}


def test_reporting_on_an_example_used_for_tuning_is_refused() -> None:
    with pytest.raises(splits.TunedOn, match=f"example {KEYS[0]} was used to choose '.*'"):
        splits.refuse_tuned(["0" * 16, KEYS[0]])
    splits.refuse_tuned(["0" * 16])


def test_a_listed_example_is_drawn_for_tuning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(200 * 3, dtype=np.uint8).reshape(200, 3)
    monkeypatch.setattr(splits, "TUNED_FILE", tmp_path / "tuned.json")
    splits._read_tuned.cache_clear()
    drawn = splits.draw(values, 10, part="report")
    key = splits.hash_example(values[drawn[0]])
    splits.record_tuned("a test", [key], path=tmp_path / "tuned.json")
    assert drawn[0] not in splits.draw(values, 9, part="report")
    assert splits.find_part(key) == "tuning"
    splits._read_tuned.cache_clear()


def test_parts_share_no_example() -> None:
    values = np.random.default_rng(0).integers(256, size=(300, 2, 2), dtype=np.uint8)
    parts = [set(splits.draw(values, 40, part=part).tolist()) for part in splits.PARTS]
    assert all(not one & other for i, one in enumerate(parts) for other in parts[:i])

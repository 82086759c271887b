"""Tests of the index of runs below a root: finding and following runs, refusing links, damaged files, grids and caches."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed_recordings import add_round, change_index

from attacker.reconstruction import Reconstruction
from attacker.service.index import Catalogue, Changes, UnknownName
from attacker.service.index import catalogue as catalogue_module
from attacker.service.index import run_folders as finding_module
from attacker.service.index import verdicts as verdicts_module
from attacker.service.index.verdicts import RunVerdicts
from attacker.service.settings import ServiceSettings

Open = Callable[..., Catalogue]


@pytest.fixture
def catalogue(root: Path) -> Open:
    """Function that makes an index (catalogue) of the root and scans it once."""

    def make(**settings: Any) -> Catalogue:
        made = Catalogue(ServiceSettings(root=root, **settings))
        made.scan()
        return made

    return make


def test_runs_are_found_up_to_three_folders_deep(root: Path, catalogue: Open) -> None:
    for path in ("a/b/c", "a/b/deep/er", ".hidden"):
        shutil.copytree(root / "digits" / "recording", root / path / "recording")
    assert [run.id for run in catalogue().list_runs()] == ["a~b~c", "digits"]


def test_run_with_an_invalid_name_is_reported_and_not_served(root: Path, catalogue: Open) -> None:
    shutil.copytree(root / "digits" / "recording", root / "<b>run" / "recording")
    found = catalogue()
    assert [run.id for run in found.list_runs()] == ["digits"]
    assert "'<b>run'" in found.trouble[0]


def test_links_are_not_followed(root: Path, tmp_path: Path, catalogue: Open) -> None:
    elsewhere = Path(shutil.move(root / "digits", tmp_path / "elsewhere"))
    (root / "linked").symlink_to(elsewhere)
    (root / "half").mkdir()
    (root / "half" / "recording").symlink_to(elsewhere / "recording")
    assert catalogue().list_runs() == []
    run = Path(shutil.copytree(elsewhere, root / "run"))
    secret = tmp_path / "secret"
    secret.write_text('{"round": 1, "loss": 42}\n')
    for name in ("metrics.jsonl", "scores.jsonl"):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    shutil.rmtree(run / "reconstructions")
    (run / "reconstructions").symlink_to(elsewhere / "reconstructions")
    found = catalogue(truth="own")
    (seen,) = found.list_runs()
    assert (found.get_training(seen), found.get_scores(seen), found.list_sources(seen)) == ([], {}, [])
    assert any("symbolic link" in trouble for trouble in found.list_trouble(seen))


def test_linked_files_of_an_attack_are_not_read(root: Path, tmp_path: Path, catalogue: Open) -> None:
    source = next((root / "digits" / "reconstructions").glob("exact-[!n]*"))
    for path in (*source.glob("*.safetensors"), source / "attack.json"):
        shutil.move(path, tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    found = catalogue()
    assert source.name not in [one.name for one in found.list_sources(found.get_run("digits"))]


def test_new_round_is_listed_once(root: Path, catalogue: Open) -> None:
    found = catalogue()
    assert found.scan() == Changes() or found.scan().arrived == []
    add_round(root / "digits" / "recording", 3)
    changes = found.scan()
    assert [run.id for run in changes.changed] == ["digits"]
    assert [(one.recording, one.round) for one in changes.arrived] == [("digits", 3)]
    assert found.scan().arrived == []
    assert found.get_run("digits").summary["last_round"] == 3
    assert len(found.get_rows(found.get_run("digits"))[3]) == 3


def test_scan_of_one_run_does_not_change_others(root: Path, catalogue: Open) -> None:
    shutil.copytree(root / "digits", root / "other")
    found = catalogue()
    others, version = found.get_run("other").version, found.version
    add_round(root / "digits" / "recording", 3)
    add_round(root / "other" / "recording", 3)
    changes = found.scan_run("digits")
    assert [(one.recording, one.round) for one in changes.arrived] == [("digits", 3)]
    assert found.get_run("digits").summary["last_round"] == 3
    assert (found.get_run("other").version, found.version == version) == (others, False)
    assert [(one.recording, one.round) for one in found.scan().arrived] == [("other", 3)]
    shutil.rmtree(root / "digits")
    assert found.scan_run("digits") == found.scan_run("unknown") == Changes()
    assert found.scan().removed == ["digits"]


def test_only_recent_runs_are_listed_as_changed(root: Path, catalogue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_module, "RECORDING_SECONDS", 1e6)
    found, index = catalogue(), root / "digits" / "recording" / "index.sqlite"
    assert found.list_changed() == []
    add_round(root / "digits" / "recording", 3)
    assert found.list_changed() == ["digits"]
    found.scan_run("digits")
    assert found.list_changed() == []
    change_index(index.parent, "UPDATE observations SET received_at = 1.0")
    found.scan()
    os.utime(index)
    assert found.list_changed() == []


def test_first_scan_lists_every_round(root: Path) -> None:
    changes = Catalogue(ServiceSettings(root=root)).scan()
    assert [(one.recording, one.round) for one in changes.arrived] == [("digits", 1), ("digits", 2)]


def test_only_rounds_that_changed_are_read_again(root: Path, catalogue: Open) -> None:
    found = catalogue()
    before = found.get_rows(found.get_run("digits"))
    add_round(root / "digits" / "recording", 3)
    found.scan()
    after = found.get_rows(found.get_run("digits"))
    assert list(after) == [1, 2, 3]
    assert all(after[number] is before[number] for number in (1, 2))


def test_repeated_round_is_read_again(root: Path, catalogue: Open) -> None:
    found = catalogue()
    found.get_rows(found.get_run("digits"))
    change_index(root / "digits" / "recording", "UPDATE observations SET attempt = 2, bytes = 9 WHERE round = 2")
    found.scan()
    assert {row.bytes for row in found.get_rows(found.get_run("digits"))[2]} == {9}


def test_deleted_run_is_listed_as_removed(root: Path, catalogue: Open) -> None:
    found = catalogue()
    shutil.rmtree(root / "digits")
    assert found.scan().removed == ["digits"]
    with pytest.raises(UnknownName):
        found.get_run("digits")


def test_scan_without_changes_changes_nothing(root: Path, catalogue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding_module, "CLOCK_RESOLUTION_SECONDS", -100.0)
    found = catalogue()
    version = found.get_run("digits").version
    assert found.scan() == Changes()
    assert found.get_run("digits").version == version


def test_second_change_with_equal_time_and_size_is_noticed(root: Path, catalogue: Open) -> None:
    """File times are coarse, so that the second of two writes may change neither time nor size."""
    found, path = catalogue(), root / "digits" / "metrics.jsonl"
    for loss in (0.25, 0.75):
        at = path.stat()
        with path.open("r+") as file:
            file.write(json.dumps({"round": 7, "loss": loss}) + "\n")
            file.truncate()
        if loss == 0.75:
            os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
        found.scan()
        assert found.get_training(found.get_run("digits"))[0]["loss"] == loss


def test_states_of_cases_follow_their_files(root: Path, tmp_path: Path, catalogue: Open) -> None:
    folder = next((root / "digits" / "reconstructions").glob("exact-[!n]*"))
    first, second, *rest = sorted(path.stem for path in folder.glob("*.safetensors"))
    shutil.move(folder / f"{first}.safetensors", tmp_path / "first")
    (folder / f"{second}.safetensors").unlink()
    found = catalogue()

    def state(key: str) -> str:
        found.scan()
        return found.get_source(found.get_run("digits"), folder.name).find_state(key)

    assert [state(key) for key in (first, second, rest[0])] == ["waiting", "waiting", "done"]
    (folder / f"{second}.failed.json").write_text(json.dumps({"case": second, "reason": "no gradient"}))
    shutil.move(tmp_path / "first", folder / f"{first}.safetensors")
    assert [state(key) for key in (first, second)] == ["done", "failed"]
    assert found.get_source(found.get_run("digits"), folder.name).failures[second] == "no gradient"


def test_interrupted_case_becomes_failed_or_done(root: Path, catalogue: Open) -> None:
    folder = next((root / "digits" / "reconstructions").glob("exact-[!n]*"))
    path = min(folder.glob("*.safetensors"))
    answer = Reconstruction.read(path)
    found = catalogue()

    def state() -> str:
        found.scan()
        return found.get_source(found.get_run("digits"), folder.name).find_state(path.stem)

    replace(answer, interrupted=True, notes=("cut off",)).write(path)
    assert state() == "interrupted"
    path.with_name(f"{path.stem}.failed.json").write_text(json.dumps({"case": path.stem, "reason": "ran away"}))
    assert state() == "failed"
    path.with_name(f"{path.stem}.failed.json").unlink()
    answer.write(path)
    assert state() == "done"


def test_failure_beside_an_answer_counts_once_the_answer_is_removed(root: Path, catalogue: Open) -> None:
    folder = next((root / "digits" / "reconstructions").glob("exact-[!n]*"))
    path = min(folder.glob("*.safetensors"))
    failed = path.with_name(f"{path.stem}.failed.json")
    failed.write_text(json.dumps({"case": path.stem, "reason": "no gradient"}))
    os.utime(failed, (1, 1))
    found = catalogue()
    for change, state in ((lambda: None, "done"), (lambda: path.write_bytes(b"no tensors"), "failed"), (path.unlink, "failed")):
        change()
        found.scan()
        source = found.get_source(found.get_run("digits"), folder.name)
        assert source.find_state(path.stem) == state
    assert source.failures[path.stem] == "no gradient"


def test_unreadable_reconstruction_stays_reported_when_another_file_changes(root: Path, catalogue: Open) -> None:
    folder = next((root / "digits" / "reconstructions").glob("exact-[!n]*"))
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    first.write_bytes(b"no tensors")
    os.utime(first, (1, 1))
    found = catalogue()
    for _ in range(2):
        assert any(first.name in trouble for trouble in found.list_trouble(found.get_run("digits")))
        second.unlink(missing_ok=True)
        found.scan()


def test_attack_on_another_recording_is_left_out(root: Path, catalogue: Open) -> None:
    path = next((root / "digits" / "reconstructions").glob("exact-[!n]*")) / "attack.json"
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps({**metadata, "run": {**metadata["run"], "created": "1999"}}))
    found = catalogue()
    assert len(found.list_sources(found.get_run("digits"))) == 1
    assert any("another recording" in trouble for trouble in found.list_trouble(found.get_run("digits")))
    with pytest.raises(UnknownName, match=r"cannot be shown: .*attack\.json is of an attack on another recording"):
        found.get_source(found.get_run("digits"), path.parent.name)


def test_damaged_manifest_is_reported_without_the_root(root: Path, catalogue: Open) -> None:
    (root / "digits" / "recording" / "manifest.json").write_text("{")
    run = catalogue().get_run("digits")
    assert run.summary["model"] is None
    assert "manifest.json" in run.summary["trouble"][0]
    assert str(root) not in run.summary["trouble"][0]


def test_damaged_rows_are_reported_and_others_kept(root: Path, catalogue: Open) -> None:
    change_index(root / "digits" / "recording", "UPDATE observations SET node = ? WHERE round = 2", "\x00")
    found = catalogue()
    run = found.get_run("digits")
    assert len(run.summary["trouble"]) == 3
    assert {number: len(rows) for number, rows in found.get_rows(run).items() if rows} == {1: 3}
    add_round(root / "digits" / "recording", 3)
    found.scan()
    assert len(found.get_run("digits").summary["trouble"]) == 3


def test_no_verdict_without_truth_or_with_invalid_or_too_many_rows(
    root: Path, catalogue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = catalogue(truth="own")
    source = next((root / "digits" / "reconstructions").glob("exact-[!n]*")).name
    verdicts = found.get_verdicts(found.get_run("digits"))
    assert verdicts.by_source[source].outcome == "recovered"
    assert verdicts.strongest == source
    assert "without the gradient it recovers" in verdicts.sentence
    untold = catalogue()
    assert untold.get_verdicts(untold.get_run("digits")) == RunVerdicts()
    monkeypatch.setattr(verdicts_module, "MAX_ROWS", 3)
    many = catalogue(truth="own")
    assert many.get_verdicts(many.get_run("digits")) == RunVerdicts()
    (root / "digits" / "scores.jsonl").write_text('{"source": "b"}\n{"run": [], "source": {}}\n')
    other = catalogue(truth="own")
    assert other.get_verdicts(other.get_run("digits")) == RunVerdicts()

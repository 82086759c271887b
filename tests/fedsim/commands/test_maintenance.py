"""Tests that verifying finds each damaged file and changes nothing, and that deleting removes a run and nothing else."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from changed_recordings import change_index
from power_cut import CutBeforeCall, PowerCut

from fedsim.commands.maintenance import VerificationResult, delete, identify_kind, verify
from fedsim.recording import DamagedFile, Manifest, Recorder, Recording, Reply
from fedsim.recording.codec import encode
from fedsim.truth import TruthWriter, describe_dataset

COHORT = ("anna", "bert")


def write(run: Path, manifest: Manifest) -> None:
    recorder = Recorder(run / "recording", manifest)
    describe_dataset(run / "truth", lambda: {"name": "digits", "arguments": {}, "content_hash": "0" * 64})
    for round in (1, 2):
        recorder.record_sent(round, {"w": torch.full((3,), float(round))})
        for number, client in enumerate(COHORT):
            recorder.record_reply(
                round, Reply(client=client, node=str(number), payload=encode({"w": torch.ones(3)}), num_examples=2)
            )
            TruthWriter(run / "truth", client).write(round, 1, [[1, 2]])
        recorder.commit(round, COHORT)
    recorder.record_sent(3, {"w": torch.zeros(3)})
    recorder.record_reply(3, Reply(client="anna", node="0", status="failed", reason="out of memory"))
    recorder.commit(3, COHORT)
    for name in ("experiment.toml", "metrics.jsonl", "scores.jsonl", "report.html"):
        (run / name).write_text("")
    for name in ("state", "clients/anna", "reconstructions/cpl-1", "pairs/cpl-1"):
        (run / name).mkdir(parents=True)
        (run / name / "file").write_text("x")


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("original") / "run"


@pytest.fixture
def run(tmp_path: Path, manifest: Manifest, original: Path) -> Path:
    """A complete run with three rounds of two clients; the last round holds only a failure."""
    if not original.exists():
        write(original, manifest)
    return Path(shutil.copytree(original, tmp_path / "run"))


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# --- verify ---


def test_an_undamaged_run_is_verified_and_not_changed(run: Path) -> None:
    before = contents(run)
    found = verify(run)
    assert found == VerificationResult(folder=str(run), rounds=3, weights=3, observations=4, intact=4)
    assert found.to_json()["intact"] == 4
    assert contents(run) == before


def test_a_recording_alone_is_verified_too(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Path(shutil.move(run / "recording", tmp_path / "alone"))
    assert verify(alone) == VerificationResult(folder=str(alone), rounds=3, weights=3, observations=4, intact=4)
    monkeypatch.chdir(alone)
    assert verify(Path()).intact == 4


@pytest.mark.parametrize(
    ("named", "weights", "intact"),
    [
        ("rounds/00001/bert.safetensors", 3, 3),
        ("rounds/00002/global.safetensors", 2, 2),
        ("rounds/00003/global.safetensors", 2, 4),
    ],
)
@pytest.mark.parametrize("harm", ["flipped", "removed"])
def test_each_damaged_file_is_named_once_with_its_reason(run: Path, named: str, weights: int, intact: int, harm: str) -> None:
    path = run / "recording" / named
    if harm == "flipped":
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    else:
        path.unlink()
    found = verify(run)
    assert (found.rounds, found.weights, found.observations, found.intact) == (3, weights, 4, intact)
    reason = (
        "its SHA-256 checksum differs from the one in the recording's index; copy the recording again"
        if harm == "flipped"
        else "is missing; copy the run again"
    )
    assert found.damaged == ((f"recording/{named}", reason),)
    assert verify(run / "recording").damaged == ((named, reason),)


def test_an_invalid_row_of_the_index_is_named_and_the_others_are_verified(run: Path) -> None:
    change_index(run / "recording", "UPDATE observations SET num_examples = -1 WHERE round = 1 AND client = 'bert'")
    found = verify(run)
    assert (found.observations, found.intact) == (3, 3)
    assert found.damaged == (("recording/index.sqlite", "row 1, 'bert': -1 is not a valid value of num_examples"),)


def test_damage_inside_the_index_that_no_row_shows_is_found(run: Path) -> None:
    """Here the SQL index `observations_by_client` contradicts its table, whose rows are all valid."""
    path = run / "recording" / "index.sqlite"
    with closing(sqlite3.connect(path)) as index:
        (page,) = index.execute("SELECT rootpage FROM sqlite_master WHERE name = 'observations_by_client'").fetchone()
    content = bytearray(path.read_bytes())
    start = content.index(b"anna", 4096 * (page - 1))
    assert start < 4096 * page
    content[start] ^= 1
    path.write_bytes(content)
    found = verify(run)
    assert found.intact == 4
    ((name, reason),) = found.damaged
    assert name == "recording/index.sqlite"
    assert reason.endswith("; copy the recording again")


def test_an_index_whose_pages_are_damaged_is_refused_with_what_to_do(run: Path) -> None:
    path = run / "recording" / "index.sqlite"
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(DamagedFile, match=r"index\.sqlite: .*; copy the recording again$"):
        Recording(run / "recording").read_rows()


@pytest.mark.parametrize("named", ["manifest.json", "index.sqlite"])
def test_without_manifest_or_index_there_is_nothing_to_verify(run: Path, named: str) -> None:
    (run / "recording" / named).write_bytes(b"junk")
    found = verify(run)
    assert (found.intact, found.unexpected) == (0, ())
    ((name, reason),) = found.damaged
    assert name == f"recording/{named}"
    assert reason
    assert str(run) not in reason


def test_files_that_are_not_part_of_a_recording_are_listed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "many").write_text("")
    recording = run / "recording"
    (recording / "notes.txt").write_text("")
    (recording / "rounds" / "00001" / "carl.safetensors").write_text("")
    (recording / "rounds" / "00004").mkdir()
    (recording / "rounds" / "00004" / "global.safetensors").write_text("")
    (recording / "a\x1b[2Jb").write_text("")
    found = verify(run)
    assert found.damaged == ()
    assert set(found.unexpected) == {
        *("recording/notes.txt", "recording/rounds/00001/carl.safetensors", "recording/rounds/00004/global.safetensors"),
        "recording/a?[2Jb",
    }
    (recording / "rounds" / "link").symlink_to(tmp_path / "outside")
    found = verify(run)
    assert (found.intact, [name for name, _ in found.damaged]) == (0, ["recording/rounds/link"])
    assert "is a symbolic link" in found.damaged[0][1]


def test_every_complete_observation_must_have_its_truth(run: Path) -> None:
    (run / "truth" / "anna.jsonl").unlink()
    change_index(run / "recording", "UPDATE observations SET attempt = 2 WHERE round = 2 AND client = 'bert'")
    found = verify(run)
    assert found.intact == 4
    assert found.damaged == (
        ("truth/anna.jsonl", "has no rows of round 1, attempt 1"),
        ("truth/bert.jsonl", "has no rows of round 2, attempt 2"),
    )
    assert verify(run / "recording").damaged[0][0] == "../truth/anna.jsonl"
    (run / "truth" / "dataset.json").unlink()
    assert [name for name, _ in verify(run).damaged] == ["truth/dataset.json"]
    shutil.rmtree(run / "truth")
    assert verify(run).damaged == ()


def test_truth_that_cannot_be_read_is_named(run: Path) -> None:
    (run / "truth" / "bert.jsonl").write_text("junk\n")
    (found,) = verify(run).damaged
    assert found[0] == "truth/bert.jsonl"


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"{folder} is neither a run nor a recording"):
            verify(folder)


# --- delete ---


def test_a_run_is_deleted_with_all_that_is_in_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [path.stat().st_size for path in run.rglob("*") if path.is_file()]
    monkeypatch.chdir(run)
    found = delete(Path())
    assert (found.files, found.bytes) == (len(sizes), sum(sizes))
    assert not run.exists()
    assert list(run.parent.iterdir()) == []


def test_a_recording_is_deleted_and_the_run_around_it_stays(run: Path) -> None:
    assert identify_kind(run / "recording") == "recording"
    delete(run / "recording")
    assert not (run / "recording").exists()
    assert (run / "truth" / "anna.jsonl").exists()
    assert identify_kind(run) == "run"


def test_a_run_with_a_broken_or_older_manifest_can_be_deleted(run: Path) -> None:
    (run / "recording" / "manifest.json").write_text('{"format_version": 1, ')
    (run / "experiment.toml").unlink()
    delete(run)
    assert not run.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: (run / "thesis.tex").write_text("years"), r"holds 'thesis\.tex', which is not part of a run; move it"),
        (lambda run: (run / ".git").mkdir(), r"holds '\.git', which is not part of a run"),
        (lambda run: (shutil.rmtree(run / "recording"), (run / "experiment.toml").unlink()), "is neither a run nor a recording"),
        (lambda run: ((run / "recording" / "manifest.json").unlink(), (run / "experiment.toml").unlink()), "is neither"),
        (
            lambda run: (
                (run / "recording" / "manifest.json").write_text('{"manifest_version": 3}'),
                (run / "experiment.toml").unlink(),
            ),
            "is neither",
        ),
        (
            lambda run: (
                (run / "recording").rename(run.parent / "elsewhere"),
                (run / "recording").symlink_to(run.parent / "elsewhere"),
                (run / "experiment.toml").unlink(),
            ),
            "is neither",
        ),
    ],
)
def test_folders_that_are_not_just_a_run_are_left_alone(run: Path, change: Callable[[Path], object], words: str) -> None:
    change(run)
    before = contents(run.parent)
    with pytest.raises(ValueError, match=words):
        delete(run)
    assert contents(run.parent) == before


def test_a_recording_with_anything_else_in_it_is_left_alone(run: Path) -> None:
    (run / "recording" / "notes.txt").write_text("mine")
    before = contents(run)
    with pytest.raises(ValueError, match=r"holds 'notes\.txt', which is not part of a recording"):
        delete(run / "recording")
    assert contents(run) == before


def test_links_files_and_missing_folders_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(ValueError, match="is a symbolic link and is not deleted"):
        delete(tmp_path / "link")
    with pytest.raises(ValueError, match="is not a folder"):
        delete(run / "report.html")
    with pytest.raises(ValueError, match="is not a folder"):
        delete(run / "nowhere")
    assert verify(run).intact == 4


def test_links_are_deleted_and_their_targets_are_not(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    shutil.rmtree(run / "pairs")
    (run / "pairs").symlink_to(outside)
    (run / "state" / "link").symlink_to(outside)
    (run / "recording" / "rounds" / "link").symlink_to(outside / "precious")
    delete(run)
    assert not run.exists()
    assert (outside / "precious").read_text() == "x"


def test_a_link_in_place_of_the_recording_is_deleted_and_the_recording_stays(run: Path, tmp_path: Path) -> None:
    (run / "recording").rename(tmp_path / "elsewhere")
    (run / "recording").symlink_to(tmp_path / "elsewhere")
    delete(run)
    assert not run.exists()
    assert verify(tmp_path / "elsewhere").intact == 4


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("at", [*range(1, 12), *range(12, 36, 3)])
def test_a_deletion_that_was_interrupted_can_be_repeated(
    run: Path, at: int, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion is interrupted before one removal. The rest is still recognised as a run, as long as a file is left."""
    if not marked:
        (run / "experiment.toml").unlink()
    with monkeypatch.context() as patched:
        cut = CutBeforeCall(patched, at)
        cut.watch(os, "unlink", "rmdir")
        try:
            delete(run)
            assert cut.done < at
        except PowerCut:
            assert run.exists()
    if any(path.is_file() for path in run.rglob("*")):
        assert identify_kind(run) == "run"
        delete(run)
        assert not run.exists()

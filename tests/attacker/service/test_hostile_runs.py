"""Tests of the service with hostile recordings and requests, and on a full disk."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from publications import list_publications

from attacker.replay.executors.worker_loop import Interrupt
from attacker.service.background import BackgroundWork
from attacker.service.http.app import make_components
from attacker.service.index import Catalogue
from attacker.service.index import json_lines as lines_module
from attacker.service.jobs.job import JobSpec
from attacker.service.jobs.queue import Queue
from attacker.service.server import make_server
from attacker.service.settings import ServiceSettings
from attacker.service.worker.execution import _JobRun, run_job
from attacker.service.worker.messages import JobTask
from fedsim.recording import index as wire_index

Ask = Callable[..., Any]
HUGE_INTEGER = 10**400
"""An integer that JSON can hold, and that is larger than any float."""
PAGES = ("", "/attacks", "/grid", "/cases", "/leakage", "/training", "/observations")


def find_first_file(run: Path, ending: str) -> Path:
    return sorted((run / "reconstructions").glob(f"exact-*/*{ending}"))[0]


def set_huge_score(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    rows[0]["psnr"] = HUGE_INTEGER
    (run / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def remove_rounds(run: Path) -> None:
    path = find_first_file(run, "attack.json")
    facts = json.loads(path.read_text())
    facts["cases"][0]["rounds"] = [[]]
    path.write_text(json.dumps(facts))


def damage_reconstruction(run: Path, *, labels: bool) -> None:
    path = find_first_file(run, ".safetensors")
    with safetensors.safe_open(path, "numpy") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no dictionary
    if labels:
        tensors["y"] = np.full(tensors["y"].shape, np.inf, np.float32)
    else:
        metadata["facts"] = json.dumps({**json.loads(metadata["facts"]), "seconds": HUGE_INTEGER})
    safetensors.numpy.save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    "harm",
    [
        set_huge_score,
        remove_rounds,
        lambda run: damage_reconstruction(run, labels=False),
        lambda run: damage_reconstruction(run, labels=True),
    ],
    ids=["score", "rounds", "seconds", "labels"],
)
def test_huge_or_missing_numbers_cause_no_server_error(ask: Ask, root: Path, harm: Callable[[Path], None]) -> None:
    harm(root / "digits")
    asked = ask(truth="own")
    found = {page: asked(f"/api/v1/recordings/digits{page}").status_code for page in PAGES}
    assert found == dict.fromkeys(PAGES, 200)
    path = find_first_file(root / "digits", ".safetensors")
    assert asked(f"/api/v1/recordings/digits/cases/{path.parent.name}/{path.stem}").status_code < 500


@pytest.mark.parametrize("arguments", [5, ["x", 3], "steps", None])
def test_invalid_arguments_are_refused_with_their_field(ask: Ask, arguments: Any) -> None:
    answer = ask()("/api/v1/jobs", "POST", json={"recording": "digits", "attack": "exact", "arguments": arguments})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "spec.arguments")


def test_report_of_a_run_with_a_very_long_id(ask: Ask, root: Path) -> None:
    names = [letter * 95 for letter in "abc"]
    (root / names[0] / names[1]).mkdir(parents=True)
    shutil.move(root / "digits", root.joinpath(*names))
    answer = ask()(f"/api/v1/recordings/{'~'.join(names)}/report")
    assert answer.status_code == 200
    assert "<html" in answer.text


def test_scores_are_not_read_byte_by_byte(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    class Counted(FileIO):
        def readinto(self, buffer: Any) -> int | None:
            reads.append(1)
            return super().readinto(buffer)

        def read(self, size: int = -1) -> bytes | None:
            reads.append(1)
            return super().read(size)

    opened = lines_module.open_file

    def counted(*arguments: Any, **options: Any) -> Any:
        return WrappedFile(opened(*arguments, **options), Counted)

    monkeypatch.setattr(lines_module, "open_file", counted)
    found, trouble = lines_module.read_scores(root / "digits")
    assert (bool(found), trouble) == (True, [])
    assert 0 < len(reads) < 100


class WrappedFile:
    """A context manager that opens a file of another class on the descriptor of a given one."""

    def __init__(self, inner: Any, kind: type[FileIO]) -> None:
        self._inner, self._kind = inner, kind

    def __enter__(self) -> FileIO:
        return self._kind(self._inner.__enter__().fileno(), closefd=False)

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)


def test_very_long_error_is_reported(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quoting(self: _JobRun) -> None:
        raise ValueError("cannot read " + "x" * 200_000)

    monkeypatch.setattr(_JobRun, "attack", quoting)
    task = JobTask(
        job="0" * 16,
        spec={"recording": "digits", "attack": "cpl"},
        run=str(root / "digits"),
        truth=(),
        lock=str(tmp_path / "lock"),
        preview=str(tmp_path / "preview"),
        threads=1,
        device="cpu",
    )
    answer = run_job(task, Interrupt(), lambda share, words: None)
    assert answer.state == "failed"
    assert answer.error.startswith("cannot read x")


def test_rules_submit_missed_rounds_after_a_full_disk(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "a"\nattack = "exact"\n')
    shutil.copytree(root / "digits", root / "other")
    components = make_components(ServiceSettings(root=root, workers=0, rules=rules))
    works, take = BackgroundWork(components), components.queue.add_job
    arrived = components.catalogue.scan().arrived

    def full(*arguments: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(components.queue, "add_job", full)
    works.apply_rules(arrived)
    assert components.queue.list() == []
    monkeypatch.setattr(components.queue, "add_job", take)
    works.apply_rules([])
    assert sorted((job.spec.recording, job.spec.rounds) for job in components.queue.list()) == [
        *[("digits", "1"), ("digits", "2"), ("other", "1"), ("other", "2")]
    ]
    components.queue.close()


def test_index_without_disk_space_is_a_trouble_of_its_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wire_index, "query_index", full)
    catalogue = Catalogue(ServiceSettings(root=root))
    catalogue.scan()
    assert "No space left" in catalogue.get_run("digits").summary["trouble"][0]


def test_full_disk_is_status_503(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    asked = ask()
    monkeypatch.setattr(asked.components.queue, "submit", full)
    answer = asked("/api/v1/jobs", "POST", json={"recording": "digits", "attack": "exact"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "disk is full" in answer.json()["error"]["message"]


def execute(queue: Queue, *statements: str) -> None:
    with queue.store.open_transaction() as db:
        for statement in statements:
            db.execute(statement)


def test_failed_transaction_is_rolled_back(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue.sqlite")
    with pytest.raises(sqlite3.IntegrityError):
        execute(queue, "PRAGMA defer_foreign_keys = ON", "INSERT INTO publications VALUES ('of no job', 1, '')")
    assert queue.submit(JobSpec(recording="digits", attack="exact")).state == "queued"
    assert list_publications(queue) == {}
    with pytest.raises(sqlite3.OperationalError, match="no such table: what"):
        execute(queue, "ROLLBACK", "SELECT * FROM what")  # SQLite itself rolls back on a full disk
    queue.close()


@pytest.mark.parametrize("harm", [lambda state: state.write_text(""), lambda state: (state / "queue.sqlite").mkdir(parents=True)])
def test_unusable_state_folder_is_refused_with_advice(tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    harm(tmp_path / "state")
    with pytest.raises(ValueError, match=r"state.*--state"):
        make_components(ServiceSettings(root=tmp_path, state=tmp_path / "state"))


def test_invalid_tls_files_are_refused_by_name(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("none")
    (tmp_path / "key").write_text("none")
    settings = ServiceSettings(root=tmp_path, certfile=tmp_path / "cert", keyfile=tmp_path / "key")
    with pytest.raises(ValueError, match=r"--certfile .*cert with --keyfile .*key"):
        make_server(ask().app, settings)

"""What a recording, a request or a machine in trouble could do to the service, each found by trying it."""

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

from attacker.replay.executors.worker_loop import Interrupt
from attacker.service.background import Works
from attacker.service.http.app import make_parts
from attacker.service.index import Catalogue
from attacker.service.index import json_lines as lines_module
from attacker.service.jobs.job import JobSpec
from attacker.service.jobs.queue import Queue
from attacker.service.server import make_server
from attacker.service.settings import ServiceSettings
from attacker.service.worker.execution import _Work, run_job
from attacker.service.worker.messages import JobTask
from fedsim.recording import index as wire_index

Ask = Callable[..., Any]
LONG = 10**400
"""A whole number as JSON may hold, and larger than any float."""
PAGES = ("", "/attacks", "/grid", "/cases", "/leakage", "/training", "/observations")


def first(run: Path, ending: str) -> Path:
    return sorted((run / "reconstructions").glob(f"exact-*/*{ending}"))[0]


def a_score(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    rows[0]["psnr"] = LONG
    (run / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def a_case_without_rounds(run: Path) -> None:
    path = first(run, "attack.json")
    facts = json.loads(path.read_text())
    facts["cases"][0]["rounds"] = [[]]
    path.write_text(json.dumps(facts))


def an_answer(run: Path, *, labels: bool) -> None:
    path = first(run, ".safetensors")
    with safetensors.safe_open(path, "numpy") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no dictionary
    if labels:
        tensors["y"] = np.full(tensors["y"].shape, np.inf, np.float32)
    else:
        metadata["facts"] = json.dumps({**json.loads(metadata["facts"]), "seconds": LONG})
    safetensors.numpy.save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    "harm",
    [a_score, a_case_without_rounds, lambda run: an_answer(run, labels=False), lambda run: an_answer(run, labels=True)],
    ids=["score", "rounds", "seconds", "labels"],
)
def test_numbers_beyond_measure_are_no_mistake_of_the_service(ask: Ask, root: Path, harm: Callable[[Path], None]) -> None:
    harm(root / "digits")
    asked = ask(truth="own")
    found = {page: asked(f"/api/v1/recordings/digits{page}").status_code for page in PAGES}
    assert found == dict.fromkeys(PAGES, 200)
    path = first(root / "digits", ".safetensors")
    assert asked(f"/api/v1/recordings/digits/cases/{path.parent.name}/{path.stem}").status_code < 500


@pytest.mark.parametrize("arguments", [5, ["x", 3], "steps", None])
def test_arguments_that_are_none_are_refused_by_their_field(ask: Ask, arguments: Any) -> None:
    answer = ask()("/api/v1/jobs", "POST", json={"recording": "digits", "attack": "exact", "arguments": arguments})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "spec.arguments")


def test_a_report_is_made_of_a_run_whose_id_is_longer_than_a_files_name(ask: Ask, root: Path) -> None:
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
        return Through(opened(*arguments, **options), Counted)

    monkeypatch.setattr(lines_module, "open_file", counted)
    found, trouble = lines_module.read_scores(root / "digits")
    assert (bool(found), trouble) == (True, [])
    assert 0 < len(reads) < 100


class Through:
    """A context of a file, that gives another kind of file on the same descriptor."""

    def __init__(self, inner: Any, kind: type[FileIO]) -> None:
        self._inner, self._kind = inner, kind

    def __enter__(self) -> FileIO:
        return self._kind(self._inner.__enter__().fileno(), closefd=False)

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)


def test_an_error_of_any_length_is_an_answer(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quoting(self: _Work) -> None:
        raise ValueError("cannot read " + "x" * 200_000)

    monkeypatch.setattr(_Work, "attack", quoting)
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
    assert answer.error is not None
    assert answer.error.startswith("cannot read x")


def test_a_disk_that_is_full_for_a_while_costs_no_round(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "a"\nattack = "exact"\n')
    shutil.copytree(root / "digits", root / "other")
    parts = make_parts(ServiceSettings(root=root, workers=0, rules=rules))
    works, take = Works(parts), parts.queue.add_job
    arrived = parts.catalogue.scan().arrived

    def full(*arguments: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(parts.queue, "add_job", full)
    works.apply_rules(arrived)
    assert parts.queue.list() == []
    monkeypatch.setattr(parts.queue, "add_job", take)
    works.apply_rules([])
    assert sorted((job.spec.recording, job.spec.rounds) for job in parts.queue.list()) == [
        *[("digits", "1"), ("digits", "2"), ("other", "1"), ("other", "2")]
    ]
    parts.queue.close()


def test_an_index_that_no_room_is_left_to_recover_is_the_trouble_of_its_own_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wire_index, "query_index", full)
    catalogue = Catalogue(ServiceSettings(root=root))
    catalogue.scan()
    assert "No space left" in catalogue.get_run("digits").told["trouble"][0]


def test_a_full_disk_is_told_as_what_it_is(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    asked = ask()
    monkeypatch.setattr(asked.parts.queue, "submit", full)
    answer = asked("/api/v1/jobs", "POST", json={"recording": "digits", "attack": "exact"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "disk is full" in answer.json()["error"]["message"]


def written(queue: Queue, *statements: str) -> None:
    with queue.store.open_transaction() as db:
        for statement in statements:
            db.execute(statement)


def test_a_transaction_that_cannot_be_ended_is_taken_back(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue.sqlite")
    with pytest.raises(sqlite3.IntegrityError):
        written(queue, "PRAGMA defer_foreign_keys = ON", "INSERT INTO publications VALUES ('of no job', 1, '')")
    assert queue.submit(JobSpec(recording="digits", attack="exact")).state == "queued"
    assert queue.list_publications() == {}
    with pytest.raises(sqlite3.OperationalError, match="no such table: what"):
        written(queue, "ROLLBACK", "SELECT * FROM what")  # as SQLite takes back by itself where the disk is full
    queue.close()


@pytest.mark.parametrize("harm", [lambda state: state.write_text(""), lambda state: (state / "queue.sqlite").mkdir(parents=True)])
def test_a_folder_of_state_that_cannot_be_used_is_told_with_the_mend(tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    harm(tmp_path / "state")
    with pytest.raises(ValueError, match=r"state.*--state"):
        make_parts(ServiceSettings(root=tmp_path, state=tmp_path / "state"))


def test_files_of_tls_that_cannot_be_used_are_told_by_name_before_anything_is_done(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("none")
    (tmp_path / "key").write_text("none")
    settings = ServiceSettings(root=tmp_path, certfile=tmp_path / "cert", keyfile=tmp_path / "key")
    with pytest.raises(ValueError, match=r"--certfile .*cert with --keyfile .*key"):
        make_server(ask().app, settings)

"""Tests of how a worker carries out a job: with the results of the commands, and a reply in every case."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from equal_results import answers, check_equal
from federations import make_replay
from publications import list_publications

from attacker.attacks import AttackSpec
from attacker.attacks.base import IntermediateResult
from attacker.attacks.matching import saved_state as memories
from attacker.reconstruction import Slot
from attacker.replay import metadata as facts
from attacker.replay.executors.worker_loop import Interrupt
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from attacker.service.jobs.job import FINAL_STATES, JobSpec
from attacker.service.jobs.queue import Queue
from attacker.service.settings import ServiceSettings
from attacker.service.supervisor import job_worker
from attacker.service.supervisor.supervisor import Supervisor
from attacker.service.worker.execution import run_job
from attacker.service.worker.messages import JobTask
from attacker.service.worker.preview_files import Painter, make_preview_path
from attacker.service.worker.preview_files import read as read_preview
from attacker.service.worker.replay_results import STOPPED_CASES
from fedsim.recording.files import hold_lock, read_json_lines

JOB = "0123456789abcdef"
SEARCH = {"steps": 4, "tv": 0.0}


@pytest.fixture
def run(root: Path) -> Path:
    return root / "digits"


@pytest.fixture
def task(run: Path, tmp_path: Path) -> JobTask:
    (tmp_path / "previews").mkdir()
    return JobTask(
        job=JOB,
        spec=JobSpec(recording="digits", attack="inverting_gradients", arguments=SEARCH, rounds="1").model_dump(mode="json"),
        run=str(run),
        truth=(str(run / "truth"),),
        lock=str(tmp_path / "lock"),
        preview=str(make_preview_path(tmp_path, JOB)),
        threads=1,
        device="cpu",
    )


def ignore_progress(share: float, words: str) -> None:
    """Ignore the progress."""


def change_spec(task: JobTask, **fields: object) -> JobTask:
    return task.model_copy(update={"spec": {**task.spec, **fields}})


def replay(run: Path, out: Path, *, null: bool = False, **settings: object) -> Replay:
    spec = AttackSpec(name="inverting_gradients", arguments=SEARCH, null=null)
    return make_replay(run, spec, out=out, **settings)


def test_job_writes_the_same_files_as_the_commands(task: JobTask, run: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    answer = run_job(task, Interrupt(), lambda share, words: shares.append(share))
    assert (answer.state, answer.error) == ("done", None)
    first, null = answer.result.attacks
    assert [(part.null, part.done, part.skipped, part.failed) for part in (first, null)] == [(False, 3, 0, {}), (True, 3, 0, {})]
    assert first.routes == {"optimisation": 3}
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    for part in (first, null):
        by_command = replay(run, tmp_path / "out", null=part.null, rounds=frozenset({1})).run()
        assert by_command.folder.name == part.source
        check_equal(run / "reconstructions" / part.source, by_command.folder)
    assert answer.result.scored
    rows = [row for row in read_json_lines(run / "scores.jsonl") if row["source"] == first.source]
    assert len(rows) == 3
    assert {row["case"] for row in rows} == {path.stem for path in (run / "reconstructions" / first.source).glob("*.safetensors")}


def test_cases_of_an_earlier_attempt_are_skipped(task: JobTask, run: Path) -> None:
    before = run_job(change_spec(task, null=False), Interrupt(), ignore_progress)
    (part,) = before.result.attacks
    files = {path: path.stat().st_mtime_ns for path in (run / "reconstructions" / part.source).glob("*.safetensors")}
    answer = run_job(change_spec(task, null=False, rounds="all"), Interrupt(), ignore_progress)
    (part,) = answer.result.attacks
    assert (part.done, part.skipped) == (3, 3)
    assert all(path.stat().st_mtime_ns == then for path, then in files.items())


def test_job_of_finished_cases_needs_no_cluster(task: JobTask) -> None:
    run_job(task, Interrupt(), ignore_progress)
    again = run_job(task.model_copy(update={"ray": "127.0.0.1:1"}), Interrupt(), ignore_progress)
    assert (again.state, again.error) == ("done", None)
    assert again.result.scored


def test_nothing_is_scored_without_true_examples(task: JobTask, run: Path) -> None:
    before = (run / "scores.jsonl").read_bytes()
    answer = run_job(task.model_copy(update={"truth": ()}), Interrupt(), ignore_progress)
    assert (answer.state, answer.result.scored) == ("done", False)
    assert "no truth" in (answer.result.score_note or "")
    assert (run / "scores.jsonl").read_bytes() == before


def test_job_without_true_examples_of_its_clients_is_done_with_a_note(task: JobTask, run: Path) -> None:
    for path in (run / "truth").glob("*.jsonl"):
        path.unlink()
    answer = run_job(task, Interrupt(), ignore_progress)
    assert (answer.state, answer.result.scored) == ("done", False)
    assert "no truth" in (answer.result.score_note or "")


def test_a_job_scores_its_own_cases_only(run: Path) -> None:
    source = next(path for path in sorted((run / "reconstructions").iterdir()) if "null" not in path.name)
    rows = [{**row, "mark": 1} for row in read_json_lines(run / "scores.jsonl")]
    (run / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    only = {row["case"] for row in rows if row["case"].startswith("00001-")}
    Scorer(run, [run / "truth"]).score(source, only=only)
    after = read_json_lines(run / "scores.jsonl")
    assert len(after) == len(rows)
    assert {row["case"] for row in after if row["source"] == source.name and "mark" not in row} == only
    assert all("mark" in row for row in after if row["source"] != source.name)


def test_an_interrupt_keeps_the_best_so_far(task: JobTask, run: Path) -> None:
    interrupt = Interrupt()

    def watch(share: float, words: str) -> None:
        if share > 0:
            interrupt()

    answer = run_job(change_spec(task, arguments={**SEARCH, "steps": 1000}), interrupt, watch)
    assert (answer.state, answer.result.scored) == ("interrupted", False)
    (part,) = answer.result.attacks
    assert part.done == 0
    found = answers(run / "reconstructions" / part.source)
    assert len(found) == 3
    assert all(one.interrupted and 0 < one.iterations < 1000 for one in found.values())
    assert part.notes == (f"{STOPPED_CASES}: 3",)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rounds": "7"}, "holds no round 7"),
        ({"clients": ["nobody"]}, "no client 'nobody'"),
        ({"attack": "gone"}, "unknown name"),
    ],
)
def test_impossible_job_fails_with_the_reason_in_the_first_line(task: JobTask, wrong: dict[str, object], words: str) -> None:
    answer = run_job(change_spec(task, arguments={}, **wrong), Interrupt(), ignore_progress)
    assert answer.state == "failed"
    assert words in answer.error.splitlines()[0]
    assert "Traceback" in answer.error


def test_job_without_a_usable_case_fails(task: JobTask, run: Path) -> None:
    for path in (run / "recording" / "rounds" / "00001").glob("*.safetensors"):
        path.write_bytes(b"damaged")
    answer = run_job(task, Interrupt(), ignore_progress)
    assert answer.state == "failed"
    assert (answer.error or "").startswith("RuntimeError: no case could be attacked: ")
    assert len(answer.result.attacks[0].failed) == 3, "its reasons are in the result"


def test_attempts_at_one_job_exclude_each_other(task: JobTask) -> None:
    done = threading.Event()

    def work() -> None:
        run_job(change_spec(task, attack="exact", arguments={}), Interrupt(), ignore_progress)
        done.set()

    thread = threading.Thread(target=work)
    with hold_lock(Path(task.lock)):
        thread.start()
        assert not done.wait(0.5)
    assert done.wait(60)
    thread.join()


def test_concurrent_replays_keep_each_others_cases(run: Path, tmp_path: Path) -> None:
    first, second = (replay(run, tmp_path / "out", rounds=frozenset({round})) for round in (1, 2))
    first.folder.mkdir(parents=True)
    path = first.folder / "attack.json"

    def write(one: Replay) -> None:
        facts.write_metadata(path, one.recording, one.identity, one.plan, oracles=())

    with hold_lock(path.with_name(".lock")):
        threads = [threading.Thread(target=write, args=(one,)) for one in (first, second)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert not path.exists(), "each waits for its turn"
    for thread in threads:
        thread.join()
    assert {case["round"] for case in json.loads(path.read_text())["cases"]} == {1, 2}


def test_previews_of_a_search_are_its_results_at_that_iteration(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(memories, "DISPLAY_SECONDS", 0.0)
    seen: dict[int, list[IntermediateResult]] = {}

    def search(steps: int, **settings: object) -> Path:
        spec = AttackSpec(name="cpl", arguments={"steps": steps, "restarts": 1})
        rounds = frozenset({1})
        return make_replay(run, spec, out=tmp_path, rounds=rounds, **settings).run().folder

    def look(sights, iteration, most) -> None:
        assert most == 5
        seen[iteration] = list(sights)

    search(5, look=look)
    last = max(seen)
    assert sorted(seen) == list(range(1, last + 1))
    assert last > 1
    found = list(answers(search(last)).values())
    assert len(found) == len(seen[last]) == 3
    for sight, answer in zip(seen[last], found, strict=True):
        assert torch.equal(sight.x, answer.x)
        assert torch.equal(sight.y, answer.y)
        assert sight.slots == answer.slots
        assert sight.loss == pytest.approx(float(answer.loss[-1]))


def test_preview_holds_images_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "previews").mkdir()
    painter = Painter(make_preview_path(tmp_path, JOB))
    x = torch.stack([torch.full((3, 4, 5), 0.2), torch.full((3, 4, 5), 7.0)])
    x[0, 2, 3, 4] = float("nan")
    slots = (Slot(2, "a", 1, 0, 1), Slot(2, "a", 1, 1, 0), Slot(2, "a", 2, 0, 1))
    assert read_preview(tmp_path, JOB) is None
    painter([IntermediateResult(x, torch.tensor([4, 9]), slots, 0.5)], 3, 10)
    seen = read_preview(tmp_path, JOB)
    assert seen.images.shape == (2, 4, 5, 3)
    assert [tuple(place) for place in seen.places] == [(2, "a", 1, 0, 9), (2, "a", 1, 1, 4)]
    assert (seen.images[0] == 255).all()
    assert seen.images[1, 0, 0].tolist() == [51, 51, 51]
    assert seen.images[1, 3, 4].tolist() == [51, 51, 0]
    assert (seen.iteration, seen.most, seen.loss) == (3, 10, 0.5)
    painter([IntermediateResult(x[:1], torch.tensor([1]), (Slot(3, "b", 1, 0, 0),), float("inf"))], 4, 10)
    later = read_preview(tmp_path, JOB)
    assert [place.client for place in later.places] == ["a", "a", "b"]
    assert later.loss is None
    assert make_preview_path(tmp_path, JOB).stat().st_mode & 0o077 == 0
    for wrong in ("../x", "", JOB.upper() + "G"):
        with pytest.raises(ValueError, match="not the id of a job"):
            read_preview(tmp_path, wrong)


def test_versions_of_previews_increase_over_attacks_and_attempts(tmp_path: Path) -> None:
    """Browsers keep an image by its address, which holds the version."""
    (tmp_path / "previews").mkdir()
    path, versions = make_preview_path(tmp_path, JOB), []
    for _ in range(3):  # an attack, its null, and a second attempt
        painter = Painter(path)
        for _ in range(2):
            painter([IntermediateResult(torch.rand(1, 3, 4, 5), torch.tensor([1]), (Slot(1, "a", 1, 0, 0),), 0.5)], 1, 2)
            seen = read_preview(tmp_path, JOB)
            versions.append(seen.version)
        path.unlink()
    assert versions == sorted(set(versions))
    assert versions[-1] < 2**53  # the largest number that the page's JavaScript and the address accept


def test_table_rows_have_no_preview(tmp_path: Path) -> None:
    (tmp_path / "previews").mkdir()
    Painter(make_preview_path(tmp_path, JOB))(
        [IntermediateResult(torch.rand(2, 7), torch.zeros(2), (Slot(1, "a", 1, 0, 0),), 0.1)], 1, 2
    )
    assert read_preview(tmp_path, JOB) is None


def test_job_of_a_killed_worker_is_repeated_with_the_same_result(
    root: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real worker runs a job from the queue; only its previews start at the first step, which shows that it works."""
    patched = "from attacker.attacks.matching import saved_state; saved_state.DISPLAY_SECONDS = 0"
    monkeypatch.setattr(job_worker, "WORKER_PROGRAM", f"{patched}; {job_worker.WORKER_PROGRAM}")
    arguments = {"steps": 300, "tv": 0.0}
    settings = ServiceSettings(root=root, state=tmp_path / "state", workers=1, truth="own")
    queue = Queue(tmp_path / "queue.sqlite")
    job = queue.submit(JobSpec(recording="digits", attack="inverting_gradients", arguments=arguments, null=False))
    supervisor = Supervisor(settings, queue)
    supervisor.start()
    try:
        seen, until = False, time.monotonic() + 300
        while queue.get(job.id).state not in FINAL_STATES and time.monotonic() < until:
            if not seen and make_preview_path(settings.state_folder, job.id).exists():
                seen = True
                (worker,) = supervisor._running
                os.kill(worker.pid, signal.SIGKILL)
            time.sleep(0.005)
    finally:
        supervisor.stop()
    now = queue.get(job.id)
    assert (now.state, now.attempts, now.crashes) == ("done", 2, 1)
    assert list_publications(queue) == {job.id: 2}
    assert now.result.scored
    assert not make_preview_path(settings.state_folder, job.id).exists(), "a preview goes with its job"
    spec = AttackSpec(name="inverting_gradients", arguments=arguments)
    undisturbed = make_replay(run, spec, out=tmp_path / "out", threads=1).run()
    check_equal(run / "reconstructions" / now.result.attacks[0].source, undisturbed.folder)
    queue.close()

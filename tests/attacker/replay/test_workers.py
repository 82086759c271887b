"""Tests of replays on several processes: results do not depend on the number of workers, or on killed ones."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equal_results import answers, check_equal
from federations import federate, make_replay
from processes import wait_until

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.replay.executors import process_pool as workers
from attacker.replay.executors.process_pool import choose_workers, run_tasks
from attacker.replay.executors.ray_cluster import read_parcel, run_remote_task
from attacker.replay.executors.worker_loop import Interrupt
from attacker.replay.replay import Replay
from attacker.replay.tasks import Task, TaskCase
from fedsim.recording import Recording


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", rounds=2, batch_size=2)


def replay(run: Path, out: str = "reconstructions", *, steps: int = 3, **settings) -> Replay:
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": steps, "tv": 0.0})
    return make_replay(run, spec, out=run / out, chunk=1, threads=1, **settings)


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_two_workers_give_bitwise_equal_results(run: Path) -> None:
    watched: list[tuple[float, int]] = []
    here, there = replay(run, "here"), replay(run, "there", workers=2)
    assert (here.run().done, here.run().skipped) == (4, 4)
    done = there.run(lambda share, total, words: watched.append((share, total)))
    assert (done.done, done.failed, done.notes) == (4, {}, [])
    check_equal(here.folder, there.folder)
    assert watched[-1] == (4.0, 4)
    assert [share for share, _ in watched] == sorted(share for share, _ in watched)
    assert not list(there.folder.glob("*.checkpoint"))


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds workers in /proc")
def test_task_of_a_killed_worker_is_repeated(run: Path) -> None:
    here, there = replay(run, "here"), replay(run, "there", workers=1)
    here.run()
    job, keys = there._job, [row.key for row in Recording(run / "recording").read_rows()]
    there.folder.mkdir(parents=True)
    (row, *_) = Recording(run / "recording").read_rows()
    task = Task(members=(TaskCase(key=keys[0], rows=((row.round, row.client),)),))
    before = set(children(os.getpid()))
    results = run_tasks(job, [task], 1, lambda number, share, words: None)

    import threading

    def kill_one() -> None:
        wait_until(lambda: set(children(os.getpid())) - before)
        os.kill((set(children(os.getpid())) - before).pop(), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    ((number, outcome),) = results
    killer.join()
    assert (number, list(outcome.done)) == (0, [keys[0]])
    (note,) = outcome.notes
    assert note.startswith("a worker died: killed by SIGKILL: its memory was not measured; the kernel ")
    assert note.endswith("; its task was repeated")
    name = f"{keys[0]}.safetensors"
    assert torch.equal(answers(there.folder)[name].x, answers(here.folder)[name].x)


def test_task_that_kills_every_worker_fails_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_RETRIES", 1)
    there = replay(run, "there")
    job, rows = there._job, Recording(run / "recording").read_rows()
    there.folder.mkdir(parents=True)
    good, deadly = (Task(members=(TaskCase(key=row.key, rows=((row.round, row.client),)),)) for row in rows[:2])
    deadly = Task(members=(TaskCase(key=rows[1].key, rows=deadly.members[0].rows, logits=((0.0,), (0.0, 1.0))),))  # no matrix
    outcomes = dict(run_tasks(job, [deadly, good], 1, lambda number, share, words: None))
    assert list(outcomes[1].done) == [rows[0].key]
    reason = outcomes[0].failed[rows[1].key]
    assert reason.startswith("its worker died 2 times, the last time because: ")
    assert "expected sequence of length 1" in reason
    assert rows[1].key in (there.folder / f"{rows[1].key}.failed.json").read_text()


PROGRAM = """
import sys
from pathlib import Path
from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from fedsim.recording import Recording

run = Path(sys.argv[1])
spec = AttackSpec(name="inverting_gradients", arguments={"steps": int(sys.argv[2]), "tv": 0.0, "signed": True})
replay = Replay(recording=Recording(run / "recording"), spec=spec, out=run / "out", chunk=1, threads=1, workers=2)
print(replay.folder, flush=True)
try:
    replay.run(lambda share, total, words: print(words, flush=True) if "left" in words else None)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_interrupt_keeps_the_result_of_every_worker(run: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run), "1000000"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    folder = Path(process.stdout.readline().strip())
    try:
        for _ in range(20):
            assert process.stdout.readline()
        wait_until(lambda: len(list(folder.glob("*.checkpoint"))) == 2)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert rest.strip().splitlines()[-1] == "interrupted"
    assert 1 <= len(answers(folder)) <= 2
    assert all(answer.interrupted for answer in answers(folder).values())


def test_interrupt_between_tasks_stops_the_next_task() -> None:
    interrupt = Interrupt()
    interrupt()
    with pytest.raises(KeyboardInterrupt), interrupt:
        raise AssertionError("the task began")
    again = Interrupt()
    with pytest.raises(KeyboardInterrupt), again:
        again()
    with pytest.raises(KeyboardInterrupt), again:  # all later tasks are interrupted too
        raise AssertionError("the task began")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_that_a_destructor_drops_comes_again_with_the_next_progress() -> None:
    interrupt = Interrupt()

    class Dropping:
        def __del__(self) -> None:
            interrupt()

    with interrupt:
        interrupt.raise_again()  # nothing came yet
        Dropping()
        with pytest.raises(KeyboardInterrupt):
            interrupt.raise_again()
        interrupt.raise_again()  # the best result is being written


@pytest.mark.parametrize(
    ("seconds", "tasks", "device", "threads", "count"),
    [(5.0, 8, "cpu", 1, 1), (500.0, 1, "cpu", 1, 1), (500.0, 8, "cuda:0", 1, 1), (500.0, 8, "cpu", 10_000, 1)],
)
def test_one_worker_is_used_if_more_do_not_help(seconds: float, tasks: int, device: str, threads: int, count: int) -> None:
    assert choose_workers(seconds, tasks, device, threads) == count


def test_number_of_workers_is_limited_by_cores_and_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [choose_workers(500.0, tasks, "cpu", None) for tasks in (2, 8, 20)] == [2, 8, 8]
    assert choose_workers(500.0, 20, "cpu", 4) == 2


def test_remote_task_without_the_recording_gets_its_files(run: Path, tmp_path: Path) -> None:
    here = replay(run, "here")
    here.run()
    job, recording = here._job, Recording(run / "recording")
    row = recording.read_rows()[0]
    task = Task(members=(TaskCase(key=row.key, rows=((row.round, row.client),)),))
    away = replace(job, recording=str(tmp_path / "not there" / "recording"), folder=str(tmp_path / "not there" / "here"))
    assert run_remote_task(away, task, recording.compute_fingerprint(), None) is None
    returned = run_remote_task(away, task, recording.compute_fingerprint(), read_parcel(recording, task))
    assert returned is not None
    outcome, files = returned
    assert (list(outcome.done), list(files)) == ([row.key], [f"{row.key}.safetensors"])
    (tmp_path / "back").mkdir()
    for name, content in files.items():
        (tmp_path / "back" / name).write_bytes(content)
        assert torch.equal(Reconstruction.read(tmp_path / "back" / name).x, answers(here.folder)[name].x)
    other = shutil.copytree(run / "recording", tmp_path / "other")
    (other / "manifest.json").write_text((other / "manifest.json").read_text().replace('"digits"', '"digits2"') + " ")
    elsewhere = replace(job, recording=str(other))
    assert run_remote_task(elsewhere, task, recording.compute_fingerprint(), None) is None

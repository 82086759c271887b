"""Tests of checkpoints of replays (attacks on a recording): a killed replay resumes and ends with the same results."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from federations import federate, make_replay

from attacker.attacks import AttackSpec
from attacker.attacks.matching.saved_state import prefix_memory
from attacker.reconstruction import Reconstruction
from attacker.replay.checkpoints import FileMemory, Origin, find_unfinished, remove_finished
from attacker.replay.replay import Replay
from fedsim.recording import Recording

ORIGIN = Origin(attack="cpl(steps=2)", seed=0, device="cpu")
STATE = {"z": torch.arange(3.0), "iteration": torch.tensor(7)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", clients=4, batch_size=2)


def memory(folder: Path, *cases: str, origin: Origin = ORIGIN) -> FileMemory:
    begun = FileMemory(folder, cases or ("a", "b"), origin)
    begun.begin()
    return begun


def test_states_are_read_back_until_they_are_forgotten(tmp_path: Path) -> None:
    first = memory(tmp_path)
    assert first.recall("start 0") is None
    first.keep("start 0", STATE)
    first.keep("start/1", {})
    first.keep("start 0", {"z": torch.zeros(3), "iteration": torch.tensor(8)})
    second = memory(tmp_path)
    found = second.recall("start 0")
    assert torch.equal(found["z"], torch.zeros(3))
    assert int(found["iteration"]) == 8
    assert second.recall("start/1") == {}
    assert second.path.stat().st_mode & 0o077 == 0
    second.forget()
    assert list(tmp_path.iterdir()) == []
    assert memory(tmp_path).recall("start 0") is None


def test_dropped_state_is_removed_by_the_same_write(tmp_path: Path) -> None:
    kept = memory(tmp_path)
    kept.keep("restart 0", {"history": torch.zeros(10_000)})
    prefix_memory(kept, "joint/").keep("restart 0", STATE)
    kept.keep("best", STATE, drop="restart 0")
    assert (kept.recall("restart 0"), memory(tmp_path).recall("restart 0")) == (None, None)
    assert kept.path.stat().st_size < 10_000
    prefix_memory(kept, "joint/").keep("best", {}, drop="restart 0")
    assert memory(tmp_path).recall("joint/restart 0") is None
    assert memory(tmp_path).recall("best") is not None


def test_stored_states_are_copies(tmp_path: Path) -> None:
    kept, z = memory(tmp_path), torch.ones(2)
    kept.keep("start", {"z": z})
    z.mul_(5)
    recalled_once = kept.recall("start")
    recalled_once["z"].mul_(7)
    kept.keep("other", {})
    assert all(torch.equal(m.recall("start")["z"], torch.ones(2)) for m in (kept, memory(tmp_path)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attack": "cpl(steps=3)"}, r"is of attack cpl\(steps=3\), and this is cpl\(steps=2\)"),
        ({"seed": 1}, "is of seed 1, and this is 0"),
        ({"device": "cuda"}, "is of device cuda, and this is cpu"),
        ({"torch": "1.0"}, "is of torch 1.0, and this is "),
        ({"form": 1}, "is of form 1, and this is "),
    ],
)
def test_checkpoint_of_other_settings_is_not_used_and_noted(tmp_path: Path, change: dict, words: str) -> None:
    output = {"attack": ORIGIN.attack, "seed": ORIGIN.seed, "device": ORIGIN.device, **change}
    memory(tmp_path, origin=Origin(**output)).keep("start 0", STATE)
    tasks, notes = find_unfinished(tmp_path, ORIGIN, {"a", "b"})
    assert tasks == []
    (note,) = notes
    assert re.search(f"^the checkpoint of 2 cases, the first a, {words}.*: they start again$", note)
    assert memory(tmp_path).recall("start 0") is None


def test_unfinished_tasks_hold_wanted_cases_only_and_do_not_overlap(tmp_path: Path) -> None:
    for cases in (("a", "b", "c"), ("b",), ("d",), ("x", "d2")):
        memory(tmp_path, *cases)
    wanted = {"a", "b", "c", "d", "d2"}
    assert sorted(find_unfinished(tmp_path, ORIGIN, wanted)[0]) == [("a", "b", "c"), ("d",)]
    tasks, notes = find_unfinished(tmp_path, ORIGIN, wanted, max_cases=2)
    assert sorted(tasks) == [("b",), ("d",)]
    assert "holds more cases than the chosen chunk of 2" in notes[0]


def test_ends_of_a_chain_of_overlapping_checkpoints_are_both_used(tmp_path: Path) -> None:
    chains = ([(f"a{n}", f"b{n}"), (f"b{n}", f"c{n}"), (f"c{n}", f"d{n}")] for n in range(100))
    chain = next(one for one in chains if (paths := [FileMemory(tmp_path, t, ORIGIN).path for t in one]) == sorted(paths))
    for cases in chain:
        memory(tmp_path, *cases)
    assert find_unfinished(tmp_path, ORIGIN, {case for cases in chain for case in cases})[0] == [chain[0], chain[2]]


def test_damaged_checkpoint_is_noted_and_finished_ones_are_removed(tmp_path: Path) -> None:
    broken, left = memory(tmp_path, "a"), memory(tmp_path, "b", "c")
    broken.path.write_bytes(b"cut off")
    assert find_unfinished(tmp_path, ORIGIN, {"a"})[1] == [
        f"{broken.path.name} cannot be read as a checkpoint: its cases start again"
    ]
    remove_finished(tmp_path, ["b"])
    assert list(tmp_path.iterdir()) == [left.path]
    remove_finished(tmp_path, ["b", "c", "d"])
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys, time
from pathlib import Path
import torch
from attacker.attacks import AttackSpec
from attacker.attacks.matching import matching_run as matching_run
from attacker.replay.replay import Replay
from fedsim.recording import Recording

torch.set_num_threads(1)
run, pause = Path(sys.argv[1]), float(sys.argv[2])
descend = matching_run.descend
def slowly(*arguments, **settings):
    if pause:
        keep = settings["checkpoint"]
        settings["checkpoint"] = lambda state: (keep(state), time.sleep(pause))
    resumed = settings.get("resume")
    print("from", 0 if resumed is None else len(resumed["active.history"]), flush=True)
    return descend(*arguments, **settings)
matching_run.descend = slowly
spec = AttackSpec(name="inverting_gradients", arguments={"steps": 15, "restarts": 2, "tv": 1e-3})
replay = Replay(recording=Recording(run / "recording"), spec=spec, out=run / "out", chunk=3, every=0.0)
print("done", replay.run().done, flush=True)
"""


def start_replay(run: Path, pause: float = 0.0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, str(run), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_when(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def make_tensors(folder: Path) -> dict[str, list[torch.Tensor]]:
    found = {path.name: Reconstruction.read(path) for path in sorted(folder.rglob("*.safetensors"))}
    return {
        name: [one.x, one.y, one.loss, one.confidence.nan_to_num(nan=-1.0), torch.tensor(one.iterations)]
        for name, one in found.items()
    }


def test_killed_replay_resumes_to_bitwise_equal_results(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": 15, "restarts": 2, "tv": 1e-3})
    assert make_replay(other, spec, out=other / "out", chunk=3, every=0.0).run().done == 4
    process = start_replay(run, pause=0.05)
    kill_when(process, lambda: iterations_kept(run) > 5)
    assert make_tensors(run / "out") == {}
    kept = iterations_kept(run)
    output, complaints = start_replay(run).communicate(timeout=300)
    first, *_, last = output.splitlines()
    assert (int(first.removeprefix("from ")) >= kept, last) == (True, "done 4"), complaints
    mine, theirs = make_tensors(run / "out"), make_tensors(other / "out")
    assert list(mine) == list(theirs)
    for name, parts in mine.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, theirs[name], strict=True)), name
    assert not list((run / "out").rglob("*.checkpoint"))


def iterations_kept(run: Path) -> int:
    from safetensors import SafetensorError, safe_open

    for path in (run / "out").rglob("*.checkpoint"):
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for _, name in json.loads(file.metadata()["names"])]
                if "active.history" in names:
                    return len(file.get_tensor(str(names.index("active.history"))))
        except (SafetensorError, OSError):
            pass
    return 0


def test_interrupted_chunk_is_attacked_again_and_written_results_stay(run: Path) -> None:
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": 2, "tv": 0.0})

    def replay(**settings: int) -> Replay:
        return make_replay(run, spec, out=run / "out", **settings)

    first = replay(chunk=4)
    first.run()
    before = {path.name: path.read_bytes() for path in first.folder.glob("*.safetensors")}
    rows = Recording(run / "recording").read_rows()
    keys = [row.key for row in rows]
    FileMemory(first.folder, tuple(keys), first._job.origin).begin()  # killed while it wrote
    for key in keys[2:]:
        first.make_path(key).unlink()
    again = replay(chunk=4).run()
    assert (again.done, again.skipped) == (2, 2)
    after = {path.name: Reconstruction.read(path) for path in first.folder.glob("*.safetensors")}
    assert all(first.make_path(key).read_bytes() == before[f"{key}.safetensors"] for key in keys[:2])
    (first.folder / "old").mkdir()
    for name, content in before.items():
        (first.folder / "old" / name).write_bytes(content)
        assert torch.equal(after[name].x, Reconstruction.read(first.folder / "old" / name).x)
    assert not list(first.folder.glob("*.checkpoint"))


def test_chunks_do_not_depend_on_finished_cases(run: Path) -> None:
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": 2, "tv": 0.0})
    replay = make_replay(run, spec, out=run / "out", chunk=2)
    chunks = [[case.key for case in chunk] for chunk in replay._chunks]
    assert [len(chunk) for chunk in chunks] == [2, 2]
    replay.run()
    replay.make_path(chunks[0][0]).unlink()
    again = make_replay(run, spec, out=run / "out", chunk=2)
    assert [[case.key for case in chunk] for chunk in again._chunks] == chunks
    assert again.run().done == 1

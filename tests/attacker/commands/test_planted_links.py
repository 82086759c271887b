"""Tests of symbolic links, hard links and pipes at any path of a run: no command follows, waits for or changes one."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import numpy as np
import pytest
import tomli_w
from command_line import join_lines, run_attacker, run_fedsim

from attacker.service.http.app import make_app, make_components
from attacker.service.jobs.job import JobSpec
from attacker.service.settings import ServiceSettings
from attacker.service.worker.execution import _JobRun
from attacker.service.worker.messages import JobTask
from fedsim.config.experiment import validate
from fedsim.engine import engines
from fedsim.engine.run import FederationRun
from fedsim.recording import DamagedFile
from fedsim.recording.run_check import find_foreign

SECONDS = 10
SECRET = b"alias ls='echo'"
"""It has no line feed at its end, so that a command that appends rows would remove it as an incomplete row."""
ReplacePath = Callable[[Path, Path], None]


def make_experiment(data: Path) -> dict[str, Any]:
    return {
        "rounds": 1,
        "model": {"name": "mlp", "hidden": [4]},
        "data": {"name": "npz", "train": str(data)},
        "clients": {"count": 2},
        "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with the files of all commands: attacked, scored and reported."""
    root = tmp_path_factory.mktemp("runs")
    values = np.random.default_rng(0).integers(0, 256, (10, 4, 4), dtype=np.uint8)
    np.savez(root / "data.npz", images=values, labels=np.arange(10) % 2)
    facts = make_experiment(root / "data.npz")
    (root / "experiment.toml").write_text(tomli_w.dumps(facts))
    engines.run(FederationRun(experiment=validate(facts, source="test"), out=root / "run", client_seed=1), engine="local")
    for words in (
        ["replay", root / "run", "--attack", "exact", "--device", "cpu"],
        ["score", root / "run"],
        ["report", root / "run"],
    ):
        result = run_attacker(*words)
        assert result.exit_code == 0, result.output
    return root / "run"


def list_paths(run: Path) -> list[str]:
    """Return the paths that commands read, write or would create in a run, one of each kind."""
    attack = sorted(path.name for path in (run / "reconstructions").iterdir())[0]
    case = sorted(path.stem for path in (run / "reconstructions" / attack).glob("*.safetensors"))[0]
    client = case.removeprefix("00001-")
    made = f"reconstructions/{attack}"
    return [
        *(
            "experiment.toml",
            "metrics.jsonl",
            "state",
            "state/lock",
            "state/server.safetensors",
            "clients",
            "clients/simulation.json",
        ),
        *("recording", "recording/manifest.json", "recording/index.sqlite", "recording/index.sqlite-journal", "recording/rounds"),
        *("recording/rounds/00001", "recording/rounds/00001/global.safetensors", f"recording/rounds/00001/{client}.safetensors"),
        *("recording/rounds/00002", f"recording/.manifest.json.{os.getpid()}.partial"),
        *(
            "truth",
            "truth/dataset.json",
            f"truth/{client}.jsonl",
            "reconstructions",
            made,
            f"{made}/attack.json",
            f"{made}/.lock",
        ),
        *(f"{made}/{case}.safetensors", f"{made}/{case}.failed.json", f"{made}/0123456789ab.checkpoint", f"{made}/deep/er"),
        *("scores.jsonl", f".scores.jsonl.{os.getpid()}.partial", "pairs", "pairs/.lock", f"pairs/{attack}"),
        *(f"pairs/{attack}/{case}-1-0.png", "report.html"),
    ]


def symbolic_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "secret")


def symbolic_link_to_a_copy(path: Path, outside: Path) -> None:
    """Replace a path by a symbolic link to its former content, so that nothing but the link is wrong."""
    target = outside / "copy"
    if os.path.lexists(path):
        path.rename(target)
    else:
        target.mkdir()
    path.symlink_to(target)


def dangling_symbolic_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "absent")


def hard_link(path: Path, outside: Path) -> None:
    os.link(outside / "secret", path)


def named_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def contents(folder: Path) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted((folder, *folder.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


@pytest.fixture
def time_limit() -> Iterator[Callable[[], object]]:
    """Return a function that begins a time limit of SECONDS for what follows, instead of the limit that it began before."""

    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"took more than {SECONDS} seconds", pytrace=True)

    before = signal.signal(signal.SIGALRM, late)
    yield lambda: signal.alarm(SECONDS)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def work_on_job(run: Path, outside: Path) -> None:
    """Attack and score a run as a worker of the service does."""
    spec = JobSpec(recording="run", attack="exact", null=False)
    task = JobTask(
        job="1",
        spec=spec.model_dump(mode="json"),
        run=str(run),
        lock="",
        preview="",
        device="cpu",
        threads=1,
        truth=(str(run / "truth"),),
    )
    work = _JobRun(task, lambda done, words: None)
    work.attack()
    work.score()


COMMANDS = {
    "verify": (run_fedsim, "verify RUN"),
    "show": (run_fedsim, "show RUN"),
    "resume": (run_fedsim, "run EXPERIMENT --out RUN --engine local --resume"),
    "replay": (run_attacker, "replay RUN --attack exact --device cpu"),
    "score": (run_attacker, "score RUN"),
    "report": (run_attacker, "report RUN"),
}


LINKS = [symbolic_link, symbolic_link_to_a_copy, dangling_symbolic_link, hard_link]


@pytest.mark.parametrize("replacements", [LINKS, [named_pipe]], ids=["links", "pipe"])
@pytest.mark.parametrize("command", [*COMMANDS, "job"])
def test_commands_refuse_links_and_pipes_and_change_nothing_outside(
    finished: Path, tmp_path: Path, command: str, replacements: list[ReplacePath], time_limit: Callable[[], object]
) -> None:
    """A pipe is put at each path for each command. Links take turns, so that each kind is at each path for some command."""
    turn = [*COMMANDS, "job"].index(command)
    for number, name in enumerate(list_paths(finished)):
        replace_path = replacements[(number + turn) % len(replacements)]
        place = tmp_path / str(number)
        run, outside = Path(shutil.copytree(finished, place / "run")), place / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(SECRET)
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if replace_path is not symbolic_link_to_a_copy and os.path.lexists(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        replace_path(path, outside)
        before = contents(outside)
        time_limit()
        if command == "job":
            with pytest.raises((ValueError, OSError)) as error:
                work_on_job(run, outside)
            message = str(error.value)
        else:
            program, words = COMMANDS[command]
            asked = words.replace("RUN", str(run)).replace("EXPERIMENT", str(finished.parent / "experiment.toml")).split()
            result = program(*asked)
            assert result.exit_code not in (0, None), (name, result.output)
            assert isinstance(result.exception, SystemExit), (name, result.exception)
            message = result.output
        message = "".join(message.split())
        assert Path(name).name.replace(" ", "") in message, (name, message)
        assert contents(outside) == before, name


def test_undamaged_run_has_no_foreign_files_and_is_scored_again(finished: Path) -> None:
    assert list(find_foreign(finished)) == []
    assert run_attacker("score", finished).exit_code == 0


def test_only_the_links_of_a_deployment_are_allowed(finished: Path, tmp_path: Path) -> None:
    attacks, scores = tmp_path / "attacks" / "federation", tmp_path / "scores" / "federation"
    shutil.copytree(finished / "reconstructions", attacks / "reconstructions")
    scores.mkdir(parents=True)
    (scores / "reconstructions").symlink_to("../../attacks/federation/reconstructions")
    (tmp_path / "data.npz").symlink_to(finished.parent / "data.npz")
    assert list(find_foreign(scores)) == []
    result = run_attacker("score", scores, "--truth", finished / "truth")
    assert result.exit_code == 0, result.output
    (tmp_path / "attacks").rename(tmp_path / "elsewhere")
    (tmp_path / "attacks").symlink_to(tmp_path / "elsewhere")
    assert [error.reason.split(",")[0] for error in find_foreign(scores)] == ["is not a folder"]
    (tmp_path / "attacks").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "attacks")
    os.mkfifo(attacks / "reconstructions" / "pipe")
    assert [error.path.name for error in find_foreign(scores)] == ["pipe"]
    (scores / "reconstructions").unlink()
    (scores / "reconstructions").symlink_to(attacks / "reconstructions")
    assert [error.path for error in find_foreign(scores)] == [scores / "reconstructions"]


def test_too_deep_folders_are_refused(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    deep = run / "pairs" / Path(*("a" * 20))
    deep.mkdir(parents=True)
    assert ["folders deep" in error.reason for error in find_foreign(run)] == [True]
    with pytest.raises(DamagedFile):
        raise next(find_foreign(run))


def test_true_examples_without_their_hash_are_refused(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    described = json.loads((run / "truth" / "dataset.json").read_text())
    (run / "truth" / "dataset.json").write_text(json.dumps({key: described[key] for key in ("name", "arguments")}))
    result = run_attacker("score", run)
    assert result.exit_code == 2
    assert "dataset.json: does not give the content_hash of the data set; copy the file" in join_lines(result.output)


def test_service_refuses_a_report_of_a_run_with_a_pipe(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "runs" / "run"))
    (run / "scores.jsonl").unlink()
    os.mkfifo(run / "scores.jsonl")
    settings = ServiceSettings(root=tmp_path / "runs", state=tmp_path / "state", workers=0, truth="own", token=False)
    app = make_app()
    app.state.components = make_components(settings)
    app.state.components.catalogue.scan()

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            return await client.get("/api/v1/recordings/run/report")

    answer = asyncio.run(ask())
    app.state.components.queue.close()
    assert answer.status_code == 409
    assert "scores.jsonl is a pipe, which no command creates; remove it" in answer.text

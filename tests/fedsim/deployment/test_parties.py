"""Tests of the folders, commands and settings that each party of a deployment gets."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_experiments import make_tiny

from fedsim.deployment import mounts
from fedsim.deployment.folders import prepare
from fedsim.deployment.parties import make_command
from fedsim.deployment.processes import find_free_port
from fedsim.engine import flower_app as flower
from fedsim.engine.locations import PartyLocations


def context(run: dict[str, Any], node: dict[str, Any]) -> Any:
    return SimpleNamespace(run_config=run, node_config=node)


def test_a_client_refuses_an_experiment_that_it_has_not_agreed_to(tmp_path: Path) -> None:
    agreed = make_tiny(defense="clip(1)")
    (tmp_path / "e.toml").write_text(agreed.to_toml())
    own = {"partition-id": 0, "data": "digits", "private": str(tmp_path / "p"), "truth": str(tmp_path / "t")}
    node = {**own, "experiment": str(tmp_path / "e.toml"), "client-seed": 3}
    asked_for = {"experiment": "", "out": "/out", "resume": False, "threads": 2}
    run = flower.find_client_run(context({**asked_for, "settings": agreed.to_toml()}, node))
    assert run.experiment == agreed
    assert (run.client_seed, run.threads, run.out) == (3, 2, Path("/out"))
    assert run.locations == PartyLocations(data="digits", private=tmp_path / "p", truth=tmp_path / "t")
    with pytest.raises(
        ValueError, match=r"the server's experiment differs in defense from .*e\.toml, to which this client agreed"
    ):
        flower.find_client_run(context({**asked_for, "settings": make_tiny(defense="").to_toml()}, node))
    assert flower.find_client_run(context({**asked_for, "settings": make_tiny().to_toml()}, own)).experiment == make_tiny()


def test_the_server_gets_the_public_folder_and_no_settings_of_a_client() -> None:
    asked_for = {"experiment": "", "settings": make_tiny().to_toml(), "out": "/out", "resume": True, "public": "/public"}
    run = flower.find_server_run(context(asked_for, {"data": "digits"}))
    assert (run.locations, run.resume, run.client_seed) == (PartyLocations(public=Path("/public")), True, None)


def test_the_start_command_of_a_party_uses_its_own_files(tmp_path: Path) -> None:
    layout = prepare(make_tiny(), tmp_path / "federation")
    address = f"127.0.0.1:{find_free_port()}"
    command = make_command("client-1", layout, address)
    assert command[:3] == ["flower-supernode", "--superlink", address]
    assert str(layout.make_key_path(1)) in command
    assert make_command("superlink", layout, address)[-1] == str(layout.certificates.secret)
    assert "--insecure" in make_command("server", layout, address, secure=False)
    server = "172.31.86.0/24"
    command = make_command("superlink", layout, address, control_from=[server])
    assert command[command.index("--control-from") + 1] == server
    for party, network, words in (
        ("superlink", "server", "write a network as"),
        ("client-1", server, "is an option of `fedsim start superlink`"),
    ):
        with pytest.raises(ValueError, match=words):
            make_command(party, layout, address, control_from=[network])
    layout.make_key_path(1).unlink()
    for party, words in (
        ("client-1", r"key does not exist; create it with `fedsim prepare`, or copy it"),
        ("client-3", "there are 3 clients, from client-0 to client-2"),
        ("attacker", r"unknown party 'attacker'\. Known: superlink, server, or client-0"),
    ):
        with pytest.raises(ValueError, match=words):
            make_command(party, layout, address)


def test_a_port_that_is_in_use_is_refused_before_the_start(tmp_path: Path) -> None:
    from socket import socket

    layout = prepare(make_tiny(), tmp_path / "federation")
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"something listens on 127\.0\.0\.1:\d+ already"):
            make_command("superlink", layout, address)


@pytest.mark.skipif(mounts.explain_missing_isolation() != "", reason=mounts.explain_missing_isolation())
def test_an_isolated_process_sees_only_its_mounts_and_writes_only_to_writable_ones(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:

    for name in ("mine", "shared", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    seen = (mounts.Mount("mine", True), mounts.Mount("shared/file"))
    script = "ls; cat shared/file; echo new > mine/file; echo no > shared/file || echo refused; "
    script += f"ls ../{tmp_path.name}/theirs 2>&1 | head -1"
    stages = tmp_path_factory.mktemp("stages")
    monkeypatch.setenv("TMPDIR", str(stages))
    prefix = mounts.make_isolation_prefix(tmp_path, seen)
    done = subprocess.run([*prefix, "sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:4] == ["mine", "shared", "sharedrefused", done.stdout.split("\n")[3]]
    assert "No such file" in done.stdout
    assert {name: (tmp_path / name / "file").read_text() for name in ("mine", "shared", "theirs")} == {
        "mine": "new\n",
        "shared": "shared",
        "theirs": "theirs",
    }
    assert not any(stages.iterdir())  # no temporary files are left


def test_a_folder_can_be_prepared_after_a_refused_number_of_days(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="between 1 and 825, got 900"):
        prepare(make_tiny(), tmp_path / "federation", days=900)
    assert prepare(make_tiny(), tmp_path / "federation").experiment.exists()


def test_an_earlier_deployment_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    layout = prepare(make_tiny(), tmp_path / "federation")
    shutil.rmtree(layout.public)
    before = {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")}
    with pytest.raises(ValueError, match="data exists already, from an earlier deployment; choose another folder, or delete"):
        prepare(make_tiny(), tmp_path / "federation")
    assert {path: path.stat().st_mtime_ns for path in layout.root.rglob("*")} == before


@pytest.mark.parametrize("name", ["recording", "experiment.toml"])
def test_the_folder_of_a_run_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"is the folder of a run, since it holds {name}; choose another folder"):
        prepare(make_tiny(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]

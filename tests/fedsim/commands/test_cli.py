"""Tests of the command line: results on stdout, all else on stderr, status 2 for wrong usage and 1 for work that failed."""

import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedsim.cli import app
from fedsim.commands.console import EXIT_FAILURES
from fedsim.config.experiment import read

SMALL = """
rounds = 2
model = { name = "mlp", hidden = [4] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.5, batch_size = 4, steps = 1 }
"""

OURS = {"plain", "masked", "withhold", "in_gradient_units"}
"""Names that no paper has published."""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def fedsim(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def run(*arguments: object) -> Result:
    return fedsim("run", "small.toml", "--out", "out", "--engine", "local", *arguments)


def words(text: str) -> str:
    return " ".join(text.split())


def test_run_prints_one_json_document_on_stdout_and_nothing_else(small: Path) -> None:
    """The command runs in a separate process, so that the test sees everything that Flower prints."""
    call = [sys.executable, "-c", "from fedsim.cli import main; main()", "run", "small.toml", "--engine", "local", "--json"]
    done = subprocess.run([*call, "--out", "out"], capture_output=True, text=True, timeout=120, cwd=small.parent)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["run"], result["rounds"], result["complete"], len(result["clients"])) == ("out", 2, 6, 3)
    assert [row["complete"] for row in result["per_round"]] == [3, 3]
    assert "3 clients, 2 rounds; writes up to" in words(done.stderr)
    assert "Traceback" not in done.stderr
    assert "INFO" not in done.stderr


def test_without_json_the_result_is_a_line_for_people(small: Path) -> None:
    result = run()
    assert result.exit_code == 0
    assert "6 observations of 3 clients in 2 rounds" in words(result.stdout)


def test_running_again_skips_what_is_done(small: Path) -> None:
    first, before = run("--json"), {p: p.stat().st_mtime_ns for p in small.parent.rglob("*") if p.is_file()}
    again = run("--json")
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert "out is done already" in again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert {p: p.stat().st_mtime_ns for p in small.parent.rglob("*") if p.is_file()} == before
    resolved = fedsim("run", "out/experiment.toml", "--out", "out", "--engine", "local")
    assert (resolved.exit_code, "done already" in resolved.stderr) == (0, True)


def test_another_experiment_in_the_same_folder_is_refused(small: Path) -> None:
    assert run().exit_code == 0
    refused = run("--set", "seed=1")
    assert refused.exit_code == 2
    assert "out holds another run, or other files" in words(refused.stderr)
    assert refused.stdout == ""


def test_print_config_prints_what_would_run_and_runs_nothing(small: Path) -> None:
    result = run("--print-config", "--set", "training.learning_rate=0.25", "--set", "defense=clip(1) | gaussian(0.1)")
    assert result.exit_code == 0
    (small.parent / "printed.toml").write_text(result.stdout)
    printed = read(small.parent / "printed.toml")
    assert (printed.training.learning_rate, printed.defense, printed.rounds) == (0.25, "clip(1) | gaussian(0.1)", 2)
    assert not (small.parent / "out").exists()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["rounds=1"], lambda e: e.rounds == 1),
        (["record.rounds=1"], lambda e: e.record.rounds == "1"),
        (["record.rounds=1-2"], lambda e: e.record.rounds == "1-2"),
        (["model=lenet_dlg"], lambda e: e.model.name == "lenet_dlg"),
        (["model.hidden=[3, 2]"], lambda e: e.model.arguments == {"hidden": [3, 2]}),
        (["data=photos", "data.size=64"], lambda e: (e.data.name, e.data.arguments) == ("photos", {"size": 64})),
        (['partition={ name = "dirichlet", alpha = 2 }'], lambda e: e.partition.arguments == {"alpha": 2}),
        (["training.shuffle=false"], lambda e: e.training.shuffle is False),
        (["defense="], lambda e: e.defense == ""),
        (["partition.alpha=2"], lambda e: e.partition.arguments == {"alpha": 2}),
        (["strategy.central={ noise_multiplier = 1.0 }"], lambda e: e.strategy.arguments["central"] == {"noise_multiplier": 1.0}),
        (["strategy.central.noise_multiplier=1.0"], lambda e: e.strategy.arguments["central"] == {"noise_multiplier": 1.0}),
        (["data=npz:a=b.npz"], lambda e: e.data.name == "npz:a=b.npz"),
    ],
)
def test_set_reads_values_as_toml_and_else_as_text(small: Path, given: list[str], found: Callable[[Any], bool]) -> None:
    result = run("--print-config", *(part for text in given for part in ("--set", text)))
    assert result.exit_code == 0, result.stderr
    (small.parent / "printed.toml").write_text(result.stdout)
    assert found(read(small.parent / "printed.toml"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "sede=1"], "override: sede: unknown key"),
        (["--set", "training.lr=1"], "override: training.lr: unknown key"),
        (["--set", "rounds"], "--set rounds: write it as KEY=VALUE"),
        (["--set", "=1"], "--set =1: write it as KEY=VALUE"),
        (["--set", "rounds=many"], "override: rounds:"),
        (["--set", "defense=clop(1)"], "Did you mean 'clip'?"),
        (["--set", "defense=clip('a')"], "max_norm must be a number, got 'a'"),
        (["--set", "defense=clip(0)"], "override: defense = 'clip(0)': clip: max_norm must be positive"),
        (["--set", "training.gradient_squeezing=1.5"], "gradient_squeezing must be a whole number of at least 1, got 1.5"),
        (["--set", "strategy.central.kind=[]"], "strategy.central.kind must be one of fixed, adaptive, got []"),
        (["--set", "model=lenet_cpl", "--set", "data=breast_cancer"], "use the model 'mlp'"),
        (["--set", "model.hidden=3"], "whole numbers above 0, got 3"),
        (["--set", "data=npz:nowhere.npz"], "nowhere.npz does not exist"),
        (["--engine", "dask"], "--engine 'dask' is unknown. Known: ray, local"),
        (["--device", "abacus"], "device 'abacus' is not available on this machine"),
        (["--threads", "0"], "--threads"),
        (["--frobnicate"], "--frobnicate"),
        (["--out", "small.toml"], "small.toml"),
    ],
)
def test_wrong_usage_is_status_2_with_the_reason_on_stderr(small: Path, arguments: list[str], expected: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2, refused.output
    assert expected in words(refused.stderr)
    assert refused.stdout == ""
    assert not (small.parent / "out").exists()


def test_an_unknown_key_in_the_file_is_named_with_the_file(small: Path) -> None:
    small.write_text(SMALL + "\n[record]\nrouns = 1\n")
    refused = run()
    assert refused.exit_code == 2
    assert "small.toml: record.rouns: unknown key" in words(refused.stderr)
    assert fedsim("run", "none.toml").exit_code == 2


def test_work_that_fails_is_status_1(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise OSError("sensor unplugged")

    monkeypatch.setattr("fedsim.client.app.train", broken)
    failed = run("--json")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    first = r"6 of 6 replies are missing, the first, of client \d+ in round 1: OSError: sensor unplugged"
    assert re.search(first, words(failed.stderr))
    assert "no client ever answered" in words(failed.stderr)
    assert "correct the cause, then fedsim delete" in words(failed.stderr)
    for again in ((), ("--resume",)):  # a finished run without any answer is still a failure
        result = run("--json", *again)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "no client ever answered: 6 of 6 replies are missing" in words(result.stderr)
        assert "is done already" not in words(result.stderr)


def test_missing_replies_have_their_own_status_unless_failures_are_allowed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedsim.client.app as client_side

    real, calls = client_side.train, []

    def sometimes(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("[bold]full")
        return real(*arguments, **named)

    monkeypatch.setattr(client_side, "train", sometimes)
    result = run("--json")
    assert result.exit_code == EXIT_FAILURES
    first = r"1 of 6 replies are missing, the first, of client \S+ in round 2: MemoryError: \[bold\]full"
    assert re.search(first, words(result.stderr))
    assert "1 reply is missing; fedsim show out lists the rounds; with --allow-failures the exit status would be 0" in words(
        result.stderr
    )
    assert [(row["complete"], row["failed"], row["late"]) for row in json.loads(result.stdout)["per_round"]] == [
        (3, 0, 0),
        (2, 1, 0),
    ]
    again = run("--allow-failures")
    assert again.exit_code == 0
    assert re.fullmatch(f"{first} out is done already", words(again.stderr))


def test_messages_of_a_deployments_server_are_printed_once_wherever_the_run_is(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.engine import engines as engine

    said = ["2 of 3 clients are connected; :abc: [bold]wait", "1 of 6 replies are missing, the first, of client c in round 1: x"]

    def deployed(experiment: Any, superlink: Any, on_round: Any, on_words: Any) -> None:
        for line in said:
            on_words(line)

    monkeypatch.setattr(engine, "run_deployment", deployed)
    result = fedsim("run", "small.toml", "--out", "there", "--engine", "deployment", "--superlink", "a:1", "--insecure")
    assert result.exit_code == 0, result.stderr
    assert all(result.stderr.count(line) == 1 for line in said)
    assert "done; there is on the server" in words(result.stderr)

    said.append("not everything succeeded: 1 reply is missing; fedsim show there lists the rounds")
    result = fedsim("run", "small.toml", "--out", "there", "--engine", "deployment", "--superlink", "a:1", "--insecure")
    assert result.exit_code == EXIT_FAILURES
    assert "1 reply is missing; fedsim show there lists the rounds; with --allow-failures" in words(result.stderr)
    there = ("run", "small.toml", "--out", "there", "--engine", "deployment", "--superlink", "a:1", "--insecure")
    assert fedsim(*there, "--allow-failures").exit_code == 0

    def here(experiment: Any, superlink: Any, on_round: Any, on_words: Any) -> None:
        on_words("6 of 6 replies are late")
        engine.run(experiment, engine="local")

    monkeypatch.setattr(engine, "run_deployment", here)
    monkeypatch.setattr("fedsim.server.outcome.check_end", lambda folder, tell: tell("6 of 6 replies are late"))
    result = fedsim("run", "small.toml", "--out", "out", "--engine", "deployment")
    assert (result.exit_code, result.stderr.count("6 of 6 replies are late")) == (0, 1)


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_folder_that_cannot_be_made_is_named_with_advice(small: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ray(*given: Any, **named: Any) -> None:  # Ray wraps the server's error in a RuntimeError
        raise RuntimeError("failed") from NotADirectoryError(20, "Not a directory", "small.toml/out")

    monkeypatch.setattr("flwr.simulation.run_simulation", on_ray)
    refused = fedsim("run", "small.toml", "--out", "small.toml/out", "--engine", engine)
    assert refused.exit_code == 2
    assert "small.toml/out: Not a directory; a part of this path is a file; name a folder" in words(refused.stderr)


def test_resources_that_the_machine_lacks_end_a_ray_run_at_once(small: Path) -> None:
    refused = fedsim("run", "small.toml", "--out", "out", "--engine", "ray", "--client-cpus", "1000")
    assert refused.exit_code == 1
    assert "--client-cpus must be above 0" in words(refused.stderr)
    assert not (small.parent / "out").exists()


def test_a_run_that_diverged_can_be_shown(small: Path) -> None:
    assert run("--set", "training.learning_rate=1e38", "--set", "training.steps=3").exit_code == EXIT_FAILURES
    result = json.loads(fedsim("show", "out", "--json").stdout)
    assert result["per_round"][-1]["loss"] is None
    assert fedsim("show", "out").exit_code == 0


# --- show and list ---


def test_show_prints_what_was_recorded(small: Path) -> None:
    run("--set", "defense=clip(2)")
    result = json.loads(fedsim("show", "out", "--json").stdout)
    assert (result["model"], result["defense"], result["complete"]) == ("mlp(hidden=[4])", "clip(2)", 6)
    assert result["data"] == {"shape": [1, 8, 8], "num_classes": 10}
    assert result["training"]["batch_size"] == 4
    metrics = [json.loads(line) for line in (small.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row["bytes"]) for row in result["per_round"]] == [(m["loss"], m["bytes_up"]) for m in metrics[1:]]
    people = words(fedsim("show", "out").stdout)
    assert "mlp(hidden=[4])" in people
    assert "clip(2)" in people
    assert f"{metrics[2]['loss']:.3f}" in people
    assert len(result["clients"]) == 3
    assert [(row["client"], row["rounds"], row["num_examples"]) for row in result["per_client"]] == [
        (client, 2, [4, 4]) for client in result["clients"]
    ]
    assert all(client in people for client in result["clients"])
    assert not re.search("gradient|network|inputs|secure", people)


def test_show_prints_all_that_clients_do(small: Path) -> None:
    keys = {"gradient": "dp_sgd(max_norm=2.0, noise=0.5)", "network": "dropout(p=0.3)", "inputs": "mixup(alpha=2.0)"}
    run(*(part for key, value in keys.items() for part in ("--set", f"{key}={value}")), "--set", "secure_aggregation.threshold=2")
    result, people = json.loads(fedsim("show", "out", "--json").stdout), words(fedsim("show", "out").stdout)
    assert (result["secure_aggregation"]["threshold"], result["codec"]) == (2, "masked")
    for key in keys:
        assert f"{key} {result[key]}" in people
        assert result[key].startswith(keys[key].partition("(")[0])
    assert "secure aggregation {'clients'" in people
    for head in ("complete", "masked", "failed", "bytes up", "accuracy"):  # at 80 columns
        assert head in people
    assert re.search(r" 1 1 3 0 0 \d", people), "round, complete, masked, failed, late"


@pytest.mark.parametrize("folder", ["nowhere", "small.toml", "."])
def test_show_refuses_a_folder_that_is_no_run(small: Path, folder: str) -> None:
    refused = fedsim("show", folder, "--json")
    assert refused.exit_code == 2
    assert "is not a recording" in words(refused.stderr)
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        ("models", {"lenet_cpl", "lenet_dlg", "mlp"}),
        ("datasets", {"photos", "digits", "breast_cancer", "npz"}),
        ("partitions", {"iid", "dirichlet"}),
        ("defenses", {"clip", "gaussian", "top_k", "dgc", "qsgd", "sign"}),
        ("gradients", {"plain", "dp_sgd", "fed_cdp", "soteria"}),
        ("networks", {"precode", "dropout"}),
        ("inputs", {"mixup", "instahide"}),
        ("strategies", {"FedAvg", "FedAdam"}),
    ],
)
def test_list_prints_every_name_with_one_line_and_its_arguments(kind: str, some: set[str]) -> None:
    result = json.loads(fedsim("list", kind, "--json").stdout)
    assert some <= set(result)
    assert all(one["summary"] and "\n" not in one["summary"] for one in result.values())
    people = fedsim("list", kind).stdout
    assert [line.split()[0] for line in people.splitlines() if line[0] != " "] == list(result)
    assert all(one["arguments"] in words(people) for one in result.values())


@pytest.mark.parametrize("kind", ["defenses", "gradients", "networks", "inputs"])
def test_list_prints_the_reference_of_all_published_methods(kind: str) -> None:
    result = json.loads(fedsim("list", kind, "--json").stdout)
    without = {name for name, one in result.items() if not re.search(r"\b(19|20)\d\d\b", one["reference"])}
    assert without <= OURS


def test_list_refuses_an_unknown_kind() -> None:
    refused = fedsim("list", "attacks")
    assert refused.exit_code == 2
    assert "models, datasets, partitions, strategies, defenses, gradients, networks, inputs" in words(refused.stderr)


def test_a_broken_package_does_not_hide_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    points = EntryPoints([EntryPoint(name="fog", value="no_such_package:fog", group="defenses")])
    monkeypatch.setattr("defenses._registry.registry.entry_points", lambda **wanted: points.select(**wanted))
    result = json.loads(fedsim("list", "defenses", "--json").stdout)
    assert "cannot be loaded" in result["fog"]["summary"]
    assert result["clip"]["arguments"] == "max_norm"


def test_only_the_owner_can_read_the_folder_of_a_run(small: Path) -> None:
    run()
    assert stat.S_IMODE((small.parent / "out").stat().st_mode) == 0o700


# --- misspelt names, versions and completion ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ruonds = 3", "ruonds: unknown key. Did you mean 'rounds'?"),
        ("[training]\nlerning_rate = 1", "training.lerning_rate: unknown key. Did you mean 'learning_rate'?"),
        ("[clients]\nfractoin = 1", "clients.fractoin: unknown key. Did you mean 'fraction'?"),
        ("[record]\nroudns = 1", "record.roudns: unknown key. Did you mean 'rounds'?"),
        ("colour = 1", "colour: unknown key"),
    ],
)
def test_a_misspelt_key_is_corrected(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "typo.toml").write_text(text)
    with pytest.raises(ValueError, match="unknown key") as refused:
        read(tmp_path / "typo.toml")
    assert expected in [line.removeprefix(f"{tmp_path / 'typo.toml'}: ") for line in str(refused.value).splitlines()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("defense=clp(1)", "Did you mean 'clip'?"),
        ("defense=clip(max_nrm=1)", "Did you mean 'max_norm'?"),
        ("model=mpl", "Did you mean 'mlp'?"),
        ("data=digts", "Did you mean 'digits'?"),
        ("gradient=dp_sdg(1, 1)", "Did you mean 'dp_sgd'?"),
    ],
)
def test_a_misspelt_name_is_corrected(small: Path, given: str, expected: str) -> None:
    refused = run("--set", given)
    assert refused.exit_code == 2, refused.output
    assert expected in words(refused.stderr)
    assert not (small.parent / "out").exists()


@pytest.mark.parametrize(("program", "given", "meant"), [("fedsim", "verfy", "verify"), ("attacker", "repaly", "replay")])
def test_a_misspelt_command_is_corrected_once(program: str, given: str, meant: str) -> None:
    from attacker.cli import app as attacker

    refused = CliRunner().invoke({"fedsim": app, "attacker": attacker}[program], [given])
    assert refused.exit_code == 2
    assert refused.stderr.count(f"Did you mean '{meant}'?") == 1


def test_the_option_version_prints_the_versions() -> None:
    from importlib.metadata import version

    result = fedsim("--version")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"fedleak {version('fedleak')}"
    assert f"torch {version('torch')}" in result.stdout


def test_shells_complete_commands_and_options() -> None:
    """The words typed so far are in environment variables, as a shell passes them, and the completions are on stdout."""

    def complete(line: str) -> str:
        environment = {"_FEDSIM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        return CliRunner().invoke(app, prog_name="fedsim", env=environment).stdout

    assert "verify" in complete("fedsim ver").split()
    assert "--resume" in complete("fedsim run --res").split()

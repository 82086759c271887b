"""Tests of `fedsim show` and `fedsim list`, and of the corrections of misspelt keys, names and commands."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import run
from command_line import join_lines, run_attacker, run_fedsim
from typer.testing import Result

from fedsim.commands.console import EXIT_FAILURES
from fedsim.config.experiment import read

OURS = {"plain", "masked", "withhold", "in_gradient_units"}
"""Names that no paper has published."""


def test_a_run_that_diverged_can_be_shown(small: Path) -> None:
    assert run("--set", "training.learning_rate=1e38", "--set", "training.steps=3").exit_code == EXIT_FAILURES
    result = json.loads(run_fedsim("show", "out", "--json").stdout)
    assert result["per_round"][-1]["loss"] is None
    assert run_fedsim("show", "out").exit_code == 0


def test_show_prints_what_was_recorded(small: Path) -> None:
    run("--set", "defense=clip(2)")
    result = json.loads(run_fedsim("show", "out", "--json").stdout)
    assert (result["model"], result["defense"], result["complete"]) == ("mlp(hidden=[4])", "clip(2)", 6)
    assert result["data"] == {"shape": [1, 8, 8], "num_classes": 10}
    assert result["training"]["batch_size"] == 4
    metrics = [json.loads(line) for line in (small.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row["bytes"]) for row in result["per_round"]] == [(m["loss"], m["bytes_up"]) for m in metrics[1:]]
    people = join_lines(run_fedsim("show", "out").stdout)
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
    result, people = json.loads(run_fedsim("show", "out", "--json").stdout), join_lines(run_fedsim("show", "out").stdout)
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
    refused = run_fedsim("show", folder, "--json")
    assert refused.exit_code == 2
    assert "is neither a run nor a recording" in join_lines(refused.stderr)
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
    result = json.loads(run_fedsim("list", kind, "--json").stdout)
    assert some <= set(result)
    assert all(one["summary"] and "\n" not in one["summary"] for one in result.values())
    people = run_fedsim("list", kind).stdout
    assert [line.split()[0] for line in people.splitlines() if line[0] != " "] == list(result)
    assert all(one["arguments"] in join_lines(people) for one in result.values())


@pytest.mark.parametrize("kind", ["defenses", "gradients", "networks", "inputs"])
def test_list_prints_the_reference_of_all_published_methods(kind: str) -> None:
    result = json.loads(run_fedsim("list", kind, "--json").stdout)
    without = {name for name, one in result.items() if not re.search(r"\b(19|20)\d\d\b", one["reference"])}
    assert without <= OURS


def test_list_refuses_an_unknown_kind() -> None:
    refused = run_fedsim("list", "attacks")
    assert refused.exit_code == 2
    assert "models, datasets, partitions, strategies, defenses, gradients, networks, inputs" in join_lines(refused.stderr)


def test_a_broken_package_does_not_hide_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    points = EntryPoints([EntryPoint(name="fog", value="no_such_package:fog", group="defenses")])
    monkeypatch.setattr("defenses.registry.registry.entry_points", lambda **wanted: points.select(**wanted))
    result = json.loads(run_fedsim("list", "defenses", "--json").stdout)
    assert "cannot be loaded" in result["fog"]["summary"]
    assert result["clip"]["arguments"] == "max_norm"


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
    assert expected in join_lines(refused.stderr)
    assert not (small.parent / "out").exists()


@pytest.mark.parametrize(("program", "given", "meant"), [(run_fedsim, "verfy", "verify"), (run_attacker, "repaly", "replay")])
def test_a_misspelt_command_is_corrected_once(program: Callable[..., Result], given: str, meant: str) -> None:
    refused = program(given)
    assert refused.exit_code == 2
    assert refused.stderr.count(f"Did you mean '{meant}'?") == 1


def test_the_option_version_prints_the_versions() -> None:
    from importlib.metadata import version

    result = run_fedsim("--version")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"fedleak {version('fedleak')}"
    assert f"torch {version('torch')}" in result.stdout


def test_shells_complete_commands_and_options() -> None:
    """The words typed so far are in environment variables, as a shell passes them, and the completions are on stdout."""

    def complete(line: str) -> str:
        environment = {"_FEDSIM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        return run_fedsim(prog_name="fedsim", env=environment).stdout

    assert "verify" in complete("fedsim ver").split()
    assert "--resume" in complete("fedsim run --res").split()

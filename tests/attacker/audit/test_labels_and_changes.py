"""Tests of audits: label counts read from updates, Flower apps as input, and the measured effect of a change of defense."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import federate
from observations import observe_steps
from typer.testing import CliRunner, Result

from attacker.audit import Finding, NotChecked, PassedCheck, check_recording
from attacker.audit.attack_findings import AuditedAttack
from attacker.audit.label_checks import READABLE, check_labels
from attacker.audit.privacy_checks import check_robustness
from attacker.audit.what_if import AuditOutcome, MeasuredChange, describe_change, name_changed_run, recommend_defense
from attacker.cli import app
from fedleak import observe
from fedsim import data as datasets
from fedsim import models
from fedsim.commands.init import write_starting_point
from fedsim.recording import DataSpec, ModelSpec, Observation, Recording
from fedsim.recording.codec import encode


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, words)])


def federate_four(out: Path, defense: str = "", rounds: int = 1) -> Path:
    model = {"name": "mlp", "hidden": [32]}
    return federate(out, model=model, clients=4, batch_size=4, defense=defense, rounds=rounds)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate_four(tmp_path_factory.mktemp("runs") / "open")


@pytest.mark.parametrize("count", [1, 4])
def test_updates_of_nan_are_named_and_left_out_of_the_checks(run: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, read = Recording(run / "recording"), Recording.read_observation
    spoilt = {row.client for row in list(recording.read_rows())[:count]}

    def read_spoilt(self: Recording, row: Any) -> Observation:
        one = read(self, row)
        nan = {name: torch.full_like(t, torch.nan) for name, t in one.update.items()}
        return replace(one, payload=encode(nan)) if one.client in spoilt else one

    monkeypatch.setattr(Recording, "read_observation", read_spoilt)
    results = check_recording(recording)
    (named,) = (one for one in results if one.rule == "updates")
    assert isinstance(named, NotChecked)
    assert named.reason.startswith(f"{count} of 4 updates are left out of the checks; round 1: the update holds")
    assert any(one.rule == READABLE for one in results) == (count < 4)


def test_negative_label_counts_are_no_finding() -> None:
    """With equal predictions and summed losses, estimates are whole numbers with the right sum, and some are negative."""
    data, spec = DataSpec(shape=(16,), num_classes=10), ModelSpec(name="mlp", arguments={"hidden": [8]})
    model = models.build(spec, data, seed=0)
    torch.nn.init.zeros_(list(model.parameters())[-2]), torch.nn.init.zeros_(list(model.parameters())[-1])
    x, y = torch.rand(10, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 2, 2, 2, 5, 5, 7, 9])

    def check(reduction: str) -> object:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction=reduction)
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        one = observe(model, "cross_entropy", gradient, shape=(16,), num_examples=10)
        return next(iter(check_labels([one, one])))

    assert isinstance(check("mean"), Finding)
    found = check("sum")
    assert isinstance(found, PassedCheck)
    assert "negative" in found.evidence


@pytest.mark.parametrize(("reported", "named"), [(4, True), (1, False)])
def test_shares_of_an_example_are_no_label_counts(reported: int, named: bool) -> None:
    """A client that reports one of its four examples has estimates of quarters, most of them near 0."""
    data, spec = DataSpec(shape=(16,), num_classes=10), ModelSpec(name="mlp", arguments={"hidden": [8]})
    model = models.build(spec, data, seed=0)
    x = torch.rand(4, 16, generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([3, 3, 3, 7]))
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    one = observe(model, "cross_entropy", gradient, shape=(16,), num_examples=reported)
    assert isinstance(next(iter(check_labels([one, one]))), Finding) is named


def observe_single(seed: int, label: int, *, classes: int, noise: float = 0.0, signs: bool = False) -> Observation:
    """An update of one example, from a network that is far from equal predictions, as after some training.

    signs: whether all entries are of equal size, as the first step of Adam makes them.
    """
    data, spec = DataSpec(shape=(16,), num_classes=classes), ModelSpec(name="mlp", arguments={"hidden": [8]})
    model, rng = models.build(spec, data, seed=0), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 4
    loss = torch.nn.functional.cross_entropy(model(torch.rand(1, 16, generator=rng)), torch.tensor([label]))
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    changed = [g + noise * float(g.square().mean().sqrt()) * torch.randn(g.shape, generator=rng) for g in gradient]
    sent = [g.sign() for g in changed] if signs else changed
    return observe(model, "cross_entropy", sent, shape=(16,), num_examples=1)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_labels_of_single_examples_are_named_whatever_is_predicted(classes: int) -> None:
    seen = [observe_single(seed, classes - 1, classes=classes) for seed in range(2)]
    (found,) = check_labels(seen)
    assert isinstance(found, Finding)
    assert f"in the first of them {classes - 1}." in found.evidence
    (alone,) = check_labels(seen[:1])
    assert not isinstance(alone, Finding) or "estimated numbers" in alone.evidence


@pytest.mark.parametrize(("classes", "named"), [(2, True), (3, False), (10, True)])
def test_labels_of_single_examples_are_named_by_signs_unless_chance_explains_them(classes: int, named: bool) -> None:
    """Of three random signs, one alone is negative in three of eight cases, so that four updates show nothing."""
    (found,) = check_labels([observe_single(seed, classes - 1, classes=classes, signs=True) for seed in range(4)])
    assert (isinstance(found, Finding) and f"in the first of them {classes - 1}." in found.evidence) is named


def test_labels_of_single_examples_are_named_after_several_steps_on_them() -> None:
    seen, labels = list[Observation](), [2, 0]
    for seed, label in enumerate(labels):
        x = torch.rand(1, 16, generator=torch.Generator().manual_seed(seed))
        data, model = DataSpec(shape=(16,), num_classes=10), ModelSpec(name="mlp", arguments={"hidden": [8]})
        steps = observe_steps(*[(x, torch.tensor([label]))] * 3, model=model, data=data)
        seen.append(replace(steps, num_examples=1))
    (found,) = check_labels(seen)
    assert isinstance(found, Finding)
    assert "2 of 2 updates" in found.evidence
    assert "in the first of them 2." in found.evidence


def test_labels_behind_undeclared_noise_are_not_named() -> None:
    noised = [observe_single(seed, 1, classes=2, noise=2.0) for seed in range(4)]
    signs = [observe_single(seed, 1, classes=10, noise=100.0, signs=True) for seed in range(8)]
    for (found,) in (check_labels(noised), check_labels(signs)):
        assert not isinstance(found, Finding)


@pytest.mark.parametrize("count", [2, 8])
def test_numbers_of_examples_of_two_classes_are_read_from_enough_updates(count: int) -> None:
    """One logit has one estimate per update, so that a few updates show no more than chance."""
    model = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    x, y = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 1.0, 1.0, 1.0])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    (found,) = check_labels([observe(model, "logistic", gradient, shape=(4,), num_examples=4)] * count)
    if count == 2:
        assert isinstance(found, NotChecked)
        assert "so few estimates" in found.reason
    else:
        assert isinstance(found, Finding)
        assert "In the first update, from label 0 on: 1, 3." in found.evidence


def test_label_counts_of_an_undefended_update_are_read(run: Path) -> None:
    (found,) = [one for one in check_recording(Recording(run / "recording")) if one.rule == READABLE]
    assert isinstance(found, Finding)
    assert found.grade == "moderate"
    counts = [int(word) for word in found.evidence.rpartition(": ")[2].rstrip(".").split(", ")]
    client = Recording(run / "recording").read_rows()[0].client
    used = json.loads((run / "truth" / f"{client}.jsonl").read_text().splitlines()[0])
    labels = datasets.load("digits").train[used["indices"]][1].tolist()
    assert counts == [labels.count(label) for label in range(10)]


@pytest.mark.parametrize("defense", ["gaussian(0.1)", "sign()"])
def test_label_counts_under_noise_or_signs_are_not_read(tmp_path: Path, defense: str) -> None:
    folder = federate_four(tmp_path / "run", defense)
    (found,) = [one for one in check_recording(Recording(folder / "recording")) if one.rule == READABLE]
    assert isinstance(found, PassedCheck)


def test_changed_federation_is_run_and_its_effect_is_measured(run: Path) -> None:
    change = "gaussian(1.0)"
    result = call(run, "--budget", "1s", "--what-if", change, "--json")
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)["what_if"]
    assert described["change"] == change
    assert described["before"]["grade"] == "severe"
    assert described["after"]["grade"] in ("none found", "low")
    assert described["before"]["examples"] == described["after"]["examples"] == 16
    assert described["before"]["recovered"] > described["after"]["recovered"] == 0
    assert "What a change would do" in (run / "audit.html").read_text()
    assert (name_changed_run(run, change) / "recording").is_dir()


def test_change_without_true_examples_is_measured_by_confidence(run: Path, tmp_path: Path) -> None:
    untold = tmp_path / "untold"
    shutil.copytree(run, untold, ignore=shutil.ignore_patterns("truth", "*what-if*"))
    result = call(untold, "--budget", "1s", "--what-if", "gaussian(1.0)", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["attacks"]
    assert not found["scored"]
    before, after = (found["what_if"][key] for key in ("before", "after"))
    assert before["grade"] == "severe"
    assert after["grade"] in ("none found", "low")
    assert (before["examples"], before["recovered"]) == (after["examples"], after["recovered"]) == (0, 0)


def test_the_recommended_change_clips_at_the_median_norm(run: Path) -> None:
    recording = Recording(run / "recording")
    updates = [recording.read_observation(row).update for row in recording.read_rows()]
    norms = sorted(sum(float(u.square().sum()) for u in update.values()) ** 0.5 for update in updates)
    clip, noise = recommend_defense(recording).split(" | ")
    assert norms[1] * 0.95 <= float(clip[5:-1]) <= norms[2] * 1.05
    assert float(noise[9:-1]) < float(clip[5:-1])


def test_what_if_is_refused_without_an_experiment(run: Path, tmp_path: Path) -> None:
    (tmp_path / "recording").symlink_to(run / "recording")
    result = call(tmp_path, "--budget", "1s", "--what-if", "recommended")
    assert result.exit_code == 2


def test_effect_of_a_change_is_described_in_sentences() -> None:
    before = AuditOutcome(grade="severe", recovered=4, examples=4, psnr=58.9, accuracy=0.8)
    described = describe_change(
        MeasuredChange(change="clip(1)", before=before, after=AuditOutcome(grade="low", examples=4, accuracy=0.7))
    )
    assert described.startswith("With clip(1), the verdict is low instead of severe")
    undefended = describe_change(MeasuredChange(change="", before=before, after=before))
    assert undefended.startswith("Without a defense, the verdict is severe instead of severe")
    assert "0 of 4 examples instead of 4 of 4" in described
    assert "70% instead of 80%" in described


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    write_starting_point("flower", tmp_path / "project")
    path = list(sys.path)
    yield tmp_path / "project"
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "app"]:
        del sys.modules[name]


def test_a_flower_app_is_run_and_audited_by_one_command(project: Path) -> None:
    result = call(project, "--clients", 2, "--budget", "1s", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["scored"] is False
    assert READABLE in {one["rule"] for one in found["findings"]}
    assert (project / "recorded" / "audit.html").exists()
    again = call(project, "--clients", 2, "--budget", "1s", "--json")
    assert "running the Flower app" in result.stderr
    assert "running the Flower app" not in again.stderr


def test_clients_of_a_flower_app_see_its_run_config(project: Path) -> None:
    client, settings = project / "app" / "client_app.py", project / "pyproject.toml"
    client.write_text(client.read_text().replace('config["examples"]', 'context.run_config["own.examples"]'))
    settings.write_text(f"{settings.read_text()}\n[tool.flwr.app.config.own]\nexamples = 3\n")
    result = call(project, "--clients", 2, "--budget", "1s", "--json")
    assert result.exit_code == 0, result.output
    rows = Recording(project / "recorded" / "recording").read_rows()
    assert {(row.status, row.num_examples) for row in rows} == {("complete", 3)}


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("[project]\nname = 'x'\n", "does not describe a Flower app"),
        ("[tool.flwr.app.components]\nserverapp = 'a:b'\n", "pass the folder that it recorded to `attacker audit`"),
    ],
)
def test_other_projects_are_refused_with_advice(tmp_path: Path, text: str, advice: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    result = call(tmp_path)
    assert result.exit_code == 2
    assert advice in " ".join(result.stderr.split())


def make_result(recovered: int, spec: str = "cpl()") -> AuditedAttack:
    return AuditedAttack(spec=spec, updates=16, examples=16, recovered=recovered)


def test_attack_above_the_accounted_bound_is_a_finding(tmp_path: Path) -> None:
    recording = Recording(federate_four(tmp_path / "run", "clip(0.1) | gaussian(0.1)") / "recording")
    (none, few, many) = (list(check_robustness(recording, one)) for one in (None, make_result(1), make_result(12)))
    assert isinstance(none[0], PassedCheck)
    assert none == few
    assert "at most 9.2% from 1 round" in none[0].evidence  # Phi(Phi^-1(0.01) + 1)
    assert isinstance(many[0], Finding)
    assert many[0].grade == "serious"


def test_an_attack_on_several_rounds_is_compared_with_the_bound_of_all_of_them(tmp_path: Path) -> None:
    recording = Recording(federate_four(tmp_path / "run", "clip(0.1) | gaussian(0.1)", rounds=4) / "recording")
    (single,) = check_robustness(recording, make_result(10))  # one release allows a share of 29 %, four of 67 %
    (joint,) = check_robustness(recording, make_result(10, "spans()"))
    assert isinstance(single, Finding)
    assert not isinstance(joint, Finding)


def test_without_noise_reconstruction_is_not_bounded(run: Path) -> None:
    (found,) = check_robustness(Recording(run / "recording"), make_result(16))
    assert isinstance(found, NotChecked)


def test_attack_is_worse_than_its_null_by_a_margin() -> None:
    one = AuditedAttack(spec="cpl", updates=1, psnr=9.9, null_psnr=11.0)
    assert one.is_worse_than_null
    assert not AuditedAttack(spec="cpl", updates=1, psnr=10.1, null_psnr=11.0).is_worse_than_null
    assert not AuditedAttack(spec="cpl", updates=1, psnr=12.0, null_psnr=11.0).is_worse_than_null
    assert not AuditedAttack(spec="exact", updates=1).is_worse_than_null


def test_smallest_number_of_examples_is_stated(tmp_path: Path) -> None:
    results = check_recording(Recording(federate(tmp_path / "run", clients=1, batch_size=4) / "recording"))
    (single,) = [one for one in results if one.rule == "single-examples"]
    assert isinstance(single, PassedCheck)
    assert single.evidence == "every update is of at least 4 examples"


@pytest.mark.parametrize("frozen", [False, True])
def test_many_labels_of_few_examples_are_read_if_the_head_was_trained(frozen: bool) -> None:
    """Rounding hides that counts are useless: with 100 labels and a frozen head, all of them are near zero."""
    data, labels = DataSpec(shape=(3, 8, 8), num_classes=100), torch.tensor([7, 42])
    one = observe_steps((torch.rand(2, 3, 8, 8), labels), model=ModelSpec(name="mlp"), data=data)
    if frozen:
        update = {name: torch.zeros_like(t) if len(t) == 100 else t for name, t in one.update.items()}
        one = replace(one, payload=encode(update))
    (found,) = check_labels([one])
    if frozen:
        assert isinstance(found, PassedCheck)
        assert "do not sum to the number of examples" in found.evidence
    else:
        assert isinstance(found, Finding)
        assert "In the first update, 1 of label 7, 1 of label 42." in found.evidence

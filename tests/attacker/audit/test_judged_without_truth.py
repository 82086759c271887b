"""Tests of audits without the true examples: what the confidence of attacks, and the values of reconstructions, say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from attacker.audit import Audit, Finding, NotChecked, audit
from attacker.audit.attack_findings import AuditedAttack, judge_alone, judge_results
from attacker.audit.output import render
from attacker.audit.plan import plan_attacks
from attacker.reconstruction import Reconstruction
from attacker.replay import identity, metadata
from fedsim import models
from fedsim.commands.import_updates import ImportSettings, import_recording
from fedsim.recording import DataSpec, ModelSpec, Recording


def audit_step(tmp_path: Path, *, mean: float, std: float, stated: str) -> Audit:
    """Audit the update of a client that takes one step on a digit (1, 8, 8), normalised by `mean` and `std`.

    stated: further settings of the data, as TOML.
    """
    data = DataSpec(shape=(1, 8, 8), num_classes=10)
    net = models.build(ModelSpec(name="mlp"), data)
    sent = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
    digits = load_digits()
    x = (torch.tensor(digits.images[:1, None] / 16, dtype=torch.float32) - mean) / std
    names, parameters = zip(*net.named_parameters(), strict=True)
    loss = torch.nn.functional.cross_entropy(net(x), torch.tensor(digits.target[:1]))
    returned = {name: sent[name] - 1e-3 * g.numpy() for name, g in zip(names, torch.autograd.grad(loss, parameters), strict=True)}
    for name, arrays in (("sent", sent), ("returned", returned)):
        np.savez(tmp_path / f"{name}.npz", **arrays)
    settings = tmp_path / "settings.toml"
    settings.write_text(
        'model = "mlp"\nnum_examples = 1\ntraining = { learning_rate = 1e-3, batch_size = 1, steps = 1 }\n'
        f"data = {{ shape = [1, 8, 8], num_classes = 10{stated} }}\n"
    )
    import_recording(tmp_path / "sent.npz", tmp_path / "returned.npz", ImportSettings.read(settings), tmp_path / "run")
    return audit(tmp_path / "run", seconds=1)


def list_rules(found: Audit) -> dict[str, Finding]:
    return {one.rule: one for one in found.findings}


@pytest.mark.parametrize(("mean", "std", "values"), [(0.0, 1 / 255, "0 to 239"), (0.3, 0.38, "-0.789 to 1.68")])
def test_an_unstated_normalisation_is_a_finding_and_no_silence(tmp_path: Path, mean: float, std: float, values: str) -> None:
    found = list_rules(audit_step(tmp_path, mean=mean, std=std, stated=""))["normalisation-misstated"]
    assert found.grade == "serious"
    assert f"values from {values}" in found.evidence
    assert "mean and std" in found.advice


@pytest.mark.parametrize("stated", ["", ", mean = [0.5], std = [0.5]"])
def test_images_that_clients_standardise_one_by_one_are_a_finding_that_blames_no_setting(tmp_path: Path, stated: str) -> None:
    image = torch.tensor(load_digits().images[0] / 16)
    mean, std = float(image.mean()), float(image.std(correction=0))
    found = list_rules(audit_step(tmp_path, mean=mean, std=std, stated=stated))
    assert "normalisation-misstated" not in found
    assert found["partly-leaked"].grade == "serious"
    assert "up to their brightness and contrast" in found["partly-leaked"].title


def test_exact_images_that_fill_the_range_of_another_normalisation_are_a_finding(tmp_path: Path) -> None:
    """By the mean and std of MNIST, digits that clients left between 0 and 1 are pale, with all values inside 0 to 1."""
    found = list_rules(audit_step(tmp_path, mean=0.0, std=1.0, stated=", mean = [0.1307], std = [0.3081]"))
    assert "examples-recovered" not in found
    assert found["normalisation-misstated"].grade == "serious"
    assert "between 0.13 and 0.42, and they would fill" in found["normalisation-misstated"].evidence
    assert "mean 0 and std 1" in found["normalisation-misstated"].evidence


@pytest.mark.parametrize("pale", [True, False])
def test_images_of_several_updates_are_judged_together(tmp_path: Path, pale: bool) -> None:
    """Each image alone has too narrow a range to tell; by three colours of each, all values are in the middle half of 0 to 1."""
    data = DataSpec(shape=(3, 8, 8), num_classes=10, mean=(0.5,), std=(0.5,))
    ends = [(0.0, 0.7), (0.2, 0.8), (0.1, 0.6), (0.3, 1.0)] if pale else [(0.0, 1.0)] * 4
    for i, (low, high) in enumerate(ends):
        x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(i)) * (high - low) + low
        Reconstruction(
            case=str(i), x=0.5 + 0.5 * x if pale else x, y=torch.zeros(1, dtype=torch.long), confidence=torch.tensor([0.98]),
            explained=torch.tensor([0.999]), slots=(), loss=torch.zeros(1), iterations=0, evaluations=1, restarts=1, seconds=0.1,
            route="optimisation", attack="cpl", oracles=(), seed=0,
        ).write(tmp_path / f"{i}.safetensors")  # fmt: skip
    alone = [judge_alone("cpl()", 1, tmp_path, [str(i)], data) for i in range(4)]
    together = judge_alone("cpl()", 4, tmp_path, ["0", "1", "2", "3"], data)
    assert [one.confident for one in alone] == [1, 1, 1, 1]
    assert (together.confident, together.undecided, together.misread) == ((0, 4, 4) if pale else (4, 0, 0))
    (result,) = judge_results([together], scored=False)
    assert result.rule == ("normalisation-misstated" if pale else "examples-recovered")


def test_the_stated_normalisation_gives_confident_examples(tmp_path: Path) -> None:
    found = audit_step(tmp_path, mean=0.3, std=0.38, stated=", mean = [0.3], std = [0.38]")
    rules = list_rules(found)
    assert "normalisation-misstated" not in rules
    assert rules["examples-recovered"].grade == "severe"
    page = render(found, tmp_path / "run")
    assert "undecided</th>" in page
    for absent in ("repeated without the update", "PSNR", "<em>null", "Efficiency", "not known</td>"):
        assert absent not in page, absent
    assert "repeated without the update" in render(replace(found, scored=True), tmp_path / "run")


def test_nulls_which_nothing_compares_neither_run_nor_count_in_the_plan(tmp_path: Path) -> None:
    found = audit_step(tmp_path, mean=0.0, std=1.0, stated="")
    folders = [path.name for path in (tmp_path / "run" / "reconstructions").iterdir()]
    assert len(folders) == len(found.attacks) > 0
    assert not [name for name in folders if "-null-" in name]
    recording = Recording(tmp_path / "run" / "recording")
    alone, paired = (
        [one for one in plan_attacks(recording, tmp_path / "none", seconds=1e9, nulls=nulls) if not isinstance(one, NotChecked)]
        for nulls in (False, True)
    )
    assert [one.spec for one in alone] == [one.spec for one in paired]
    assert all(one.null_share == 0 for one in alone)
    assert 0 < sum(one.core_seconds for one in alone) < sum(one.core_seconds for one in paired)


def test_likely_and_undecided_answers_are_told_with_the_reason() -> None:
    likely = AuditedAttack(spec="exact()", updates=3, likely=3)
    doubted = AuditedAttack(spec="cpl()", updates=3, undecided=2, doubt="confidence is undecided: no curve")
    (result,) = judge_results([likely, doubted], scored=False)
    assert isinstance(result, NotChecked)
    assert "of at least 0.5: 3 of exact()" in result.reason
    assert "2 of cpl() (confidence is undecided: no curve)" in result.reason


@pytest.mark.parametrize("is_random", [False, True])
def test_values_outside_the_range_say_nothing_about_the_normalisation_if_clients_draw_at_random(is_random: bool) -> None:
    far = AuditedAttack(spec="exact()", updates=3, undecided=3, outside=3, outside_values=(-2.0, 2.1), explained=0.999)
    (result,) = judge_results([far], scored=False, is_random=is_random)
    assert (result.rule == "normalisation-misstated") is not is_random
    assert isinstance(result, NotChecked) is is_random
    assert ("3 of them have values outside 0 to 1" in str(result)) is is_random


@pytest.mark.parametrize(("route", "counted"), [("linear", 1), ("features", 0), ("layer_input", 0)])
def test_estimates_under_a_prior_without_limits_do_not_show_a_normalisation(tmp_path: Path, route: str, counted: int) -> None:
    """Behind saturated sigmoids, `features` explained a batch with values of hundreds, though clients had stated 0 to 1."""
    Reconstruction(
        case="one", x=torch.full((1, 1, 8, 8), 700.0), y=torch.zeros(1, dtype=torch.long), confidence=torch.tensor([torch.nan]),
        explained=torch.tensor([0.999]), slots=(), loss=torch.zeros(1), iterations=0, evaluations=1, restarts=1, seconds=0.1,
        route=route, attack="exact", oracles=(), seed=0,
    ).write(tmp_path / "one.safetensors")  # fmt: skip
    found = judge_alone("exact()", 1, tmp_path, ["one"], DataSpec(shape=(1, 8, 8), num_classes=10))
    assert found.outside == counted
    assert found.undecided == 1


def test_an_audit_names_answers_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = audit_step(tmp_path, mean=0.0, std=1.0, stated="")
    assert not [one for one in first.not_checked if "which may answer otherwise" in one.reason]
    for module in (identity, metadata):
        monkeypatch.setattr(module, "identify_version", lambda: "9.9+0123abcd")
    again = audit(tmp_path / "run", seconds=1)
    reasons = [one.reason for one in again.not_checked if "9.9+0123abcd, which may answer otherwise" in one.reason]
    assert len(reasons) == len(again.attacks)
    assert reasons[0].startswith("exact(fallback='none'): 1 finished case in ")


@pytest.mark.parametrize(
    ("shares", "named"), [((0.0, None), True), ((0.1, 0.4), True), ((0.1, 0.9), False), ((None, None), False)]
)
def test_answers_that_fit_badly_point_at_the_stated_settings(shares: tuple[float | None, ...], named: bool) -> None:
    (result,) = judge_results([AuditedAttack(spec="cpl()", updates=1, explained=share) for share in shares], scored=False)
    assert isinstance(result, NotChecked)
    assert ("compare learning rate, clipping, steps" in result.reason) is named

"""Tests of the checks of an audit: each constructed fault is found by its rule, and correct defenses have no finding."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federations import federate
from observations import make_observation
from torch import Generator, Tensor

from attacker.audit import Finding, NotChecked, PassedCheck, check_recording
from attacker.audit.defense_checks import NEVER_BINDS_RULE, NOT_APPLIED_RULE, SUPPORT_RULE, check_defense, check_support
from attacker.audit.defense_outputs import measure_signature
from attacker.audit.findings import CheckResult, find_worst_grade, order
from attacker.audit.noise_checks import MISSING_RULE, REUSED_RULE, check_noise
from attacker.audit.privacy_checks import EPSILON_RULE
from attacker.audit.setting_checks import METRICS_RULE, check_settings, find_isolated_clients
from defenses import DefenseSpec
from defenses.base import Update
from fedsim.models.imprint_layers import find_parallel_rows
from fedsim.recording import DataSpec, ModelSpec, Observation, Recording, Training
from fedsim.recording.files import read_json_lines

COUNT = 8
SHAPES = {"hidden.weight": (24, 64), "hidden.bias": (24,), "head.weight": (10, 24), "head.bias": (10,)}
STD = 0.3
Sent = Callable[[Update, int], Update]


def draw_update(number: int) -> dict[str, Tensor]:
    """Return the update of one example: weights of rank one, as every linear layer has."""
    rng = Generator().manual_seed(number)
    found = {}
    for layer in ("hidden", "head"):
        rows, columns = SHAPES[f"{layer}.weight"]
        left, right = torch.randn(rows, generator=rng), torch.randn(columns, generator=rng)
        found[f"{layer}.weight"], found[f"{layer}.bias"] = left[:, None] * right / 8, left / 32
    return found


def observe_clients(defense: str, send: Sent) -> list[Observation]:
    """Return the observations of clients that declare a defense, but send what the function `send` returns."""
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    facts = {"model": ModelSpec(name="mlp"), "data": DataSpec(shape=(64,), num_classes=10), "defense": defense, "cohort": ()}
    training = Training(learning_rate=0.1, batch_size=1, steps=1)
    return [make_observation(send(draw_update(i), i), weights, training=training, client=f"c{i}", **facts) for i in range(COUNT)]


def find_rules(observations: list[Observation]) -> list[str]:
    """Return the rules of all findings on the updates and their defense."""
    signature = measure_signature(observations[0].defenses, observations[0].update)
    results = [*check_defense(observations, signature), *check_noise(observations, signature)]
    return [one.rule for one in results if isinstance(one, Finding)]


def make_sender(defense: str) -> Sent:
    built = DefenseSpec.parse(defense).build()
    return lambda update, i: built.apply(update, built.init(update), Generator().manual_seed(100 + i))[0]


@pytest.mark.parametrize(
    ("defense", "revealing"),
    [("top_k(0.1)", True), ("prune(0.8)", True), ("random_k(0.3)", False), ("withhold(['head.*'])", False)],
)
def test_sparsifiers_that_select_by_the_data_are_found(defense: str, revealing: bool) -> None:
    observations = observe_clients(defense, make_sender(defense))
    result = check_support(observations, measure_signature(observations[0].defenses, observations[0].update))
    assert isinstance(result, Finding if revealing else PassedCheck)
    assert result.rule == SUPPORT_RULE
    if isinstance(result, Finding) and defense == "top_k(0.1)":
        assert "by chance it would be 10%" in result.evidence


@pytest.mark.parametrize("defense", ["clip(1)", f"gaussian({STD})", "qsgd(levels=8)"])
def test_selection_is_not_checked_if_all_coordinates_are_sent(defense: str) -> None:
    observations = observe_clients(defense, make_sender(defense))
    signature = measure_signature(observations[0].defenses, observations[0].update)
    assert isinstance(check_support(observations, signature), NotChecked)


@pytest.mark.parametrize(
    ("cohorts", "isolated"),
    [
        (["ab", "cd"], ""),
        (["abcd", "abcd"], ""),
        (["abc", "ab"], "c"),  # the first sum minus the second
        (["ab", "bc", "ac"], "abc"),  # (ab + ac - bc) / 2 = a
        (["abcd", "ab", "ac"], ""),  # only b - c and b + c + 2 d can be computed
        (["abcd", "ab", "ac", "bd"], ""),
        (["abcd", "ab", "c"], "cd"),
    ],
)
def test_clients_that_sums_of_rounds_isolate_are_found(cohorts: list[str], isolated: str) -> None:
    assert find_isolated_clients(cohorts) == list(isolated)


DEFENSES = (
    "clip(0.5)",
    "clip_each(0.1)",
    "top_k(0.1)",
    "prune(0.8)",
    "random_k(0.3)",
    "gradient_dropout(0.7)",
    "sign()",
    "sign(scale='mean')",
    "qsgd(levels=8)",
    "uniform(4)",
    f"gaussian({STD})",
    f"laplace({STD})",
    "gaussian(snr_db=0)",
    "gaussian(snr_db=20)",
    f"clip(1) | gaussian({STD})",
    f"clip(1) | laplace({STD})",
    "withhold(['head.*'])",
    "dgc(0.1)",
)


@pytest.mark.parametrize("defense", DEFENSES)
def test_correct_defense_has_no_finding_and_one_that_returns_its_input_has_one(defense: str) -> None:
    assert find_rules(observe_clients(defense, make_sender(defense))) == []
    expected = MISSING_RULE if "gaussian" in defense or "laplace" in defense else NOT_APPLIED_RULE
    assert find_rules(observe_clients(defense, lambda update, i: update)) == [expected]


@pytest.mark.parametrize("defense", ["gaussian(0.1) | clip(1)", "masked(gaussian(0.1) | clip(1), ['*'])"])
def test_noise_before_the_last_step_is_not_checked(defense: str) -> None:
    observations = observe_clients(defense, make_sender(defense))
    signature = measure_signature(observations[0].defenses, observations[0].update)
    results = list(check_noise(observations, signature))
    assert [type(one) for one in results] == [NotChecked, NotChecked]
    assert [one.rule for one in results] == [MISSING_RULE, REUSED_RULE]


@pytest.mark.parametrize("std", [STD, 0.003])
def test_reused_noise_is_found(std: float) -> None:
    """The small noise is far weaker than the gradient, so that it shows only outside of the gradient's low rank."""
    built = DefenseSpec.parse(f"gaussian({std})").build()
    assert find_rules(observe_clients(f"gaussian({std})", lambda u, i: built.apply(u, {}, Generator().manual_seed(5))[0])) == [
        REUSED_RULE
    ]


@pytest.mark.parametrize("left_out", ["hidden.bias", "hidden.weight"])
def test_tensor_without_noise_is_found(left_out: str) -> None:
    send = make_sender(f"gaussian({STD})")
    assert find_rules(observe_clients(f"gaussian({STD})", lambda u, i: {**send(u, i), left_out: u[left_out]})) == [MISSING_RULE]


def test_coordinates_without_noise_are_found() -> None:
    """Only a twelfth of one tensor has no noise, which the tensor's mean square alone does not show."""
    send = make_sender("gaussian(2)")

    def part(update: Update, i: int) -> Update:
        noised = dict(send(update, i))
        noised["hidden.weight"] = torch.cat([update["hidden.weight"][:2], noised["hidden.weight"][2:]])
        return noised

    assert find_rules(observe_clients("gaussian(2)", part)) == [MISSING_RULE]


def test_noise_of_half_the_declared_size_is_found() -> None:
    assert find_rules(observe_clients(f"gaussian({STD})", make_sender(f"gaussian({STD / 2})"))) == [MISSING_RULE]


def test_clipping_norm_that_no_update_reaches_is_found() -> None:
    assert find_rules(observe_clients("clip(1000)", lambda update, i: update)) == [NEVER_BINDS_RULE]


@pytest.mark.parametrize(("metrics", "examples", "found"), [("train_loss", 1, True), ("train_loss", 2, False), ("lr", 1, False)])
def test_loss_of_a_single_example_in_clear_is_found(metrics: str, examples: int, found: bool, tmp_path: Path) -> None:
    recording = Recording(federate(tmp_path / "run") / "recording")
    first, *others = observe_clients("", lambda update, i: update)
    seen = [replace(first, num_examples=examples, metrics={metrics: 2.3}), *(replace(one, metrics={}) for one in others)]
    evidence = [one.evidence for one in check_settings(recording, seen) if isinstance(one, Finding) and one.rule == METRICS_RULE]
    assert bool(evidence) is found
    assert all(text.startswith(f"1 of {COUNT} updates come with train_loss.") for text in evidence)


def test_parallel_rows_are_found_in_imprint_layers_only() -> None:
    rng = Generator().manual_seed(0)
    measured = torch.rand(64, generator=rng)
    scales = torch.rand(32, generator=rng) + 0.1
    assert len(find_parallel_rows(scales[:, None] * measured)) == 32
    assert len(find_parallel_rows(torch.randn(32, 64, generator=rng))) == 0
    half = torch.cat([torch.randn(16, 64, generator=rng), scales[:16, None] * measured])
    assert find_parallel_rows(half).tolist() == list(range(16, 32))
    assert len(find_parallel_rows(torch.zeros(32, 64))) == 0


def make_finding(grade: str) -> Finding:
    return Finding(rule="r", grade=grade, title="t", evidence="e", advice="a")


def test_the_grade_of_an_audit_is_that_of_its_worst_finding() -> None:
    findings = [make_finding("low"), make_finding("severe"), make_finding("moderate")]
    assert find_worst_grade(findings) == "severe"
    assert find_worst_grade([]) == "none found"
    assert [one.grade for one in order(findings)] == ["severe", "moderate", "low"]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of three rounds whose noise gives a finite epsilon."""
    return federate(tmp_path_factory.mktemp("runs") / "noisy", rounds=3, batch_size=4, defense="clip(0.5) | gaussian(0.5)")


def test_epsilon_of_a_correct_run_has_no_finding(noisy: Path) -> None:
    results = check_recording(Recording(noisy / "recording"))
    assert [one for one in results if isinstance(one, Finding)] == []
    assert EPSILON_RULE in [one.rule for one in results]


def test_epsilon_is_not_checked_if_the_number_of_examples_is_hidden(tmp_path: Path) -> None:
    run = federate(
        tmp_path / "run",
        clients=3,
        training={"learning_rate": 0.1, "batch_size": 32, "steps": 2},
        gradient="dp_sgd(max_norm=1, noise=3)",
        secure_aggregation={"threshold": 2, "clip": 1.0},
    )
    results = check_recording(Recording(run / "recording"))
    assert [one for one in results if isinstance(one, Finding)] == []
    assert any(isinstance(one, NotChecked) and one.rule == EPSILON_RULE and "not recorded" in one.reason for one in results)


@pytest.mark.parametrize(("key", "cause"), [("epsilon_round", "the same in every round"), (None, "left out")])
def test_wrong_epsilon_is_found_with_its_cause(noisy: Path, key: str | None, cause: str) -> None:
    path = noisy / "metrics.jsonl"
    before = path.read_text()
    rows = read_json_lines(path)
    for row in rows:
        if "privacy" in row:
            row["privacy"]["epsilon"] = row["privacy"][key] if key else 0.7 * row["privacy"]["epsilon"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        (wrong,) = [one for one in check_recording(Recording(noisy / "recording")) if isinstance(one, Finding)]
    finally:
        path.write_text(before)
    assert (wrong.rule, wrong.grade) == (EPSILON_RULE, "serious")
    assert cause in wrong.evidence


@pytest.mark.parametrize(("batch_size", "is_known"), [(4, False), (2000, True)])
def test_epsilon_counts_examples_as_reused_only_if_the_recording_shows_it(
    batch_size: int, is_known: bool, tmp_path: Path
) -> None:
    """A round of one small batch reports its own examples, of which the next rounds use none again."""
    training = {"learning_rate": 0.1, "batch_size": batch_size, "steps": 1}
    run = federate(tmp_path / "run", rounds=3, training=training, gradient="dp_sgd(max_norm=1, noise=3)")

    def check() -> list[CheckResult]:
        return [one for one in check_recording(Recording(run / "recording")) if one.rule == EPSILON_RULE]

    (found,) = check()
    assert isinstance(found, PassedCheck if is_known else NotChecked)
    path = run / "metrics.jsonl"
    rows = read_json_lines(path)
    for row in rows:
        if "privacy" in row:
            row["privacy"]["epsilon"] = row["privacy"]["epsilon_round"] * (1.0 if is_known else 0.9)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = check()
    assert isinstance(found, Finding)

"""Canaries of consenting clients, from the experiment to the audit's comparison with the accounted epsilon."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from attacker.audit import Finding, NotChecked, Passed
from attacker.audit.canary_checks import REFUTED_RULE, check_canaries
from attacker.scoring import Scorer
from attacker.scoring.canaries import guess_canaries
from fedsim.config.experiment import validate
from fedsim.engine import engines
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.round_metrics import read_metrics
from fedsim.training.batches import choose_versions

CLIENTS, CANARIES = 6, 8
EXPERIMENT: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "mlp", "hidden": [8]},
    "data": "digits",
    "clients": {"count": CLIENTS, "canaries": CANARIES},
    "training": {"learning_rate": 0.1, "batch_size": 1000, "epochs": 1},
    "privacy": {"delta": 1e-5},
}


def federate(out: Path, **changes: Any) -> Path:
    experiment = validate({**EXPERIMENT, **changes}, source="test")
    engines.run(FederationRun(experiment=experiment, out=out, client_seed=1), engine="local")
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digits of which the clients' canaries leave nothing over."""
    path, digits = tmp_path_factory.mktemp("data") / "few.npz", load_digits()
    count = 2 * CANARIES * CLIENTS
    np.savez(path, images=(digits.images[:count] * 15).astype(np.uint8)[..., None], labels=digits.target[:count])
    return {"name": "npz", "train": str(path), "test": str(path)}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> Path:
    """A federation without noise."""
    return federate(tmp_path_factory.mktemp("runs") / "few", data=data)


def test_each_client_uses_one_version_of_each_canary(few: Path) -> None:
    scorer, recording = Scorer(few, [few / "truth"]), Recording(few / "recording")
    firsts = []
    for client in {row.client for row in recording.read_rows()}:
        pairs = scorer.read_canaries(client)
        used = {index for step in scorer.read_used(1, 1, client).steps for index in step}
        assert len(pairs) == CANARIES
        assert len({index for pair in pairs for index in pair}) == 2 * CANARIES
        assert all((a in used) != (b in used) for a, b in pairs)
        firsts += [a in used for a, _ in pairs]
    assert 0 < sum(firsts) < len(firsts)  # coins, not always the first


def test_without_noise_canaries_are_guessed_and_bound_epsilon(few: Path) -> None:
    scorer, recording = Scorer(few, [few / "truth"]), Recording(few / "recording")
    found = guess_canaries(scorer, recording)
    assert found is not None
    assert found.canaries == found.guesses == CLIENTS * CANARIES
    assert found.right > 0.7 * found.guesses
    (result,) = check_canaries(recording, scorer, read_metrics(few))
    assert isinstance(result, Passed)
    assert "none, as no noise is accounted" in result.evidence
    lied = [{"privacy": {"epsilon": 0.1, "delta": 1e-5}}]
    (result,) = check_canaries(recording, scorer, lied)
    assert isinstance(result, Finding)
    assert (result.rule, result.grade) == (REFUTED_RULE, "serious")


def test_sound_noise_is_not_refuted_and_counts_only_what_clients_use(tmp_path: Path, data: dict[str, str]) -> None:
    run = federate(tmp_path / "run", gradient="dp_sgd(max_norm=1, noise=2)", data=data)
    scorer, recording = Scorer(run, [run / "truth"]), Recording(run / "recording")
    (result,) = check_canaries(recording, scorer, metrics := read_metrics(run))
    assert isinstance(result, Passed)
    assert f"The accountant's epsilon: {metrics[-1]['privacy']['epsilon']:.3g}" in result.evidence
    assert {row.reported for row in recording.read_rows()} == {CANARIES}


def test_without_canaries_or_truth_nothing_is_checked(tmp_path: Path, few: Path) -> None:
    (result,) = check_canaries(Recording(few / "recording"), None, [])
    assert isinstance(result, NotChecked)
    run = federate(tmp_path / "run", clients={"count": 2}, rounds=1)
    (result,) = check_canaries(Recording(run / "recording"), Scorer(run, [run / "truth"]), [])
    assert isinstance(result, NotChecked)


def test_versions_follow_the_coins() -> None:
    used, pairs = choose_versions(np.array([10, 11, 12, 13, 14]), 2, np.array([1, 0]))
    assert used.tolist() == [11, 12, 14]
    assert pairs == [(10, 11), (12, 13)]


def test_more_canaries_than_examples_are_refused_before_the_run(tmp_path: Path) -> None:
    experiment = validate({**EXPERIMENT, "clients": {"count": 2, "canaries": 900}}, source="test")
    with pytest.raises(ValueError, match=r"clients\.canaries = 900 takes 1800 examples"):
        FederationRun(experiment=experiment, out=tmp_path / "run").check()

"""Tests of canaries (pairs of examples, one of which a coin selects), and of the audit's lower bound of epsilon by them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import federate
from sklearn.datasets import load_digits

from attacker.audit import Finding, NotChecked, PassedCheck
from attacker.audit.canaries import REFUTED_RULE, check_canaries, guess_canaries, separate_canaries
from attacker.scoring import Scorer
from fedsim.recording import Recording
from fedsim.recording.round_metrics import read_metrics
from fedsim.training.batches import choose_versions

CLIENTS, CANARIES = 6, 16
SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "clients": {"count": CLIENTS, "canaries": CANARIES},
    "training": {"learning_rate": 0.1, "batch_size": 1000, "epochs": 1},
    "privacy": {"delta": 1e-5},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Specification of a data set of digits, all of which the clients need for canaries."""
    path, digits = tmp_path_factory.mktemp("data") / "noiseless.npz", load_digits()
    count = 2 * CANARIES * CLIENTS
    np.savez(path, images=(digits.images[:count] * 15).astype(np.uint8)[..., None], labels=digits.target[:count])
    return {"name": "npz", "train": str(path), "test": str(path)}


@pytest.fixture(scope="module")
def noiseless(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> Path:
    """Folder of a finished federation without noise."""
    return federate(tmp_path_factory.mktemp("runs") / "noiseless", **SETTINGS, data=data)


def test_each_client_uses_one_version_of_each_canary(noiseless: Path) -> None:
    scorer, recording = Scorer(noiseless, [noiseless / "truth"]), Recording(noiseless / "recording")
    firsts = []
    for client in {row.client for row in recording.read_rows()}:
        pairs = scorer.truth.read_canaries(client)
        used = {index for step in scorer.truth.read_used(1, 1, client).steps for index in step}
        assert len(pairs) == CANARIES
        assert len({index for pair in pairs for index in pair}) == 2 * CANARIES
        assert all((a in used) != (b in used) for a, b in pairs)
        firsts += [a in used for a, _ in pairs]
    assert 0 < sum(firsts) < len(firsts)  # the coins select both versions


def test_without_noise_guessed_canaries_refute_a_small_epsilon(noiseless: Path) -> None:
    scorer, recording = Scorer(noiseless, [noiseless / "truth"]), Recording(noiseless / "recording")
    found = guess_canaries(scorer, recording)
    assert found.canaries == found.guesses == CLIENTS * CANARIES
    assert found.right > 0.7 * found.guesses
    (result,) = check_canaries(recording, scorer, read_metrics(noiseless))
    assert isinstance(result, PassedCheck)
    assert "none, as no noise is accounted" in result.evidence
    lied = [{"privacy": {"epsilon": 0.01, "delta": 1e-5}}]
    (result,) = check_canaries(recording, scorer, lied)
    assert isinstance(result, Finding)
    assert (result.rule, result.grade) == (REFUTED_RULE, "serious")


def test_correct_noise_is_not_refuted(tmp_path: Path, data: dict[str, str]) -> None:
    run = federate(tmp_path / "run", **SETTINGS, gradient="dp_sgd(max_norm=1, noise=2)", data=data)
    scorer, recording = Scorer(run, [run / "truth"]), Recording(run / "recording")
    (result,) = check_canaries(recording, scorer, metrics := read_metrics(run))
    assert isinstance(result, PassedCheck)
    assert f"The accountant's epsilon: {metrics[-1]['privacy']['epsilon']:.3g}" in result.evidence
    assert {row.reported for row in recording.read_rows()} == {CANARIES}


def test_without_canaries_or_truth_nothing_is_checked(tmp_path: Path, noiseless: Path) -> None:
    (result,) = check_canaries(Recording(noiseless / "recording"), None, [])
    assert isinstance(result, NotChecked)
    run = federate(tmp_path / "run", **SETTINGS | {"clients": 2, "rounds": 1})
    (result,) = check_canaries(Recording(run / "recording"), Scorer(run, [run / "truth"]), [])
    assert isinstance(result, NotChecked)


def test_overlapping_canaries_are_separated() -> None:
    """Without noise all coins are found; with strong noise, the estimates correlate with the inner products."""
    rng = torch.Generator().manual_seed(0)
    differences = torch.randn(60, 100, generator=rng, dtype=torch.float64) + torch.randn(100, generator=rng, dtype=torch.float64)
    coins = torch.randint(0, 2, (60,), generator=rng).double() * 2 - 1
    products = differences @ differences.T
    estimates, _ = separate_canaries(differences @ (coins @ differences), products)
    assert torch.equal(estimates.sign(), coins)
    assert (torch.sign(products @ coins) != coins).any()  # the inner products alone are wrong about some

    directions = torch.randn(400, 500, generator=rng, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    inner, products = directions @ (1e4 * torch.randn(500, generator=rng, dtype=torch.float64)), directions @ directions.T
    estimates, overlap = separate_canaries(inner, products)
    assert torch.corrcoef(torch.stack([estimates, inner]))[0, 1] > 0.95
    assert overlap == pytest.approx(float(products.fill_diagonal_(0).square().sum()) / 400, rel=0.3)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_useless_gradients_give_no_guess(value: float) -> None:
    estimates, overlap = separate_canaries(torch.full((3,), value).double(), torch.full((3, 3), value).double())
    assert (estimates.tolist(), overlap) == ([0.0] * 3, 0.0)


def test_canaries_in_small_batches_are_guessed(tmp_path: Path, data: dict[str, str]) -> None:
    training = {"learning_rate": 0.01, "batch_size": 4, "epochs": None, "steps": 1}
    training = {key: value for key, value in training.items() if value is not None}
    run = federate(tmp_path / "run", **SETTINGS | {"training": training, "rounds": 8}, data=data)
    found = guess_canaries(Scorer(run, [run / "truth"]), Recording(run / "recording"))
    assert found.right_of_all > 0.7 * found.canaries


def test_versions_follow_the_coins() -> None:
    used, pairs = choose_versions(np.array([10, 11, 12, 13, 14]), 2, np.array([1, 0]))
    assert used.tolist() == [11, 12, 14]
    assert pairs == [(10, 11), (12, 13)]


def test_more_canaries_than_examples_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"clients\.canaries = 900 requires 1800 examples"):
        federate(tmp_path / "run", clients={"count": 2, "canaries": 900})

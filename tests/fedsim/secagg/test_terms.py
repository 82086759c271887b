"""Tests of the configuration of secure aggregation: defaults, and settings that are refused before any work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from secure_runs import make_secure

from fedsim.config.experiment import ExperimentError, read
from fedsim.engine.run import FederationRun
from fedsim.recording.training import Training
from fedsim.secagg.protocol.quantisation import MAX_SUM
from fedsim.secagg.protocol.terms import Agreement, SecureAggregationTable

STEPS = Training(learning_rate=0.1, batch_size=8, steps=3)
EPOCHS = Training(learning_rate=0.1, batch_size=8, epochs=3)


def settle_terms(clients: int = 5, training: Training = STEPS, strategy: str = "FedAvg", **table: Any) -> Agreement:
    return SecureAggregationTable(**table).settle(clients=clients, training=training, strategy=strategy)


def test_defaults_follow_from_the_federation() -> None:
    assert settle_terms() == Agreement(
        clients=5, threshold=3, neighbours=64, clip=3.0, target_range=MAX_SUM // (5 * 24), max_weight=24, reveal=False
    )
    assert settle_terms(training=EPOCHS).max_weight == 1000
    assert [settle_terms(clients=n).threshold for n in (2, 3, 4, 5, 100)] == [2, 2, 3, 3, 33]
    assert settle_terms(clients=100, neighbours=10).threshold == 6
    assert settle_terms(bits=8).target_range == 127
    assert settle_terms(clip=2).clip == 2.0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"threshold": 1}, "threshold must be a whole number from 2 to .*got 1"),
        ({"threshold": True}, "threshold must be a whole number .*got True"),
        ({"neighbours": 3}, "neighbours must be even, got 3"),
        ({"neighbours": 0}, "neighbours must be a whole number from 2"),
        ({"clip": 0}, "clip must be positive and finite, got 0"),
        ({"clip": float("inf")}, "clip must be positive and finite, got inf"),
        ({"bits": 32}, "bits must be a whole number from 2 to 31, got 32"),
        ({"max_weight": 0}, "max_weight must be a whole number from 1"),
        ({"reveal": 1}, r"reveal must be true or false \(whether clients send .* unmasked\), got 1"),
        ({"revel": True}, "unknown key 'revel'; known: threshold, neighbours, clip, bits, max_weight, reveal"),
        (3, "must be false, true or a table of threshold.*, got 3"),
    ],
)
def test_wrong_values_are_refused_with_their_range(table: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SecureAggregationTable.parse(table)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threshold": 6}, r"threshold must be from 2 to 5, .*got 6"),
        ({"clients": 50, "neighbours": 4, "threshold": 6}, r"threshold must be from 2 to 5, .*4 neighbours of 50 clients.*got 6"),
        ({"clients": 1}, "at least 2 clients a round"),
        ({"max_weight": 23}, r"at least batch_size \* steps = 24, got 23"),
        (
            {"bits": 26},
            "5 clients x a weight of up to 24 x scaled values of up to 33554431 add up to 4026531720, and 32-bit words hold",
        ),
        ({"clients": 10**6, "max_weight": 10**4}, "leave 0 as the largest rounded value in 32-bit sums, .* minimum of 127"),
        ({"training": replace(STEPS, buffers="shared")}, "would send batch-norm statistics unmasked"),
        *(({"strategy": name}, f"strategy {name} acts on each client's own") for name in ("FedMedian", "Krum", "MultiKrum")),
        *(({"strategy": name}, f"strategy {name} acts on each client's own") for name in ("FedTrimmedAvg", "Bulyan", "QFedAvg")),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settle_terms(**settings)


def test_the_default_range_is_the_largest_that_cannot_overflow() -> None:
    found = settle_terms(clients=7, max_weight=30)
    assert 7 * 30 * found.target_range <= MAX_SUM < 7 * 30 * (found.target_range + 1)


@pytest.mark.parametrize("value", [True, {"threshold": 4, "clip": 0.5, "bits": 16, "reveal": True}])
def test_a_printed_experiment_is_read_as_the_same(value: Any, tmp_path: Path) -> None:
    made = make_secure(secure_aggregation=value)
    (tmp_path / "e.toml").write_text(made.to_toml())
    assert read(tmp_path / "e.toml") == made
    assert made.settle_agreement().threshold == (3 if value is True else 4)
    assert read(tmp_path / "e.toml", [("secure_aggregation", False)]).settle_agreement() is None


def test_the_command_line_sets_it(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(make_secure(secure_aggregation=False).to_toml())
    assert read(tmp_path / "e.toml").settle_agreement() is None
    assert read(tmp_path / "e.toml", [("secure_aggregation", True)]).settle_agreement().threshold == 3
    assert read(tmp_path / "e.toml", [("secure_aggregation.threshold", 5)]).settle_agreement().threshold == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "FedMedian"}, "strategy FedMedian acts on each client's own update"),
        ({"secure_aggregation": {"clipp": 9}}, "tiny.toml: secure_aggregation: unknown key 'clipp'"),
        (
            {"training": {"learning_rate": 1, "batch_size": 4, "steps": 1, "mode": "train", "buffers": "shared"}},
            "would send batch-norm statistics unmasked",
        ),
        (
            {"strategy": {"name": "FedAvg", "central": {"max_norm": 1, "noise_multiplier": 1}}},
            "strategy.central clips each client's own update on the server",
        ),
    ],
)
def test_an_experiment_that_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExperimentError, match=words):
        make_secure(**changes)


def test_a_client_with_more_examples_than_the_largest_weight_is_refused_before_any_work(tmp_path: Path) -> None:
    training = {"learning_rate": 0.1, "batch_size": 8, "epochs": 1}
    made = make_secure(training=training, secure_aggregation={"max_weight": 100})
    with pytest.raises(
        ValueError, match=r"a client holds (\d+) examples, and secure_aggregation.max_weight is 100; set it to \1"
    ):
        FederationRun(experiment=made, out=tmp_path / "run", device="cpu").check()


def test_warnings_state_the_limits_of_secure_aggregation() -> None:
    settings = {"clients": 10, "neighbours": 64, "clip": 1.0, "target_range": 2**20, "max_weight": 10}
    usual, low = (Agreement(threshold=threshold, **settings).list_warnings() for threshold in (6, 5))
    assert len(usual) == 1
    assert "follows the protocol" in usual[0]
    assert "Public keys are not authenticated" in usual[0]
    assert "threshold = 5 is at most half of the 10 clients" in low[1]
    assert "6 or more" in low[1]

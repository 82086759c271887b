"""Tests of the privacy accounts of an experiment by round: which noise counts, how often examples are used, and the output."""

import json
import math
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from command_line import run_fedsim
from tiny_experiments import Federate, make_tiny

from defenses.privacy.accounting import (
    bound_reconstruction,
    bound_reconstruction_renyi,
    compute_epsilon,
    compute_epsilon_drawn,
    compute_epsilon_poisson,
)
from defenses.privacy.sensitivity import Noise
from fedsim.config.experiment import ExperimentError
from fedsim.recording import Training
from fedsim.training.batches import Cursor, draw_batches
from fedsim.training.privacy import INFINITY_TEXT, count_steps, count_uses, make_accounts


def row(number: int, *, smallest: int = 40, buffers: bool = False, **changes: Any) -> dict[str, Any]:
    return make_accounts(make_tiny(**changes), tensors=4, smallest=smallest, buffers=buffers).make_row(number)


# --- how often an example is used ---


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 4, 5, 7, 12])
@pytest.mark.parametrize("how_long", [{"steps": 1}, {"steps": 2}, {"steps": 5}, {"epochs": 1}, {"epochs": 3}])
def test_no_example_is_used_more_often_than_the_accounts_say_and_the_first_of_each_epoch_is_as_often(
    how_long: dict[str, int], size: int, drop_last: bool
) -> None:
    training = Training(learning_rate=0.1, batch_size=4, drop_last=drop_last, **how_long)
    if drop_last and size < 4:
        pytest.skip("no batch at all")
    rng = np.random.default_rng(0)
    at_random = [rng.permutation(size) for _ in range(50)]
    at_random[1::2] = [order[::-1] for order in at_random[::2]]  # the last example of an epoch is the first of the next
    for orders in (at_random, [np.arange(size)] * 50):
        cursor, used = Cursor(), []
        for _ in range(7):
            chosen, cursor = draw_batches(cursor, size, training, lambda epoch, orders=orders: orders[epoch])
            assert len(chosen) == count_steps(training, size)
            used.append(Counter(int(i) for step in chosen for i in step))
        for first, last in combinations(range(8), 2):
            assert max(sum(used[first:last], Counter()).values()) <= count_uses(training, size, first + 1, last)
    assert [sum(used[:last], Counter())[0] for last in range(1, 8)] == [
        count_uses(training, size, 1, last) for last in range(1, 8)
    ]


# --- noise that a client adds ---


def test_noise_on_the_update_hides_a_client_and_rounds_add_up() -> None:
    found = row(
        3,
        defense="clip(0.5) | gaussian(1)",
        privacy={"delta": 1e-4, "prior": 0.2},
        clients={"count": 8, "fraction": 0.25},
    )
    assert found == {
        "epsilon": compute_epsilon(Noise(2.0), delta=1e-4, times=3),  # no amplification: the server knows which clients it asked
        "epsilon_round": compute_epsilon(Noise(2.0), delta=1e-4),
        "delta": 1e-4,
        "unit": "client",
        "relation": "replace-one",
        "prior": 0.2,
        "bound": pytest.approx(bound_reconstruction(0.2, math.sqrt(3) / 2)),  # sqrt(T) C / sigma
    }
    assert found["epsilon_round"] < found["epsilon"]


def test_laplace_noise_has_a_bound_of_its_own() -> None:
    found = row(4, defense="clip(0.5) | laplace(1)")
    assert found["bound"] == pytest.approx(bound_reconstruction_renyi(0.01, 1.0))
    assert found["epsilon"] == compute_epsilon(Noise(2.0, "laplace"), delta=1e-5, times=4)


@pytest.mark.parametrize(
    ("defense", "why"),
    [
        ("", "no noise"),
        ("clip(1)", "no noise"),
        ("gaussian(1)", "not bounded before the noise"),
        ("clip(1) | gaussian(snr_db=3)", "depends on the data"),
    ],
)
def test_without_a_guarantee_epsilon_is_infinite_and_the_reason_is_given(defense: str, why: str) -> None:
    found = row(2, defense=defense)
    assert (found["epsilon"], found["epsilon_round"], found["bound"]) == (INFINITY_TEXT, INFINITY_TEXT, 1.0)
    assert why in found["why"]
    json.dumps(found, allow_nan=False)


def test_noise_in_the_gradient_hides_an_example_as_often_as_it_is_used() -> None:
    training = {"learning_rate": 0.5, "batch_size": 4, "steps": 5}  # half an epoch of 40 examples
    found = row(6, gradient="dp_sgd(max_norm=3, noise=2)", training=training)
    assert found["unit"] == "example"
    assert found["epsilon"] == compute_epsilon(Noise(2.0), delta=1e-5, times=3)  # three epochs, not 30 steps
    assert found["epsilon_round"] == compute_epsilon(Noise(2.0), delta=1e-5)
    assert found["bound"] == pytest.approx(bound_reconstruction(0.01, math.sqrt(3) / 2))
    assert found["epsilon_if_poisson"] == compute_epsilon_poisson(Noise(2.0), delta=1e-5, times=30, rate=0.1)
    fewer = row(6, gradient="dp_sgd(max_norm=3, noise=2)", training=training, smallest=10)
    assert fewer["epsilon"] == compute_epsilon(Noise(2.0), delta=1e-5, times=10)  # 30 steps, three in an epoch


def test_a_round_counts_for_the_client_that_uses_an_example_most_often_in_it() -> None:
    """For a client with 8 examples, two steps are an epoch. With 12, steps 3 and 4 belong to two epochs, which may repeat one."""
    rule, training = "dp_sgd(max_norm=3, noise=2)", {"learning_rate": 0.5, "batch_size": 4, "steps": 2}
    e = make_tiny(gradient=rule, training=training)
    found = make_accounts(e, tensors=4, smallest=8, others=frozenset({8, 12}), buffers=False).make_row(2)
    assert found["epsilon_round"] == compute_epsilon(Noise(2.0), delta=1e-5, times=2)
    assert found["epsilon"] == compute_epsilon(Noise(2.0), delta=1e-5, times=2)
    assert row(2, smallest=8, gradient=rule, training=training)["epsilon_round"] == compute_epsilon(Noise(2.0), delta=1e-5)


def test_defenses_after_a_gradient_rule_do_not_change_its_epsilon_but_noise_on_the_update_does() -> None:
    plain, after = (row(2, gradient="dp_sgd(1, 2)", defense=defense) for defense in ("", "top_k(0.1, error_feedback=True)"))
    assert plain == after
    both = row(2, gradient="dp_sgd(1, 2)", defense="clip(1) | gaussian(3)")
    assert both == row(2, defense="clip(1) | gaussian(3)")
    assert both["unit"] == "client"


def test_shared_batch_norm_statistics_and_mixed_examples_remove_the_guarantee() -> None:
    shared = {"learning_rate": 0.5, "batch_size": 4, "steps": 1, "buffers": "shared"}
    for changes in ({"defense": "clip(1) | gaussian(3)"}, {"gradient": "dp_sgd(1, 2)"}):
        leaking = row(1, training=shared, buffers=True, **changes)
        assert leaking["epsilon"] == INFINITY_TEXT
        assert "batch-norm" in leaking["why"]
        assert row(1, training=shared, **changes)["epsilon"] != INFINITY_TEXT  # without batch norm
    central = row(1, training=shared, buffers=True, strategy=CENTRAL)["central"]
    assert central["epsilon"] == INFINITY_TEXT
    mixed = row(1, gradient="dp_sgd(1, 2)", inputs="mixup(0.4)")
    assert mixed["epsilon"] == INFINITY_TEXT


# --- noise that the server adds ---

CENTRAL = {"name": "FedAvg", "central": {"noise_multiplier": 2.0, "clipping_norm": 0.1}}


def test_noise_on_the_server_does_not_protect_from_the_server() -> None:
    found = row(5, strategy=CENTRAL, clients={"count": 10, "fraction": 0.2})
    assert found["epsilon"] == INFINITY_TEXT
    central = found["central"]
    assert central["epsilon"] == compute_epsilon_drawn(Noise(2.0), delta=1e-5, times=5, drawn=2, population=10)
    assert central["epsilon_round"] == compute_epsilon_drawn(Noise(2.0), delta=1e-5, times=1, drawn=2, population=10)
    assert central["bound"] == pytest.approx(bound_reconstruction(0.01, math.sqrt(5) / 2))
    assert (central["unit"], central["relation"]) == ("client", "replace-one")
    everyone = row(5, strategy=CENTRAL, clients={"count": 10})["central"]
    assert everyone["epsilon"] == compute_epsilon(Noise(2.0), delta=1e-5, times=5) > central["epsilon"]


def test_noise_on_the_server_counts_only_for_averaging_strategies() -> None:
    assert row(1, strategy={**CENTRAL, "name": "FedAdam"})["central"]["epsilon"] == INFINITY_TEXT
    silent = {"name": "FedAvg", "central": {"noise_multiplier": 0, "clipping_norm": 0.1}}
    assert row(1, strategy=silent)["central"]["epsilon"] == INFINITY_TEXT
    assert "central" not in row(1)


# --- in the experiment, and in metrics.jsonl ---


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"delta": 0}, r"privacy\.delta: .*greater than 0"),
        ({"delta": 1.0}, r"privacy\.delta: .*less than 1"),
        ({"prior": 2}, r"privacy\.prior: .*less than 1"),
        ({"epsilon": 2}, r"privacy\.epsilon: unknown key"),
    ],
)
def test_privacy_settings_out_of_range_are_refused(privacy: dict[str, float], words: str) -> None:
    with pytest.raises(ExperimentError, match=words):
        make_tiny(privacy=privacy)


def parse_strictly(line: str) -> dict[str, Any]:
    def no_number(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    parsed: dict[str, Any] = json.loads(line, parse_constant=no_number)
    return parsed


@pytest.mark.parametrize("defense", ["", "clip(0.5) | gaussian(0.1)"])
def test_the_metrics_of_every_round_have_its_epsilon(federate: Federate, defense: str) -> None:
    run = federate(rounds=3, defense=defense, privacy={"prior": 0.1})
    first, *rows = [parse_strictly(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert "privacy" not in first
    expected = make_accounts(run.experiment, tensors=4, smallest=40, buffers=False)
    assert [found["privacy"] for found in rows] == [expected.make_row(number) for number in (1, 2, 3)]
    spent = [found["privacy"]["epsilon"] for found in rows]
    assert spent[0] < spent[1] < spent[2] if defense else spent == [INFINITY_TEXT] * 3
    assert all(0.1 < found["privacy"]["bound"] <= 1 for found in rows)


def test_the_smallest_client_and_the_networks_own_tensors_are_counted(federate: Federate) -> None:
    run = federate(
        rounds=2, gradient="fed_cdp(max_norm=1, noise=2)", training={"learning_rate": 0.1, "batch_size": 100, "steps": 3}
    )
    size = min(np.bincount(np.arange(len(run.load_data().train)) % 3))  # an even partition
    rows = [parse_strictly(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    uses = count_uses(run.experiment.training, int(size), 1, 2)
    assert uses == 2  # six steps, five in an epoch
    assert rows[2]["privacy"]["epsilon"] == compute_epsilon(Noise(1.0), delta=1e-5, times=uses)  # weight and bias of two layers


def test_show_prints_a_column_only_for_a_finite_epsilon(federate: Federate) -> None:
    for name, changes, shown, hidden in (
        ("plain", {}, [], ["epsilon"]),
        ("noisy", {"defense": "clip(0.5) | gaussian(2)"}, ["epsilon (client)"], ["(example)", "global"]),
        ("central", {"strategy": CENTRAL}, ["epsilon (global model)"], ["client)"]),
    ):
        run = federate(name, rounds=1, **changes)
        result = run_fedsim("show", run.out, env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        flat = " ".join(result.output.replace("┃", " ").split())
        assert all(words in flat for words in shown), flat
        assert not any(words in flat for words in hidden), flat
    measured = json.loads(run_fedsim("show", run.out, "--json").stdout)["per_round"][0]
    assert measured["epsilon_client"] == INFINITY_TEXT
    assert measured["epsilon_central"] == pytest.approx(compute_epsilon(Noise(2.0), delta=1e-5))

"""Tests that recording a third-party federation does not change its results."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedsim.client import update_mod

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedMedian": flower.FedMedian,
    "Krum": lambda: flower.Krum(num_malicious_nodes=0),
    "FedAdam": lambda: flower.FedAdam(eta=0.01),
    "server-side clipping": lambda: flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 0.05, 3),
    "adaptive clipping": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), 0.1, 3, initial_clipping_norm=0.05, clipped_count_stddev=0.1
    ),
    "client-side clipping": lambda: flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.1, 0.05, 3),
}


def clients_of(name: str) -> dict[str, Any]:
    """Return options of the clients. Flower's clipping mod is for training only, since it requires a norm in every message."""
    return {"train_mods": [fixedclipping_mod]} if name == "client-side clipping" else {}


def end_alike(one: Result, two: Result) -> bool:
    """Return whether two federations ended with the same arrays, bit for bit."""
    arrays = [{name: (a.dtype, a.shape, a.numpy().tobytes()) for name, a in result.arrays.items()} for result in (one, two)]
    return bool(arrays[0]) and arrays[0] == arrays[1]


def test_the_app_knows_nothing_of_this_project() -> None:
    paths = list(Path(__file__).with_name("quickstart").glob("*.py"))
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text())
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name.partition(".")[0] for name in names} & {"fedsim", "attacker", "defenses"}, path.name


@pytest.mark.parametrize("name", STRATEGIES)
def test_recorded_and_unrecorded_federations_have_the_same_results(app: Any, name: str) -> None:
    """Weights are equal bit for bit, and so are the metrics that clients report of training and evaluation."""
    alone = app.run(STRATEGIES[name](), **clients_of(name))
    recorded = app.run(app.record(STRATEGIES[name]()), **clients_of(name))
    assert end_alike(recorded, alone)
    assert len(app.recording.read_rows()) == 6
    for figures in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        assert getattr(recorded, figures) == getattr(alone, figures)
        assert sorted(getattr(recorded, figures)) == [1, 2]


@pytest.mark.parametrize("name", STRATEGIES)
def test_with_the_mod_results_differ_only_by_rounding(app: Any, name: str) -> None:
    """The server adds the update to the weights that it sent, which differs from the client's weights by rounding."""
    alone = app.run(STRATEGIES[name](), rounds=1, **clients_of(name))
    recorded = app.run(app.record(STRATEGIES[name]()), rounds=1, mods=[update_mod()], **clients_of(name))
    assert list(recorded.arrays) == list(alone.arrays)
    for key, array in alone.arrays.items():
        torch.testing.assert_close(
            torch.from_numpy(recorded.arrays[key].numpy()).double(),
            torch.from_numpy(array.numpy()).double(),
            rtol=1e-4,
            atol=3e-8,
        )
    assert recorded.evaluate_metrics_clientapp[1]["eval_loss"] == pytest.approx(alone.evaluate_metrics_clientapp[1]["eval_loss"])


def test_batch_norm_statistics_and_counters_are_the_same(app: Any) -> None:
    alone = app.run(FedAvg(), net="NormedNet")
    recorded = app.run(app.record(FedAvg(), net="NormedNet"), net="NormedNet")
    assert end_alike(recorded, alone)


def test_a_recorded_strategy_is_the_same_object(app: Any) -> None:
    """Apps read attributes of a strategy, check its class, and may override `start`, which calls other methods of the object."""

    class Saving(FedAvg):
        def start(self, *args: Any, **kwargs: Any) -> Result:
            self.started = True
            return super().start(*args, **kwargs)

        def configure_train(self, server_round: int, arrays: Any, config: ConfigRecord, grid: Any) -> Any:
            config["lr"] = 0.05 / server_round
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Saving(fraction_evaluate=0.0)
    assert app.record(strategy) is strategy
    app.run(strategy)
    assert strategy.started
    assert (strategy.fraction_train, isinstance(strategy, FedAvg)) == (1.0, True)
    assert {row.round: row.status for row in app.recording.read_rows()} == {1: "complete", 2: "complete"}

"""Tests of apps with Flower's older interface, NumPyClient and flwr.server.strategy: recording does not change results."""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, Context, FitIns, FitRes, Parameters, Scalar, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.replay.replay import Replay
from fedsim.engine import engines
from fedsim.engine.engines import EngineError

RATE, CLIENTS, ROUNDS = 0.05, 3, 2
Weights = list[NDArray[Any]]
Order = Callable[[torch.nn.Module], dict[str, torch.Tensor]]


def whole_state(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(network.state_dict())


def parameters_alone(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(network.named_parameters())


class OlderApp:
    """The quickstart app with the older interface. sent, returned: weights that clients got and returned, with the partition."""

    def __init__(self, app: Any, net: str, order: Order) -> None:
        self.app, self.net, self.order = app, getattr(app.task, net), order
        self.sent: list[tuple[int, Weights]] = []
        self.returned: list[tuple[int, Weights]] = []
        self.broken: int | None = None
        self.raises = False
        self.running, self.most_running = 0, 0

    def run(self, make_strategy: Callable[..., Strategy], *, rounds: int = ROUNDS) -> Weights:
        """Run the federation and return the server's last weights."""
        random.seed(7)
        torch.manual_seed(1)
        start = ndarrays_to_parameters([t.detach().numpy() for t in self.order(self.net()).values()])
        last: list[Parameters] = []

        def keep(server_round: int, weights: Weights, config: dict[str, Scalar]) -> None:
            last.append(ndarrays_to_parameters(weights))

        strategy = make_strategy(initial_parameters=start, evaluate_fn=keep)
        components = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))
        engines.run_local(ServerApp(server_fn=lambda _: components), ClientApp(client_fn=self._make_client), CLIENTS)
        return parameters_to_ndarrays(last[-1])

    def _make_client(self, context: Context) -> Client:
        partition, own = int(context.node_config["partition-id"]), self

        class OlderClient(NumPyClient):
            def fit(self, parameters: Weights, config: dict[str, Scalar]) -> tuple[Weights, int, dict[str, Scalar]]:
                own.running += 1
                own.most_running = max(own.most_running, own.running)
                time.sleep(0.01)
                try:
                    return self.train(parameters)
                finally:
                    own.running -= 1

            def train(self, parameters: Weights) -> tuple[Weights, int, dict[str, Scalar]]:
                network = own.net()
                own.sent.append((partition, parameters))
                for target, values in zip(own.order(network).values(), parameters, strict=True):
                    target.data.copy_(torch.as_tensor(values))
                loader, _ = own.app.task.load_data(partition, CLIENTS, 1, 1)
                own.app.task.train(network, loader, 1, RATE)
                returned = [t.detach().numpy() for t in own.order(network).values()]
                if partition == own.broken:
                    if own.raises:
                        raise ArithmeticError("the client ran out of luck")
                    return returned[:-1], 1, {}
                own.returned.append((partition, returned))
                return returned, 1, {"train_loss": 0.5, "note": "text is not recorded"}

        return OlderClient().to_client()


def plain(**options: Any) -> FedAvg:
    """Return FedAvg that waits for every client; by default it begins a round with the first two that are connected."""
    return FedAvg(fraction_evaluate=0.0, min_fit_clients=CLIENTS, min_available_clients=CLIENTS, **options)


def make_clipping_strategy(**options: Any) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(plain(**options), 0.0, 1e-3, CLIENTS)


def recorded(app: Any, make: Callable[..., Strategy], net: str = "Net", **options: Any) -> Callable[..., Strategy]:
    return lambda **given: cast(Strategy, app.record(make(**given), net=net, **options))


@pytest.mark.parametrize(
    ("net", "order", "make"),
    [
        ("Net", whole_state, plain),
        ("NormedNet", whole_state, plain),
        ("NormedNet", parameters_alone, plain),
        ("Net", whole_state, make_clipping_strategy),
    ],
    ids=["plain", "batch norm", "batch norm, without buffers", "clipped by the server"],
)
def test_the_federation_is_unchanged_and_every_message_is_recorded(
    app: Any, net: str, order: Order, make: Callable[..., Strategy]
) -> None:
    without = OlderApp(app, net, order).run(make)
    older = OlderApp(app, net, order)
    with_record = older.run(recorded(app, make, net))
    assert older.most_running == 1  # although the server sends from several threads
    for found_array, expected_array in zip(with_record, without, strict=True):  # the order of answers changes rounding
        torch.testing.assert_close(torch.as_tensor(found_array), torch.as_tensor(expected_array), rtol=1e-5, atol=1e-7)

    names = list(order(older.net()))
    found = list(app.recording.read_observations())
    assert [o.round for o in found] == [1, 1, 1, 2, 2, 2]
    assert len({o.client for o in found}) == CLIENTS
    expected = [dict(zip(names, map(torch.as_tensor, weights), strict=True)) for _, weights in older.returned]
    for o in found:
        assert (o.payload.codec, o.num_examples, len(o.cohort), o.metrics) == ("weights", 1, CLIENTS, {"train_loss": 0.5})
        first = 0 if o.round == 1 else CLIENTS
        assert any(
            all(torch.equal(o.payload.tensors[name], one[name]) for name in o.payload.tensors)
            for one in expected[first : first + CLIENTS]
        )
        sent = dict(zip(names, map(torch.as_tensor, older.sent[first][1]), strict=True))
        assert all(torch.equal(t, sent[name]) for name, t in o.weights.items())


def test_a_server_outside_of_a_run_is_recorded(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start_simulation` and `start_server` call the strategy without the identity that Flower gives to tasks of a run."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)

    class LocalClient(ClientProxy):
        def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
            return FitRes(Status(Code.OK, ""), ins.parameters, 4, {})

        def refuse(self, *given: Any) -> Any:
            raise NotImplementedError

        get_properties = get_parameters = evaluate = reconnect = refuse

    manager = SimpleClientManager()
    for cid in ("ward 7", "ward 9"):
        manager.register(LocalClient(cid))
    start = ndarrays_to_parameters([t.numpy() for t in app.task.Net().state_dict().values()])
    strategy = app.record(FedAvg(fraction_evaluate=0.0, initial_parameters=start), net="Net")
    Server(client_manager=manager, strategy=strategy).fit(2, timeout=None)
    found = list(app.recording.read_observations())
    assert sorted((o.round, o.client) for o in found) == [(r, c) for r in (1, 2) for c in ("1", "2")]
    assert all(not u.any() for o in found for u in o.update.values())


def test_a_client_whose_list_does_not_fit_is_recorded_as_failed_and_the_strategy_fails_as_before(app: Any) -> None:
    older = OlderApp(app, "Net", whole_state)
    older.broken = 1
    unequal = r"zip\(\) argument 2 is (shorter|longer) than argument 1"  # depends on the order of answers
    with pytest.raises(EngineError, match=unequal):
        older.run(plain)
    with pytest.raises(EngineError, match=unequal):
        older.run(recorded(app, plain))
    rows = {row.status: row for row in app.recording.read_rows()}
    assert set(rows) == {"complete", "failed"}
    assert rows["failed"].reason.startswith("malformed reply: the list of weights does not fit the state dict of the network")


def test_a_client_that_raises_is_recorded_as_failed_with_the_reason(app: Any) -> None:
    older = OlderApp(app, "Net", whole_state)
    older.broken, older.raises = 1, True
    older.run(recorded(app, plain), rounds=1)
    rows = list(app.recording.read_rows())
    assert sorted(row.status for row in rows) == ["complete", "complete", "failed"]
    assert "the client ran out of luck" in next(row.reason for row in rows if row.status == "failed")


def test_sums_of_flowers_secure_aggregation_are_no_updates_of_clients(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Flower's workflow gives the strategy the sum as the result of each client."""
    older = OlderApp(app, "Net", whole_state)
    server, client = ServerApp(), ClientApp(client_fn=older._make_client, mods=[secaggplus_mod])

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        start = ndarrays_to_parameters([t.numpy() for t in app.task.Net().state_dict().values()])
        strategy = app.record(plain(initial_parameters=start), net="Net")
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
        DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(grid, legacy)

    with caplog.at_level(logging.WARNING, logger="flwr"):
        engines.run_local(server, client, CLIENTS)
    assert "no update of this round is recorded: the strategy got one result for all clients" in caplog.text
    rows = list(app.recording.read_rows())
    assert [row.status for row in rows] == ["failed"] * CLIENTS
    assert all("secure aggregation" in row.reason for row in rows)


def test_another_network_is_refused_before_the_first_round(app: Any) -> None:
    with pytest.raises(EngineError, match=r"expected 20 arrays, got 10; give record\(\) the network that is trained"):
        OlderApp(app, "Net", whole_state).run(recorded(app, plain, "NormedNet"))
    assert not (app.folder / "recording").exists()


def test_an_attack_reads_the_label_of_each_client(app: Any) -> None:
    older = OlderApp(app, "Net", whole_state)
    older.run(recorded(app, plain), rounds=1)
    replay = Replay(recording=app.recording, spec=AttackSpec(name="cpl", arguments={"steps": 2}), out=app.folder / "found").run()
    labels = [int(Reconstruction.read(path).y) for path in replay.folder.glob("*.safetensors")]
    assert sorted(labels) == sorted(int(app.example(client)[1]) for client in range(CLIENTS))

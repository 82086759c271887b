"""Recording of strategies of Flower's older interface (`flwr.server.strategy`, with `configure_fit`)."""

from collections.abc import Iterable, Sequence
from logging import INFO, WARNING
from time import time
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Parameters, parameters_to_ndarrays
from flwr.common.logger import log
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from torch import nn

from fedsim.flower import records

SERVER_NODE = 1
"""Node id of the server in messages, as in Flower's own."""
TTL_SECONDS = 43_200.0
"""Lifetime of a message; a reply to a message that is older raises an exception."""
FAILED_REPLY = 1
"""Code of the error that stands for a client's failure, whose reason the older interface states in words."""
SECURE_SUM = "the strategy got one result for all clients, as by Flower's secure aggregation, whose sums are not recorded"
"""Error of each client in such a round."""


def is_older(strategy: object) -> bool:
    """Return whether an object has the methods `configure_fit` and `aggregate_fit` of Flower's older interface."""
    return hasattr(strategy, "configure_fit") and hasattr(strategy, "aggregate_fit")


def watch_older(strategy: Any, watched: Strategy, messages: "SentMessages", network: nn.Module) -> None:
    """Make an older strategy also pass its messages to `watched`, by replacing its `configure_fit` and `aggregate_fit` in place.

    What the strategy computes does not change. The new `configure_fit` raises ValueError if the weights sent do not fit
    `network`.

    watched: strategy that records, with `messages` as its inner strategy. network: the network that is trained; its state dict
    gives the names of the arrays, which the older interface sends as a list without names.
    """
    configure, aggregate = strategy.configure_fit, strategy.aggregate_fit
    names = ArrayNames(network)

    def configure_fit(server_round: int, parameters: Parameters, client_manager: Any) -> list[tuple[ClientProxy, Any]]:
        instructed: list[tuple[ClientProxy, Any]] = configure(server_round, parameters, client_manager)
        arrays = names.name_arrays(parameters)
        messages.sent, messages.given = [], [instructions.parameters for _, instructions in instructed]
        for client, instructions in instructed:
            weights = arrays if instructions.parameters is parameters else names.name_arrays(instructions.parameters)
            content = RecordDict({records.WEIGHTS_KEY: weights})
            messages.sent.append(_make_message(content, messages.number_client(client)))
        watched.configure_train(server_round, arrays, ConfigRecord(), cast(Grid, None))  # nothing is sent through it
        return instructed

    def aggregate_fit(server_round: int, results: Any, failures: Any) -> Any:
        watched.aggregate_train(server_round, messages.list_replies(results, failures, names))
        return aggregate(server_round, results, failures)

    vars(strategy).update(configure_fit=configure_fit, aggregate_fit=aggregate_fit)


class ArrayNames:
    """Names of the arrays that the older interface sends as a list, by their order in the state dict of the network.

    The list may have all entries of the state dict, all but `num_batches_tracked`, or the parameters alone.
    """

    def __init__(self, network: nn.Module) -> None:
        state = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        parameters = {name for name, _ in network.named_parameters()}
        self._orders = [
            state,
            {name: shape for name, shape in state.items() if not name.endswith("num_batches_tracked")},
            {name: shape for name, shape in state.items() if name in parameters},
        ]

    def name_arrays(self, parameters: Parameters) -> ArrayRecord:
        """Return the arrays as a record with their names. Raises ValueError if their shapes do not fit the network's."""
        arrays = parameters_to_ndarrays(parameters)
        shapes = [array.shape for array in arrays]
        for order in self._orders:
            if shapes == list(order.values()):
                return ArrayRecord({name: records.pack(array) for name, array in zip(order, arrays, strict=True)})
        raise ValueError(self._describe_difference(arrays))

    def _describe_difference(self, arrays: Sequence[NDArray[Any]]) -> str:
        expected = self._orders[0]
        pairs = zip(expected.items(), arrays, strict=False)
        wrong = next((f"{name!r} of shape {want}, got {array.shape}" for (name, want), array in pairs if want != array.shape), "")
        wanted = f"array {wrong}" if wrong else f"{len(expected)} arrays, got {len(arrays)}"
        return (
            f"the list of weights does not fit the state dict of the network: expected {wanted}; give record() the network that "
            "is trained"
        )


class SentMessages(Strategy):
    """The messages that an older strategy sends in the current round, as a strategy of the newer interface.

    Its `configure_train` returns them; its other methods of that interface do nothing. given: the weights as the strategy sends
    them, of which clients in the server's process may return the same object.
    """

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.given: list[Parameters] = []
        self._numbers: dict[str, int] = {}

    def number_client(self, client: ClientProxy) -> int:
        """Return a client's node id. If the client has none, return a number instead, from 1 in order of first appearance."""
        node = getattr(client, "node_id", None)
        if node is not None:
            return int(node)
        if client.cid not in self._numbers:
            self._numbers[client.cid] = len(self._numbers) + 1
            log(INFO, "fedleak: client %r is recorded as %d", client.cid, self._numbers[client.cid])
        return self._numbers[client.cid]

    def list_replies(self, results: Any, failures: Any, names: ArrayNames) -> list[Message]:
        """Return one message for every client that was asked: its reply, or an error if it has no valid result.

        results, failures: arguments of Flower's `aggregate_fit`. names: names of the arrays in results. Exceptions in `failures`
        do not name their client, so that the error of each client without a result lists all of them. Results of clients that
        were not asked are left out, with a warning in the log. Flower's workflow of secure aggregation puts the sum, as one
        object, into the results of all clients: each client then gets an error.
        """
        sent = {message.metadata.dst_node_id: message for message in self.sent}
        replies = {}
        objects = {id(result.parameters) for _, result in results}
        is_sum = len(objects) == 1 < len(results) and objects.isdisjoint(map(id, self.given))
        if is_sum:
            log(WARNING, "fedleak: no update of this round is recorded: %s", SECURE_SUM)
        for client, result in [*results, *(failure for failure in failures if isinstance(failure, tuple))]:
            node = self.number_client(client)
            if node in sent:
                replies[node] = _make_failure(sent[node], SECURE_SUM) if is_sum else _make_reply(sent[node], result, names)
            else:
                log(
                    WARNING,
                    "fedleak: an update of node %s, to which no weights were sent, is not recorded; it may be a secure sum",
                    node,
                )
        raised = sorted({str(failure) or type(failure).__name__ for failure in failures if isinstance(failure, BaseException)})
        reason = "; ".join(raised) or "no answer"
        missing = [_make_failure(message, reason) for node, message in sent.items() if node not in replies]
        return [*replies.values(), *missing]

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return self.sent

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return None, None

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        pass


def _make_message(content: RecordDict, node: int) -> Message:
    """Return a message that is addressed to `node` but never sent.

    `Message(content, dst_node_id=..., message_type=...)` would raise RuntimeError in apps that `start_simulation` or
    `start_server` run, since Flower then sets no identity of the run.
    """
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=SERVER_NODE,
        dst_node_id=node,
        reply_to_message_id="",
        group_id="",
        created_at=time(),
        ttl=TTL_SECONDS,
        message_type="train",
    )
    return cast(Message, Message(content, metadata=metadata))  # type: ignore[call-overload]


def _make_reply(sent: Message, result: FitRes, names: ArrayNames) -> Message:
    if result.status.code != Code.OK:
        return _make_failure(sent, result.status.message)
    try:
        arrays = names.name_arrays(result.parameters)
    except Exception as error:  # one malformed reply must not end the federation, whatever it raises
        return _make_failure(sent, f"malformed reply: {error}")
    reported = (result.metrics or {}).items()  # a recording cannot store booleans, text or bytes
    numbers = {name: value for name, value in reported if isinstance(value, int | float) and not isinstance(value, bool)}
    metrics: dict[str, Any] = {records.NUM_EXAMPLES_KEY: result.num_examples, **numbers}
    return Message(RecordDict({records.WEIGHTS_KEY: arrays, records.METRICS_KEY: MetricRecord(metrics)}), reply_to=sent)


def _make_failure(sent: Message, reason: str) -> Message:
    return Message(Error(FAILED_REPLY, reason), reply_to=sent)

"""An honest-but-curious strategy: aggregates exactly as the strategy that it wraps, and writes down what passes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedsim import records
from fedsim.wire.codec import decode
from fedsim.wire.files import append_json_line
from fedsim.wire.recorder import Recorder, Reply, is_plain

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class Recording(Strategy):
    """Wraps any Flower strategy.

    inner:     samples clients and aggregates; it sees plain replies, with weights, and never knows that it is watched.
    recorder:  where observations go.
    wanted:    the rounds that are written down; None for all of them.
    metrics:   a file that gets one JSON row a round.
    on_round:  is called with that row, for progress bars.
    """

    def __init__(
        self,
        inner: Strategy,
        recorder: Recorder,
        *,
        wanted: frozenset[int] | None = None,
        metrics: Path | None = None,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.inner = inner
        self._recorder, self._wanted, self._metrics, self._on_round = recorder, wanted, metrics, on_round
        self._weights: dict[str, Tensor] = {}
        self._asked: list[int] = []
        self._pseudonyms: dict[int, str] = {}
        self._traffic: dict[str, int] = {}
        self._started = monotonic()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """As Flower's own, and one row of metrics a round."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            evaluated = evaluate_fn(server_round, arrays) if evaluate_fn else None
            self._finish_round(server_round, dict(evaluated or {}))
            return evaluated

        self._started = monotonic()
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        self._started = monotonic()
        config["attempt"] = 1
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._asked = [message.metadata.dst_node_id for message in messages]
        self._weights = records.to_tensors(arrays)
        self._traffic = {"bytes_down": sum(records.count_bytes(message.content) for message in messages), "bytes_up": 0}
        if self._writes(server_round):
            self._recorder.sent(server_round, self._weights)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        answered = list(replies)
        received = sorted(((self._receive(message), message) for message in answered), key=lambda pair: pair[0].client)
        late = sorted(set(self._asked) - {message.metadata.src_node_id for message in answered})
        missing = [Reply(client=self._name(node), node=str(node), status="late", reason="no answer in time") for node in late]
        everyone = _distinct([reply for reply, _ in received] + missing)
        cohort = sorted(reply.client for reply in everyone)
        if self._writes(server_round):
            for reply in everyone:
                self._recorder.received(server_round, reply, cohort)
        complete = sum(reply.status == "complete" for reply in everyone)
        self._traffic |= {
            "bytes_up": sum(reply.bytes for reply in everyone),
            "clients": complete,
            "missing": len(everyone) - complete,
        }
        arrays, metrics = self.inner.aggregate_train(
            server_round, [message for reply, message in received if reply.status == "complete" or message.has_error()]
        )
        return (None if arrays is None else self._as_sent(arrays)), metrics

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.inner.summary()

    def _writes(self, server_round: int) -> bool:
        return self._wanted is None or server_round in self._wanted

    def _name(self, node: int) -> str:
        return self._pseudonyms.get(node, str(node))

    def _as_sent(self, arrays: ArrayRecord) -> ArrayRecord:
        """Weights in the types that clients were sent: some of Flower's strategies turn float32 into float64."""
        return records.to_arrays({name: t.to(self._weights[name].dtype) for name, t in records.to_tensors(arrays).items()})

    def _receive(self, message: Message) -> Reply:
        """What the server learns from one reply; the reply itself becomes the plain one that the inner strategy expects."""
        node = message.metadata.src_node_id
        if message.has_error():
            return Reply(client=self._name(node), node=str(node), status="failed", reason=message.error.reason or "")
        content = message.content
        size = records.count_bytes(content)
        if records.CLIENT in content and is_plain(pseudonym := str(content[records.CLIENT]["pseudonym"])):
            self._pseudonyms[node] = pseudonym
        try:
            payload = records.take_payload(content)
            update = decode(payload)
            self._check(update)
            metrics = records.reported(content)
            examples = int(metrics.pop(records.NUM_EXAMPLES))
        except (KeyError, ValueError, AssertionError) as error:
            return Reply(client=self._name(node), node=str(node), status="failed", reason=f"malformed reply: {error}", bytes=size)
        content[records.WEIGHTS] = records.to_arrays({name: w + update[name] for name, w in self._weights.items()})
        return Reply(
            client=self._name(node),
            node=str(node),
            payload=payload,
            num_examples=examples,
            bytes=size,
            metrics=metrics,
        )

    def _check(self, update: Mapping[str, Tensor]) -> None:
        """Raises ValueError where an update does not fit the weights that were sent."""
        shapes = [{name: tuple(t.shape) for name, t in tensors.items()} for tensors in (update, self._weights)]
        if shapes[0] != shapes[1]:
            wrong = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
            raise ValueError(f"names or shapes differ from the weights sent, the first: {wrong[0]}")

    def _finish_round(self, server_round: int, evaluated: dict[str, Any]) -> None:
        row = {"round": server_round, **evaluated, **self._traffic, "seconds": monotonic() - self._started}
        if self._metrics is not None:
            append_json_line(self._metrics, {key: value if isfinite(value) else None for key, value in row.items()})
        if self._on_round is not None:
            self._on_round(row)


def _distinct(replies: Sequence[Reply]) -> list[Reply]:
    """A pseudonym stands for one client a round: whoever else sends it is known by its node id."""
    named: dict[str, Reply] = {}
    for reply in replies:
        client = reply.node if reply.client in named else reply.client
        named[client] = replace(reply, client=client)
    return list(named.values())

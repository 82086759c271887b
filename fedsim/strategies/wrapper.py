"""Base class of strategies that wrap another one."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy


class Wrapper(Strategy):
    """A strategy that forwards its configure, aggregate and summary methods to `inner`; subclasses change some of them."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.inner.summary()


def find_innermost(strategy: Strategy) -> Strategy:
    """Return the strategy inside all wrappers: those of this project and Flower's, such as for central differential privacy."""
    while True:
        inside = getattr(strategy, "inner", None) or getattr(strategy, "strategy", None)
        if not isinstance(inside, Strategy):
            return strategy
        strategy = inside

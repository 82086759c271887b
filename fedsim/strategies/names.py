"""Flower's aggregation strategies by name: those that need nothing but an update from each client."""

from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from defenses.registry import bind_arguments
from fedsim.strategies.central import wrap

STRATEGY_NAMES = ("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedMedian", "FedTrimmedAvg", "FedYogi", "Krum", "MultiKrum")


def build(name: str, *, clients: int, fraction: float, **arguments: Any) -> Strategy:
    """Return Flower's aggregation strategy `name` for `clients` clients, max(1, int(clients * fraction)) of them per round.

    arguments: arguments of Flower's class. In addition, `central` may be a table of settings for differential privacy on the
               server, which clips updates and adds noise to their mean; the strategy is then wrapped as by
               `fedsim.strategies.central.wrap`.
    Raises ValueError for an unknown name, unknown arguments, and arguments that follow from `clients` and `fraction`.
    """
    if name not in STRATEGY_NAMES:
        raise ValueError(f"strategy: unknown name {name!r}. Known: {', '.join(STRATEGY_NAMES)}")
    drawn = max(1, int(clients * fraction))
    sampling = {
        "fraction_train": fraction,
        "fraction_evaluate": 0.0,
        "min_train_nodes": drawn,
        "min_evaluate_nodes": 0,
        "min_available_nodes": clients,
    }
    if fixed := sorted(set(arguments) & set(sampling)):
        raise ValueError(f"strategy.{fixed[0]} follows from clients.count and clients.fraction; set those instead")
    central = arguments.pop("central", None)
    factory = getattr(flower, name)
    bound: Strategy = factory(**bind_arguments(f"strategy {name}", factory, given={**sampling, **arguments}))
    return bound if central is None else wrap(bound, drawn, central)

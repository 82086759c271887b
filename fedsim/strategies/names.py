"""Flower's strategies by name: those that need nothing of the client beyond an update."""

from typing import Any

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from defenses._registry import bind
from fedsim.strategies.central import wrap

NAMES = (
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedMedian",
    "FedTrimmedAvg",
    "FedYogi",
    "Krum",
    "MultiKrum",
)


def build(name: str, *, clients: int, fraction: float, **arguments: Any) -> Strategy:
    """The strategy `name` over `clients` clients, of which `fraction` are drawn a round; `arguments` are Flower's own.

    `central`, a table, is none of Flower's: it asks for noise on the server (`fedsim.strategies.central`).
    """
    if name not in NAMES:
        raise ValueError(f"strategy: unknown name {name!r}. Known: {', '.join(NAMES)}")
    drawn = max(1, int(clients * fraction))
    sampling = {
        "fraction_train": fraction,
        "fraction_evaluate": 0.0,
        "min_train_nodes": drawn,
        "min_evaluate_nodes": 0,
        "min_available_nodes": clients,
    }
    if fixed := sorted(set(arguments) & set(sampling)):
        raise ValueError(f"strategy.{fixed[0]} follows from clients.count and clients.fraction; set those")
    central = arguments.pop("central", None)
    factory = getattr(flower, name)
    bound: Strategy = factory(**bind(f"strategy {name}", factory, given={**sampling, **arguments}))
    return bound if central is None else wrap(bound, drawn, central)

"""Configuration of secure aggregation, and the agreement that follows from it for a federation."""

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from defenses._registry import suggest_name
from fedsim.recording.observation import Training
from fedsim.secagg.protocol.quantisation import MAX_SUM, Quantiser

AVERAGING_STRATEGIES = ("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedYogi")
"""Strategies that need only the weighted mean of the updates."""
DEFAULT_NEIGHBOURS = 64
MAX_WEIGHT = 1000
MIN_LEVELS = 127
"""Smallest `target_range` that is chosen if `bits` is not given. If 32-bit words leave less, `Terms.settle` raises."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Public settings that server and clients agree on.

    clients:    number of clients asked in each round.
    threshold:  number of clients that must answer every exchange. It is also the number of shares that determine a secret; fewer
                shares tell nothing about it.
    neighbours: number of other clients with which each client shares masks; even. If there are fewer other clients, all of them.
    clip, target_range, max_weight: see `Quantiser`.
    reveal:     whether clients also send their number of examples and their metrics unmasked.
    """

    clients: int
    threshold: int
    neighbours: int
    clip: float
    target_range: int
    max_weight: int
    reveal: bool = False

    def __post_init__(self) -> None:
        if self.clients < 2:
            raise ValueError(f"secure aggregation needs at least 2 clients a round: a sum over {self.clients} hides nothing")
        around = min(self.neighbours + 1, self.clients)
        if not 2 <= self.threshold <= around:
            raise ValueError(
                f"secure_aggregation.threshold must be from 2 to {around}, which is how many clients hold shares of a secret "
                f"(itself and up to {self.neighbours} neighbours of {self.clients} clients), got {self.threshold}"
            )
        _ = self.quantiser

    def list_warnings(self) -> list[str]:
        """Return what these settings do not protect against, as sentences that the server prints at its start."""
        around = min(self.neighbours + 1, self.clients)
        found = [
            "secure aggregation hides updates only from a server that follows the protocol. Public keys are not authenticated: "
            "a server that replaces them can read every update"
        ]
        if 2 * self.threshold <= around:
            found.append(
                f"secure_aggregation.threshold = {self.threshold} is at most half of the {around} clients that hold shares of a "
                "secret: a server that sends them different lists of the clients that dropped out can unmask single updates; "
                f"{around // 2 + 1} or more prevents that"
            )
        return found

    @property
    def quantiser(self) -> Quantiser:
        return Quantiser(clip=self.clip, target_range=self.target_range, clients=self.clients, max_weight=self.max_weight)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a manifest."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The table `secure_aggregation` of an experiment; every key may be left out.

    threshold:  see `Agreement`; by default n // 2 + 1, where n = min(neighbours + 1, clients) hold shares of a secret.
    neighbours: see `Agreement`.
    clip:       coordinates of an update are clipped to [-clip, clip]; their number is reported.
    bits:       bits per coordinate, including the sign; by default as many as fit into 32 for these clients and weights.
    max_weight: largest number of examples of a client; by default `batch_size * steps`, or 1000 if clients train epochs.
    reveal:     see `Agreement`.
    """

    threshold: int | None = None
    neighbours: int = DEFAULT_NEIGHBOURS
    clip: float = 3.0
    bits: int | None = None
    max_weight: int | None = None
    reveal: bool = False

    def __post_init__(self) -> None:
        for key, least, most in (("threshold", 2, 2**20), ("neighbours", 2, 2**20), ("bits", 2, 31), ("max_weight", 1, MAX_SUM)):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise ValueError(f"{key} must be a whole number from {least} to {most}, got {value!r}")
        if self.neighbours % 2:
            raise ValueError(f"neighbours must be even, got {self.neighbours}")
        if type(self.clip) not in (int, float) or not (isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip must be positive and finite, got {self.clip!r}")
        if type(self.reveal) is not bool:
            raise ValueError(f"reveal must be true or false (whether clients send metrics in clear), got {self.reveal!r}")

    @classmethod
    def parse(cls, value: Any) -> "Terms | None":
        """Parse `true`, `false` or a table; return None for `false`. Raises ValueError, naming the key, for anything else."""
        if isinstance(value, cls):
            return value
        if value is False:
            return None
        known = [field.name for field in fields(cls)]
        given = {} if value is True else value
        if not isinstance(given, dict):
            raise ValueError(f"expected false, true or a table of {', '.join(known)}, got {value!r}")
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(known)}.{suggest_name(unknown[0], known)}")
        return cls(**given)

    def settle(self, *, clients: int, training: Training, strategy: str, central: bool = False) -> Agreement:
        """Return the agreement for a federation with `clients` clients per round, with all defaults filled in.

        central: whether the strategy clips updates and adds noise on the server, which is an error.
        Raises ValueError for this and for anything else that secure aggregation rules out: a strategy that needs single updates,
        shared buffers, a `max_weight` below batch_size * steps, and sums that overflow.
        """
        check_strategy(strategy)
        if central:
            raise ValueError(
                "strategy.central clips each client's own update on the server, and with secure aggregation the server sees "
                "nothing but their weighted mean; let clients do it: defense = 'clip(...) | gaussian(...)'"
            )
        if training.buffers == "shared":
            raise ValueError(
                "training.buffers = 'shared' sends batch-norm statistics in clear, beside a masked update; use 'none' or 'local'"
            )
        most = training.batch_size * training.steps if training.steps else None
        weight = self.max_weight or most or MAX_WEIGHT
        if most is not None and weight < most:
            raise ValueError(f"secure_aggregation.max_weight must be at least batch_size * steps = {most}, got {weight}")
        return Agreement(
            clients=clients,
            threshold=self.threshold or min(self.neighbours + 1, clients) // 2 + 1,
            neighbours=self.neighbours,
            clip=float(self.clip),
            target_range=2 ** (self.bits - 1) - 1 if self.bits else _compute_range(clients, weight),
            max_weight=weight,
            reveal=self.reveal,
        )


def check_strategy(name: str) -> None:
    """Raise ValueError for a strategy that needs more than the weighted mean, such as each client's update."""
    if name not in AVERAGING_STRATEGIES:
        raise ValueError(
            f"strategy {name} acts on each client's own update, and with secure aggregation the server sees nothing but their "
            f"weighted mean; use one of {', '.join(AVERAGING_STRATEGIES)}, or secure_aggregation = false"
        )


def _compute_range(clients: int, weight: int) -> int:
    widest = MAX_SUM // (clients * weight)
    if widest < MIN_LEVELS:
        raise ValueError(
            f"{clients} clients with a weight of up to {weight} leave only a target range of {widest} in 32-bit words, so that "
            f"updates would be rounded more coarsely than with the minimum of {MIN_LEVELS}; lower secure_aggregation.max_weight "
            "or, to accept coarser rounding, set a small secure_aggregation.bits"
        )
    return widest

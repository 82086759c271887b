"""Settings of secure aggregation: the user's table of an experiment, and the complete settings that follow from it."""

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from defenses.registry import suggest_name
from fedsim.recording.training import Training
from fedsim.secagg.protocol.quantisation import MAX_SUM, Quantiser

AVERAGING_STRATEGIES = ("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedYogi")
"""Strategies that need only the weighted mean of the updates."""
DEFAULT_NEIGHBOURS = 64
MAX_WEIGHT = 1000
MIN_LEVELS = 127
"""Smallest `target_range` that is chosen if `bits` is not given; `SecureAggregationTable.settle` raises if words leave less."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Complete settings of secure aggregation, which are public and equal on the server and all clients.

    clients:    largest number of clients asked in a round.
    threshold:  smallest number of clients that must answer every exchange. It is also the number of shares that determine a
                secret; fewer shares tell nothing about it.
    neighbours: number of other clients that have a mask in common with each client and hold shares of its secrets; even. If there
                are fewer other clients, all of them do.
    clip, target_range, max_weight: see `Quantiser`.
    reveal:     whether clients also send their number of examples and their metrics unmasked.
    Raises ValueError for fewer than 2 clients, for a threshold below 2 or above the number of clients that hold shares of one
    secret (including its owner), and if `Quantiser` refuses its settings.
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
                f"secure_aggregation.threshold must be from 2 to {around}, the number of clients that hold shares of a secret "
                f"(its owner and up to {self.neighbours} neighbours of {self.clients} clients), got {self.threshold}"
            )
        _ = self.quantiser

    def list_warnings(self) -> list[str]:
        """Return warnings, each a text, of attacks that these settings do not prevent if the server breaks the protocol.

        The first one holds for all settings: a server can replace the public keys. A second one is added if the threshold is at
        most half the number of clients that hold shares of a secret.
        """
        around = min(self.neighbours + 1, self.clients)
        warnings = [
            "secure aggregation hides updates only from a server that follows the protocol. Public keys are not authenticated: "
            "a server that replaces them can read every update"
        ]
        if 2 * self.threshold <= around:
            warnings.append(
                f"secure_aggregation.threshold = {self.threshold} is at most half of the {around} clients that hold shares of a "
                "secret: a server that sends them different lists of the clients that dropped out can unmask single updates; "
                f"{around // 2 + 1} or more prevents that"
            )
        return warnings

    @property
    def quantiser(self) -> Quantiser:
        return Quantiser(clip=self.clip, target_range=self.target_range, clients=self.clients, max_weight=self.max_weight)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a dict from name to value that JSON can represent."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SecureAggregationTable:
    """The table `secure_aggregation` of an experiment; every key may be left out.

    threshold:  see `Agreement`; by default n // 2 + 1, where n = min(neighbours + 1, clients) hold shares of a secret.
    neighbours: see `Agreement`.
    clip:       coordinates of an update are clipped to [-clip, clip]; the number of clipped ones is reported.
    bits:       bits, including the sign, of the range to which coordinates are scaled: `target_range` of `Quantiser` is
                2^(bits - 1) - 1. By default, `target_range` is the largest whole number at which no 32-bit sum can overflow,
                (2^31 - 1) // (clients * max_weight), whether or not it has this form.
    max_weight: largest number of examples that a client may have; by default `batch_size * steps`, or 1000 if clients train
                whole epochs.
    reveal:     see `Agreement`.
    Raises ValueError for values out of range.
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
            raise ValueError(
                "reveal must be true or false (whether clients send their number of examples and metrics unmasked), got "
                f"{self.reveal!r}"
            )

    @classmethod
    def parse(cls, value: Any) -> "SecureAggregationTable | None":
        """Return the settings for `true` (all defaults) or a table, and None for `false`. Settings are returned unchanged.

        Raises ValueError for any other value, and for unknown keys and invalid values in the table.
        """
        if isinstance(value, cls):
            return value
        if value is False:
            return None
        known = [field.name for field in fields(cls)]
        settings = {} if value is True else value
        if not isinstance(settings, dict):
            raise ValueError(f"secure_aggregation must be false, true or a table of {', '.join(known)}, got {value!r}")
        if unknown := sorted(settings.keys() - set(known)):
            raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(known)}.{suggest_name(unknown[0], known)}")
        return cls(**settings)

    def settle(self, *, clients: int, training: Training, strategy: str, central: bool = False) -> Agreement:
        """Return the complete settings for a federation, with all defaults filled in.

        clients: number of clients per round. training: local training, which gives the default of `max_weight`.
        strategy: name of Flower's strategy. central: whether the server clips single updates and adds noise.
        Raises ValueError for settings that contradict secure aggregation: `central`, a strategy that needs single updates, shared
        buffers, a `max_weight` below batch_size * steps, fewer than 2 clients, a threshold above the number of share holders, and
        sums that overflow unless coordinates are rounded very coarsely.
        """
        check_strategy(strategy)
        if central:
            raise ValueError(
                "strategy.central clips each client's own update on the server, and with secure aggregation the server sees "
                "nothing but their weighted mean; let clients do it: defense = 'clip(...) | gaussian(...)'"
            )
        if training.buffers == "shared":
            raise ValueError(
                "training.buffers = 'shared' would send batch-norm statistics unmasked, beside a masked update; use 'none' or "
                "'local'"
            )
        maximum = training.batch_size * training.steps if training.steps else None
        weight = self.max_weight or maximum or MAX_WEIGHT
        if maximum is not None and weight < maximum:
            raise ValueError(f"secure_aggregation.max_weight must be at least batch_size * steps = {maximum}, got {weight}")
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
    """Raise ValueError unless `name` is one of `AVERAGING_STRATEGIES`, which need only the weighted mean of the updates."""
    if name not in AVERAGING_STRATEGIES:
        raise ValueError(
            f"strategy {name} acts on each client's own update, and with secure aggregation the server sees nothing but their "
            f"weighted mean; use one of {', '.join(AVERAGING_STRATEGIES)}, or secure_aggregation = false"
        )


def _compute_range(clients: int, weight: int) -> int:
    widest = MAX_SUM // (clients * weight)
    if widest < MIN_LEVELS:
        raise ValueError(
            f"{clients} clients of up to {weight} examples leave {widest} as the largest rounded value in 32-bit sums, below the "
            f"minimum of {MIN_LEVELS}; lower secure_aggregation.max_weight or, to accept coarser rounding, set a small "
            "secure_aggregation.bits"
        )
    return widest

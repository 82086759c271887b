"""Differential privacy that an experiment guarantees, round by round, against two observers.

* The honest-but-curious server receives each client's message and knows which clients it asked. Against it, only noise that the
  client itself adds counts, without amplification by sampling of clients.
* All other observers see only the global model. Against them, noise that the server adds counts (`central`), and the sampling of
  clients is secret. The server adds its noise after the messages are recorded, so that it does not protect against attacks on a
  recording.

The guarantees assume that the experiment's seed, from which the server's noise and the sampling are drawn, stays secret, as well
as a seed of the clients, if there is one. They cover updates only: numbers of examples and reported metrics are taken as public.
"""

import math
from dataclasses import dataclass
from typing import Any

from defenses.gradients import GradientSpec
from defenses.privacy.accounting import (
    check_delta,
    check_prior,
    compute_bound,
    compute_epsilon,
    compute_epsilon_drawn,
    compute_epsilon_poisson,
)
from defenses.privacy.sensitivity import NO_NOISE, Noise, find_gradient_noise, find_noise
from fedsim.config.experiment import Experiment
from fedsim.recording.training import Training

INFINITY_TEXT = "infinity"
"""Representation of an infinite epsilon in JSON, which has no such number."""
BUFFERS_UNPROTECTED = Noise(why="batch-norm statistics are sent without noise")
MIXED_UNPROTECTED = Noise(why="an example is part of several mixed examples, for which the noise does not account")
STRATEGY_NOT_A_MEAN = Noise(why="the noise is made for a mean of the updates, and this strategy computes no mean")


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """Noise, numbers of examples and settings from which the privacy of a federation is computed.

    client:   noise that a client adds to its update, relative to the largest norm of the update.
    example:  noise that a client adds to its gradients, relative to the largest norm of one example's gradient.
    training: local training of the clients, which says how often an example is used.
    size:     number of examples of the smallest client, which uses each of its examples most often over the whole run.
    others:   numbers of examples of the other clients. In one round, such a client may use an example twice although the smallest
              client uses each once, if an epoch ends within the round.
    released: noise that the server adds to the mean of m updates, relative to S / m, the most that one update clipped to norm S
              contributes to the mean; None if the server adds none.
    drawn, population: number of clients per round, and in total.
    delta:    delta of every epsilon.
    prior:    probability that an attacker who sees no message reconstructs an example.
    Raises ValueError if `delta` or `prior` is out of range.
    """

    client: Noise
    example: Noise
    training: Training
    size: int
    others: frozenset[int] = frozenset()
    released: Noise | None = None
    drawn: int = 1
    population: int = 1
    delta: float = 1e-5
    prior: float = 0.01

    def __post_init__(self) -> None:
        check_delta(self.delta)
        check_prior(self.prior)

    def make_row(self, number: int) -> dict[str, Any]:
        """Return the guarantee after round `number` as plain data, for a client that took part in every round.

        epsilon:            over all rounds so far; epsilon_round: of this round alone. An infinite one is `INFINITY_TEXT`.
        delta, prior:       as given.
        bound:              upper bound on the probability that an attacker reconstructs an example from all rounds so far.
        unit:               what the guarantee protects: "example" if only gradients have noise, otherwise "client", that is, its
                            whole update.
        relation:           "replace-one": neighbouring inputs differ in the content of one unit.
        why:                why there is no guarantee; missing if there is noise that gives one.
        epsilon_if_poisson: only for the unit "example": epsilon if batches were Poisson-sampled (add-or-remove-one), which they
                            are not.
        central:            a dict of the fields above except epsilon_if_poisson, against an observer of the global model only,
                            for the unit "client"; missing if the server adds no noise.
        """
        by_example = self.example.multiplier > 0 and not self.client.multiplier > 0
        if not by_example:
            return self._make_entry(self.client, "client", 1, number) | self._make_central(number)
        ever = count_uses(self.training, self.size, 1, number)
        now = max(count_uses(self.training, size, number, number) for size in {self.size, *self.others})
        steps = count_steps(self.training, self.size)
        rate = min(1.0, self.training.batch_size / self.size)
        poisson = compute_epsilon_poisson(self.example, delta=self.delta, times=steps * number, rate=rate)
        return (
            self._make_entry(self.example, "example", now, ever)
            | {"epsilon_if_poisson": _to_json(poisson)}
            | self._make_central(number)
        )

    def _make_entry(self, noise: Noise, unit: str, now: int, ever: int) -> dict[str, Any]:
        return {
            "epsilon": _to_json(compute_epsilon(noise, delta=self.delta, times=ever)),
            "epsilon_round": _to_json(compute_epsilon(noise, delta=self.delta, times=now)),
            "delta": self.delta,
            "unit": unit,
            "relation": "replace-one",
            "prior": self.prior,
            "bound": compute_bound(noise, prior=self.prior, times=ever),
        } | ({"why": noise.why} if noise.why else {})

    def _make_central(self, number: int) -> dict[str, Any]:
        """Return {"central": the guarantee against an observer of the global model only}; {} if the server adds no noise."""
        if self.released is None:
            return {}
        entry = self._make_entry(self.released, "client", 1, number)
        for key, times in (("epsilon", number), ("epsilon_round", 1)):
            drawn = compute_epsilon_drawn(
                self.released, delta=self.delta, times=times, drawn=self.drawn, population=self.population
            )
            entry[key] = _to_json(drawn)
        return {"central": entry}


def make_accounts(e: Experiment, *, tensors: int, smallest: int, others: frozenset[int] = frozenset(), buffers: bool) -> Accounts:
    """Return what the privacy of an experiment is computed from.

    tensors:  number of parameter tensors of the model, for defenses that bound the norm of each tensor separately.
    smallest: number of examples of the smallest client. others: numbers of examples of the other clients.
    buffers:  whether the model has batch-norm statistics. With `training.buffers = "shared"`, clients send them without noise, so
              that nothing is guaranteed (every epsilon is infinite).
    """
    example = MIXED_UNPROTECTED if e.inputs else find_gradient_noise(GradientSpec.parse(e.gradient), tensors=tensors)
    client, released = find_noise(e.parse_defense(), tensors=tensors), _find_released(e)
    if buffers and e.training.buffers == "shared":
        client = example = BUFFERS_UNPROTECTED
        released = released and BUFFERS_UNPROTECTED
    return Accounts(
        client=client,
        example=example,
        training=e.training,
        size=smallest,
        others=others,
        released=released,
        drawn=e.clients.drawn,
        population=e.clients.count,
        delta=e.privacy.delta,
        prior=e.privacy.prior,
    )


def _find_released(e: Experiment) -> Noise | None:
    """Return the noise that the server adds, by the table `strategy.central` of the experiment; None without this table.

    Its multiplier z stands for noise with standard deviation z * S / m on the mean of m updates clipped to norm S. For a strategy
    other than FedAvg, which computes no such mean, the returned multiplier is 0, which guarantees nothing.
    """
    central = e.strategy.arguments.get("central")
    if central is None:
        return None
    multiplier = float(central["noise_multiplier"])
    if e.strategy.name != "FedAvg":
        return STRATEGY_NOT_A_MEAN
    return Noise(multiplier) if multiplier else NO_NOISE


def count_steps(training: Training, size: int) -> int:
    """Return the number of optimiser steps in one round of a client with `size` examples."""
    return training.steps if training.steps is not None else (training.epochs or 1) * _count_batches(training, size)


def count_uses(training: Training, size: int, first: int, last: int) -> int:
    """Return an upper bound on the number of optimiser steps in rounds `first` to `last` that use the same example of a client.

    size: number of the client's examples. first, last: rounds from 1; both are included.
    The bound is the number of epochs that these rounds touch, since an epoch uses an example at most once. With `steps`, epochs
    continue across rounds; with `epochs`, each round begins with a new epoch.
    """
    if training.steps is None:
        return (training.epochs or 1) * (last - first + 1)
    epoch = _count_batches(training, size)
    return -(-training.steps * last // epoch) - training.steps * (first - 1) // epoch


def _count_batches(training: Training, size: int) -> int:
    """Return the number of batches in one epoch over `size` examples, at least 1."""
    return max(1, size // training.batch_size if training.drop_last else math.ceil(size / training.batch_size))


def _to_json(value: float) -> float | str:
    """Return `value`, or `INFINITY_TEXT` if it is infinite or NaN, which JSON cannot represent."""
    return value if math.isfinite(value) else INFINITY_TEXT

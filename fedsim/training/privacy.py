"""What an experiment promises in terms of differential privacy, round by round: its settings, put together for the accountant.

There are two observers. The honest-but-curious server gets each client's message, and knows whom it asked: only noise that the
client itself adds counts, and no sampling of clients makes it better. Everybody else sees no more than the global model: the
server's own noise counts as well (`central`), and clients are drawn in secret. That noise comes after the messages that are
recorded here: it protects against none of the attacks on a recording. It is drawn, as the clients are, from the experiment's
seed, which must stay as secret as the messages for any of this to hold. So must a seed that clients' secrets are drawn from, if
one is given: their noise follows from it, and comes again in every run with that seed.

All of it is about the updates. How many examples a client has, and the metrics that it reports, are taken to be public.
"""

import math
from dataclasses import dataclass
from typing import Any

from defenses.accounting import (
    bound_of,
    check_delta,
    check_prior,
    epsilon,
    epsilon_drawn,
    epsilon_poisson,
)
from defenses.gradients import GradientSpec
from defenses.sensitivity import NO_NOISE, Noise, noise_of, noise_of_gradient
from fedsim.config.experiment import Experiment
from fedsim.recording.observation import Training

INFINITY = "infinity"
"""How an infinite epsilon is written: JSON has no number for it."""
BUFFERS = Noise(why="batch-norm statistics are sent as they are")
MIXED = Noise(why="an example enters several mixed ones")
NOT_A_MEAN = Noise(why="the strategy is not the mean of the updates, for which the noise is made")


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """All that the privacy of a federation follows from.

    client:   what hides one client's update in what it sends. example: what hides one example in each gradient.
    size:     examples of the client that has the fewest, and so uses each most often in the end. others: of all others; one of
              them may use an example twice in a round that is a single epoch to the smallest.
    released: what hides one client's update in the mean over those drawn; None without central noise.
    drawn, population: clients in each round, and in all.
    delta:    of every epsilon. prior: chance of success of someone who sees no message, for the bound on reconstruction.
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

    def row(self, number: int) -> dict[str, Any]:
        """What holds after round `number`, as plain data: for a client that took part in every round.

        epsilon, bound: of all rounds so far. epsilon_round: of this one. unit: what is hidden, a whole client, or, where only its
        gradients have noise, an example, of the client that uses it most often. relation: between inputs that are hard to tell
        apart. why: what is missing where epsilon is infinite. epsilon_if_poisson: what it would be if each example entered each
        batch by chance, relation add-or-remove-one; batches here are not drawn so. central: the same for who sees only the global
        model.
        """
        by_example = self.example.multiplier > 0 and not self.client.multiplier > 0
        if not by_example:
            return self._entry(self.client, "client", 1, number) | self._central(number)
        ever = most_uses(self.training, self.size, 1, number)
        now = max(most_uses(self.training, size, number, number) for size in {self.size, *self.others})
        steps = steps_a_round(self.training, self.size)
        rate = min(1.0, self.training.batch_size / self.size)
        poisson = epsilon_poisson(self.example, delta=self.delta, times=steps * number, rate=rate)
        return self._entry(self.example, "example", now, ever) | {"epsilon_if_poisson": _written(poisson)} | self._central(number)

    def _entry(self, noise: Noise, unit: str, now: int, ever: int) -> dict[str, Any]:
        return {
            "epsilon": _written(epsilon(noise, delta=self.delta, times=ever)),
            "epsilon_round": _written(epsilon(noise, delta=self.delta, times=now)),
            "delta": self.delta,
            "unit": unit,
            "relation": "replace-one",
            "prior": self.prior,
            "bound": bound_of(noise, prior=self.prior, times=ever),
        } | ({"why": noise.why} if noise.why else {})

    def _central(self, number: int) -> dict[str, Any]:
        if self.released is None:
            return {}
        entry = self._entry(self.released, "client", 1, number)
        for key, times in (("epsilon", number), ("epsilon_round", 1)):
            drawn = epsilon_drawn(self.released, delta=self.delta, times=times, drawn=self.drawn, population=self.population)
            entry[key] = _written(drawn)
        return {"central": entry}


def accounts(e: Experiment, *, tensors: int, smallest: int, others: frozenset[int] = frozenset(), buffers: bool) -> Accounts:
    """The accounts of an experiment.

    tensors: number of the model's parameters, as tensors. smallest: examples of the client that has the fewest. others: of the
    others. buffers: whether the model has any, which clients send without noise where `training.buffers` is "shared".
    """
    example = MIXED if e.inputs else noise_of_gradient(GradientSpec.parse(e.gradient), tensors=tensors)
    client, released = noise_of(e.update_defense(), tensors=tensors), _released(e)
    if buffers and e.training.buffers == "shared":
        client = example = BUFFERS
        released = released and BUFFERS
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


def _released(e: Experiment) -> Noise | None:
    """The mean over m clients of updates of length S or less, with noise of multiplier z: its deviation is z * S / m."""
    central = e.strategy.arguments.get("central")
    if central is None:
        return None
    multiplier = float(central["noise_multiplier"])
    if e.strategy.name != "FedAvg":
        return NOT_A_MEAN
    return Noise(multiplier) if multiplier else NO_NOISE


def steps_a_round(training: Training, size: int) -> int:
    """Optimiser steps of a client with `size` examples in one round."""
    return training.steps if training.steps is not None else (training.epochs or 1) * _batches(training, size)


def most_uses(training: Training, size: int, first: int, last: int) -> int:
    """How many steps of rounds `first` to `last`, 1-based, one example of a client with `size` examples enters at most.

    An epoch has each example at most once; `steps` go on through the epoch from round to round, epochs start anew.
    """
    if training.steps is None:
        return (training.epochs or 1) * (last - first + 1)
    epoch = _batches(training, size)
    return -(-training.steps * last // epoch) - training.steps * (first - 1) // epoch


def _batches(training: Training, size: int) -> int:
    """In one epoch."""
    return max(1, size // training.batch_size if training.drop_last else math.ceil(size / training.batch_size))


def _written(value: float) -> float | str:
    return value if math.isfinite(value) else INFINITY

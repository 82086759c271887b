"""Settings for the simulation of a client's update from candidate examples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from attacker.attacks.simulation.client import (
    choose_simulated_steps,
    count_ordered_steps,
    draws_at_random,
    find_schedule,
    sends_signs,
)
from attacker.attacks.simulation.gradients import Gradients
from attacker.attacks.simulation.local_steps import build_stepped_gradient, count_separate_epochs
from fedsim.recording.observation import Observation
from fedsim.recording.training import Training

LocalSteps = Literal["one_batch", "simulated", "auto"]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The attacker's assumptions on what a client computed.

    local_steps:     "one_batch" treats all local steps as one step on all examples (AGIC); "simulated" simulates each step;
                     "auto" is "simulated" if every step of a client is on all of its examples, so that nothing about their order
                     is unknown, and otherwise "one_batch", see `adapt_to`; before a polish, the order is then inferred or
                     searched for, and the steps are simulated in it, see `count_ordered_steps`.
    surrogate:       if several local steps are treated as one, compute the gradient not at the weights sent, but at a point
                     between the weights sent and the weights returned; this point is optimised together with the examples
                     (SME). Not used for clients that send signs, from which no weights between can be known.
    order_invariant: if above 0, each simulated local epoch gets separate examples, and the loss penalises differences between the
                     means of the examples of different epochs, with this weight (Dimitrov et al. 2022).
    in_order:        compare the rounds of a client in order, with the simulated state of a defense such as error feedback,
                     instead of each separately.
    knows_defense:   compute gradients as the defense does (for example clipped per example), simulate its effect on the update,
                     leave out parameters whose gradients it replaces by random or wrong ones, and, for squared distances, do not
                     restart searches whose final loss is at the level of the defense's noise.
    draws:           search for what the client drew at random in one step, with the examples: the mixtures of MixUp, and the
                     masks of dropout (`simulation.draws`). If not set, examples are assumed to be unmixed, and dropout to keep
                     all values.
    """

    local_steps: LocalSteps = "one_batch"
    surrogate: bool = False
    order_invariant: float = 0.0
    in_order: bool = False
    knows_defense: bool = True
    draws: bool = False

    def __post_init__(self) -> None:
        if self.order_invariant and self.local_steps != "simulated":
            raise ValueError("order_invariant needs simulated local epochs; set local_steps=simulated")
        if self.surrogate and self.local_steps == "simulated":
            raise ValueError("surrogate replaces the simulation of local steps; set local_steps=one_batch, or surrogate=false")
        if self.draws and (self.surrogate or self.local_steps == "simulated" or self.in_order):
            raise ValueError(
                "draws=true searches for random numbers that a client drew in one local step, and needs local_steps=one_batch, "
                "surrogate=false and in_order=false; set these, or draws=false"
            )

    def adapt_to(self, observations: Sequence[Observation], model: nn.Module) -> "Simulation":
        """Return these settings for the observations of a case: without "auto", and with `surrogate` only where it is of use.

        `surrogate` is left out if the client took one step or sends signs, or if its steps are simulated.
        """
        if self.local_steps == "auto":
            simulated = self.count_simulated_steps(observations, model) > 1
            surrogate = self.surrogate and not simulated
            fixed = replace(self, local_steps="simulated" if simulated else "one_batch", surrogate=surrogate)
            return fixed.adapt_to(observations, model)
        _, steps = find_schedule(observations[0])
        unused = self.surrogate and (steps == 1 or sends_signs(observations[0]))
        return replace(self, surrogate=False) if unused else self

    def count_simulated_steps(self, observations: Sequence[Observation], model: nn.Module) -> int:
        """Return the largest number of local steps of a client in one round that "auto" simulates; 1 if it simulates none.

        It simulates none with `draws` or `in_order`, nor if the client sends signs, which fit the updates of many examples, or
        draws random numbers in its network, which are not known.
        """
        if not self._may_simulate_steps(observations, model):
            return 1
        steps = [
            (find_schedule(observation)[1], choose_simulated_steps(observation.training, observation.num_examples or 0))
            for observation in observations
        ]
        known = all(taken == repeated for taken, repeated in steps)
        return max(repeated for _, repeated in steps) if known else 1

    def count_ordered_steps(self, observations: Sequence[Observation], model: nn.Module) -> int:
        """Return the largest number of local steps of a client in one round if "auto" searches for the order in which the
        client used its examples (`simulation.step_orders`); 1 if it does not. Such steps are simulated in the order that is
        inferred from the update, or treated as one step at first if none is inferred.

        It does so where it would simulate the steps, if each were on all examples of the client, but not with `surrogate`.
        """
        if self.surrogate or not self._may_simulate_steps(observations, model):
            return 1
        ordered = 1
        for observation in observations:
            (sizes, taken), examples = find_schedule(observation), observation.num_examples or 0
            steps = count_ordered_steps(observation.training, examples) if len(sizes) > 1 else 1
            if taken not in (steps, choose_simulated_steps(observation.training, examples)):
                return 1
            ordered = max(ordered, steps)
        return ordered

    def _may_simulate_steps(self, observations: Sequence[Observation], model: nn.Module) -> bool:
        first, fixed = observations[0], self.local_steps != "auto" or self.draws or self.in_order
        return not (fixed or sends_signs(first) or draws_at_random(first, model))

    def build_gradient(
        self, gradient: Gradients, training: Training, sizes: Sequence[int], frozen: frozenset[str] = frozenset()
    ) -> Gradients:
        """Return the function that computes a client's gradient: `gradient` itself for "one_batch", or one that simulates steps.

        "auto" must have been replaced, see `adapt_to`.

        gradient: computes the gradient of one batch. sizes: batch sizes, one per local step. frozen: names of parameters that are
        not trained.
        """
        return gradient if self.local_steps == "one_batch" else build_stepped_gradient(gradient, training, sizes, frozen)

    def count_epochs(self, training: Training) -> int:
        """Return the number of epochs with separate examples: 1 if `order_invariant` is 0, or if clients train by steps."""
        return count_separate_epochs(self.order_invariant, training)

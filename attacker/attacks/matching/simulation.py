"""How the update of a client is simulated from a guess of its examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attacker.attacks.simulation import local_epochs
from attacker.attacks.simulation.gradients import Gradients
from attacker.attacks.simulation.local_steps import after_local_steps
from fedsim.recording.observation import Training

LocalSteps = Literal["one_batch", "simulated"]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a client is taken to have computed.

    local_steps: one_batch takes all steps of a client as one on all its examples (AGIC); simulated goes through them one by one.
    surrogate: the one batch is taken at weights between those sent and those sent back; how far is searched for (SME).
    order_invariant: above 0, examples of each simulated local epoch are their own, tied together by a prior of this weight.
    knows_defense: compute gradients by the clients' own rule, pass the simulated update through the channel of the defense, leave
                   out what misleads, and start again only where more than the noise is left unexplained.
    """

    local_steps: LocalSteps = "one_batch"
    surrogate: bool = False
    order_invariant: float = 0.0
    knows_defense: bool = True

    def __post_init__(self) -> None:
        if self.order_invariant and self.local_steps != "simulated":
            raise ValueError("order_invariant ties the local epochs of a simulation: set local_steps to simulated")
        if self.surrogate and self.local_steps == "simulated":
            raise ValueError("surrogate weights stand for the local steps: set local_steps to one_batch")

    def whole(self, gradient: Gradients, training: Training, sizes: Sequence[int]) -> Gradients:
        """Return the gradient of all examples as one batch, or the one that all local steps on them add up to.

        gradient: of one batch. sizes: of the batches, in the order of steps.
        """
        return gradient if self.local_steps == "one_batch" else after_local_steps(gradient, training, sizes)

    def epochs(self, training: Training) -> int:
        """Return how many local epochs have examples of their own: 1 without their prior, or of a client that makes one."""
        return local_epochs.separate(self.order_invariant, training)

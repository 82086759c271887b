"""An attack: a plain class with `needs`, `device`, `null` and a call."""

from collections.abc import Sequence
from time import perf_counter
from typing import Literal

import torch
from torch import Generator, Tensor

from attacker.attacks import Case, Memory, Need, Progress, seed_generator
from attacker.reconstruction import Reconstruction, list_slots


class FirstLayer:
    """An attack on one example and a first linear layer: row i of the weight's gradient is the bias gradient i times the input.

    row: "largest" uses the row with the largest bias gradient; "mean" averages all rows, weighted by their bias gradients.
    """

    device = "cpu"
    needs = frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.SINGLE_EXAMPLE})

    def __init__(self, *, row: Literal["largest", "mean"] = "largest") -> None:
        if row not in ("largest", "mean"):
            raise ValueError(f"first_layer: row must be 'largest' or 'mean', got {row!r}")
        self.row = row

    def null(self) -> "FirstLayer":
        """Return the attack itself, since a null gets updates of zeros, for which this attack guesses at random."""
        return self

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction for each case."""
        return [self._solve(case, rng) for case in cases]

    def _solve(self, case: Case, rng: Generator) -> Reconstruction:
        started, (seen,) = perf_counter(), case.observations
        tensors = list(seen.update.values())
        weight, bias, last = tensors[0].flatten(1), tensors[1], tensors[-1]
        if not bias.any():
            x = torch.rand(seen.data.size, generator=seed_generator(rng, case, "guess"))
        elif self.row == "largest":
            x = weight[bias.abs().argmax()] / bias.abs().max() * bias[bias.abs().argmax()].sign()
        else:
            x = (weight * bias[:, None]).sum(dim=0) / bias.square().sum()
        return Reconstruction(
            case=case.key,
            x=seen.data.denormalise(x.reshape(1, *seen.data.shape)),
            y=_label(last),
            confidence=torch.full((1,), torch.nan),
            slots=list_slots(seen.round, seen.client, (1,)),
            loss=torch.zeros(1),
            iterations=1,
            evaluations=0,
            restarts=1,
            seconds=perf_counter() - started,
            route="first layer",
            attack="first_layer",
            oracles=(),
            seed=rng.initial_seed(),
        )


def _label(bias: Tensor) -> Tensor:
    """Return the only class whose logit the update increases."""
    return bias.argmax().reshape(1)

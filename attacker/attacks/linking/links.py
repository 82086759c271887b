"""What is claimed about which places of several observations hold the same example."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Links:
    """Which examples the observations of a case share.

    places:     one tensor (N_o,) int64 for each observation: the number of the example at each of its places. Numbers run from
                0, each is used, and none twice in one observation.
    confidence: (examples,) in [0, 1]: how sure it is that all places of an example are its own; 1 for one that has only one.
    labels:     (examples,) int64: what each example's label was inferred to be; None where nobody asked.
    epochs:     the 1-based epoch of its client that each observation began in; empty where nobody asked.
    notes:      what linking says of the observations, in words: epochs, gaps, what was left out.
    """

    places: tuple[Tensor, ...]
    confidence: Tensor
    labels: Tensor | None = None
    epochs: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        each = [places.tolist() for places in self.places]
        used = sorted(set().union(*each))
        if used != list(range(len(self.confidence))):
            raise ValueError(f"links number examples {used}, and there are {len(self.confidence)}")
        for places in each:
            if len(set(places)) != len(places):
                raise ValueError(f"links put one example twice into one observation: {places}")

    @property
    def examples(self) -> int:
        """How many examples there are in all."""
        return len(self.confidence)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Places of each observation."""
        return tuple(len(places) for places in self.places)


def unlinked(sizes: Sequence[int], notes: tuple[str, ...] = ()) -> Links:
    """No two places hold the same example."""
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    places = tuple(torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False))
    return Links(places, torch.ones(sum(sizes)), notes=notes)

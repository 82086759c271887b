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
    notes:      what linking says of the observations, in words: epochs, gaps, what was left out.
    """

    places: tuple[Tensor, ...]
    confidence: Tensor
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = torch.cat(self.places).unique() if self.places else torch.empty(0, dtype=torch.long)
        if not torch.equal(used, torch.arange(len(self.confidence))):
            raise ValueError(f"links number examples {used.tolist()}, and there are {len(self.confidence)}")
        for places in self.places:
            if len(places.unique()) != len(places):
                raise ValueError(f"links put one example twice into one observation: {places.tolist()}")

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
    return Links(places, torch.ones(sum(sizes)), notes)

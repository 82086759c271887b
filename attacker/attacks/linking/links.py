"""Links: statements about which places (positions of examples in observations) hold the same example."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Links:
    """The examples of a case (observations that are attacked together), and the places at which each occurs.

    places:     one tensor (N_o,) int64 per observation of N_o examples: the number of the example at each place. Numbers are
                contiguous from 0, and none occurs twice in one observation.
    confidence: (examples,) in [0, 1]: estimated certainty that all places of an example are correct; 1 for an example with one
                place.
    labels:     (examples,) int64 inferred labels, or None.
    epochs:     1-based number of the pass over the examples (epoch) to which each observation belongs; empty if unknown.
    notes:      remarks on the observations, such as passes, gaps and rounds left out.
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
            raise ValueError(
                f"Links.confidence has one entry for each of {len(self.confidence)} examples, so that Links.places must use all "
                f"example numbers from 0 to {len(self.confidence) - 1}, got {used}"
            )
        for places in each:
            if repeated := [example for example, count in Counter(places).items() if count > 1]:
                raise ValueError(
                    f"Links.places must hold an example once per observation, got example {repeated[0]} twice in {places}"
                )

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.confidence)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each observation: the length of its tensor in `places`."""
        return tuple(len(places) for places in self.places)


def build_unlinked(sizes: Sequence[int], notes: tuple[str, ...] = ()) -> Links:
    """Return links in which no two places hold the same example. sizes: number of examples of each observation."""
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    places = tuple(torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False))
    return Links(places, torch.ones(sum(sizes)), notes=notes)


def repeat_links(links: Links, epochs: int) -> Links:
    """Return links for `epochs` local epochs that are simulated with separate examples.

    The places of each observation are repeated for every epoch e = 0, 1, ...; in epoch e they hold separate examples, whose
    numbers are larger by e times the number of examples of one epoch.
    """
    places = tuple(torch.cat([own + epoch * links.examples for epoch in range(epochs)]) for own in links.places)
    labels = None if links.labels is None else links.labels.repeat(epochs)
    return replace(links, places=places, confidence=links.confidence.repeat(epochs), labels=labels)

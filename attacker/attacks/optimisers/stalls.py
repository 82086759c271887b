"""Stalled searches: their loss stays near the loss of a plain grey image and hardly falls any more.

In deep networks, and in vision transformers above all, most of an update depends on the labels. A search then reaches the loss of
a grey image within a few iterations, far below its loss at the start, and the small rest holds too little of the examples.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A test whether a search is stalled: both limits must be exceeded. All losses are best losses so far.

    after, since: numbers of iterations: the test is made after `after` iterations, and compares with the loss after `since`.
    plain:        the loss must be above this share of the loss of plain examples (grey images).
    fall:         the loss must be above this share of the loss after `since` iterations.
    least:        smallest maximum number of iterations of a search for which the test is made.
    """

    after: int
    since: int
    plain: float
    fall: float
    least: int = 0

    def find(self, *, loss: Tensor, earlier: Tensor, plain: Tensor) -> Tensor:
        """Return a mask (P,) of the searches that are stalled.

        All arguments are losses (P,), after the loss that known noise causes is subtracted.
        loss, earlier: best losses after `after` and `since` iterations. plain: losses of plain examples.
        """
        return (loss > self.plain * plain) & (loss > self.fall * earlier)


INVERTING_STALL = Stall(after=45, since=22, plain=0.55, fall=0.75, least=300)
"""The test of Inverting Gradients; chosen on the tuning part of benchmarks/support/splits.py (benchmarks/tuning.py give_up)."""

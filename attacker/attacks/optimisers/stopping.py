"""Stopping rules of a search: convergence, no further progress, and hopeless or stalled searches that are given up.

In deep networks, and in vision transformers above all, most of an update depends on the labels. A search then reaches the loss of
a grey image within a few iterations, far below its loss at the start, and the small rest holds too little of the examples. Such a
search is called stalled.
"""

from dataclasses import dataclass

from torch import Tensor

MIN_GIVE_UP_STEPS = 30
"""Number of iterations before which a problem is given up only by `Stop.early` and `Stop.stall`."""
GIVE_UP_SHARE = 0.1
"""Share of the steps after which Inverting Gradients gives up problems with a high loss for the last time. The test for stalled
problems (`Stall`) is made at a fixed iteration, which may be later."""
MIN_HOPELESS_LOSS = 0.15
"""Share of the loss at the start above which a problem is hopeless, if the loss is also above MIN_UNEXPLAINED_LOSS."""
EARLY_LIMITS = ((6, 0.4), (15, 0.22), (MIN_GIVE_UP_STEPS, MIN_HOPELESS_LOSS))
"""Iterations of Inverting Gradients, each with the share of the loss at the start above which a problem is hopeless after that
iteration. With MIN_HOPELESS_LOSS and GIVE_UP_SHARE, they were chosen on the tuning part of benchmarks/support/splits.py
(benchmarks/tuning.py give_up)."""
MIN_UNEXPLAINED_LOSS = 0.1
"""Share of the loss of a zero gradient up to which no problem is given up because of a high loss; with batch norm, a start may
be below it."""


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


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Settings that decide when a search ends, and when it is started again from another point.

    An iteration consists of one or several gradient evaluations, see `Optimiser.period`. The zero loss of a problem is the loss
    of candidates whose simulated gradient is zero, that is the distance between the observed gradient and zero.
    tolerance: a problem has converged if its best loss is at most this value.
    precision: a problem has also converged if its best loss is at most this share of the zero loss.
    patience:  number of successive iterations without progress after which the search for a problem stops.
    decrease:  an iteration makes progress if the best loss after it is less than 1 - `decrease` times the best loss after the
               last progress.
    stuck:     share of the zero loss. Another start is made, if one is left, only if the final loss is above this share and above
               `tolerance`. The caller may raise this threshold, for example for noise.
    give_up:   share of the maximum number of iterations after which hopeless problems are stopped, but not before
               `MIN_GIVE_UP_STEPS` iterations. Problems are tested once, after that iteration, and also after the iterations of
               `early` and `stall`. 0 never stops a problem as hopeless, and ignores `early` and `stall`.
    hopeless, unexplained: a problem is hopeless if its best loss is above the share `hopeless` of the loss at its starting point,
               and also above the share `unexplained` of the zero loss. All losses are compared after the loss that known noise
               causes (`Problems.floor`) is subtracted.
    early:     pairs of an iteration and a share: problems are also tested right after this iteration, with the share in place of
               `hopeless`. Pairs with an iteration later than the share `give_up` of all iterations are ignored.
    stall:     a problem is also hopeless, whatever `hopeless` and `unexplained` say, if this test finds that it is stalled near
               the loss of plain examples (`Problems.plain`).

    `descend` does not know the zero loss: its caller computes the losses for tolerance, precision and unexplained, see
    `Problems`, and makes other starts.
    """

    tolerance: float = 0.0
    precision: float = 0.0
    patience: int = 20
    decrease: float = 0.05
    stuck: float = 1e-3
    give_up: float = 0.0
    hopeless: float = MIN_HOPELESS_LOSS
    unexplained: float = MIN_UNEXPLAINED_LOSS
    early: tuple[tuple[int, float], ...] = ()
    stall: Stall | None = None

    def get_hopeless_loss(self, iteration: int, steps: int) -> float:
        """Return the share of the loss at the start above which a problem is hopeless after this iteration; inf without a test.

        iteration: its number, from 1. steps: maximum number of iterations.
        """
        last = round(self.give_up * steps)
        if self.give_up > 0 and iteration == max(MIN_GIVE_UP_STEPS, last):
            return self.hopeless
        return dict(self.early).get(iteration, float("inf")) if iteration <= last else float("inf")

    def get_stall(self, iteration: int, steps: int) -> Stall | None:
        """Return the test for stalled problems if it is due, else None. Arguments as in `get_hopeless_loss`."""
        is_due = self.stall is not None and self.stall.after == iteration and self.stall.least <= steps
        return self.stall if is_due and self.give_up > 0 else None


PLATEAU_STOP = Stop(precision=1e-8, patience=10, decrease=0.05)
"""Default stopping rule for L-BFGS: a problem is stopped after 10 iterations that decreased its loss by less than 5 %."""
INVERTING_STALL = Stall(after=45, since=22, plain=0.55, fall=0.75, least=300)
"""The test of Inverting Gradients; chosen on the tuning part of benchmarks/support/splits.py (benchmarks/tuning.py give_up)."""

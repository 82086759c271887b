"""Routing: closed forms (routes) tried in turn on cases, of which each case keeps the best answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator

from attacker.attacks.base import Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.closed_form.any_loss import can_measure_any_loss, measure_any_loss
from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations, observe
from attacker.attacks.closed_form.rgap.recursion import RgapSettings
from attacker.attacks.closed_form.routes import ROUTES, explain_error
from attacker.attacks.confidence import MIN_CERTIFIED_STAYS
from attacker.attacks.matching.warm_starts import WarmStart

EXACT_DISTANCE = 1e-3
"""Largest distance between the gradient of an exact answer and the observed one, relative to the norm of the observed one."""
NEAR_DISTANCE = 0.1
"""Distance of gradients, as for EXACT_DISTANCE, up to which an answer is not displaced by a final one that fits less well. If
clients compute in half precision, right answers are not exact."""
MAX_REST = 1e-6
"""Largest share of the squared norm of the first layer's gradient that a single example leaves unexplained if it is read off."""
OTHER_LOSS = (
    "the examples explain the gradient, but with another loss or learning rate than stated, such as label smoothing or the "
    "squared error of a regression; labels may be wrong then"
)


@dataclass
class RoutedCase:
    """The best answer to one case so far.

    missed:  distance between the answer's gradient and the observed one, relative to the norm of the observed one; inf without an
             answer.
    tried:   number of answers checked.
    reasons: dict from the name of a closed form to why it gave no answer; those that were tried on the gradient come before those
             that do not suit the network, since long lists are cut.
    open_question: the first `ClosedFormAnswer.open_question` of all answers, which may also be true of the other answers.
    """

    answer: ClosedFormAnswer | None = None
    missed: float = float("inf")
    tried: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    open_question: str = ""

    @property
    def exact(self) -> bool:
        return self.missed <= EXACT_DISTANCE

    @property
    def final(self) -> bool:
        """Whether no search starts from the answer, even if it is not exact, see `ClosedFormAnswer.final`."""
        return self.answer is not None and self.answer.final

    @property
    def reads_example(self) -> bool:
        """Whether the answer is a single example that divides the first layer's gradient without a rest.

        An estimate with a prior is then no better, even if the rest of the gradient fits it less badly, as with another loss.
        """
        stays = None if self.answer is None or self.answer.route != "linear" else self.answer.stays
        return stays is not None and len(stays) == 1 and float(stays) >= 1 - MAX_REST

    def is_better(self, missed: float) -> bool:
        """Return whether the answer is kept in place of a final one with the distance `missed`, which is not exact."""
        near = self.missed <= min(missed, NEAR_DISTANCE) and not self.is_ambiguous
        return self.exact or near or (missed > EXACT_DISTANCE and self.reads_example)

    @property
    def is_ambiguous(self) -> bool:
        """Whether, by count of equations, other inputs have the same gradient as the answer; another route may then do better."""
        return self.answer is not None and self.answer.determined < 1


class Routing:
    """The best answers of closed forms to cases that agree in model, data, training settings, defense and number of examples.

    Raises ValueError if the gradient of a case is zero or not finite.

    routes, rgap, stability, knows_defense: as for `ClosedForm`.
    observed: the stacked observations of all cases. routed: for each case, its best answer so far.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        rng: Generator,
        *,
        routes: Sequence[str],
        rgap: RgapSettings,
        stability: bool,
        knows_defense: bool,
        device: str,
        progress: Progress | None = None,
    ) -> None:
        self.cases, self.rng, self.progress = cases, rng, progress
        self.routes, self.rgap, self.stability = routes, rgap, stability
        self.observed = observe(cases, knows_defense=knows_defense, device=device)
        self.routed = [RoutedCase() for _ in cases]
        self._refused = {i: reason for i in range(len(cases)) if (reason := self.observed.explain_other_optimiser(i))}

    def answer(self) -> None:
        """Try the closed forms (routes) in order, and store in `routed` the best answer to each case and why others gave none.

        Each is tried only on the cases whose best answer so far is not final, and is not exact or not unique
        (`RoutedCase.is_ambiguous`). None is tried on updates of another optimiser than stated.
        """
        for row, reason in self._refused.items():
            self.routed[row].reasons["optimiser"] = reason
        able = [(row, routed) for row, routed in enumerate(self.routed) if row not in self._refused]
        for i, route in enumerate(self.routes):
            pending = [row for row, routed in able if not routed.final and (not routed.exact or routed.is_ambiguous)]
            if pending:
                if self.progress is not None:
                    self.progress(i, len(self.routes), f"{route}: {len(pending)} of {len(self.cases)} left")
                self._try(route, pending)

    def get_warm_start(self, i: int) -> WarmStart | None:
        """Return the best answer to case i, clamped to [0, 1], as a start; None if it explains nothing of the gradient."""
        routed = self.routed[i]
        if routed.answer is None or routed.missed >= 1:
            return None
        return WarmStart(routed.answer.x.clamp(0, 1), routed.answer.y, alone=routed.answer.likeliest)

    def _try(self, route: str, pending: list[int]) -> None:
        """Try one route on the cases with indices `pending`, and keep answers that are better than the present ones.

        A new answer replaces the present one in three cases: its gradient is nearer to the observed one, unless it is not exact
        and the present one is read off (`RoutedCase.reads_example`); it is exact, and the present one has fewer independent
        equations than unknowns, so that it is not unique (`is_ambiguous`); or no search may start from it (`final`), and the
        present one is not better (`RoutedCase.is_better`). Answers with NaN or infinite values are dropped. If the route raises
        an error, its message is stored in `RoutedCase.reasons` of these cases.
        """
        try:
            self._apply(route, pending)
        except Exception as error:  # the next routes and the search may still answer; a user's network may fail in any way
            for i in pending:
                self.routed[i].reasons[route] = explain_error(route, error)

    def _apply(self, route: str, pending: list[int]) -> None:
        """Try a route as `_try` describes, without catching its errors, among them ValueError if the route does not apply."""
        observed = self.observed.select(pending)
        answers = list(ROUTES[route](observed, self.rng, self.rgap))
        for row, (i, answer) in enumerate(zip(pending, tuple(answers), strict=True)):
            routed, missed = self.routed[i], observed.measure_misfit(row, answer.x, answer.y)
            if missed > EXACT_DISTANCE and can_measure_any_loss(observed) and _has_all_examples(answer, observed.examples):
                nearest = measure_any_loss(observed, row, answer.x)
                if nearest <= EXACT_DISTANCE:
                    answer, missed = _allow_any_loss(answer), nearest
                    answers[row] = answer
            routed.tried += 1
            routed.open_question = routed.open_question or answer.open_question
            if not len(answer.x):
                routed.reasons = {route: "; ".join(answer.notes), **routed.reasons}
            elif bool(torch.isfinite(answer.x).all()) and (
                (routed.is_ambiguous and missed <= EXACT_DISTANCE)
                or (missed < routed.missed and (missed <= EXACT_DISTANCE or not routed.reads_example))
                or (answer.final and not routed.is_better(missed))
            ):
                routed.answer, routed.missed = answer, missed
        if self.stability:
            self._measure_stability(route, observed, pending, answers)

    def _measure_stability(
        self, route: str, observed: StackedObservations, pending: list[int], answers: Sequence[ClosedFormAnswer]
    ) -> None:
        """Repeat a route on a gradient with added rounding errors, and store in `stays` how little each exact answer changes.

        This is done for answers that the route has just given, that were kept, and that have no `stays` yet. The errors are
        random, as large as those of rounding to float32. `stays` of an example is one minus its mean squared change
        relative to the variance of its values, at least 0, times the answer's `determined`.
        """
        new = [
            self.routed[i].exact and self.routed[i].answer is a and a.stays is None for i, a in zip(pending, answers, strict=True)
        ]
        rows = [row for row, is_new in enumerate(new) if is_new]
        if not rows:
            return
        rngs = [seed_generator(self.rng, self.cases[pending[row]], "rounding") for row in rows]
        jittered = observed.select(rows)
        jittered = replace(jittered, gradient=jittered.jitter(rngs))
        for row, repeated in zip(rows, ROUTES[route](jittered, self.rng, self.rgap), strict=True):
            routed, answer = self.routed[pending[row]], answers[row]
            spread = answer.x.flatten(1).var(dim=1).clamp(min=torch.finfo(answer.x.dtype).tiny)
            moved = (answer.x - repeated.x).flatten(1).square().mean(dim=1)
            stays = (1 - moved / spread).nan_to_num(nan=0.0).clamp(0, 1)
            routed.answer = replace(answer, stays=stays * answer.determined)


def _has_all_examples(answer: ClosedFormAnswer, examples: int) -> bool:
    """Return whether the answer has all examples of the batch, each of them once, with finite values."""
    x = answer.x.flatten(1)
    return len(x) == examples and bool(torch.isfinite(x).all()) and len(torch.unique(x, dim=0)) == examples


def _allow_any_loss(answer: ClosedFormAnswer) -> ClosedFormAnswer:
    """Return an answer that explains the gradient with another loss. Several such examples may be mixtures, and are doubted."""
    stays = answer.stays
    if stays is not None and len(answer.x) > 1:
        stays = stays.masked_fill(stays < MIN_CERTIFIED_STAYS, torch.nan)
    return replace(answer, stays=stays, notes=(*answer.notes, *answer.doubts, OTHER_LOSS))

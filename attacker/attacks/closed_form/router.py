"""Router: an attack that tries closed forms in order, checks each answer by its gradient, and may search if none is exact.

A case is the observations that are attacked together: one round of a client, or several. A route is one of the methods that an
attack tries in turn; here, a closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Generator

from attacker.attacks.base import Case, Effort, Memory, Need, Progress, RoutePlan, estimate_effort, find_unmet, seed_generator
from attacker.attacks.closed_form.observations import Observed, observe
from attacker.attacks.closed_form.rgap.inversion import ClosedFormAnswer
from attacker.attacks.closed_form.rgap.walk import DEFAULT_WALK, Walk
from attacker.attacks.closed_form.routes import EVALUATIONS, ROUTES, explain_error, explain_refusal
from attacker.attacks.confidence import MIN_CERTIFIED_STAYS, doubt_likely, judge_closed_form, judge_prior
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.warm_starts import Given
from attacker.attacks.nulls import blind_cases
from attacker.attacks.simulation.client import find_schedule
from attacker.reconstruction import Reconstruction, list_slots

MAX_NOISE_RATIO = 1.1
"""A search result is preferred to a closed form if its distance to the observed gradient is at most this multiple of the known
noise: a closed form with a smaller distance then fits the noise."""
EXACT_DISTANCE = 1e-3
"""Largest distance between the gradient of an exact answer and the observed one, relative to the norm of the observed one."""
WHOLE_NETWORK_ROUTES = ("layers", "peeled")
MAX_UNDEFENDED_DISTANCE = 0.3
"""Distance from which answers of WHOLE_NETWORK_ROUTES are undecided if no defense explains it."""
CHANGED_INPUTS = (
    "clients draw random numbers before the first layer, such as dropout of inputs, and the values are those of the examples "
    "after that"
)
UNEXPLAINED_GRADIENT = (
    "the answer does not explain the gradient, and no defense is stated: more examples are behind the update than reported, or "
    "clients train otherwise than stated (loss, learning rate, steps, frozen layers)"
)
MIN_CERTIFIED_CONFIDENCE = 0.9
"""Smallest confidence in the examples of a certified answer. Undecided confidence is no reason against an answer."""


@dataclass(kw_only=True)
class ClosedForm:
    """An attack that tries closed forms before a search.

    routes:    names of closed forms in `ROUTES`, tried in order until an answer is `final`, or until it is exact and, by count of
               equations, the only input with this gradient.
    fallback:  search for cases without an exact or `final` answer, started from the best answer. Of the search's answer and the
               closed form's, the one whose gradient is nearer to the observed one is returned, or the search's answer if the
               closed form's would fit noise. Without a fallback, the best closed-form answer is returned.
    walk:      settings of R-GAP.
    stability: whether to repeat a closed form with an exact answer on a gradient with added random rounding errors, and lower the
               confidence by how much the answer changes, if the closed form does not measure its certainty itself.
    knows_defense: whether simulated gradients go through the model of the defense before they are compared; closed forms use the
               gradient as received in either case.
    sees_gradient: False gives the null, the attack without the gradient: the fallback's null, or grey images without a fallback.
    """

    name: str
    routes: tuple[str, ...] = tuple(ROUTES)
    fallback: GradientMatching | None = None
    walk: Walk = DEFAULT_WALK
    stability: bool = True
    knows_defense: bool = True
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES}))
    device: str = "cpu"

    @property
    def effort(self) -> Effort:
        return estimate_effort(self.fallback)

    def null(self) -> "ClosedForm":
        return replace(self, sees_gradient=False)

    def plan(self, case: Case) -> RoutePlan:
        """Return for each route why it cannot apply to a case, or "" if it may, before any is tried.

        A route is a closed form. The plan also holds the number of gradient evaluations of the routes that may apply. For a null
        (the attack without the gradient) it has no routes. Raises ValueError if the gradient is zero or not finite.
        """
        if not self.sees_gradient or not self.routes:
            return RoutePlan()
        observed = observe([case], knows_defense=self.knows_defense, device=self.device)
        reasons = {route: explain_refusal(route, observed) for route in self.routes}
        return RoutePlan(reasons, sum(EVALUATIONS.get(route, 0) for route, reason in reasons.items() if not reason))

    def certify(self, case: Case, *, rng: Generator) -> Reconstruction | None:
        """Return the closed forms' answer to a case if it is certified, without a search; None otherwise.

        A certified answer is exact and has all examples of the batch. At least the share MIN_CERTIFIED_STAYS of each example is
        determined by the gradient and not by a prior. The confidence in each example is undecided or at least
        MIN_CERTIFIED_CONFIDENCE. If a defense adds noise above EXACT_DISTANCE of the gradient's norm, nothing is certified, since
        an exact answer would fit the noise. Raises ValueError if the gradient is zero or not finite.
        """
        if observe([case], knows_defense=self.knows_defense, device=self.device).estimate_noise(0) > EXACT_DISTANCE:
            return None
        return Routing(self, [case], rng, None).certify(0)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Attack `cases`, which must agree in model, data, training settings, defense and number of examples.

        Returns one reconstruction per case, in order; if the user interrupts the search, cases without any answer are left out.
        memory: storage for checkpoints, which only the fallback uses.
        Raises ValueError with the reasons if no closed form answers one of the cases, and no fallback can search for it, and if
        the gradient of a case is zero or not finite.
        """
        return Routing(self, cases if self.sees_gradient else blind_cases(cases), rng, progress, memory).run()


@dataclass
class _Found:
    """The best answer to one case so far.

    missed:  distance between the answer's gradient and the observed one, relative to the norm of the observed one; inf without an
             answer.
    tried:   number of answers checked.
    reasons: dict from the name of a closed form to why it gave no answer.
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
    def open(self) -> bool:
        """Whether, by count of equations, other inputs have the same gradient as the answer; another route may then do better."""
        return self.answer is not None and self.answer.determined < 1


class Routing:
    """The state of one call of a `ClosedForm`: the best answers so far to its cases."""

    def __init__(
        self, attack: ClosedForm, cases: Sequence[Case], rng: Generator, progress: Progress | None, memory: Memory | None = None
    ) -> None:
        self.attack, self.cases, self.rng, self.progress, self.memory = attack, cases, rng, progress, memory
        self.found = [_Found() for _ in cases]

    def run(self) -> list[Reconstruction]:
        if not self.attack.sees_gradient:
            return self._run_null()
        started = perf_counter()
        self.answer()
        seconds = (perf_counter() - started) / len(self.cases)
        rest = [i for i, found in enumerate(self.found) if not found.exact and not found.final]
        searched = self._search(rest) if rest else {}
        cut_off = any(one.interrupted for one in searched.values())
        said = [i for i, found in enumerate(self.found) if not cut_off or i in searched or found.answer is not None]
        return [self._build_reconstruction(i, seconds, searched.get(i)) for i in said]

    def answer(self) -> None:
        """Try the closed forms (routes) in order, and store in `found` the best answer to each case and why others gave none.

        Each is tried only on the cases whose best answer so far is not final, and is not exact or not unique (`_Found.open`).
        Sets `observed`, the stacked observations of all cases. Raises ValueError if the gradient of a case is zero or not finite.
        """
        self.observed = observe(self.cases, knows_defense=self.attack.knows_defense, device=self.attack.device)
        for i, route in enumerate(self.attack.routes):
            pending = [row for row, found in enumerate(self.found) if not found.final and (not found.exact or found.open)]
            if pending:
                self._report_progress(i, f"{route}: {len(pending)} of {len(self.cases)} left")
                self._try(route, pending)

    def certify(self, i: int) -> Reconstruction | None:
        """Try the routes on all cases; return the answer to case i if it is certified, see `ClosedForm.certify`, else None."""
        started = perf_counter()
        self.answer()
        found = self.found[i]
        if found.answer is None or not found.exact or len(found.answer.x) != self.observed.examples:
            return None
        own = self._build_from_answer(i, found, found.answer, perf_counter() - started)
        stays = torch.tensor(found.answer.determined) if found.answer.stays is None else found.answer.stays
        doubted = not bool((stays >= MIN_CERTIFIED_STAYS).all()) or bool((own.confidence < MIN_CERTIFIED_CONFIDENCE).any())
        return None if doubted else own

    def get_warm_start(self, i: int) -> Given | None:
        """Return the warm start of a search for case i: its best answer, clamped to [0, 1].

        None if the case has no answer, or the answer's gradient is no nearer to the observed one than a zero gradient.
        """
        found = self.found[i]
        if found.answer is None or found.missed >= 1:
            return None
        return Given(found.answer.x.clamp(0, 1), found.answer.y, alone=found.answer.likeliest)

    def _try(self, route: str, pending: list[int]) -> None:
        """Try one route on the cases with indices `pending`, and keep answers that are better than the present ones.

        A new answer replaces the present one in three cases: its gradient is nearer to the observed one; it is exact, and the
        present one has fewer independent equations than unknowns, so that it is not unique (`open`); or no search may start from
        it (`final`), and the present one is not exact. Answers with NaN or infinite values are dropped. If the route raises an
        error, its message is stored in `_Found.reasons` of these cases.
        """
        try:
            self._apply(route, pending)
        except Exception as error:  # the next routes and the search may still answer; a user's network may fail in any way
            for i in pending:
                self.found[i].reasons[route] = explain_error(route, error)

    def _apply(self, route: str, pending: list[int]) -> None:
        """Try a route as `_try` describes, without catching its errors, among them ValueError if the route does not apply."""
        observed = self.observed.select(pending)
        answers = ROUTES[route](observed, self.rng, self.attack.walk)
        for row, (i, answer) in enumerate(zip(pending, answers, strict=True)):
            found, missed = self.found[i], observed.measure_misfit(row, answer.x, answer.y)
            found.tried += 1
            found.open_question = found.open_question or answer.open_question
            if not len(answer.x):
                found.reasons[route] = "; ".join(answer.notes)
            elif bool(torch.isfinite(answer.x).all()) and (
                missed < found.missed or (found.open and missed <= EXACT_DISTANCE) or (answer.final and not found.exact)
            ):
                found.answer, found.missed = answer, missed
        if self.attack.stability:
            self._measure_stability(route, observed, pending, answers)

    def _measure_stability(self, route: str, observed: Observed, pending: list[int], answers: Sequence[ClosedFormAnswer]) -> None:
        """Repeat a route on a gradient with added rounding errors, and store in `stays` how little each exact answer changes.

        This is done for answers that the route has just given, that were kept, and that have no `stays` yet. The errors are
        random, as large as those of rounding to float32. `stays` of an example is one minus its mean squared change
        relative to the variance of its values, at least 0, times the answer's `determined`.
        """
        new = [
            self.found[i].exact and self.found[i].answer is a and a.stays is None for i, a in zip(pending, answers, strict=True)
        ]
        rows = [row for row, doubted in enumerate(new) if doubted]
        if not rows:
            return
        rngs = [seed_generator(self.rng, self.cases[pending[row]], "rounding") for row in rows]
        jittered = observed.select(rows)
        jittered = replace(jittered, gradient=jittered.jitter(rngs))
        for row, other in zip(rows, ROUTES[route](jittered, self.rng, self.attack.walk), strict=True):
            found, answer = self.found[pending[row]], answers[row]
            spread = answer.x.flatten(1).var(dim=1).clamp(min=torch.finfo(answer.x.dtype).tiny)
            moved = (answer.x - other.x).flatten(1).square().mean(dim=1)
            stays = (1 - moved / spread).nan_to_num(nan=0.0).clamp(0, 1)
            found.answer = replace(answer, stays=stays * answer.determined)

    def _search(self, rest: list[int]) -> dict[int, Reconstruction]:
        """Search for the cases without an exact or final answer; return a dict from their indices to reconstructions.

        rest: indices of these cases in `self.cases`. The search is the attack's `fallback`, which starts from the best
              closed-form answer. The result is empty without a fallback, and lacks the cases that the search cannot attack. Why
              it cannot is stored in `_Found.reasons`.
        """
        attack = self.attack.fallback
        if attack is None:
            return {}
        able = []
        for i in rest:
            if reasons := find_unmet(attack, self.cases[i]):
                self.found[i].reasons["optimisation"] = f"the attack {attack.name} cannot be used: {'; '.join(reasons)}"
            else:
                able.append(i)
        if not able:
            return {}
        starts = {self.cases[i].key: self.get_warm_start(i) for i in able}
        search = replace(attack, device=self.attack.device, warm_start=lambda cases, _: [starts[case.key] for case in cases])
        found = search([self.cases[i] for i in able], rng=self.rng, progress=self.progress, memory=self.memory)
        return dict(zip(able, found, strict=True))

    def _build_reconstruction(self, i: int, seconds: float, searched: Reconstruction | None) -> Reconstruction:
        found = self.found[i]
        if searched is not None:
            missed = self.observed.measure_misfit(i, searched.x.to(self.attack.device), searched.y.to(self.attack.device))
            if found.answer is None or not found.missed <= missed or missed <= MAX_NOISE_RATIO * self.observed.estimate_noise(i):
                route = searched.route.replace("a closed form", found.answer.route if found.answer is not None else "")
                judged = doubt_likely(searched.confidence, found.open_question)
                return replace(
                    searched,
                    attack=self.attack.name,
                    route=route,
                    confidence=judged[0],
                    seconds=searched.seconds + seconds,
                    notes=(*self._explain(found), *_describe_distance(missed), *judged[1]),
                )
        if found.answer is None:
            raise ValueError("; ".join(dict.fromkeys(found.reasons.values())) or "all closed forms returned NaN or infinity")
        own = self._build_from_answer(i, found, found.answer, seconds + (searched.seconds if searched else 0.0))
        return replace(own, interrupted=searched is not None and searched.interrupted)

    def _build_from_answer(self, i: int, found: _Found, answer: ClosedFormAnswer, seconds: float) -> Reconstruction:
        case, count = self.cases[i], len(answer.x)
        observation = case.observations[0]
        stays = torch.full((count,), answer.determined) if answer.stays is None else answer.stays
        judged = judge_closed_form(
            answer.route,
            answer.x,
            found.missed,
            stays,
            observation.data,
            self.observed.examples,
            self._find_open_question(found, answer),
        )
        return Reconstruction(
            case=case.key,
            x=answer.x.float().cpu(),
            y=answer.y.cpu(),
            confidence=judged.confidence,
            explained=judged.explained,
            evidence={name: tuple(values.tolist()) for name, values in judged.evidence.items()},
            slots=list_slots(observation.round, observation.client, find_schedule(observation)[0], count),
            loss=torch.tensor([found.missed**2]),
            iterations=0,
            evaluations=found.tried,
            restarts=1,
            seconds=seconds,
            route=answer.route,
            attack=self.attack.name,
            oracles=("labels",) if case.known_labels is not None else (),
            seed=self.rng.initial_seed(),
            notes=(*answer.notes, *(() if found.exact else answer.doubts), *_describe_distance(found.missed), *judged.notes),
        )

    def _find_open_question(self, found: _Found, answer: ClosedFormAnswer) -> str:
        """Return why the confidence in the best answer to a case is undecided instead of high; "" for no such reason."""
        if self.observed.has_random_inputs:
            return CHANGED_INPUTS
        if answer.open_question:
            return answer.open_question
        first = self.cases[0].observations[0]
        if first.data.is_image and bool(is_eight_bit(answer.x).all()):
            return ""
        if answer.route not in WHOLE_NETWORK_ROUTES or found.missed <= MAX_UNDEFENDED_DISTANCE or first.is_defended:
            return found.open_question
        return found.open_question or UNEXPLAINED_GRADIENT

    def _explain(self, found: _Found) -> list[str]:
        """Return the reasons why no closed-form answer was returned for a case, and how far the best one was off."""
        told = [f"{route}: {reason}" for route, reason in found.reasons.items()]
        if found.answer is not None:
            distance = f"its gradient differs from the observed one by {found.missed:.2g} of the latter's norm"
            told += [f"{found.answer.route}: {one}" for one in (distance, *found.answer.notes, *found.answer.doubts)]
        return told

    def _run_null(self) -> list[Reconstruction]:
        if self.attack.fallback is not None:
            null = replace(self.attack.fallback.null(), device=self.attack.device)
            found = null(self.cases, rng=self.rng, progress=self.progress, memory=self.memory)
            return [replace(one, attack=self.attack.name) for one in found]
        return [self._build_grey(case) for case in self.cases]

    def _build_grey(self, case: Case) -> Reconstruction:
        """Return images of constant value 0.5 with random labels: the answer of a null without a fallback search.

        A null is the attack without the gradient.
        """
        observation = case.observations[0]
        count, data = observation.num_examples or 0, observation.data
        labels = torch.randint(data.num_classes, (count,), generator=seed_generator(self.rng, case, "labels"))
        judged = judge_prior(count, data)
        return Reconstruction(
            case=case.key,
            x=torch.full((count, *data.shape), 0.5),
            y=labels,
            confidence=judged.confidence,
            explained=judged.explained,
            slots=list_slots(observation.round, observation.client, find_schedule(observation)[0], count),
            loss=torch.ones(1),
            iterations=0,
            evaluations=0,
            restarts=1,
            seconds=0.0,
            route="prior alone",
            attack=self.attack.name,
            oracles=(),
            seed=self.rng.initial_seed(),
        )

    def _report_progress(self, done: int, words: str) -> None:
        if self.progress is not None:
            self.progress(done, len(self.attack.routes), words)


def _describe_distance(missed: float) -> tuple[str, ...]:
    if missed <= EXACT_DISTANCE:
        return ()
    return (f"the gradient of this answer differs from the observed one by {missed:.2g} of the latter's norm",)

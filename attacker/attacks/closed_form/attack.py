"""The attack `ClosedForm`: it tries closed forms in order, checks each answer by its gradient, and may search if none is exact.

A route is one of the methods that an attack tries in turn; here, a closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Generator, Tensor

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Effort, Memory, Progress, RoutePlan, estimate_effort, find_unmet
from attacker.attacks.cases import Case
from attacker.attacks.closed_form.layer_input import time_iteration
from attacker.attacks.closed_form.linear.route import CHANGED_INPUTS
from attacker.attacks.closed_form.observations import ClosedFormAnswer, observe
from attacker.attacks.closed_form.rgap.recursion import DEFAULT_RGAP, RgapSettings
from attacker.attacks.closed_form.routes import EVALUATIONS, ROUTES, explain_refusal
from attacker.attacks.closed_form.routing import EXACT_DISTANCE, RoutedCase, Routing
from attacker.attacks.confidence import MIN_CERTIFIED_STAYS, doubt_likely, judge_closed_form
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.needs import Need
from attacker.attacks.networks.discrete_inputs import is_differentiable
from attacker.attacks.nulls import blind_cases, build_prior_answer
from attacker.attacks.simulation.client import find_schedule
from attacker.attacks.timing import time_call
from attacker.reconstruction import MAX_RECOVERED_MSE, Reconstruction, list_slots

MAX_NOISE_RATIO = 1.1
"""A search result is preferred to a closed form if its distance to the observed gradient is at most this multiple of the known
noise: a closed form with a smaller distance then fits the noise."""
WHOLE_NETWORK_ROUTES = ("layers", "peeled")
MAX_SHOWN_RATIO = 0.5
"""Largest ratio of two distances from the observed gradient: that of an answer's gradient, and that of a paler copy's. Copies of
images are as far away as the worst recovered answer, those of rows half as large. Above it, the gradient shows no answer."""
UNDETERMINED_EXAMPLES = (
    "the first layer's gradient does not determine the example, and the answer does not explain the gradient of all layers"
)
UNEXPLAINED_GRADIENT = (
    "the answer does not explain the gradient, and no defense is stated: more examples are behind the update than reported, or "
    "clients train otherwise than stated (loss, learning rate, steps, frozen layers)"
)
WHOLE_NUMBERS = (
    "the network reads whole numbers, such as tokens, which no closed form computes: of this answer, only the labels mean "
    "something"
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
    rgap:      settings of R-GAP.
    stability: whether to repeat a closed form with an exact answer on a gradient with added random rounding errors, and lower the
               confidence by how much the answer changes, if the closed form does not measure its certainty itself.
    knows_defense: whether simulated gradients go through the model of the defense before they are compared; closed forms use the
               gradient as received in either case.
    sees_gradient: False gives the null, the attack without the gradient: the fallback's null, or grey images without a fallback.
    """

    name: str
    routes: tuple[str, ...] = tuple(ROUTES)
    fallback: GradientMatching | None = None
    rgap: RgapSettings = DEFAULT_RGAP
    stability: bool = True
    knows_defense: bool = True
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES}))
    device: str = "cpu"

    @property
    def effort(self) -> Effort:
        if self.fallback is None:
            return Effort()
        if not self.sees_gradient:
            return estimate_effort(self.fallback.null())
        effort = estimate_effort(self.fallback)
        return replace(effort, starts=effort.starts + 1)  # the first search starts from the best closed-form answer

    def null(self) -> "ClosedForm":
        return replace(self, sees_gradient=False)

    def plan(self, case: Case) -> RoutePlan:
        """Return for each route why it cannot apply to a case, or "" if it may, before any is tried.

        A route is a closed form. The plan also holds the number of gradient evaluations of the routes that may apply. They are
        not counted if `linear` may apply, which comes before them and solves single examples without any. For a null it has no
        routes. Raises ValueError if the gradient is zero or not finite.
        """
        if not self.sees_gradient or not self.routes:
            return RoutePlan()
        observed = observe([case], knows_defense=self.knows_defense, device=self.device)
        reasons = {route: explain_refusal(route, observed) for route in self.routes}
        counted = [] if reasons.get("linear") == "" else [route for route, reason in reasons.items() if not reason]
        return RoutePlan(reasons, sum(EVALUATIONS.get(route, 0) for route in counted))

    def time_evaluation(self, case: Case) -> float:
        """Return the seconds of one evaluation of the search, see `Measurable`.

        Without a search, it is one iteration of the route `layer_input` if `plan` counts these, and otherwise an evaluation of
        the network's gradient. The null without a search evaluates nothing; the result is then 0.
        """
        if self.fallback is not None:
            return replace(self.fallback, sees_gradient=self.sees_gradient, device=self.device).time_evaluation(case)
        if not self.sees_gradient:
            return 0.0
        observed = observe([case], knows_defense=self.knows_defense, device=self.device)
        if self.plan(case).evaluations:
            return time_iteration(observed)
        x = torch.full((observed.examples, *observed.data.shape), 0.5)
        y = torch.zeros(observed.examples, dtype=torch.long)
        return time_call(lambda: observed.measure_misfit(0, x, y), self.device)

    def certify(self, case: Case, *, rng: Generator) -> Reconstruction | None:
        """Return the closed forms' answer to a case if it is certified, without a search; None otherwise.

        A certified answer is exact and has all examples of the batch. At least the share MIN_CERTIFIED_STAYS of each example is
        determined by the gradient and not by a prior. The confidence in each example is undecided or at least
        MIN_CERTIFIED_CONFIDENCE. If a defense adds noise above EXACT_DISTANCE of the gradient's norm, nothing is certified, since
        an exact answer would fit the noise. Raises ValueError if the gradient is zero or not finite.
        """
        if observe([case], knows_defense=self.knows_defense, device=self.device).estimate_noise(0) > EXACT_DISTANCE:
            return None
        return _Run(self, [case], rng).certify()

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Attack `cases`, which must agree in model, data, training settings, defense and number of examples.

        Returns one reconstruction per case, in order; if the user interrupts the search, cases without any answer are left out.
        memory: storage for checkpoints, which only the fallback uses.
        Raises ValueError with the reasons if no closed form answers one of the cases, and no fallback can search for it, and if
        the gradient of a case is zero or not finite.
        """
        if not self.sees_gradient:
            return self._run_null(blind_cases(cases), rng, progress, memory)
        return _Run(self, cases, rng, progress, memory).run()

    def _run_null(
        self, cases: Sequence[Case], rng: Generator, progress: Progress | None, memory: Memory | None
    ) -> list[Reconstruction]:
        if self.fallback is None:
            return [build_prior_answer(case, attack=self.name, rng=rng) for case in cases]
        null = replace(self.fallback.null(), device=self.device)
        return [
            replace(reconstruction, attack=self.name) for reconstruction in null(cases, rng=rng, progress=progress, memory=memory)
        ]


class _Run:
    """One call of a `ClosedForm`: the routing of its cases, the search for those without an exact answer, and reconstructions."""

    def __init__(
        self,
        attack: ClosedForm,
        cases: Sequence[Case],
        rng: Generator,
        progress: Progress | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.attack, self.cases, self.rng, self.progress, self.memory = attack, cases, rng, progress, memory
        started = perf_counter()
        self.routing = Routing(
            cases,
            rng,
            routes=attack.routes,
            rgap=attack.rgap,
            stability=attack.stability,
            knows_defense=attack.knows_defense,
            device=attack.device,
            progress=progress,
        )
        self.routing.answer()
        self.observed, self.routed = self.routing.observed, self.routing.routed
        self.seconds = (perf_counter() - started) / len(cases)

    def run(self) -> list[Reconstruction]:
        """Search for the cases without an exact or final answer, and return the answers in order, as far as there are any."""
        rest = [i for i, routed in enumerate(self.routed) if not routed.exact and not routed.final]
        searched = self._search(rest) if rest else {}
        cut_off = any(reconstruction.interrupted for reconstruction in searched.values())
        answered = [i for i, routed in enumerate(self.routed) if not cut_off or i in searched or routed.answer is not None]
        return [self._choose_answer(i, searched.get(i)) for i in answered]

    def certify(self) -> Reconstruction | None:
        """Return the closed forms' answer to the first case if it is certified, see `ClosedForm.certify`, else None."""
        routed = self.routed[0]
        if routed.answer is None or not routed.exact or len(routed.answer.x) != self.observed.examples:
            return None
        reconstruction = self._build_reconstruction(0, routed.answer)
        stays = torch.tensor(routed.answer.determined) if routed.answer.stays is None else routed.answer.stays
        is_doubted = not bool((stays >= MIN_CERTIFIED_STAYS).all()) or bool(
            (reconstruction.confidence < MIN_CERTIFIED_CONFIDENCE).any()
        )
        return None if is_doubted else reconstruction

    def _search(self, unanswered: list[int]) -> dict[int, Reconstruction]:
        """Search for the cases without an exact or final answer; return a dict from their indices to reconstructions.

        unanswered: indices of these cases in `self.cases`. The search is the attack's `fallback`, which starts from the best
              closed-form answer. The result is empty without a fallback, and lacks the cases that the search cannot attack. Why
              it cannot is stored in `RoutedCase.reasons`.
        """
        attack = self.attack.fallback
        if attack is None:
            return {}
        able = []
        for i in unanswered:
            if reasons := find_unmet(attack, self.cases[i]):
                self.routed[i].reasons["optimisation"] = f"the attack {attack.name} cannot be used: {'; '.join(reasons)}"
            else:
                able.append(i)
        if not able:
            return {}
        starts = {self.cases[i].key: self.routing.get_warm_start(i) for i in able}
        search = replace(attack, device=self.attack.device, warm_start=lambda cases, _: [starts[case.key] for case in cases])
        reconstructions = search([self.cases[i] for i in able], rng=self.rng, progress=self.progress, memory=self.memory)
        return dict(zip(able, reconstructions, strict=True))

    def _choose_answer(self, i: int, searched: Reconstruction | None) -> Reconstruction:
        """Return the search's answer to case i if it explains the gradient better, or as well as its noise allows.

        Else return the closed forms' answer. Raises ValueError with their reasons if there is none.
        """
        routed = self.routed[i]
        if searched is not None:
            misfit = self.observed.measure_misfit(i, searched.x.to(self.attack.device), searched.y.to(self.attack.device))
            if (
                routed.answer is None
                or not routed.missed <= misfit
                or misfit <= MAX_NOISE_RATIO * self.observed.estimate_noise(i)
            ):
                confidence, doubts = doubt_likely(searched.confidence, routed.open_question)
                return replace(
                    searched,
                    attack=self.attack.name,
                    route=searched.route.replace("a closed form", routed.answer.route if routed.answer is not None else ""),
                    confidence=confidence,
                    seconds=searched.seconds + self.seconds,
                    notes=(*self._explain(routed), *_describe_distance(misfit), *doubts),
                )
        if routed.answer is None:
            raise ValueError("; ".join(dict.fromkeys(routed.reasons.values())) or "all closed forms returned NaN or infinity")
        reconstruction = self._build_reconstruction(i, routed.answer)
        if searched is None:
            return reconstruction
        return replace(reconstruction, seconds=reconstruction.seconds + searched.seconds, interrupted=searched.interrupted)

    def _build_reconstruction(self, i: int, answer: ClosedFormAnswer) -> Reconstruction:
        """Return the closed forms' best answer to case i as a reconstruction."""
        case, routed, count = self.cases[i], self.routed[i], len(answer.x)
        observation = case.observations[0]
        stays = torch.full((count,), answer.determined) if answer.stays is None else answer.stays
        judged = judge_closed_form(
            answer.route,
            answer.x,
            routed.missed,
            stays,
            observation.data,
            self.observed.examples,
            self._find_open_question(routed, answer),
        )
        confidence, reasons = doubt_likely(judged.confidence, *self._find_unexplained(i, answer, stays))
        judged = replace(judged, confidence=confidence, notes=(*judged.notes, *reasons))
        if not is_differentiable(observation.model, observation.data):
            unknown = torch.full((count,), torch.nan)
            judged = replace(judged, confidence=torch.zeros(count), explained=unknown, notes=(WHOLE_NUMBERS,))
        return build_reconstruction(
            case,
            answer.x,
            answer.y,
            attack=self.attack.name,
            rng=self.rng,
            route=answer.route,
            loss=torch.tensor([routed.missed**2]),
            confidence=judged.confidence,
            explained=judged.explained,
            evidence={name: tuple(values.tolist()) for name, values in judged.evidence.items()},
            slots=list_slots(observation.round, observation.client, find_schedule(observation)[0], count),
            evaluations=routed.tried,
            seconds=self.seconds,
            oracles=("labels",) if case.known_labels is not None else (),
            notes=(*answer.notes, *(() if routed.exact else answer.doubts), *_describe_distance(routed.missed), *judged.notes),
        )

    def _find_open_question(self, routed: RoutedCase, answer: ClosedFormAnswer) -> str:
        """Return why the confidence in the best answer to a case is undecided instead of high; "" for no such reason."""
        if self.observed.has_random_inputs:
            return CHANGED_INPUTS
        if answer.open_question:
            return answer.open_question
        first = self.cases[0].observations[0]
        if first.data.is_image and bool(is_eight_bit(answer.x).all()):
            return ""
        return routed.open_question

    def _find_unexplained(self, i: int, answer: ClosedFormAnswer, stays: Tensor) -> tuple[str, Tensor]:
        """Return why the observed gradient of case i does not show examples of an answer, and a mask (N,) of these; else "".

        It shows them if their gradient, after the stated training and defense of the clients, is much nearer to the observed one
        than that of paler copies, see MAX_SHOWN_RATIO. Signs, for example, are those of the copies as well.
        If clients send plain gradients, two further kinds of examples are shown, whatever the loss and the learning rate are:
        those of the route `linear` whose certainty `stays` (N,) is at least MIN_CERTIFIED_STAYS, by the first layer alone, and
        images with the values of 8-bit images. Behind a defense, the latter may lack the pixels that were not sent.
        """
        first = self.cases[0].observations[0]
        copies = self.observed.make_paler(answer.x, MAX_RECOVERED_MSE if first.data.is_image else None)
        paler = self.observed.measure_misfit(i, copies, answer.y)
        unsure = torch.ones(len(answer.x), dtype=torch.bool)
        if self.routed[i].missed <= MAX_SHOWN_RATIO * paler:
            return "", ~unsure
        changes = [str(first.defenses)] if first.defenses.steps else []
        changes += [first.gradient.step.name] if first.gradient.step else []
        changes += [first.training.optimiser] if first.training.optimiser != "sgd" else []
        if changes:
            words = f"after {' and '.join(changes)}, the observed gradient does not tell the answer from a paler copy of it"
            return words, unsure
        if first.data.is_image:
            unsure &= ~is_eight_bit(answer.x).cpu()
        if answer.route in WHOLE_NETWORK_ROUTES:
            return UNEXPLAINED_GRADIENT, unsure
        return UNDETERMINED_EXAMPLES, unsure & ~(stays.cpu() >= MIN_CERTIFIED_STAYS)

    def _explain(self, routed: RoutedCase) -> list[str]:
        """Return the reasons why no closed-form answer was returned for a case, and how far the best one was off."""
        reasons = [f"{route}: {reason}" for route, reason in routed.reasons.items()]
        if routed.answer is not None:
            distance = f"its gradient differs from the observed one by {routed.missed:.2g} of the latter's norm"
            reasons += [f"{routed.answer.route}: {text}" for text in (distance, *routed.answer.notes, *routed.answer.doubts)]
        return reasons


def _describe_distance(missed: float) -> tuple[str, ...]:
    if missed <= EXACT_DISTANCE:
        return ()
    return (f"the gradient of this answer differs from the observed one by {missed:.2g} of the latter's norm",)

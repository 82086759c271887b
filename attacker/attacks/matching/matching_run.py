"""The run of a gradient matching attack on a batch of cases: its starts, its best results, and its checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from attacker.attacks.base import IntermediateResult, Look, Memory, Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.labels.step_labels import InferredOrder
from attacker.attacks.linking import Links
from attacker.attacks.matching.answers import build_answer, list_case_slots
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.loss.problems import ProblemRow
from attacker.attacks.matching.saved_state import BestResult, checkpoint_periodically, pack_bests, to_device, unpack_bests
from attacker.attacks.matching.settings import MatchingSettings
from attacker.attacks.matching.warm_starts import WarmStart, place_start
from attacker.attacks.optimisers.descent import Problems, descend, get_best
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.attacks.optimisers.stopping import Stop
from attacker.attacks.simulation.client import draws_at_random
from attacker.reconstruction import Reconstruction

MIN_STEP_EFFECT = 0.03
"""Smallest effect of local steps on the simulated gradient for which the order of examples is searched for. It is above the
effect at which that search had a lower PSNR, on one client with tuning images and four steps."""
FITTING_SHARE = 0.3
"""Share of the gradient evaluations of a search in which examples are fitted to orders of the clients' examples, see `Polish`."""
JUDGING_SECONDS = 15.0
"""Time in seconds for the confidence in all answers of searches that were interrupted."""


class SearchPart(NamedTuple):
    """The cases of a run that are searched in the same way: with local steps in an inferred order, or as the settings say.

    batch: all cases of the run with these settings. cases: indices of the cases of this part. steps: maximum number of iterations
    of a start. name: added to the keys of its checkpoints.
    """

    batch: CaseBatch
    cases: Sequence[int]
    steps: int
    name: str


class MatchingRun:
    """The state of one call of a gradient matching attack: its cases, and for each the result with the lowest loss so far.

    warm_starts: for each case a warm start (examples from which its first search begins), or None.
    inferred: for each case the order of its client's examples that its update shows (`infer_step_order`); None if it cannot be
    inferred, or if no order of single observations is searched for.
    orders: for each case this order, if the search simulates the local steps with it, and otherwise None: where nothing is
    inferred, or where the steps hardly matter (`MIN_STEP_EFFECT`). It does not depend on the other cases.
    parts: the cases without and those with an order.
    steps_each: number of local steps that each evaluation of the loss simulates. ordered_steps: see `CaseBatch`.
    polishing: number of iterations of L-BFGS that follow the search (`Polish`).
    fits: number of orders of the examples of each observation to which they are fitted before it, by one such iteration each
    (`OrderSearch`).
    steps: maximum number of iterations before both, added over the parts.
    fitted: for each case the batch whose settings explain its answer, and the index of the case in it: that of the search, or of
    the polish that simulates the local steps of clients.
    interrupted: indices of the cases whose search the user interrupted.
    """

    def __init__(
        self,
        attack: MatchingSettings,
        cases: Sequence[Case],
        rng: Generator,
        progress: Progress | None,
        memory: Memory | None = None,
    ) -> None:
        self.attack, self.cases, self.rng, self.progress, self.memory = attack, cases, rng, progress, memory
        self.batch = CaseBatch(attack, cases)
        steps, period = max(1, attack.search.steps // self.batch.steps_each), attack.search.optimiser.period
        self.steps_each, self.ordered_steps = self.batch.steps_each, self.batch.ordered_steps
        ordered, evaluations = self.ordered_steps, steps * period
        self.polishing = self._count_polishing_iterations(evaluations // ordered)
        self.fits = int(FITTING_SHARE * evaluations / ordered) // LBFGS().period if self.polishing and ordered > 1 else 0
        unordered = steps - (self.polishing + self.fits) * ordered * LBFGS().period // period
        self.inferred = self._infer_orders() if self.fits and len(self.batch.views) == 1 else [None] * len(cases)
        self.orders = [found.order if found and found.effect > MIN_STEP_EFFECT else None for found in self.inferred]
        self.parts = self._split_into_parts(unordered)
        self.steps = sum(part.steps for part in self.parts)
        self.best = [BestResult() for _ in cases]
        self.warm_starts = self._compute_warm_starts()
        self.interrupted: set[int] = set()
        self.fitted = [(self._get_part(i).batch, i) for i in range(len(cases))]
        self.started = perf_counter()

    def search(self) -> None:
        """Search for each case's examples, with the further starts that `_needs_restart` requires, until Ctrl-C."""
        for restart in range(self._restore(), self.max_starts):
            pending = [i for i in range(len(self.cases)) if self._needs_restart(i, restart)]
            if pending and not self.interrupted:  # Ctrl-C ends all restarts
                self.search_once(pending, restart)
                self._save(restart)

    def decode_best(self, i: int) -> Tensor:
        """Return the examples (N, *shape) of the best result of case i so far, on the CPU."""
        best = self.best[i]
        assert best.z is not None
        assert best.labels is not None
        return self.batch.decode_answer(i, best.z, best.labels)[0].cpu()

    def build_answers(self) -> list[Reconstruction]:
        """Return the reconstructions of all cases from the best results so far.

        After an interruption, estimates of their confidence have JUDGING_SECONDS together, since workers that do not end are
        killed.
        """
        seconds = (perf_counter() - self.started) / len(self.cases)
        until = perf_counter() + JUDGING_SECONDS if self.interrupted else inf
        return [
            build_answer(
                self._get_part(i).batch,
                i,
                best,
                fitted,
                self.rng,
                steps=self._get_part(i).steps,
                seconds=seconds,
                interrupted=i in self.interrupted,
                judged_until=until,
            )
            for i, (best, fitted) in enumerate(zip(self.best, self.fitted, strict=True))
        ]

    def _split_into_parts(self, steps: int) -> list[SearchPart]:
        """Return the cases without an order, if there are any, and those with one. steps: iterations of those without.

        In the batch of those with an order, the other cases have an arbitrary one.
        """
        every = range(len(self.cases))
        parts = [SearchPart(self.batch, [i for i in every if self.orders[i] is None], steps, "")]
        ordered = [order for order in self.orders if order is not None]
        if ordered:
            batch = CaseBatch(self.attack.copy_with(local_steps="simulated"), self.cases)
            batch.set_orders([(order or ordered[0],) for order in self.orders])
            chosen = [i for i in every if self.orders[i] is not None]
            parts.append(SearchPart(batch, chosen, max(1, steps // self.ordered_steps), " in order"))
        return [part for part in parts if part.cases]

    def _get_part(self, i: int) -> SearchPart:
        return next(part for part in self.parts if i in part.cases)

    def _count_polishing_iterations(self, evaluations: int) -> int:
        """Return the number of iterations of L-BFGS after the search; 0 where there is no second search, see `Polish`.

        evaluations: number of gradient evaluations of both searches together.
        """
        attack, batch = self.attack, self.batch
        if attack.polish is None or not attack.sees_gradient:
            return 0
        noisy = any(view.noisy for view in batch.views) or self._draws_at_random
        by_gradient = not noisy and batch.in_order is None and not batch.views_with_statistics
        return attack.polish.count_iterations(evaluations) if by_gradient and not attack.objective.robust else 0

    @property
    def max_starts(self) -> int:
        """Return the largest number of starts of a case, one after the other."""
        search, warm = self.attack.search, any(start is not None for start in self.warm_starts)
        return search.restarts // search.at_once + warm

    def report(self, restart: int, before: int, done: int, _: int, message: str) -> None:
        """Report the progress of the start with the index `restart` as a part of all starts, so that it does not begin again.

        before: number of iterations of this start that earlier parts make.
        """
        assert self.progress is not None
        self.progress(restart * self.steps + before + done, self.max_starts * self.steps + self.fits + self.polishing, message)

    def report_polish(self, begin: float, end: float, done: int, total: int, message: str) -> None:
        """Report the progress of a part of the polish. begin, end: shares of the whole polish before and after this part."""
        share = begin + (end - begin) * done / max(1, total)
        self.report(self.max_starts, 0, int(share * (self.fits + self.polishing) + 1e-9), 0, message)

    def _compute_warm_starts(self) -> Sequence[WarmStart | None]:
        """Return the warm start of each case; None for cases without one, and for all if the attack does not see the gradient."""
        attack = self.attack
        return attack.warm_start(self.cases, self.rng) if attack.warm_start and attack.sees_gradient else [None] * len(self.cases)

    def _needs_restart(self, i: int, restart: int) -> bool:
        """Return whether case i needs the start with the index `restart`, from 0.

        Start 0 is always needed: the warm start if the case has one, otherwise the regular start, which the parametrisation
        makes. The first regular start after a warm start is needed if the loss is above `enough`, or, if the warm start is marked
        `alone` (see `WarmStart`), above `stuck`. Every later start is needed if the loss is above `stuck`, up to
        `Search.restarts` regular starts.
        """
        warm_start = self.warm_starts[i]
        regular_start = restart - (warm_start is not None)
        if regular_start < 0 or restart == 0:
            return True
        only_if_stuck = regular_start > 0 or (warm_start is not None and warm_start.alone)
        scales = self.batch.scales
        threshold = scales.stuck[i] if only_if_stuck else scales.enough[i]
        return regular_start < self.attack.search.restarts and self.best[i].loss > float(threshold)

    def search_once(self, cases: list[int], restart: int) -> None:
        """Run `Search.at_once` searches for each of the cases with these indices, and keep results better than earlier ones.

        The parts follow each other. If the user interrupts one, cases of the next that have no result yet get one iteration.
        """
        before = 0
        for part in self.parts:
            left = [i for i in cases if i in part.cases and (not self.interrupted or self.best[i].z is None)]
            if left:
                self._search_part(part._replace(steps=1) if self.interrupted else part, left, restart, before)
                self.interrupted |= set(left) if self.interrupted else set()
            before += part.steps

    def _search_part(self, part: SearchPart, cases: list[int], restart: int, before: int) -> None:
        """Search as `search_once` for cases of one part. before: number of iterations of the parts before it.

        Each search has an entry in `pending`, the index of its case, and in `starts`, the number of its start.
        """
        search, batch, memory, device = self.attack.search, part.batch, self.memory, self.attack.device
        pending = [i for i in cases for _ in range(search.at_once)]
        z, labels, problems = self._build_problems(batch, pending, restart)
        key = f"restart {restart}{part.name}"
        minima = descend(
            z,
            problems,
            batch.space.split_into_phases(search.optimiser),
            part.steps,
            self._choose_stop(restart),
            progress=self.progress and partial(self.report, restart, before),
            checkpoint=checkpoint_periodically(memory, key, partial(self._show, part, pending, labels)) if memory else None,
            resume=to_device(memory.recall(key), device) if memory else None,
        )
        for row, i in enumerate(pending):
            best, gain = self.best[i], float(problems.per_problem["gain"][row])
            if minima.interrupted[row]:
                self.interrupted.add(i)
            best.iterations += minima.iterations[row]
            best.evaluations += minima.iterations[row] * search.optimiser.period
            best.restarts += 1
            loss = minima.loss[row] / gain
            if best.z is None or loss < best.loss:
                best.loss, best.z, best.history = loss, minima.z[row], minima.history[row] / gain
                best.labels, best.from_warm_start = labels[row], restart == 0 and self.warm_starts[i] is not None
                best.given_up = minima.given_up[row]

    def _build_problems(self, batch: CaseBatch, pending: list[int], restart: int) -> tuple[Tensor, Tensor, Problems]:
        """Return the starting latents z (P, D) of searches, their labels (P, V), and their minimisation problems.

        batch: that of the searches' part. pending: index of the case of each search; the `Search.at_once` searches of a case
        follow each other.
        """
        search = self.attack.search
        starts = [restart + place % search.at_once for place in range(len(pending))]
        labels = self._find_labels(pending, restart)
        logits = [_get_logits(self.cases[i], batch.links[i], batch.epochs) for i in pending] if batch.compares_logits else None
        rngs = [seed_generator(self.rng, self.cases[i], f"features {start}") for i, start in zip(pending, starts, strict=True)]
        features = batch.solve_features(pending, labels, rngs)
        z = self._draw_starts(batch, pending, starts, labels, features)
        problem = batch.build_problem(pending, z, labels, torch.stack(logits) if logits else None, features)
        problems = Problems(
            evaluate=batch.evaluate,
            per_problem=problem,
            project=batch.space.project,
            enough=batch.scales.enough[pending] * problem["gain"],
            least=batch.scales.least[pending] * problem["gain"],
            floor=batch.scales.floor[pending] * problem["gain"],
            anew=search.coarse if batch.coarse else 0.0,
            plain=batch.encode_plain(labels, rngs) if self._choose_stop(restart).stall else None,
        )
        return z, labels, problems

    @cached_property
    def _draws_at_random(self) -> bool:
        return any(draws_at_random(case.observations[0], self.batch.model) for case in self.cases)

    def _choose_stop(self, restart: int) -> Stop:
        """Return the stopping rule of the searches of this restart.

        A null is never given up as hopeless, nor a search if clients draw random numbers (`draws_at_random`), or if it takes
        several local steps for one whose order of examples is then searched for: even the loss of the true examples is high then.
        Two tests for hopeless searches, `Stop.early` and `Stop.stall`, are left out in restart 0 of an attack with warm starts,
        since the loss of a search from a warm start may rise at first. Both tests are also left out in all restarts if a client
        declares a defense, since the loss of defended updates need not fall far, and if the loss compares returned statistics of
        batch norm, for which the tests were not chosen.
        """
        stop = self.attack.search.stop
        if not self.attack.sees_gradient or self._draws_at_random or self.fits:
            return replace(stop, give_up=0.0, stall=None)
        declared = any(
            observation.defenses.steps or observation.gradient.step for case in self.cases for observation in case.observations
        )
        is_warm = self.attack.warm_start is not None and restart == 0
        return replace(stop, early=(), stall=None) if declared or is_warm or self.batch.views_with_statistics else stop

    def _infer_orders(self) -> Sequence[InferredOrder | None]:
        """Return for each case the inferred order of its client's examples, or None."""
        return [self.batch.infer_order(i, seed_generator(self.rng, case, "orders")) for i, case in enumerate(self.cases)]

    def _find_labels(self, pending: list[int], restart: int) -> Tensor:
        """Return the labels (P, V) that the searches for the cases with indices `pending` use.

        They are those of an inferred order if there is one, and are not inferred a second time where there is none.
        """
        labels = []
        for i in pending:
            found = self.inferred[i]
            if found is not None:
                labels.append(torch.tensor(found.order.labels, device=self.attack.device))
            else:
                rng = seed_generator(self.rng, self.cases[i], f"labels {restart}")
                labels.append(self.batch.find_labels(i, rng, simulated=not self.fits or len(self.batch.views) > 1))
        return torch.stack(labels)

    def _draw_starts(
        self, batch: CaseBatch, pending: list[int], numbers: list[int], labels: Tensor, features: ProblemRow | None
    ) -> Tensor:
        """Return the latents (P, D) from which searches begin, for the cases with indices `pending` and their starts `numbers`.

        The parametrisation's `init` makes the examples. In start 0, the examples of a case's warm start replace made ones with
        the same label, or any made ones if labels are optimised as well. features: as `CaseBatch.solve_features` returns them.
        """
        space = batch.space
        rngs = [seed_generator(self.rng, self.cases[i], f"start {number}") for i, number in zip(pending, numbers, strict=True)]
        starts = [space.init(batch.data, y, g) for y, g in zip(labels.cpu(), rngs, strict=True)]
        if numbers[0] == 0:
            fixed_labels = [None if space.joint else label for label in labels.cpu()]
            pairs = zip(starts, [self.warm_starts[i] for i in pending], fixed_labels, strict=True)
            starts = [start if warm_start is None else place_start(warm_start, start, y) for start, warm_start, y in pairs]
        return batch.inject_features(space.encode(starts, rngs, self.attack.device), pending, features)

    def _save(self, restart: int) -> None:
        """Save the best results so far as a checkpoint, and delete the restart's own checkpoints; do nothing if interrupted."""
        if self.memory is not None and not self.interrupted:
            for part in self.parts:
                self.memory.keep("best", pack_bests(self.best, restart + 1), drop=f"restart {restart}{part.name}")

    def _restore(self) -> int:
        """Restore the results of earlier restarts from a checkpoint, and return the number of the next restart; 0 without one."""
        state = self.memory.recall("best") if self.memory else None
        if state is None:
            return 0
        self.best, restarts = unpack_bests(state, self.attack.device)
        return restarts

    def _show(self, part: SearchPart, pending: list[int], labels: Tensor, look: Look, state: Mapping[str, Tensor]) -> None:
        """Pass the best candidates of a running search to `look`, the callback for live display.

        pending: index of the case of each search. state: the state of the searches, as `descend` saves it.
        """
        batch, at_once = part.batch, self.attack.search.at_once
        z, loss = get_best(state)
        results = []
        for first, i in enumerate(pending[::at_once]):
            row = first * at_once + int(loss[first * at_once : (first + 1) * at_once].argmin())
            x, y = batch.decode_answer(i, z[row], labels[row])
            places = tuple(slot for o in range(len(batch.views)) for slot in list_case_slots(batch, i, o))
            results.append(IntermediateResult(x.cpu(), (y.argmax(dim=1) if y.ndim == 2 else y).cpu(), places, float(loss[row])))
        look(results, len(state["active.history"]), part.steps)


def _get_logits(case: Case, links: Links, epochs: int) -> Tensor:
    """Return the given logits (V, K) of the first observation, repeated for each epoch; zeros for examples that it lacks."""
    known = case.known_logits
    assert known is not None
    logits = known.new_zeros(links.examples, *known.shape[1:])
    logits[links.places[0]] = known.repeat(epochs, *(1,) * (known.ndim - 1))
    return logits

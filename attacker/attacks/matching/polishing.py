"""The polish of a search: L-BFGS from its best results, and the search for the orders of the examples that precedes it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import torch
from torch import Generator, Tensor
from torch.func import vmap

from attacker.attacks.base import Memory, Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.labels.step_labels import infer_step_order
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.loss.problems import ProblemRow
from attacker.attacks.matching.matching_run import MIN_STEP_EFFECT, MatchingRun
from attacker.attacks.matching.saved_state import BestResult, prefix_memory
from attacker.attacks.matching.settings import MIN_POLISH_GAIN
from attacker.attacks.simulation.gradients import squared_norm
from attacker.attacks.simulation.step_orders import FITTED_AT_ONCE, Fit, StepOrder, search_order

MAX_FITTED_WEIGHTS = 4_000_000
"""Largest number of weights, over all networks, of the orders to which examples are fitted at once, beyond the first order."""
MEASURED_AT_ONCE = 64
"""Number of orders whose updates are simulated at once for fixed examples."""


@dataclass(frozen=True)
class PolishStart:
    """Where the polish of a case starts.

    case: index of the case in the first search. z: latent vector (D,). labels: (V,).
    orders: assumed order of the examples in the local steps of each observation; empty if no order is searched for.
    spared: number of fits that the search for orders did not need. They become iterations of the polish.
    """

    case: int
    z: Tensor
    labels: Tensor
    orders: tuple[StepOrder, ...] = ()
    spared: int = 0


def polish(run: MatchingRun) -> None:
    """Search again by L-BFGS from the best results of a run, and replace those that become much better, see `Polish`."""
    polish_starts(run, find_starts(run))


def find_starts(run: MatchingRun) -> list[PolishStart]:
    """Return where the polish of each case starts; without cases whose search was given up, and empty if none is polished.

    If the run simulated the local steps of a client in an inferred order, or took them for one, and that matters
    (`MIN_STEP_EFFECT`), the orders in which the client used its examples are searched for.
    """
    chosen = [i for i, best in enumerate(run.best) if not best.given_up and isfinite(best.loss)]
    if not run.polishing or run.interrupted or not chosen:
        return []
    starts = [PolishStart(i, *run.best[i].get_latent()) for i in chosen]
    try:
        searches = {k: OrderSearch(run, start) for k, start in enumerate(starts) if run.ordered_steps > 1}
        searches = {
            k: search
            for k, search in searches.items()
            if run.orders[starts[k].case] is not None or search.measure_effect() > MIN_STEP_EFFECT
        }
        share = run.fits / (run.fits + run.polishing)
        for number, (k, search) in enumerate(searches.items()):
            starts[k] = search.run(share * number / len(searches), share * (number + 1) / len(searches))
    except KeyboardInterrupt:
        run.interrupted |= set(chosen)
    return starts


def polish_starts(
    run: MatchingRun, starts: Sequence[PolishStart], *, times: float = 1.0, stage: int = 0, stages: int = 1
) -> None:
    """Polish the cases of a run from these starts, in one of several stages that have equal costs.

    The evaluations of a search for orders belong to the polish where there is none. times: factor of the number of iterations.
    stage: from 0.
    """
    ordered, plain = [start for start in starts if start.orders], [start for start in starts if not start.orders]
    begin = run.fits / (run.fits + run.polishing) if run.fits else 0.0
    first, middle, end = (begin + (1 - begin) * (stage + part) / stages for part in (0, len(plain) / max(1, len(starts)), 1))
    more = (run.polishing + run.fits) * run.ordered_steps
    try:
        _polish_cases(run, plain, round(times * more), first, middle, stage)
        for spared in sorted({start.spared for start in ordered}):
            alike = [start for start in ordered if start.spared == spared]
            middle, begun = middle + (end - middle) * len(alike) / len(ordered), middle
            _polish_cases(run, alike, round(times * (run.polishing + spared)), begun, middle, stage)
    except KeyboardInterrupt:
        run.interrupted |= {start.case for start in starts}


def measure_start(run: MatchingRun, start: PolishStart) -> float:
    """Return the distance of the gradients at a start of the polish, relative to that of zero gradients."""
    return PolishingRun(run, [start], 1).batch.measure_relative_distance(0, start.z, start.labels)


def _polish_cases(run: MatchingRun, starts: Sequence[PolishStart], iterations: int, begin: float, end: float, stage: int) -> None:
    """Polish these cases of a run, all with orders or all without, which spared equally many fits.

    begin, end: shares of the progress of all polishes.
    """
    if not starts or run.interrupted:
        return
    name = (f"polish in order {starts[0].spared} " if starts[0].orders else "polish ") + (f"{stage} " if stage else "")
    report = run.progress and partial(run.report_polish, begin, end)
    polishing = PolishingRun(run, starts, iterations, report, prefix_memory(run.memory, name))
    initial = [polishing.batch.measure_distance(k, *run.best[start.case].get_latent()) for k, start in enumerate(starts)]
    polishing.search_once(list(range(len(starts))), 0)
    for k, (start, polished, initial_distance) in enumerate(zip(starts, polishing.best, initial, strict=True)):
        best = run.best[start.case]
        best.iterations += polished.iterations
        best.evaluations += polished.evaluations
        least = 1.0 if stage and best.polished else MIN_POLISH_GAIN
        if least * polishing.batch.measure_distance(k, *polished.get_latent()) <= initial_distance:
            best.z, best.labels = polished.get_latent()
            best.polished, run.fitted[start.case] = best.polished + polished.evaluations, (polishing.batch, k)
    run.interrupted |= {starts[k].case for k in polishing.interrupted}


class PolishingRun(MatchingRun):
    """A search by L-BFGS from results of a first search, for some of its cases (`Polish`).

    first: the first search. starts: where to start, for each case. iterations: number of iterations. progress, memory: as in
    `Attack.__call__`. only: index of the observation of each case that is compared; None for all.
    """

    def __init__(
        self,
        first: MatchingRun,
        starts: Sequence[PolishStart],
        iterations: int,
        progress: Progress | None = None,
        memory: Memory | None = None,
        only: int | None = None,
    ) -> None:
        self.starts, simulation = starts, first.batch.attack.simulation
        ordered = bool(starts[0].orders)
        super().__init__(
            replace(
                first.attack, simulation=replace(simulation, local_steps="simulated") if ordered else simulation
            ).build_polish(iterations),
            [_keep_observation(first.cases[start.case], only) for start in starts],
            first.rng,
            progress,
            memory,
        )
        if ordered:
            self.batch.set_orders([start.orders for start in starts])

    def _find_labels(self, pending: list[int], restart: int) -> Tensor:
        return torch.stack([self.starts[i].labels for i in pending])

    def _draw_starts(
        self, batch: CaseBatch, pending: list[int], numbers: list[int], labels: Tensor, features: ProblemRow | None
    ) -> Tensor:
        return torch.stack([self.starts[i].z for i in pending])


def _keep_observation(case: Case, o: int | None) -> Case:
    """Return the case with its o-th observation alone; unchanged if it has no other, or if o is None."""
    if o is None or case.links is None:
        return case
    return replace(
        case, observations=(case.observations[o],), links=replace(case.links, places=(case.links.places[o],), epochs=())
    )


class OrderSearch:
    """The search for the orders in which the clients of a case used their examples (`simulation.step_orders`).

    first: the search that took all local steps for one, or simulated them in an inferred order. start: its result for the case.
    fits: number of fits made. report: callback for progress; None for none.
    """

    def __init__(self, first: MatchingRun, start: PolishStart) -> None:
        self.first, self.case, self.fits = first, first.cases[start.case], 0
        self.report: Progress | None = None
        self.places = [places.to(start.z.device) for places in first.batch.links[start.case].places]
        rng = seed_generator(first.rng, self.case, "orders of rounds")
        orders: list[StepOrder] = []
        self.likely: list[bool] = []
        for o, (view, places) in enumerate(zip(first.batch.views, self.places, strict=True)):
            inferred = self._infer_order(start, o, rng)
            used = tuple(k % len(places) for k in range(sum(view.sizes)))
            orders.append(inferred or StepOrder(used, tuple(start.labels[places].tolist())))
            self.likely.append(inferred is not None)
        unknown = len(self.places) == 1 and self.case.known_labels is None and not first.batch.space.joint
        self.changes_labels = unknown and not any(self.likely)
        self.start = replace(start, orders=tuple(orders))
        trial = PolishingRun(first, [self.start], 1).batch
        self.views, self.rows = trial.views, [view.get_case(0) for view in trial.views]
        self.x = trial.decode_case(0, start.z, start.labels)[0].detach()

    def _infer_order(self, start: PolishStart, o: int, rng: Generator) -> StepOrder | None:
        """Return the order of the o-th observation that its update shows for the labels of the start; None if none.

        For a single observation, it was inferred before the first search.
        """
        if len(self.places) == 1:
            found = self.first.inferred[start.case]
            return None if found is None else found.order
        found = infer_step_order(self.first.batch.views[o], start.case, start.labels[self.places[o]], rng, known=True)
        return None if found is None else found.order

    def measure_effect(self) -> float:
        """Return how much the local steps matter: |g - h|^2 / |g|^2, the largest over all observations of several steps.

        g and h are the simulated gradients of the start with local steps in some order, and with all steps taken for one, each
        tensor divided by its root mean square in the observed gradient.
        """
        one_batch, effects = PolishingRun(self.first, [replace(self.start, orders=())], 1).batch, [0.0]
        for o, view in enumerate(self.views):
            if len(view.sizes) > 1:
                row = {**self.rows[o], "places": self.places[o][list(self.start.orders[o].examples)]}
                here = view.simulate(row, self.x, self.start.labels, self.start.z)
                there = one_batch.views[o].simulate(one_batch.views[o].get_case(0), self.x, self.start.labels, self.start.z)
                difference = squared_norm({name: here[name] - there[name] for name in row["observed"]})
                effects.append(float(difference / squared_norm({name: here[name] for name in row["observed"]})))
        return max(effects)

    def run(self, begin: float, end: float) -> PolishStart:
        """Return the orders that explain the observations best, with examples that were fitted to them.

        begin, end: shares of the progress of all polishes before and after this search.
        """
        self.report = self.first.progress and partial(self.first.report_polish, begin, end)
        current = self.start
        ordered = [o for o, view in enumerate(self.views) if len(view.sizes) > 1]
        classes = self.first.batch.data.num_classes if self.changes_labels else 0
        for o in ordered:
            order, fit = search_order(
                current.orders[o],
                self.views[o].sizes,
                partial(self._measure, o),
                partial(self._fit, o),
                fits=self.first.fits,
                classes=classes,
                likely=self.likely[o],
                alone=len(self.views) == 1,
            )
            z = fit.z if fit and len(self.views) == 1 else self.start.z
            current = self._assume((*current.orders[:o], order, *current.orders[o + 1 :]), z)
        return replace(current, spared=max(0, self.first.fits - self.fits // max(1, len(ordered))))

    def _assume(self, orders: tuple[StepOrder, ...], z: Tensor) -> PolishStart:
        """Return a start with these orders, and with the labels of the first order if labels may be changed."""
        labels = self.start.labels.clone()
        if self.changes_labels:
            labels[self.places[0]] = torch.tensor(orders[0].labels, device=labels.device)
        return replace(self.start, z=z, labels=labels, orders=orders)

    def _measure(self, o: int, orders: Sequence[StepOrder]) -> list[float]:
        """Return the distance of the o-th observation for each order, with the examples of the start."""
        view, row, device = self.views[o], self.rows[o], self.x.device

        def measure(used: Tensor, labels: Tensor) -> Tensor:
            return view.compute_distance({**row, "places": self.places[o][used]}, self.x, labels, self.start.z)

        used = torch.tensor([order.examples for order in orders], device=device)
        labels = self.start.labels.repeat(len(orders), 1)
        labels[:, self.places[o]] = torch.tensor([order.labels for order in orders], device=device)
        with torch.no_grad():
            parts = [slice(k, k + MEASURED_AT_ONCE) for k in range(0, len(orders), MEASURED_AT_ONCE)]
            return torch.cat([vmap(measure)(used[part], labels[part]) for part in parts]).tolist()

    def _fit(self, o: int, tried: Sequence[StepOrder]) -> list[Fit]:
        """Fit the examples of the start to each tried order of the o-th observation alone, by one iteration of L-BFGS."""
        starts, fits = [self._assume((order,), self.start.z) for order in tried], []
        weights = sum(w.numel() for w in self.case.observations[0].weights.values())
        at_once = max(1, min(FITTED_AT_ONCE, MAX_FITTED_WEIGHTS // weights))
        for part in (starts[k : k + at_once] for k in range(0, len(starts), at_once)):
            run = PolishingRun(self.first, part, 1, only=o)
            run.search_once(list(range(len(part))), 0)
            if run.interrupted:
                raise KeyboardInterrupt
            latents = [best.get_latent() for best in run.best]
            fits += [Fit(run.batch.measure_distance(k, *latent), latent[0]) for k, latent in enumerate(latents)]
            self._count(run.best)
        return fits

    def _count(self, fitted: Sequence[BestResult]) -> None:
        """Count the gradient evaluations of these fits for the case, and report the progress.

        An evaluation of one of R observations counts as 1 / R.
        """
        first, counted = self.first, self.first.best[self.start.case]
        counted.iterations += sum(best.iterations for best in fitted)
        counted.evaluations += sum(best.evaluations for best in fitted) // len(self.views)
        self.fits += len(fitted)
        if self.report:
            whole = first.fits * sum(len(view.sizes) > 1 for view in self.views)
            self.report(self.fits, whole, f"order of examples, {self.fits} of {whole} tried")

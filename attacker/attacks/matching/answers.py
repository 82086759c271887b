"""Conversion of search results into reconstructions, with their confidence."""

from dataclasses import replace
from functools import partial
from math import isfinite
from time import perf_counter

import torch
from torch import Generator, Tensor

from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.confidence import (
    INFERRED_ORDER,
    ConfidenceEstimates,
    SearchAnswer,
    SimulatedObservation,
    build_undecided,
    judge_prior,
    judge_search,
)
from attacker.attacks.gradients.products import GradientTensors
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.decoders import pixels, smooth
from attacker.attacks.matching.loss.problems import ProblemRow
from attacker.attacks.matching.loss.view import View
from attacker.attacks.matching.saved_state import BestResult
from attacker.attacks.needs import list_oracles
from attacker.attacks.simulation.gradients import squared_norm
from attacker.reconstruction import Reconstruction, Slot, list_slots

FittedCase = tuple[CaseBatch, int]
"""A batch of cases, and the index of one of them."""


def build_answer(
    batch: CaseBatch,
    i: int,
    best: BestResult,
    fitted: FittedCase,
    rng: Generator,
    *,
    steps: int,
    seconds: float,
    interrupted: bool,
    judged_until: float,
) -> Reconstruction:
    """Return the reconstruction of case i, with its confidence, from its best search result.

    fitted:  the batch and the index of the case in it whose simulated gradient was fitted to the observed one.
    steps:   maximum number of iterations of the search, without those of a polish (`Polish`).
    rng:     its seed determines the random estimates on which the confidence is based.
    seconds: time that the search took per case, to which the time that this function takes is added. interrupted: whether the
             user interrupted the search.
    judged_until: time on the clock `perf_counter` at which a confidence that is not yet estimated becomes undecided.
    """
    started, case = perf_counter(), batch.cases[i]
    assert best.z is not None
    assert best.labels is not None
    x, y = batch.decode_answer(i, best.z, best.labels)
    judged = _judge(batch, i, best, fitted, rng, len(x), judged_until, stopped=interrupted)
    return Reconstruction(
        case=case.key,
        x=x.cpu(),
        y=(y.argmax(dim=1) if y.ndim == 2 else y).cpu(),
        confidence=judged.confidence,
        explained=judged.explained,
        evidence={name: tuple(value.tolist()) for name, value in judged.evidence.items()},
        slots=tuple(slot for o in range(len(batch.views)) for slot in list_case_slots(batch, i, o)),
        loss=best.history.cpu(),
        iterations=best.iterations,
        evaluations=best.evaluations,
        restarts=best.restarts,
        seconds=seconds + perf_counter() - started,
        route=_name_route(batch, best, fitted[0]),
        attack=batch.attack.name,
        oracles=_list_oracles(batch, case),
        seed=rng.initial_seed(),
        interrupted=interrupted or judged.interrupted,
        notes=(
            *(batch.links[i].notes if batch.attack.sees_gradient else ()),
            *_note_giving_up(batch, best, steps),
            *_note_enhancement(batch),
            *judged.notes,
        ),
    )


def _note_giving_up(batch: CaseBatch, best: BestResult, steps: int) -> tuple[str, ...]:
    """Return one note, as a tuple, if the search was stopped early as its loss stayed high (`Stop`); else an empty tuple.

    steps: maximum number of iterations of the search, without those of a polish.
    """
    if not best.given_up:
        return ()
    iterations = len(best.history)
    limit = batch.attack.search.stop.get_hopeless_loss(iterations, steps)
    high = isfinite(limit) and float(best.history[-1]) > limit * float(best.history[0])
    reason = f"was still above {limit:.0%} of that at the start" if high else "hardly fell below that of a grey image"
    return (
        f"the search was given up after {iterations} of {steps} iterations, because its loss {reason}; --set give_up=0 "
        "searches to the end",
    )


def _note_enhancement(batch: CaseBatch) -> tuple[str, ...]:
    """Return one note, as a tuple, if the attack has an enhancer, which sharpens its images; else an empty tuple."""
    enhancer = batch.attack.enhancer
    if enhancer is None:
        return ()
    return (f"the images were enhanced by {enhancer.name}, as those of the attack's null are; compare them with that null",)


def _judge(
    batch: CaseBatch,
    i: int,
    best: BestResult,
    fitted: FittedCase,
    rng: Generator,
    examples: int,
    until: float,
    *,
    stopped: bool,
) -> ConfidenceEstimates:
    """Return the estimated probability that each example of the answer to case i is right, with the evidence for it.

    For a null, the probability follows from the data and the number of examples alone. If the estimate is interrupted, the
    confidence is undecided.
    best: the best search result. fitted: as in `build_answer`. examples: number of examples of the answer. rng: its seed
    determines random estimates. until: as `judged_until` of `build_answer`. stopped: whether the search was interrupted.
    """
    if not batch.attack.sees_gradient:
        return judge_prior(examples, batch.data)
    route = "joint over rounds" if len(fitted[0].views) > 1 else _name_route(batch, best, fitted[0])
    try:
        found = replace(_describe_search(batch, i, best, fitted, rng, examples), until=until, stopped=stopped)
        return judge_search(found, route)
    except KeyboardInterrupt:
        return replace(build_undecided(examples, "it was interrupted"), interrupted=True)


def _describe_search(
    batch: CaseBatch, i: int, best: BestResult, fitted: FittedCase, rng: Generator, examples: int
) -> SearchAnswer:
    """Return the answer to case i with the facts about its search from which `judge_search` estimates the confidence in it.

    best: the best search result. fitted: as in `build_answer`. examples: number of examples of the answer. rng: its seed
    determines the random estimates of `judge_search`.
    """
    assert best.z is not None
    assert best.labels is not None
    x, y = (t.detach() for t in batch.decode_case(i, best.z, best.labels))
    return SearchAnswer(
        x=x,
        labels=y.argmax(dim=1) if y.ndim == 2 else y,
        examples=examples,
        compared=tuple(_build_comparison(view, fitted[1], y, best.z) for view in fitted[0].views),
        data=batch.data,
        model=batch.model,
        kept_evaluations=len(best.history) * batch.attack.search.optimiser.period + best.polished,
        linked=batch.links[i].confidence,
        rng=seed_generator(rng, batch.cases[i], "confidence"),
        unfamiliar=_explain_uncalibrated(batch),
        given_up=best.given_up,
        drift=partial(_measure_drift, *fitted, x, y, best.z),
        adaptive=batch.cases[i].observations[0].training.optimiser != "sgd",
        ordered=fitted[0].simulates_parts,
        inferred=fitted[0].in_inferred_order,
    )


def _explain_uncalibrated(batch: CaseBatch) -> str:
    """Return why the confidence in the answers of this search was not calibrated; "" if it was."""
    if batch.attack.enhancer is not None:
        return "no enhancer was calibrated"
    if batch.attack.simulation.surrogate:
        return "searches with surrogate weights were not calibrated"
    if batch.views[0].is_partial:
        return "comparisons of a part of the gradient's entries were not calibrated"
    if batch.in_order:
        return "searches that simulate all rounds in order, as for a defense with state, were not calibrated"
    if batch.attack.parametrisation.decoder not in (pixels, smooth):
        return "of the decoders, only 'pixels' and 'smooth' were calibrated"
    if batch.attack.parametrisation.decoder is smooth and len(batch.views) > 1:
        return "searches in several rounds with the decoder 'smooth' were not calibrated"
    return ""


def _build_comparison(view: View, i: int, y: Tensor, z: Tensor) -> SimulatedObservation:
    """Return the observed gradient of one observation of case i, with a function that simulates it for examples x.

    The factors by which the objective weighs layers are divided out of both gradients. view: the observation. y, z: labels and
    latent vector of the answer.
    """
    row = view.get_case(i)
    return SimulatedObservation(
        observed=_unweigh(row["observed"], row),
        simulate=lambda x: _unweigh(view.simulate(row, x, y, z), row),
        weight=row["gamma"],
        variance=view.variance[i],
        coordinates=view.coordinates,
    )


def _measure_drift(batch: CaseBatch, i: int, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return how much an answer's gradient changes over the client's local steps, if the attack treats them as one step, 0-d.

    It is |g1 - g0|^2 / |g0|^2, with g0 and g1 the simulated gradients of the answer at the weights sent and at those returned;
    the largest over all observations of several steps. It is 0 without such observations, if local steps are simulated, and for
    attacks with surrogate weights. x, y, z: examples, labels and latent vector of case i.
    """
    simulation, maximum = batch.attack.simulation, torch.zeros(())
    if simulation.local_steps == "simulated" or simulation.surrogate:
        return maximum
    for o, view in enumerate(batch.views):
        if view.steps > 1:
            row, update = view.get_case(i), batch.cases[i].observations[o].update
            moved = {name: w + update[name].to(w) for name, w in row["weights"].items()}
            here, there = view.simulate(row, x, y, z), view.simulate({**row, "weights": moved}, x, y, z)
            off = squared_norm({name: there[name] - here[name] for name in here})
            maximum = torch.maximum(maximum, (off / squared_norm(here)).cpu())
    return maximum


def _unweigh(gradient: GradientTensors, row: ProblemRow) -> dict[str, Tensor]:
    """Return the entries of a gradient that are compared, with the layer weights of the objective divided out."""
    scale, compared = row["scale"], {name: gradient[name] for name in row["observed"]}
    return {name: g / scale[name].clamp(min=1e-12) if name in scale else g for name, g in compared.items()}


def _name_route(batch: CaseBatch, best: BestResult, fitted: CaseBatch) -> str:
    """Return the method of a search. batch: that of the search. fitted: the batch whose simulated gradients were fitted."""
    if not batch.attack.sees_gradient:
        return "prior alone"
    if best.from_warm_start:
        return "optimisation from a closed form"
    return INFERRED_ORDER if fitted.in_inferred_order and len(fitted.views) == 1 and batch.data.is_image else "optimisation"


def _list_oracles(batch: CaseBatch, case: Case) -> tuple[str, ...]:
    """Return the names of what the attack used although no server has it (oracles).

    They are the oracles that the attack's `needs` imply, "labels" if the true labels were given, and "logits" if the loss uses
    the true logits (`CaseBatch.compares_logits`). A null uses neither labels nor logits.
    """
    labels = ("labels",) if case.known_labels is not None and batch.attack.sees_gradient else ()
    return (*list_oracles(batch.attack.needs), *labels, *(("logits",) if batch.compares_logits else ()))


def list_case_slots(batch: CaseBatch, i: int, o: int) -> list[Slot]:
    """Return the slots of the o-th observation of case i.

    A `Slot` is a position in the batch of one of the client's local steps, with the row of the case's reconstruction that fills
    it.
    """
    observation, places = batch.cases[i].observations[o], batch.links[i].places[o].tolist()
    examples = len(places) // batch.epochs
    return [
        replace(slot, example=places[slot.example])
        for slot in list_slots(observation.round, observation.client, batch.views[o].sizes, examples)
    ]

"""Reconstruction of clients with several local batches per round: each round alone first, then all rounds together.

The server does not see in which order a client used its examples (`simulation.step_orders`), and a search in all rounds that
takes the local steps of each for one is misled in each round. The order of a single round can often be found, although the
examples that explain this round then need not be good. They tell the orders of the other rounds, and all rounds together
determine the examples better than each of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Generator

from attacker.attacks.base import Memory, Progress
from attacker.attacks.cases import Case
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.matching_run import FITTING_SHARE, MatchingRun
from attacker.attacks.matching.polishing import find_starts, measure_start, polish, polish_starts
from attacker.attacks.matching.saved_state import BestResult, prefix_memory
from attacker.attacks.simulation.client import build_network
from attacker.reconstruction import Reconstruction

ALONE_SHARE = 0.45
"""Share of the gradient evaluations that the searches in single rounds make. On tuning images 0.3 and 0.6 were about as good."""
MAX_WORSENING, MIN_COMPARED_DISTANCE = 10.0, 1e-4
"""The examples that explain all rounds together replace those of the best round alone if their distance is at most MAX_WORSENING
times that of this round alone, or MAX_WORSENING times MIN_COMPARED_DISTANCE. Distances are relative to that of a zero gradient,
and the mean over rounds."""


def has_unknown_orders(attack: GradientMatching, case: Case) -> bool:
    """Return whether the rounds of a case are searched one by one first.

    They are if a polish would search for the order of the client's examples in several rounds, and the links state that all
    rounds hold the same examples (`link_same`), none of which is known. False for a null.
    """
    links, observations = case.links, case.observations
    if case.key in attack.held or links is None or len(observations) == 1 or attack.polish is None or not attack.sees_gradient:
        return False
    same = all(places.tolist() == list(range(links.examples)) for places in links.places)
    return same and attack.simulation.count_ordered_steps(observations, build_network(observations[0])) > 1


def search_round_by_round(
    attack: GradientMatching,
    cases: Sequence[Case],
    *,
    rng: Generator,
    progress: Progress | None = None,
    memory: Memory | None = None,
) -> list[Reconstruction]:
    """Return one reconstruction for each of `cases`, for which `has_unknown_orders` must hold.

    The answer of a case is that of the round whose update it explains best, if the other rounds do not agree with it.
    rng, progress, memory: as in `Attack.__call__`.
    """
    assert attack.polish is not None
    steps, together = attack.search.steps, (1 - ALONE_SHARE) / (FITTING_SHARE + attack.polish.share)
    joint = MatchingRun(attack.copy_with(steps=round(together * steps)), cases, rng, progress, prefix_memory(memory, "together/"))
    alone = MatchingRun(
        attack.copy_with(steps=round(ALONE_SHARE * steps)),
        [round_alone for case in cases for round_alone in _split_rounds(case)],
        rng,
        progress and (lambda now, total, message: joint.report(0, 0, joint.steps * joint.max_starts * now // total, 0, message)),
        prefix_memory(memory, "alone/"),
    )
    alone.search()
    chosen = _polish_by_halves(alone, len(alone.cases) // len(cases))
    adopted = [_adopt(joint, i, alone, k) for i, k in enumerate(chosen)]
    polish(joint)
    for i, (k, one) in enumerate(zip(chosen, adopted, strict=True)):
        limit = MAX_WORSENING * max(_measure_distance(alone, k), MIN_COMPARED_DISTANCE)
        if _measure_distance(joint, i) > limit:
            spent = joint.best[i]
            joint.best[i] = replace(one, iterations=spent.iterations, evaluations=spent.evaluations)
            joint.fitted[i] = alone.fitted[k]
    answers = zip(joint.build_answers(), chosen, strict=True)
    return [replace(found, notes=(*found.notes, _describe(joint, i, alone, k))) for i, (found, k) in enumerate(answers)]


def _describe(joint: MatchingRun, i: int, alone: MatchingRun, k: int) -> str:
    """Return a note on which rounds the answer of case i explains. k: index in `alone` of the round that was explained best."""
    number = alone.cases[k].observations[0].round
    if joint.fitted[i] is alone.fitted[k]:
        return f"the answer explains round {number} alone, since no order of the client's examples was found that explains all"
    return f"round {number} was explained best alone, and the answer explains all {len(joint.batch.views)} rounds together"


def _split_rounds(case: Case) -> list[Case]:
    """Return the rounds of a case as cases of one observation each, without links."""
    counts = [observation.num_examples or 0 for observation in case.observations]
    known = [None] * len(counts) if case.known_labels is None else torch.split(case.known_labels, counts)
    return [Case((one,), labels) for one, labels in zip(case.observations, known, strict=True)]


def _polish_by_halves(alone: MatchingRun, rounds: int) -> list[int]:
    """Search for the orders of all rounds, polish those that are explained best, and return the index of the best of each case.

    By successive halving: half of the rounds of each case are polished, then the better half of these, until one is left. Each
    stage has the same number of iterations, over all rounds, and all stages have as many as a polish of every round. If no round
    of a case can be polished, for example after an interruption, the best is that of its search.
    rounds: number of rounds of each case.
    """
    starts = {start.case: start for start in find_starts(alone)}
    left = [[i for i in range(first, first + rounds) if i in starts] for first in range(0, len(alone.cases), rounds)]
    stages = rounds.bit_length() - 1
    for stage in range(stages):
        kept = rounds >> (stage + 1)
        distances = {i: measure_start(alone, starts[i]) for own in left for i in own}
        left = [sorted(own, key=distances.__getitem__)[:kept] for own in left]
        polish_starts(alone, [starts[i] for own in left for i in own], times=rounds / (stages * kept), stage=stage, stages=stages)
        starts |= {i: replace(starts[i], z=best.get_latent()[0]) for i, best in enumerate(alone.best) if best.polished}
    return [
        own[0] if own else min(range(first, first + rounds), key=partial(_measure_distance, alone))
        for own, first in zip(left, range(0, len(alone.cases), rounds), strict=True)
    ]


def _measure_distance(run: MatchingRun, i: int) -> float:
    batch, k = run.fitted[i]
    return batch.measure_relative_distance(k, *run.best[i].get_latent())


def _adopt(joint: MatchingRun, i: int, alone: MatchingRun, k: int) -> BestResult:
    """Make the best result of case k of `alone`, a round of case i of `joint`, the best result of case i; return a copy of it.

    The searches in all rounds of case i count; an evaluation in one of R rounds counts as 1 / R.
    """
    found, rounds = alone.best[k], len(joint.batch.views)
    x, labels = alone.batch.decode_case(k, *found.get_latent())
    z = joint.batch.space.encode([x.detach()], [joint.rng], joint.attack.device)[0]
    every = alone.best[i * rounds : (i + 1) * rounds]
    joint.best[i], joint.fitted[i] = replace(found, z=z, labels=labels), alone.fitted[k]
    joint.best[i].iterations = sum(one.iterations for one in every) // rounds
    joint.best[i].evaluations = sum(one.evaluations for one in every) // rounds
    if k in alone.interrupted:
        joint.interrupted.add(i)
    return replace(joint.best[i])

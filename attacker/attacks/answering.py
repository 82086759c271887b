"""What a search has come to, as a reconstruction."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attacker.attacks import local_epochs
from attacker.attacks.base import Case
from attacker.attacks.memories import Best
from attacker.attacks.objectives import squared_norm
from attacker.reconstruction import Reconstruction, Slot, slots_of

if TYPE_CHECKING:
    from attacker.attacks.search import Search


def answer(search: "Search", i: int, seconds: float) -> Reconstruction:
    """What a search has come to for case i. seconds: those that it took for each case."""
    case, best = search.cases[i], search.best[i]
    assert best.z is not None
    assert best.labels is not None
    x, y = search.decode(best.z, {"labels": best.labels})
    confidence = _confidence(search, i, best.z, x, y)
    x, y = local_epochs.merged(x, y, search.epochs)
    return Reconstruction(
        case=case.key,
        x=x.cpu(),
        y=(y.argmax(dim=1) if y.ndim == 2 else y).cpu(),
        confidence=confidence * search.links[i].confidence[: len(x)],
        slots=tuple(slot for o in range(len(search.views)) for slot in slots(search, i, o)),
        loss=best.history.cpu(),
        iterations=best.iterations,
        evaluations=best.evaluations,
        restarts=best.restarts,
        seconds=seconds,
        route=_route(search, best),
        attack=search.attack.name,
        oracles=_oracles(search, case),
        seed=search.rng.initial_seed(),
        interrupted=i in search.interrupted,
        notes=search.links[i].notes if search.attack.sees_gradient else (),
    )


def _route(search: "Search", best: Best) -> str:
    if not search.attack.sees_gradient:
        return "prior alone"
    return "optimisation from a closed form" if best.given else "optimisation"


def _oracles(search: "Search", case: Case) -> tuple[str, ...]:
    """What was used of what no server knows."""
    labels = ("labels",) if case.known_labels is not None and search.attack.sees_gradient else ()
    return (*search.attack.oracles, *labels, *(("logits",) if search.told else ()))


def slots(search: "Search", i: int, o: int) -> list[Slot]:
    """The places of the o-th observation of case i, and which example each holds."""
    observation, places = search.cases[i].observations[o], search.links[i].places[o].tolist()
    own = len(places) // search.epochs
    return [
        replace(slot, example=places[slot.example])
        for slot in slots_of(observation.round, observation.client, search.views[o].sizes, own)
    ]


def _confidence(search: "Search", i: int, z: Tensor, x: Tensor, y: Tensor) -> float:
    """The share of the observed gradients' power that the answer explains; 0 without a gradient, or with one of zeros."""
    shares = []
    for view in search.views if search.attack.sees_gradient else ():
        row = view.case(i)
        if squared_norm(row["observed"]) > 0:
            worst = view.worst[i].clamp(min=torch.finfo(z.dtype).tiny)
            share = 1 - view.distance(row, x, y, z) / worst
            shares.append((float(row["gamma"]), float(share.nan_to_num(nan=0.0).clamp(0, 1))))
        else:
            shares.append((float(row["gamma"]), 0.0))
    total = sum(gamma for gamma, _ in shares)
    return sum(gamma * share for gamma, share in shares) / total if total else 0.0

"""What a search has come to, as a reconstruction."""

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from attacker.attacks.base import Case, oracles_of
from attacker.attacks.confidence import Judged, of_prior, of_search, undecided
from attacker.attacks.matching.saved_state import Best
from attacker.attacks.simulation import local_epochs
from attacker.reconstruction import Reconstruction, Slot, slots_of

if TYPE_CHECKING:
    from attacker.attacks.matching.search import Search


def answer(search: "Search", i: int, seconds: float) -> Reconstruction:
    """What a search has come to for case i. seconds: those that it took for each case."""
    started, case, best = perf_counter(), search.cases[i], search.best[i]
    assert best.z is not None
    assert best.labels is not None
    x, y = search.decode(best.z, {"labels": best.labels})
    x, y = local_epochs.merged(x, y, search.epochs)
    judged = _judged(search, i, best, len(x))
    return Reconstruction(
        case=case.key,
        x=x.cpu(),
        y=(y.argmax(dim=1) if y.ndim == 2 else y).cpu(),
        confidence=judged.confidence,
        explained=judged.explained,
        evidence={name: tuple(value.tolist()) for name, value in judged.evidence.items()},
        slots=tuple(slot for o in range(len(search.views)) for slot in slots(search, i, o)),
        loss=best.history.cpu(),
        iterations=best.iterations,
        evaluations=best.evaluations,
        restarts=best.restarts,
        seconds=seconds + perf_counter() - started,
        route=_route(search, best),
        attack=search.attack.name,
        oracles=_oracles(search, case),
        seed=search.rng.initial_seed(),
        interrupted=i in search.interrupted,
        notes=(*(search.links[i].notes if search.attack.sees_gradient else ()), *judged.notes),
    )


def _judged(search: "Search", i: int, best: Best, examples: int) -> Judged:
    """How sure the attack is of the answer to case i, which holds so many examples."""
    assert best.z is not None
    assert best.labels is not None
    if not search.attack.sees_gradient:
        return of_prior(examples, search.data)
    route = "joint over rounds" if len(search.views) > 1 else _route(search, best)
    try:
        return of_search(search, i, best.z, best.labels, examples, route)
    except KeyboardInterrupt:
        search.interrupted.add(i)
        return undecided(examples, "it was interrupted")


def _route(search: "Search", best: Best) -> str:
    if not search.attack.sees_gradient:
        return "prior alone"
    return "optimisation from a closed form" if best.given else "optimisation"


def _oracles(search: "Search", case: Case) -> tuple[str, ...]:
    """What was used of what no server knows."""
    labels = ("labels",) if case.known_labels is not None and search.attack.sees_gradient else ()
    return (*oracles_of(search.attack.needs), *labels, *(("logits",) if search.told else ()))


def slots(search: "Search", i: int, o: int) -> list[Slot]:
    """The places of the o-th observation of case i, and which example each holds."""
    observation, places = search.cases[i].observations[o], search.links[i].places[o].tolist()
    own = len(places) // search.epochs
    return [
        replace(slot, example=places[slot.example])
        for slot in slots_of(observation.round, observation.client, search.views[o].sizes, own)
    ]

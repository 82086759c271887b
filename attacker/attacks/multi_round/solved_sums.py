"""Examples of single clients from secure sums that are solved for the clients' updates.

It is assumed that a client sends the same update in each of its rounds. As the weights change between rounds, updates change as
well, and the solved updates are approximate. No answer is certain.
"""

from dataclasses import replace
from time import perf_counter

import torch
from torch import Generator

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Progress, find_unmet
from attacker.attacks.cases import Case
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.multi_round.certified_examples import DIRECT_ROUTES
from attacker.attacks.multi_round.disaggregation import disaggregate
from attacker.reconstruction import Reconstruction, Slot


def attack_solved_sums(case: Case, attack: str, rng: Generator, progress: Progress | None, device: str) -> Reconstruction:
    """Return the examples that closed forms find in the single clients' updates that explain a case's sums by least squares.

    Each example has one `Slot` for every round of the case in which its client took part. A slot states the round and the client
    whose training example the reconstructed one is meant to be; scoring compares the two. attack: name of the attack.
    Raises ValueError with the reason if the sums determine no client's update, or if closed forms find nothing in any.
    """
    started, found = perf_counter(), disaggregate(case.observations)
    closed = ClosedForm(name="exact", routes=DIRECT_ROUTES)
    closed.device = device
    clients = sorted({name for one in case.observations for name in one.cohort})
    answers, reasons = {}, dict[str, str]()
    for number, (name, observation) in enumerate(found.clients.items(), start=1):
        single = Case((observation,))
        try:
            if unmet := find_unmet(closed, single):
                raise ValueError("; ".join(unmet))
            (answers[name],) = closed([single], rng=rng)
        except ValueError as error:
            reasons[name] = str(error)
        if progress is not None:
            progress(number, len(found.clients), f"closed forms: {len(answers)} of {len(clients)} clients")
    notes = (
        f"the sums determine the updates of {len(found.clients)} of {len(clients)} clients",
        f"the least squares leave {found.residual:.1e} of the sums' norm",
        f"closed forms found examples in {len(answers)} of them",
    )
    if not answers:
        details = "; ".join((*notes, *dict.fromkeys(reasons.values())))
        advice = "; attack more rounds, which determine more updates" if len(found.clients) < len(clients) else ""
        raise ValueError(f"no example could be recovered from the secure sums: {details}{advice}")
    x, y = (torch.cat([getattr(answer, field) for answer in answers.values()]) for field in ("x", "y"))
    slots, start = [], 0
    for name, answer in answers.items():
        for one in (one for one in case.observations if name in one.cohort):
            slots += [Slot(one.round, name, 1, position, start + position) for position in range(len(answer.x))]
        start += len(answer.x)
    return replace(
        build_reconstruction(
            case, x, y, attack=attack, rng=rng, route="solved sums", slots=tuple(slots), seconds=perf_counter() - started
        ),
        evaluations=sum(answer.evaluations for answer in answers.values()),
        notes=notes,
    )

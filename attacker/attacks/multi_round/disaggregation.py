"""Linear disaggregation of secure sums: each client's own update from sums over cohorts that change from round to round.

With the participation matrix P (rounds x clients), the clients' updates U and the sums S of the rounds, P U = S. This assumes
that a client sends the same update in each round: it uses all its examples every time, and the weights hardly change. What
differs between rounds is left as the residual. As the weights change between rounds, the solved updates are approximate, and no
example that closed forms find in them is certain.
A recorded secure sum is the mean over its cohort (the clients of the sum), and is multiplied by the size of the cohort first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Generator, Tensor

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.base import Progress, find_unmet
from attacker.attacks.cases import Case
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.multi_round.certified_examples import DIRECT_ROUTES
from attacker.reconstruction import Reconstruction, Slot
from fedsim.recording.codec import encode
from fedsim.recording.observation import Observation

MIN_DETERMINED = 1 - 1e-6
"""Smallest diagonal entry of pinv(P) P of a client whose update is determined by the sums; the exact value is 1."""


@dataclass(frozen=True)
class Disaggregated:
    """The clients' updates U that solve P U = S by least squares.

    P, (rounds, clients), is 1 where a client takes part in a round, else 0. S holds one sum of updates per round: the recorded
    mean times the number of clients.
    clients:  dict from the name of each client whose update is determined to an observation with that update, which attacks on
              single rounds can be given. The observation's round is the first round of the client.
    residual: norm of P U - S relative to the norm of S; near 0 if clients repeat their updates.
    """

    clients: dict[str, Observation]
    residual: float


def disaggregate(sums: Sequence[Observation]) -> Disaggregated:
    """Return the updates of single clients that explain secure sums by least squares, as far as the sums determine them.

    All clients are taken to have the same weight in a sum, as with equal numbers of examples. The model weights in a client's
    observation are the mean of the model weights that were sent in its rounds; the update is then accurate to the second order in
    the changes of the model weights. The number of examples in a client's observation is that of a sum divided by the size of the
    sum's cohort, if this is the same whole number in all rounds of the client, and else None.
    sums: the secure sums (means over the cohort) of several rounds. Raises ValueError if there are none.
    """
    if not sums:
        raise ValueError("linear disaggregation needs the secure sums of at least one round, got none")
    names = sorted({name for secure_sum in sums for name in secure_sum.cohort})
    participation = torch.tensor(
        [[float(name in secure_sum.cohort) for name in names] for secure_sum in sums], dtype=torch.float64
    )
    solve = torch.linalg.pinv(participation)
    determined = (solve @ participation).diagonal() >= MIN_DETERMINED
    updates, residual, total = {}, 0.0, 0.0
    for key, w in sums[0].weights.items():
        totals = torch.stack([secure_sum.update[key].double().flatten() * len(secure_sum.cohort) for secure_sum in sums])
        solution = solve @ totals
        updates[key] = solution.reshape(len(names), *w.shape).float()
        residual += float((participation @ solution - totals).square().sum())
        total += float(totals.square().sum())
    observations = {
        name: _build_observation(
            name, [observation for observation in sums if name in observation.cohort], {key: u[i] for key, u in updates.items()}
        )
        for i, name in enumerate(names)
        if determined[i]
    }
    return Disaggregated(observations, (residual / total) ** 0.5 if total else 0.0)


def _build_observation(client: str, sums: Sequence[Observation], update: Mapping[str, Tensor]) -> Observation:
    """Return the observation of one client, with the `update` that was solved from `sums`, those in which it took part."""
    weights = {key: torch.stack([observation.weights[key] for observation in sums]).mean(dim=0) for key in sums[0].weights}
    sizes = {
        None if observation.num_examples is None else observation.num_examples / len(observation.cohort) for observation in sums
    }
    size = sizes.pop() if len(sizes) == 1 else None
    return replace(
        sums[0],
        client=client,
        cohort=(client,),
        num_examples=int(size) if size is not None and size.is_integer() else None,
        weights=weights,
        payload=encode(dict(update)),
    )


def attack_solved_sums(case: Case, attack: str, rng: Generator, progress: Progress | None, device: str) -> Reconstruction:
    """Return the examples that closed forms find in the single clients' updates that explain a case's sums by least squares.

    Each example has one `Slot` for every round of the case in which its client took part. A slot states the round and the client
    whose training example the reconstructed one is meant to be; scoring compares the two. attack: name of the attack.
    Raises ValueError with the reason if the sums determine no client's update, or if closed forms find nothing in any.
    """
    started, solved = perf_counter(), disaggregate(case.observations)
    closed = ClosedForm(name="exact", routes=DIRECT_ROUTES)
    closed.device = device
    clients = sorted({name for observation in case.observations for name in observation.cohort})
    answers, reasons = {}, dict[str, str]()
    for number, (name, observation) in enumerate(solved.clients.items(), start=1):
        single = Case((observation,))
        try:
            if unmet := find_unmet(closed, single):
                raise ValueError("; ".join(unmet))
            (answers[name],) = closed([single], rng=rng)
        except ValueError as error:
            reasons[name] = str(error)
        if progress is not None:
            progress(number, len(solved.clients), f"closed forms: {len(answers)} of {len(clients)} clients")
    notes = (
        f"the sums determine the updates of {len(solved.clients)} of {len(clients)} clients",
        f"the least squares leave {solved.residual:.1e} of the sums' norm",
        f"closed forms found examples in {len(answers)} of them",
    )
    if not answers:
        details = "; ".join((*notes, *dict.fromkeys(reasons.values())))
        advice = "; attack more rounds, which determine more updates" if len(solved.clients) < len(clients) else ""
        raise ValueError(f"no example could be recovered from the secure sums: {details}{advice}")
    x, y = (torch.cat([getattr(answer, field) for answer in answers.values()]) for field in ("x", "y"))
    slots, start = [], 0
    for name, answer in answers.items():
        for round in (observation.round for observation in case.observations if name in observation.cohort):
            slots += [Slot(round, name, 1, position, start + position) for position in range(len(answer.x))]
        start += len(answer.x)
    return replace(
        build_reconstruction(
            case, x, y, attack=attack, rng=rng, route="solved sums", slots=tuple(slots), seconds=perf_counter() - started
        ),
        evaluations=sum(answer.evaluations for answer in answers.values()),
        notes=notes,
    )

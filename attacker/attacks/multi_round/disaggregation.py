"""Linear disaggregation of secure sums: each client's own update from sums over cohorts that change from round to round.

With the participation matrix P (rounds x clients), the clients' updates U and the sums S of the rounds, P U = S. This assumes
that a client sends the same update in each round: it uses all its examples every time, and the weights hardly change. What
differs between rounds is left as the residual.
A recorded secure sum is the mean over its cohort (the clients of the sum), and is multiplied by the size of the cohort first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
        name: _build_observation(name, [one for one in sums if name in one.cohort], {key: u[i] for key, u in updates.items()})
        for i, name in enumerate(names)
        if determined[i]
    }
    return Disaggregated(observations, (residual / total) ** 0.5 if total else 0.0)


def _build_observation(client: str, sums: Sequence[Observation], update: Mapping[str, Tensor]) -> Observation:
    """Return the observation of one client, with the `update` that was solved from `sums`, those in which it took part."""
    weights = {key: torch.stack([one.weights[key] for one in sums]).mean(dim=0) for key in sums[0].weights}
    sizes = {None if one.num_examples is None else one.num_examples / len(one.cohort) for one in sums}
    size = sizes.pop() if len(sizes) == 1 else None
    return replace(
        sums[0],
        client=client,
        cohort=(client,),
        num_examples=int(size) if size is not None and size.is_integer() else None,
        weights=weights,
        payload=encode(dict(update)),
    )

"""Spans of single clients' examples, computed from secure sums and their cohorts, and the part of each client in a sum.

The span of examples x is the set of all linear combinations of their vectors [x, 1]; a cohort is the clients of one sum.
The row space of a summed update is the sum of the spans of its clients' examples, although the model changes between rounds. If
clients use the same examples in every round, the row spaces of all sums in which a client took part intersect, in general, in the
span of this client's examples, as soon as no other client took part in all of these sums. Given the spans of all clients of a
round, the round's sum splits into one part per client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.isolation import group_parallel_rows, select_independent
from attacker.attacks.closed_form.linear.low_rank import polish
from attacker.attacks.closed_form.linear.zeros import compute_zero_threshold
from attacker.attacks.multi_round.spans.row_space import RowSpace, intersect
from attacker.attacks.multi_round.spans.separation import ERROR_FACTOR, MAX_RESIDUAL, ZERO_LEVEL

MIN_ZERO_SHARE = 0.05
"""Smallest share of neurons that must be off for an example, so that zeros are evidence of it."""
MAX_CONDITION = 1e6
"""Largest condition number of the spans of a round's clients up to which the round's sum is split."""


@dataclass(frozen=True)
class IsolatedClient:
    """The span of the vectors [x, 1] of all examples x of one client.

    y: (dimensions, F) vectors that form a basis of the span, with noise of standard deviation 1 per entry. round: the round, from
    1, after which the client was isolated.
    """

    y: Tensor
    round: int


@dataclass(frozen=True)
class ClientPart:
    """The rows of one client in several sums.

    space: these rows, one per neuron and sum, see `split_sums`. sums: the indices of the sums, in the order of the rows.
    """

    space: RowSpace
    sums: tuple[int, ...]


def isolate_clients(
    spaces: Sequence[RowSpace], cohorts: Sequence[Sequence[str]], rounds: Sequence[int]
) -> dict[str, IsolatedClient]:
    """Return a dict from the name of each client that can be isolated to the span of the vectors [x, 1] of its examples x.

    A client can be isolated if no other client took part in all of its sums. The row spaces of its sums are intersected in the
    given order, only until no other client took part in all sums used so far; later sums are not used. If the intersection is
    empty, the client is left out of the dict.
    spaces, cohorts, rounds: row space, clients and round of each sum. Sums of full rank are ignored, since they intersect every
    other sum.
    """
    found: dict[str, IsolatedClient] = {}
    for client in sorted({name for cohort in cohorts for name in cohort}):
        own = [t for t, cohort in enumerate(cohorts) if client in cohort and not spaces[t].saturated]
        if not own:
            continue
        if set.intersection(*(set(cohorts[t]) for t in own)) != {client}:
            continue
        others, y, last = set(cohorts[own[0]]) - {client}, spaces[own[0]].y, rounds[own[0]]
        for t in own[1:]:
            if not others:
                break
            y, others, last = intersect(y, spaces[t].y).y, others & set(cohorts[t]), rounds[t]
        if len(y):
            found[client] = IsolatedClient(y, last)
    return found


def split_sums(
    spaces: Sequence[RowSpace], cohorts: Sequence[Sequence[str]], clients: Mapping[str, IsolatedClient]
) -> dict[str, ClientPart]:
    """Split sums into the parts of their clients; return a dict from client to its parts of all split sums, in factorised form.

    A sum is split if all of its clients are isolated, its rank is not full and equals the added dimensions of the clients' spans,
    and these spans are independent up to MAX_CONDITION. The rows of a client's matrix, one per neuron and sum, are `coordinates`
    times the orthonormal basis of the client's span that `orthonormalise(y)` returns.
    """
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    sums: dict[str, list[int]] = {}
    for t, (space, cohort) in enumerate(zip(spaces, cohorts, strict=True)):
        if space.saturated or not all(name in clients for name in cohort):
            continue
        bases = [orthonormalise(clients[name].y) for name in cohort]
        z = torch.cat(bases) @ space.basis.T
        if len(z) != space.rank or float(torch.linalg.cond(z)) > MAX_CONDITION:
            continue
        inverse = torch.linalg.inv(z)
        sizes = [len(basis) for basis in bases]
        split, factors = torch.split(space.coordinates @ inverse, sizes, dim=1), torch.split(inverse.norm(dim=0), sizes)
        for name, rows, factor in zip(cohort, split, factors, strict=True):
            parts.setdefault(name, []).append((rows, space.noise * float(factor.max())))
            sums.setdefault(name, []).append(t)
    found = {}
    for name, part in parts.items():
        rows, noise = (torch.cat(each) for each in zip(*part, strict=True))
        found[name] = ClientPart(RowSpace(clients[name].y, rows, noise, 0.0, saturated=False), tuple(sums[name]))
    return found


def separate_by_zeros(space: RowSpace) -> Tensor:
    """Return vectors (n, F) of a client's examples x, found by rows (neurons) that only one example turns on.

    A vector is [x, 1] times a factor, of either sign, that scales the estimated error of its entries to 1.
    space: the client's parts of several sums, see `split_sums`. Rows that only one example turns on are parallel. All examples or
    none are returned: n is the dimension of the span, or 0 if fewer directions were found, if hardly any neurons are off for one
    of the examples, or if examples in these directions do not explain all rows. A span of dimension 1 is a single example.
    """
    rank, basis = space.rank, orthonormalise(space.y)
    nothing = basis.new_zeros(0, basis.shape[1])
    live = space.coordinates.norm(dim=1) > ZERO_LEVEL * space.noise * rank**0.5
    if rank == 1:
        return space.y
    if int(live.sum()) < rank + 2:
        return nothing
    rows, noise = space.coordinates[live], space.noise[live]
    groups = group_parallel_rows(rows, noise, torch.ones(len(rows), dtype=torch.bool))
    sure = groups.directions[groups.confirmed]
    z = sure[select_independent(sure)][:rank]
    if len(z) < rank:
        return nothing
    inverse = torch.linalg.inv(z)
    d = rows @ inverse
    level = torch.outer(noise, inverse.norm(dim=0))
    on = d.abs() > compute_zero_threshold(level, d.abs().median(dim=0).values)
    if float((~on).double().mean(dim=0).min()) < MIN_ZERO_SHARE:
        return nothing
    d, z, residual = polish(rows, noise, on, z)
    vectors = z @ basis
    if not residual <= MAX_RESIDUAL or not bool(torch.isfinite(vectors).all()):
        return nothing
    weighted = d / noise[:, None]
    error = torch.linalg.inv(weighted.T @ weighted).diagonal().clamp(min=torch.finfo(z.dtype).tiny).sqrt()
    scaled: Tensor = vectors / (ERROR_FACTOR * error[:, None])
    return scaled


def find_common(holders: Sequence[int], cohorts: Sequence[Sequence[str]]) -> set[str]:
    """Return the clients that took part in all sums that contain an example. holders: indices of these sums."""
    return set.intersection(*(set(cohorts[t]) for t in holders)) if holders else set()


def name_owner(holders: Sequence[int], cohorts: Sequence[Sequence[str]]) -> str:
    """Return the only client that took part in all sums that contain an example, or "" if there are several or none."""
    common = find_common(holders, cohorts)
    return next(iter(common)) if len(common) == 1 else ""


def orthonormalise(y: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of the rows of y, which must be independent."""
    basis: Tensor = torch.linalg.qr(y.T).Q.T
    return basis

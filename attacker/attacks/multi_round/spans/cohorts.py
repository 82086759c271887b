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

from attacker.attacks.cases import Case
from attacker.attacks.multi_round.spans.components import MixedImages, is_separable, mix_images, span_vectors
from attacker.attacks.multi_round.spans.layer_updates import join_parameters
from attacker.attacks.multi_round.spans.row_space import RowSpace, intersect, orthonormalise
from attacker.attacks.multi_round.spans.same_batch import make_factors, stack_spaces
from attacker.attacks.networks.input_layer import InputLayer
from fedsim.recording.observation import DataSpec

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


def find_common(holders: Sequence[int], cohorts: Sequence[Sequence[str]]) -> set[str]:
    """Return the clients that took part in all sums that contain an example. holders: indices of these sums."""
    return set.intersection(*(set(cohorts[t]) for t in holders)) if holders else set()


def name_owner(holders: Sequence[int], cohorts: Sequence[Sequence[str]]) -> str:
    """Return the only client that took part in all sums that contain an example, or "" if there are several or none."""
    common = find_common(holders, cohorts)
    return next(iter(common)) if len(common) == 1 else ""


def list_mixed_sums(
    case: Case,
    layer: InputLayer,
    spaces: Sequence[RowSpace],
    clients: Mapping[str, IsolatedClient],
    parts: Mapping[str, ClientPart],
    *,
    relu: bool,
) -> list[MixedImages]:
    """Return the spans of isolated clients and of sums. Sums of the same cohort with equal row spaces are one span.

    Left out are spans that independent component analysis cannot separate (`is_separable`), sums whose row spaces are not whole
    (`RowSpace.is_whole`), and clients that took part in a sum that is neither whole nor of full rank.
    relu: whether ReLU follows the layer. If it does not, the rows of updates are not used.
    """
    data, seen = case.observations[0].data, case.observations
    mixed = []

    def join_sent(sums: Sequence[int]) -> Tensor | None:
        return torch.cat([join_parameters(seen[t].weights, layer) for t in sums]) if relu and sums else None

    for name, client in clients.items():
        own = [t for t, observation in enumerate(seen) if name in observation.cohort and not spaces[t].saturated]
        if not is_separable(len(client.y), data) or not all(spaces[t].is_whole for t in own):
            continue
        if name in parts:
            rows = parts[name].space
            factors = make_factors(rows.coordinates, orthonormalise(client.y), rows.noise)
            mixed.append(mix_images(factors, own, join_sent(parts[name].sums)))
        else:
            mixed.append(mix_images(span_vectors(client.y), own, None))
    for group in _group_equal_sums(spaces, [observation.cohort for observation in seen], data):
        mixed.append(mix_images(stack_spaces([spaces[t] for t in group]), group, join_sent(group)))
    return mixed


def _group_equal_sums(spaces: Sequence[RowSpace], cohorts: Sequence[Sequence[str]], data: DataSpec) -> list[list[int]]:
    """Return groups of sums of one cohort with equal row spaces, as indices. Sums that cannot be separated are left out."""
    groups: list[list[int]] = []
    for t, space in enumerate(spaces):
        if not space.is_whole or not is_separable(space.rank, data):
            continue
        for group in groups:
            first = spaces[group[0]]
            same = first.rank == space.rank and set(cohorts[group[0]]) == set(cohorts[t])
            if same and len(intersect(first.y, space.y).y) == space.rank:
                group.append(t)
                break
        else:
            groups.append([t])
    return groups

"""Partitions: functions that distribute the training examples among the clients, and their registry."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from defenses.registry import Registry, bind_arguments
from fedsim.data import Examples

Indices = NDArray[np.int64]


def iid(examples: Examples, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Split examples at random into parts whose sizes differ by at most one, one part per client.

    Returns a list with the indices (n,) of each client's examples.
    """
    return [np.sort(part) for part in np.array_split(rng.permutation(len(examples)), clients)]


def dirichlet(examples: Examples, clients: int, rng: np.random.Generator, *, alpha: float) -> list[Indices]:
    """Split each class among the clients by shares drawn from a symmetric Dirichlet distribution (Yurochkin et al. 2019).

    alpha: concentration, above 0; the smaller it is, the more the clients' classes differ, on average.

    A client that would get no example gets one from a client with the most. Returns a list with the indices (n,) of each client's
    examples.
    """
    if not 0 < alpha < np.inf:
        raise ValueError(f"partition dirichlet: alpha must be positive and finite, got {alpha}")
    parts: list[list[int]] = [[] for _ in range(clients)]
    for members in _group_members(examples.labels):
        members = rng.permutation(members)
        cuts = (np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(members)).round().astype(int)
        for part, chosen in zip(parts, np.split(members, cuts), strict=True):
            part.extend(chosen.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return _sort_parts(parts)


def by_label(examples: Examples, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Split examples by class, the extreme non-i.i.d. case: each client holds one class if there are as many clients as classes.

    With fewer clients than classes, each class goes as a whole to one client; clients get classes in turn, so some hold several.
    With more clients than classes, each client holds examples of one class; clients are assigned to classes in turn, and the
    clients of a class share its examples at random in parts whose sizes differ by at most one.
    Returns a list with the indices (n,) of each client's examples.
    """
    classes = _group_members(examples.labels)
    if clients <= len(classes):
        return _sort_parts([np.concatenate(classes[client::clients]).tolist() for client in range(clients)])
    parts: list[list[int]] = []
    for members, holders in zip(classes, _deal_classes([len(c) for c in classes], clients), strict=True):
        parts.extend(part.tolist() for part in np.array_split(rng.permutation(members), holders))
    return _sort_parts(parts)


def k_classes(examples: Examples, clients: int, rng: np.random.Generator, *, k: int) -> list[Indices]:
    """Give each client examples of exactly `k` classes, drawn at random (like the shards of McMahan et al. 2017).

    Larger classes get more clients, approximately in proportion; the clients of a class share its examples at random in parts
    whose sizes differ by at most one. If clients x k is less than the number of classes, the examples of the smallest classes are
    not used. If it is at least the number of classes, all examples are used.
    Returns a list with the indices (n,) of each client's examples. Raises ValueError if there are too few examples for this
    number of clients and classes.
    """
    classes = _group_members(examples.labels)
    if not isinstance(k, int) or not 0 < k <= len(classes):
        raise ValueError(f"partition k_classes: k must be a whole number from 1 to the {len(classes)} classes, got {k}")
    limits = [min(len(members), clients) for members in classes]
    if sum(limits) < clients * k:
        raise ValueError(
            f"partition k_classes: there are too few examples to give each of {clients} clients examples of {k} classes; lower "
            "clients.count or k"
        )
    holders = _share_slots([len(members) for members in classes], limits, clients * k)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for members, holding in zip(classes, _draw_holders(holders, clients, rng), strict=True):
        for client, part in zip(holding, np.array_split(rng.permutation(members), max(len(holding), 1)), strict=False):
            parts[client].extend(part.tolist())
    return _sort_parts(parts)


def by_group(examples: Examples, clients: int, rng: np.random.Generator, *, column: str) -> list[Indices]:
    """Give all examples with the same value of a column, such as a person or a hospital, to the same client.

    column: a column of a csv table other than its label and split, or `person` of lfw. Rows without a value form one group.

    Groups are assigned from the largest to the smallest, each to the client with the fewest examples so far.
    Returns a list with the indices (n,) of each client's examples. Raises ValueError if there are more clients than groups.
    """
    if column not in examples.groups:
        advice = f"use one of {', '.join(examples.groups)}" if examples.groups else "it has no group columns; csv and lfw do"
        raise ValueError(f"partition by_group: the data set has no group column {column!r}; {advice}")
    groups = [rng.permutation(members) for members in _group_members(examples.groups[column])]
    if clients > len(groups):
        raise ValueError(f"clients.count is {clients}, but column {column!r} has only {len(groups)} groups; use fewer clients")
    held = [(0, tie, client) for client, tie in enumerate(rng.permutation(clients).tolist())]
    heapq.heapify(held)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for number in sorted(rng.permutation(len(groups)).tolist(), key=lambda i: -len(groups[i])):
        size, tie, client = heapq.heappop(held)
        parts[client].extend(groups[number].tolist())
        heapq.heappush(held, (size + len(groups[number]), tie, client))
    return _sort_parts(parts)


def _group_members(values: NDArray[Any]) -> list[Indices]:
    """Return a list with, for each distinct value of `values` (N,) in sorted order, the indices at which it stands."""
    _, numbers = np.unique(values, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _sort_parts(parts: list[list[int]]) -> list[Indices]:
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def _deal_classes(sizes: list[int], clients: int) -> list[int]:
    """Return how many clients each class gets if clients are assigned one by one to class 0, 1, ..., then 0 again, and so on.

    sizes:   number of examples of each class. A class never gets more clients than it has examples.
    clients: number of clients, at most the sum of `sizes`.
    """
    holders = [0] * len(sizes)
    while clients:
        for label in (i for i, size in enumerate(sizes) if holders[i] < size):
            if clients:
                holders[label] += 1
                clients -= 1
    return holders


def _share_slots(sizes: list[int], limits: list[int], slots: int) -> list[int]:
    """Return how many clients each class gets, if `slots` pairs of client and class are distributed among the classes.

    sizes:  number of examples of each class. Each class first gets one client, the largest first, as long as `slots` last. The
            rest are distributed approximately in proportion to `sizes` (D'Hondt method).
    limits: largest number of clients of each class.
    """
    holders = [0] * len(sizes)
    waiting = [(-np.inf, -size, label) for label, size in enumerate(sizes)]
    heapq.heapify(waiting)
    for _ in range(slots):
        _, size, label = heapq.heappop(waiting)
        holders[label] += 1
        if holders[label] < limits[label]:
            heapq.heappush(waiting, (size / (holders[label] + 1), size, label))
    return holders


def _draw_holders(holders: list[int], clients: int, rng: np.random.Generator) -> list[list[int]]:
    """Draw which clients hold each class; return a list of client numbers for each class. A client gets each class at most once.

    holders: number of clients of each class; the sum is a multiple of `clients`, so that all clients get equally many classes.
    A list with each class c repeated `holders[c]` times is first dealt to the clients in turn. Then random pairs of clients swap
    classes.
    """
    slots = np.repeat(np.arange(len(holders)), holders)
    owned = [set(slots[client::clients].tolist()) for client in range(clients)]
    for a, b in rng.integers(clients, size=(8 * len(slots), 2)).tolist():
        given, taken = sorted(owned[a] - owned[b]), sorted(owned[b] - owned[a])
        if given and taken:
            x, y = given[rng.integers(len(given))], taken[rng.integers(len(taken))]
            owned[a] ^= {x, y}
            owned[b] ^= {x, y}
    return [[client for client in range(clients) if label in owned[client]] for label in range(len(holders))]


PARTITIONS: Registry[Callable[..., list[Indices]]] = Registry(
    "fedsim.partitions", {"iid": iid, "dirichlet": dirichlet, "by_label": by_label, "k_classes": k_classes, "by_group": by_group}
)


def split(examples: Examples, clients: int, *, seed: int, name: str, **arguments: Any) -> list[Indices]:
    """Split examples by the partition `name`; return a list with the indices (n,) of each client's examples.

    seed: seed of all random choices.
    name: a key of `PARTITIONS`; `arguments` are the arguments of the partition's function besides examples, clients and rng.
    No example has two clients, and every client gets at least one example.
    Raises ValueError if there are more clients than examples, for invalid arguments of the partition, or if the partition, which
    may be the user's own, returns something else.
    """
    if clients > len(examples):
        raise ValueError(f"clients.count is {clients}, but there are only {len(examples)} training examples; use fewer clients")
    factory = PARTITIONS[name]
    rng = np.random.default_rng([seed, 0x5917])
    bound = bind_arguments(f"partition {name}", factory, examples, clients, rng, given=arguments, hidden=3)
    parts = [np.asarray(part) for part in factory(**bound)]
    _check_parts(name, parts, len(examples), clients)
    return parts


def _check_parts(name: str, parts: list[Indices], examples: int, clients: int) -> None:
    """Raise ValueError if the parts are not one array of indices for each client, without empty ones and common examples."""
    advice = f"partition {name} must return one array of indices for each client"
    if len(parts) != clients:
        raise ValueError(f"{advice}, got {len(parts)} for {clients} clients")
    for client, part in enumerate(parts):
        if part.ndim != 1 or not len(part) or part.dtype.kind not in "iu":
            raise ValueError(f"{advice}, got {part.dtype} of shape {part.shape} for client {client}")
        if part.min() < 0 or part.max() >= examples:
            raise ValueError(f"{advice}, from 0 to {examples - 1}, got {part.min()} to {part.max()} for client {client}")
    if len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
        raise ValueError(f"{advice}, without common examples, but some index occurs twice")

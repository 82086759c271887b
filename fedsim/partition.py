"""How the training examples are split among the clients."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from defenses.registry import Registry, bind

Indices = NDArray[np.int64]


def iid(labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
    """A random split into parts whose sizes differ by one at most."""
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet(labels: Indices, clients: int, rng: np.random.Generator, *, alpha: float) -> list[Indices]:
    """Each class is spread over the clients by shares drawn from a symmetric Dirichlet distribution (Hsu et al. 2019).

    alpha: concentration; small values give each client few classes. Every client holds one example at least.
    """
    if not 0 < alpha < np.inf:
        raise ValueError(f"partition dirichlet: alpha must be positive and finite, got {alpha}")
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(members)).round().astype(int)
        for part, chosen in zip(parts, np.split(members, cuts), strict=True):
            part.extend(chosen.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


PARTITIONS: Registry[Callable[..., list[Indices]]] = Registry("fedsim.partitions", {"iid": iid, "dirichlet": dirichlet})


def split(labels: Indices, clients: int, *, seed: int, name: str, **arguments: Any) -> list[Indices]:
    """Indices into `labels` of each client: disjoint, none empty, all of them together."""
    if clients > len(labels):
        raise ValueError(f"clients.count is {clients}, and there are only {len(labels)} training examples")
    factory = PARTITIONS[name]
    rng = np.random.default_rng([seed, 0x5917])
    bound = bind(f"partition {name}", factory, labels, clients, rng, given=arguments, hidden=3)
    return factory(**bound)

"""Graph of neighbours: the pairs of clients that have a mask in common and hold shares of each other's secrets."""

from collections.abc import Collection, Mapping, Sequence
from random import Random

Graph = Mapping[int, frozenset[int]]
"""Neighbours of each member."""


def draw_graph(members: Sequence[int], neighbours: int, rng: Random) -> Graph:
    """Return a random graph, a dict from each member to its neighbours: `neighbours` other members, or all if there are fewer.

    Members are arranged in a circle in random order, and each is linked to the nearest on both sides (Harary graph; Bell et al.
    2020, 3.1). Raises ValueError unless `neighbours` is even and at least 2.
    """
    if neighbours < 2 or neighbours % 2:
        raise ValueError(f"neighbours must be even and at least 2, got {neighbours}")
    if neighbours >= len(members) - 1:
        return {member: frozenset(members) - {member} for member in members}
    circle = rng.sample(list(members), len(members))
    reach = [offset for offset in range(-neighbours // 2, neighbours // 2 + 1) if offset]
    return {member: frozenset(circle[(at + offset) % len(circle)] for offset in reach) for at, member in enumerate(circle)}


def is_connected(graph: Graph, among: Collection[int]) -> bool:
    """Return whether the graph restricted to the members in `among` is connected; true if there are none.

    If it is not, the masks cancel within each component, so that the server would learn one sum per component.
    """
    left = set(among)
    reached = [left.pop()] if left else []
    while reached:
        near = graph[reached.pop()] & left
        left -= near
        reached += near
    return not left

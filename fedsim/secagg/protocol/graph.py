"""Who shares masks with whom."""

from collections.abc import Collection, Mapping, Sequence
from random import Random

Graph = Mapping[int, frozenset[int]]
"""The neighbours of each member."""


def draw(members: Sequence[int], neighbours: int, rng: Random) -> Graph:
    """A random graph in which each member has `neighbours` neighbours, or all others where they are no more than that.

    All stand in a circle, in random order, each linked to the nearest on both sides (the Harary graph of Bell et al. 2020, 3.1).
    neighbours: even. Raises ValueError otherwise.
    """
    if neighbours < 2 or neighbours % 2:
        raise ValueError(f"neighbours must be even and at least 2, got {neighbours}")
    if neighbours >= len(members) - 1:
        return {member: frozenset(members) - {member} for member in members}
    circle = rng.sample(list(members), len(members))
    reach = [offset for offset in range(-neighbours // 2, neighbours // 2 + 1) if offset]
    return {member: frozenset(circle[(at + offset) % len(circle)] for offset in reach) for at, member in enumerate(circle)}


def is_connected(graph: Graph, among: Collection[int]) -> bool:
    """Whether there is a way from each of `among` to each other through nobody else. Masks cancel within each part of a graph
    that falls apart, so its parts would be unmasked one by one."""
    left = set(among)
    reached = [left.pop()] if left else []
    while reached:
        near = graph[reached.pop()] & left
        left -= near
        reached += near
    return not left

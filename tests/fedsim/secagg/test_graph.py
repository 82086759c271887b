"""Tests of the graph whose edges are the pairs of clients that share a mask."""

from random import Random

import pytest

from fedsim.secagg.protocol.aggregator import draw_graph, is_connected


@pytest.mark.parametrize(("members", "neighbours"), [(10, 4), (11, 8), (30, 2)])
def test_the_graph_is_symmetric_connected_and_regular(members: int, neighbours: int) -> None:
    graph = draw_graph(range(1, members + 1), neighbours, Random(0))
    for member, near in graph.items():
        assert len(near) == neighbours
        assert member not in near
        assert all(member in graph[other] for other in near)
    assert is_connected(graph, graph)


@pytest.mark.parametrize("neighbours", [4, 6, 64])
def test_few_members_are_all_neighbours(neighbours: int) -> None:
    assert draw_graph([1, 2, 5, 7, 9], neighbours, Random(0)) == {m: {1, 2, 5, 7, 9} - {m} for m in (1, 2, 5, 7, 9)}


def test_the_graph_is_drawn_at_random() -> None:
    one, two, again = (draw_graph(range(20), 4, Random(seed)) for seed in (0, 1, 0))
    assert one == again
    assert one != two
    assert any(near != {(m + d) % 20 for d in (-2, -1, 1, 2)} for m, near in one.items())


def test_connectivity_is_that_of_the_remaining_members() -> None:
    ring = {m: frozenset({(m - 1) % 6, (m + 1) % 6}) for m in range(6)}
    assert is_connected(ring, {0, 1, 2, 3, 4})
    assert not is_connected(ring, {0, 1, 3, 4})
    assert is_connected(ring, {3})
    assert is_connected(ring, ())


@pytest.mark.parametrize("neighbours", [0, 1, 3, -2])
def test_an_invalid_number_of_neighbours_is_refused(neighbours: int) -> None:
    with pytest.raises(ValueError, match=f"even and at least 2, got {neighbours}"):
        draw_graph(range(10), neighbours, Random(0))

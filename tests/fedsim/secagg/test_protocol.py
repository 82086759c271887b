"""Tests of a complete round without Flower, whose sum is exact or lost, and of the graph of clients that share a mask."""

from random import Random

import numpy as np
import pytest
from protocol_round import CONTEXT, Round, agreed, draw_client_words

from fedsim.secagg.protocol import participant, shamir
from fedsim.secagg.protocol.aggregator import Aggregator, RoundLost, draw_graph, is_connected
from fedsim.secagg.protocol.keys import draw_bytes
from fedsim.secagg.protocol.masks import Words


def total(words: dict[int, Words], *without: int) -> list[int]:
    return list(sum((own.astype(object) for i, own in words.items() if i not in without), 0) % 2**32)


@pytest.mark.parametrize(
    ("clients", "settings", "fails"),
    [
        *((clients, {}, {}) for clients in (2, 3, 5, 12)),
        *((11, {"neighbours": neighbours, "threshold": 2}, {}) for neighbours in (2, 4, 6)),
        *((5, {}, {stage: gone}) for stage in ("setup", "share", "collect", "unmask") for gone in ((1,), (3,), (2, 5))),
        (9, {}, {"setup": (4,), "share": (9,), "collect": (1,), "unmask": (6,)}),
        (20, {"neighbours": 8, "threshold": 4}, {"share": (3,), "collect": (7, 16), "unmask": (5,)}),
    ],
)
def test_the_sum_is_that_of_all_clients_whose_vectors_arrived(
    clients: int, settings: dict[str, int], fails: dict[str, tuple[int, ...]]
) -> None:
    """A client that drops out at exchange 'unmask' has sent its vector before."""
    words, absent = draw_client_words(clients), [i for stage, gone in fails.items() if stage != "unmask" for i in gone]
    assert Round(agreed(clients, **settings), words, fails).run().tolist() == total(words, *absent)


@pytest.mark.parametrize("stage", ["setup", "share", "collect", "unmask"])
def test_below_the_threshold_the_round_is_lost(stage: str) -> None:
    words, fails = draw_client_words(5), {stage: (1, 2, 4)}
    lost = ", so that the sum cannot be unmasked" if stage == "unmask" else ""
    with pytest.raises(RoundLost, match=f"2 of 5 clients answered at exchange '{stage}', and the threshold is 3{lost}"):
        Round(agreed(5), words, fails).run()
    if stage == "unmask":
        assert Round(agreed(5, threshold=2), words, fails).run().tolist() == total(words)


def test_a_member_with_too_few_neighbours_left_is_named() -> None:
    """In a ring, three clients hold shares of a member; if one of them drops out, two shares are left, below the threshold."""
    with pytest.raises(RoundLost, match=r"3 clients, member \d+ and its neighbours, only 2 answered at exchange 'collect', and"):
        Round(agreed(10, neighbours=2, threshold=3), draw_client_words(10), {"collect": (5,)}).run()
    with pytest.raises(RoundLost, match=r"2 of the 3 clients that hold shares of member \d+ answered at exchange 'unmask'"):
        Round(agreed(10, neighbours=2, threshold=3), draw_client_words(10), {"unmask": (5,)}).run()


def test_a_sum_is_not_unmasked_if_the_graph_is_disconnected() -> None:
    """A ring without two members that are not adjacent has two arcs; masks cancel within each, which would reveal two sums."""
    rounds = [Round(agreed(8, neighbours=2, threshold=2), draw_client_words(8), {"collect": (1, i)}) for i in range(2, 9)]
    lost = 0
    for one in rounds:
        try:
            one.run()
        except RoundLost as error:
            lost += "are not all connected by masks" in str(error) or "and its neighbours" in str(error)
    assert lost == 5


def test_two_clients_under_one_key_end_the_round() -> None:
    one, two = (participant.setup(CONTEXT, 2, draw_bytes).publics for _ in range(2))
    with pytest.raises(RoundLost, match="the same public key"):
        Aggregator(agreed(3), CONTEXT, Random(0)).draw_rosters({1: one, 2: two, 3: one})


def test_wrong_shares_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the server would subtract a wrong mask and get a wrong sum."""
    real = shamir.combine
    monkeypatch.setattr(shamir, "combine", lambda shares, threshold: real({**shares, min(shares): bytes(66)}, threshold))
    with pytest.raises(RoundLost, match=r"cannot be removed .* 'unmask': the shares at points .* belong to different secrets"):
        Round(agreed(5), draw_client_words(5)).run()


def test_shares_of_another_key_than_the_advertised_one_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shamir, "combine", lambda shares, threshold: bytes(32))
    with pytest.raises(RoundLost, match=r"shares of member 2 .* another key than this member advertised"):
        Round(agreed(5), draw_client_words(5), {"collect": (2,)}).run()


def test_no_word_of_a_masked_vector_is_that_of_the_vector() -> None:
    words = draw_client_words(4)
    played = Round(agreed(4), words)
    played.run()
    for i, masked in played.masked.items():
        assert np.mean(masked == words[i]) < 0.05


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

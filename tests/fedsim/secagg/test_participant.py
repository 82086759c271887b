"""Tests of what a client refuses to a malicious server in secure aggregation."""

from dataclasses import replace

import numpy as np
import pytest

from fedsim.secagg.protocol import participant
from fedsim.secagg.protocol.keys import agree, derive_public, draw_bytes, seal, unseal
from fedsim.secagg.protocol.participant import Participant, PublicKeys

CONTEXT = "round 1, attempt 1"
Members = dict[int, Participant]
Sealed = dict[int, dict[int, bytes]]


def shared() -> tuple[Members, Sealed]:
    """Return four members after the exchange of shares, and the encrypted shares that each is to receive; the threshold is 3."""
    begun = {i: participant.setup(CONTEXT, 3, draw_bytes) for i in range(1, 5)}
    publics = {i: me.publics for i, me in begun.items()}
    members, given = {}, {}
    for i, me in begun.items():
        members[i], given[i] = participant.share(me, i, {j: key for j, key in publics.items() if j != i}, draw_bytes)
    return members, {i: {j: given[j][i] for j in given if j != i} for i in given}


def collect_members() -> Members:
    members, given = shared()
    return {i: participant.mask(participant.receive(me, given[i]), np.zeros(4, np.uint32))[0] for i, me in members.items()}


@pytest.mark.parametrize(
    ("left", "gone", "words"),
    [
        ([1, 2, 3], [2, 4], "requests both shares of member 2"),
        ([1, 2], [3, 4], "2 members take part in exchange 'unmask', and the threshold is 3"),
        ([2, 3, 4], [], "leaves it out of the sum"),
        ([1, 2, 3], [7], "a share of member 7"),
    ],
    ids=["both kinds of one peer", "too few members", "without its vector", "of a stranger"],
)
def test_shares_that_could_reveal_a_vector_are_not_given(left: list[int], gone: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        participant.unmask(collect_members()[1], left, gone)


def test_a_second_request_for_shares_is_refused() -> None:
    me, opened = participant.unmask(collect_members()[1], [1, 2, 3], [4])
    assert (set(opened.seeds), set(opened.keys)) == ({1, 2, 3}, {4})
    with pytest.raises(ValueError, match=r"'unmask' .* after 'unmask'"):
        participant.unmask(me, [1, 3, 4], [2])
    assert (me.mask_key, me.share_key, me.seed, me.shares) == (b"", b"", b"", {})


def test_a_second_vector_under_the_same_keys_is_refused() -> None:
    """Under the same masks, the difference of two vectors is that of two updates, in clear."""
    members, given = shared()
    me, _ = participant.mask(participant.receive(members[1], given[1]), np.zeros(4, np.uint32))
    with pytest.raises(ValueError, match=r"'collect' .* after 'collect'"):
        participant.mask(me, np.ones(4, np.uint32))
    with pytest.raises(ValueError, match=r"'collect' .* after 'collect'"):
        participant.receive(me, given[1])


def test_exchanges_out_of_turn_are_refused() -> None:
    begun = participant.setup(CONTEXT, 2, draw_bytes)
    with pytest.raises(ValueError, match=r"'collect' .* after 'setup'"):
        participant.receive(begun, {})
    with pytest.raises(ValueError, match=r"'unmask' .* after 'setup'"):
        participant.unmask(begun, [1, 2], [])
    members, _ = shared()
    with pytest.raises(ValueError, match=r"'share' .* after 'share'"):
        participant.share(members[1], 1, members[1].peers, draw_bytes)


def test_a_public_key_that_comes_twice_is_refused() -> None:
    me = participant.setup(CONTEXT, 2, draw_bytes)
    one, two = (participant.setup(CONTEXT, 2, draw_bytes).publics for _ in range(2))
    same = [{2: one, 3: one}, {2: one, 3: PublicKeys(two.mask, one.share)}, {2: one, 3: PublicKeys(one.share, two.share)}]
    for peers in (*same, {2: one, 3: me.publics}):
        with pytest.raises(ValueError, match="two public keys are equal"):
            participant.share(me, 1, peers, draw_bytes)
    assert participant.share(me, 1, {2: one, 3: two}, draw_bytes)


@pytest.mark.parametrize("number", [0, 2, -1])
def test_numbers_of_members_are_distinct_and_from_one(number: int) -> None:
    me, peer = (participant.setup(CONTEXT, 2, draw_bytes) for _ in range(2))
    with pytest.raises(ValueError, match="must be distinct and at least 1"):
        participant.share(me, number, {2: peer.publics}, draw_bytes)


def test_too_few_neighbours_are_refused() -> None:
    """With fewer members than the threshold, nothing could be unmasked, and a mask shared with one peer hides nothing from it."""
    me, peer = (participant.setup(CONTEXT, 3, draw_bytes) for _ in range(2))
    with pytest.raises(ValueError, match="2 members take part in exchange 'share', and the threshold is 3"):
        participant.share(me, 1, {2: peer.publics}, draw_bytes)
    members, given = shared()
    with pytest.raises(ValueError, match="2 members take part in exchange 'collect'"):
        participant.receive(members[1], {2: given[1][2]})


def test_shares_for_or_from_another_member_cannot_be_decrypted() -> None:
    members, given = shared()
    for wrong in ({2: given[1][3], 3: given[1][3]}, {2: given[3][2], 3: given[1][3]}, {2: given[1][2][:-1], 3: given[1][3]}):
        with pytest.raises(ValueError, match="cannot be decrypted"):
            participant.receive(members[1], wrong)
    with pytest.raises(ValueError, match="member 9 sent shares"):
        participant.receive(members[1], {**given[1], 9: b""})
    other = replace(members[1], context="round 2, attempt 1")
    with pytest.raises(ValueError, match="cannot be decrypted"):
        participant.receive(other, given[1])


def test_a_key_of_small_order_is_refused() -> None:
    """With such a public key, every client would derive the same shared key."""
    for public in (bytes(32), (1).to_bytes(32, "little")):
        with pytest.raises(ValueError, match="small order"):
            agree(draw_bytes(32), public, "mask", CONTEXT)


def test_keys_are_bound_to_purpose_round_and_both_ends() -> None:
    one, two, three = (draw_bytes(32) for _ in range(3))
    assert participant.derive_pairwise_seed(one, derive_public(two), CONTEXT) == participant.derive_pairwise_seed(
        two, derive_public(one), CONTEXT
    )
    seeds = [
        participant.derive_pairwise_seed(one, derive_public(two), CONTEXT),
        participant.derive_pairwise_seed(one, derive_public(two), "round 1, attempt 2"),
        participant.derive_pairwise_seed(one, derive_public(three), CONTEXT),
        agree(one, derive_public(two), "share", CONTEXT),
        agree(one, derive_public(two), "mask", CONTEXT),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(len(seed) == 32 for seed in seeds)


def test_each_direction_between_two_members_has_its_own_key() -> None:
    me, peer = (participant.setup(CONTEXT, 2, draw_bytes) for _ in range(2))
    me, sealed = participant.share(me, 1, {2: peer.publics}, draw_bytes)
    with pytest.raises(ValueError, match="cannot be decrypted"):  # its own ciphertext, sent back as if from member 2
        participant.receive(me, {2: sealed[2]})


def test_shares_are_bound_to_the_numbers_of_both_ends() -> None:
    members, given = shared()
    with pytest.raises(ValueError, match="cannot be decrypted"):
        participant.receive(replace(members[1], number=7), given[1])
    assert participant._derive_channel_key(members[1], 2, outward=True) == participant._derive_channel_key(
        members[2], 1, outward=False
    )
    assert participant._derive_channel_key(members[1], 2, outward=True) != participant._derive_channel_key(
        members[1], 2, outward=False
    )


def test_an_encrypted_text_is_authenticated_with_its_context() -> None:
    key = draw_bytes(32)
    sealed = seal(key, b"text", "from 1 to 2", draw_bytes)
    assert unseal(key, sealed, "from 1 to 2") == b"text"
    for wrong in ((key, sealed, "from 1 to 3"), (draw_bytes(32), sealed, "from 1 to 2"), (key, b"", "from 1 to 2")):
        with pytest.raises(ValueError, match="cannot be decrypted"):
            unseal(*wrong)
    assert seal(key, b"text", "from 1 to 2", draw_bytes) != sealed

"""The client's part of the protocol: one function per exchange, each with its checks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from fedsim.secagg.protocol import shamir
from fedsim.secagg.protocol.keys import KEY_BYTES, Draw, agree, derive_public, seal, unseal
from fedsim.secagg.protocol.masks import Words, add_mask, subtract_mask

Stage = Literal["setup", "share", "collect", "unmask"]
STAGES: tuple[Stage, ...] = ("setup", "share", "collect", "unmask")


class PublicKeys(NamedTuple):
    """Public keys of one client in one round: `mask` to agree on masks with neighbours, `share` to encrypt shares."""

    mask: bytes
    share: bytes


class Shares(NamedTuple):
    """The shares that a client holds of the two secrets of one member (a client of the round, possibly itself).

    key: share of the member's private mask key, from which the masks follow that the member has in common with its neighbours;
    empty in the entry of the client itself. seed: share of the seed of the member's own mask.
    """

    key: bytes
    seed: bytes


class RevealedShares(NamedTuple):
    """Shares that a client reveals to the server.

    seeds: dict from the number of a member in the sum to the share of the seed of this member's own mask.
    keys:  dict from the number of a member that sent no vector to the share of this member's private mask key.
    """

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class Participant:
    """State of a client between the exchanges of one round. The clients of the round, its members, are numbered from 1.

    A peer of a client is a neighbour in the graph of masks: the two have a mask in common and hold shares of each other's
    secrets.

    context:   name of the round and of the attempt at it, such as "round 3, attempt 1"; keys differ between contexts.
    threshold: number of shares that determine a secret. The client refuses an exchange in which it and its peers together are
               fewer than this number.
    done:      the exchange that it answered last, one of `STAGES`.
    mask_key, share_key: private keys. seed: seed of its own mask. number: its own number. After "unmask" all are empty or 0.
    peers:     dict from a peer's number to its public keys.
    shares:    dict from a member's number to the shares that this client holds of its secrets: one entry for each peer that sent
               them, and one for itself. The entry for itself has no share of the mask key, since the key is revealed only if this
               client drops out.
    """

    context: str
    threshold: int
    done: Stage
    mask_key: bytes = b""
    share_key: bytes = b""
    seed: bytes = b""
    number: int = 0
    peers: Mapping[int, PublicKeys] = field(default_factory=dict)
    shares: Mapping[int, Shares] = field(default_factory=dict)

    @property
    def publics(self) -> PublicKeys:
        return PublicKeys(derive_public(self.mask_key), derive_public(self.share_key))


def setup(context: str, threshold: int, draw: Draw) -> Participant:
    """Return a client's state at the beginning of a round, with new keys; its `publics` are the answer to the server.

    context, threshold: see `Participant`. draw: returns random bytes of a given length.
    """
    mask_key, share_key, seed = (draw(KEY_BYTES) for _ in range(3))
    return Participant(context=context, threshold=threshold, done="setup", mask_key=mask_key, share_key=share_key, seed=seed)


def share(me: Participant, number: int, peers: Mapping[int, PublicKeys], draw: Draw) -> tuple[Participant, dict[int, bytes]]:
    """Split this client's private mask key, and the seed of its own mask, into shares for its peers.

    The client keeps one share of the seed itself, but none of the key. Returns the new state, and a dict from peer number to the
    encrypted shares that this peer is to hold.

    number: this client's own number. peers: dict from a peer's number to its public keys. draw: returns random bytes of a given
    length.
    Raises ValueError if this client and its peers are fewer than the threshold, if a number is below 1 or occurs twice, if two
    public keys are equal, or if "setup" was not the client's last exchange.
    """
    _check_stage("setup", "share", me)
    _check_enough(me, len(peers) + 1, "share")
    if number in peers or min((number, *peers)) < 1:
        raise ValueError(
            f"the server gave this client the number {number} and its neighbours {sorted(peers)}, but the numbers must be "
            "distinct and at least 1; this client leaves the round"
        )
    keys = [key for publics in (me.publics, *peers.values()) for key in publics]
    if len(set(keys)) != len(keys):
        raise ValueError("among this client and its neighbours, two public keys are equal; this client shares no secrets")
    holders = sorted((number, *peers))
    of_key = shamir.split(me.mask_key, me.threshold, holders, draw)
    of_seed = shamir.split(me.seed, me.threshold, holders, draw)
    me = replace(me, done="share", number=number, peers=dict(peers), shares={number: Shares(b"", of_seed[number])})
    sealed = {
        peer: seal(
            _derive_channel_key(me, peer, outward=True), of_key[peer] + of_seed[peer], _describe_message(me, number, peer), draw
        )
        for peer in sorted(peers)
    }
    return me, sealed


def receive(me: Participant, sealed: Mapping[int, bytes]) -> Participant:
    """Return the state with the decrypted shares that the peers sent, after which the client may mask and send its vector.

    sealed: dict from the number of the peer that sent them to encrypted shares.
    Raises ValueError if too few peers sent shares, if a sender is not a peer, if shares cannot be decrypted or have a wrong
    length, and if "share" was not the client's last exchange.
    """
    _check_stage("share", "collect", me)
    _check_enough(me, len(sealed) + 1, "collect")
    if strangers := sorted(sealed.keys() - me.peers.keys()):
        raise ValueError(
            f"member {strangers[0]} sent shares, but is not a neighbour of this client; this client leaves the round"
        )
    shares = dict(me.shares)
    for peer, text in sorted(sealed.items()):
        opened = unseal(_derive_channel_key(me, peer, outward=False), text, _describe_message(me, peer, me.number))
        if len(opened) != 2 * shamir.SHARE_BYTES:
            raise ValueError(
                f"member {peer} sent {len(opened)} bytes of shares, but the two shares that it must send have "
                f"{2 * shamir.SHARE_BYTES} bytes; this client leaves the round"
            )
        shares[peer] = Shares(opened[: shamir.SHARE_BYTES], opened[shamir.SHARE_BYTES :])
    return replace(me, shares=shares)


def mask(me: Participant, words: Words) -> tuple[Participant, Words]:
    """Mask `words`, uint32 (N,), in place, and return the new state and the same array.

    Modulo 2^32, the client's own mask is added and, for each peer that sent this client shares, the mask that the two have in
    common. If the peer has the smaller number, the common mask is subtracted instead. Raises ValueError unless "share" was the
    client's last exchange: two vectors under the same masks would reveal their difference.
    """
    _check_stage("share", "collect", me)
    add_mask(words, me.seed)
    for peer in sorted(me.shares.keys() - {me.number}):
        seed = derive_pairwise_seed(me.mask_key, me.peers[peer].mask, me.context)
        (add_mask if me.number < peer else subtract_mask)(words, seed)
    return replace(me, done="collect"), words


def unmask(me: Participant, summed: Iterable[int], dropped: Iterable[int]) -> tuple[Participant, RevealedShares]:
    """Return a state without secrets, and the shares of members' secrets that the server needs to remove masks from the sum.

    summed:  numbers of members in the sum; for each, a share of the seed of its own mask is returned.
    dropped: numbers of members that sent no vector; for each, a share of its private mask key is returned.
    Raises ValueError if a member is in both, since both secrets together reveal its update; if a member sent this client no
    shares; if this client is not in `summed`; if `summed` has fewer members than the threshold; and if "collect" was not the
    client's last exchange.
    """
    _check_stage("collect", "unmask", me)
    summed, dropped = set(summed), set(dropped)
    if both := sorted(summed & dropped):
        raise ValueError(
            f"the server requests both shares of member {both[0]}, which together reveal its update; no share is sent"
        )
    if strangers := sorted((summed | dropped) - me.shares.keys()):
        raise ValueError(
            f"the server requests a share of member {strangers[0]}, which sent no shares to this client; no share is sent"
        )
    if me.number not in summed:
        raise ValueError("this client sent its vector, but the server leaves it out of the sum; no share is sent")
    _check_enough(me, len(summed), "unmask")
    opened = RevealedShares(
        seeds={member: me.shares[member].seed for member in sorted(summed)},
        keys={member: me.shares[member].key for member in sorted(dropped)},
    )
    return Participant(context=me.context, threshold=me.threshold, done="unmask"), opened


def derive_pairwise_seed(private: bytes, public: bytes, context: str) -> bytes:
    """Return the seed of the mask that two members have in common, from one's private and the other's public mask key.

    context: name of the round and of the attempt at it; the seed differs between contexts.
    """
    ends = sorted((derive_public(private).hex(), public.hex()))
    return agree(private, public, "mask", "/".join((context, *ends)))


def _derive_channel_key(me: Participant, peer: int, *, outward: bool) -> bytes:
    """Return the key that encrypts shares sent to `peer` if `outward` is true, else the key of shares that `peer` sent."""
    ends = [me.publics.share.hex(), me.peers[peer].share.hex()]
    return agree(me.share_key, me.peers[peer].share, "share", "/".join((me.context, *(ends if outward else ends[::-1]))))


def _describe_message(me: Participant, sender: int, receiver: int) -> str:
    return f"in {me.context}, from {sender} to {receiver}"


def _check_stage(previous: Stage, stage: Stage, me: Participant) -> None:
    if me.done != previous:
        raise ValueError(
            f"the server asks for exchange '{stage}' of {me.context} after '{me.done}'; exchanges are answered once each, in "
            "order"
        )


def _check_enough(me: Participant, count: int, stage: Stage) -> None:
    if count < me.threshold:
        raise ValueError(
            f"only {count} members take part in exchange '{stage}', and the threshold is {me.threshold}; this client sends "
            "nothing"
        )

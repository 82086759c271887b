"""Encoding of the messages of secure aggregation, and of a client's state between them, as Flower records."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedsim.flower import records
from fedsim.recording.safe_files import shorten
from fedsim.secagg.protocol.aggregator import Roster, ShareRequest
from fedsim.secagg.protocol.keys import KEY_BYTES, check_public
from fedsim.secagg.protocol.masks import Words
from fedsim.secagg.protocol.participant import STAGES, Participant, PublicKeys, RevealedShares, Shares, Stage
from fedsim.secagg.protocol.shamir import SHARE_BYTES

EXCHANGE_KEY = "secagg"
"""Key of the record of one exchange, in both directions, and of a client's state."""
MASKED_KEY = "masked"
"""Key of the record with a masked vector."""
WORDS_KEY = "words"
VERSION_ADVICE = "install the same version of fedleak on server and clients"
"""Advice for a malformed message, used in error messages."""


def read_context(message: Message) -> str:
    """Return the text, such as "round 3, attempt 1", that names a round and the attempt at it; a missing attempt is 1."""
    config = message.content[records.CONFIG_KEY]
    assert isinstance(config, ConfigRecord)
    return f"round {int(str(config['server-round']))}, attempt {int(str(config.get('attempt', 1)))}"


def read_stage(content: RecordDict) -> Stage | None:
    """Return the exchange that a server's message belongs to, such as "setup"; None if it has no record of secure aggregation.

    Raises ValueError for an unknown exchange.
    """
    if EXCHANGE_KEY not in content:
        return None
    stage = _find_record(content)["stage"]
    if stage not in STAGES:
        raise ValueError(
            f"the server's message names {stage!r} as its exchange of secure aggregation, which is not one of "
            f"{', '.join(STAGES)}; {VERSION_ADVICE}"
        )
    return stage


# --- what the server sends ---


def ask_setup() -> ConfigRecord:
    return ConfigRecord({"stage": "setup"})


def ask_share(roster: Roster) -> ConfigRecord:
    publics = roster.peers.values()
    return ConfigRecord(
        {
            "stage": "share",
            "number": roster.number,
            "peers": list(roster.peers),
            "mask-keys": [keys.mask for keys in publics],
            "share-keys": [keys.share for keys in publics],
        }
    )


def ask_collect(sealed: Mapping[int, bytes]) -> ConfigRecord:
    return ConfigRecord({"stage": "collect", "peers": list(sealed), "sealed": list(sealed.values())})


def ask_unmask(request: ShareRequest) -> ConfigRecord:
    return ConfigRecord({"stage": "unmask", "summed": request.summed, "dropped": request.dropped})


def read_roster(content: RecordDict) -> Roster:
    record = _find_record(content)
    masks, shares = _read_by_member(record, "peers", "mask-keys"), _read_by_member(record, "peers", "share-keys")
    return Roster(_check_number(record["number"]), {peer: PublicKeys(masks[peer], shares[peer]) for peer in masks})


def read_sealed(content: RecordDict) -> dict[int, bytes]:
    """Return the encrypted shares in a message, as a dict by the number of a client.

    In a server's message, this client sent the shares; in a client's answer, this client is to receive the shares. The server
    numbers the clients of a round from 1.
    """
    return _read_by_member(_find_record(content), "peers", "sealed")


def read_share_request(content: RecordDict) -> ShareRequest:
    record = _find_record(content)
    return ShareRequest(_check_numbers(record["summed"], "summed"), _check_numbers(record["dropped"], "dropped"))


# --- what clients answer ---


def answer_setup(publics: PublicKeys) -> ConfigRecord:
    return ConfigRecord({"mask-key": publics.mask, "share-key": publics.share})


def answer_share(sealed: Mapping[int, bytes]) -> ConfigRecord:
    return ConfigRecord({"peers": list(sealed), "sealed": list(sealed.values())})


def answer_collect(words: Words) -> ArrayRecord:
    return ArrayRecord({WORDS_KEY: records.pack(words)})


def answer_unmask(opened: RevealedShares) -> ConfigRecord:
    return ConfigRecord(
        {
            "summed": list(opened.seeds),
            "seeds": list(opened.seeds.values()),
            "dropped": list(opened.keys),
            "keys": list(opened.keys.values()),
        }
    )


def read_publics(content: RecordDict) -> PublicKeys:
    record = _find_record(content)
    keys = PublicKeys(_check_bytes(record["mask-key"], "mask-key"), _check_bytes(record["share-key"], "share-key"))
    if [len(key) for key in keys] != [KEY_BYTES, KEY_BYTES]:
        raise ValueError(
            f"the client's public keys must have {KEY_BYTES} bytes each, got {len(keys.mask)} and {len(keys.share)}; "
            f"{VERSION_ADVICE}"
        )
    if keys.mask == keys.share:
        raise ValueError(f"the client sent the same public key for masks and for shares; {VERSION_ADVICE}")
    for key in keys:  # checked here, since otherwise every neighbour of the client would fail
        check_public(key)
    return keys


def read_shared(content: RecordDict, roster: Roster) -> dict[int, bytes]:
    """Return the encrypted shares in a client's answer, as a dict by the number of the client that is to receive them.

    Raises ValueError unless the receivers are exactly the answering client's neighbours in `roster`.
    """
    sealed = read_sealed(content)
    if sealed.keys() != roster.peers.keys():
        raise ValueError(
            f"the client must send one encrypted share to each of its neighbours, {shorten(sorted(roster.peers))}, got shares "
            f"for {shorten(sorted(sealed))}; {VERSION_ADVICE}"
        )
    return sealed


def read_words(content: RecordDict, length: int) -> Words:
    """Return a client's masked vector as a read-only uint32 array (length,).

    Raises ValueError or KeyError if the answer holds no such array.
    """
    record = content[MASKED_KEY]
    if not isinstance(record, ArrayRecord) or WORDS_KEY not in record:
        raise ValueError(f"the client's answer contains no masked vector; {VERSION_ADVICE}")
    words = records.read_array(record[WORDS_KEY])
    if words.dtype != np.uint32 or words.shape != (length,):
        raise ValueError(
            f"the client's masked vector must have {length} uint32 words, got {words.dtype} of shape {words.shape}; give server "
            "and clients the same experiment file"
        )
    return cast(Words, words)


def read_opened(content: RecordDict, request: ShareRequest) -> RevealedShares:
    """Return the decrypted shares that a client reveals to the server.

    Raises ValueError unless there is a share of the right length for exactly the members in the server's `request`.
    """
    record = _find_record(content)
    opened = RevealedShares(_read_by_member(record, "summed", "seeds"), _read_by_member(record, "dropped", "keys"))
    if sorted(opened.seeds) != request.summed or sorted(opened.keys) != request.dropped:
        raise ValueError(
            f"the client revealed shares of members {shorten(sorted([*opened.seeds, *opened.keys]))}, but the server requested "
            f"those of members {shorten(sorted([*request.summed, *request.dropped]))}; {VERSION_ADVICE}"
        )
    if sizes := {len(share) for shares in opened for share in shares.values()} - {SHARE_BYTES}:
        raise ValueError(
            f"the client revealed a share of {min(sizes)} bytes, but a share has {SHARE_BYTES} bytes; {VERSION_ADVICE}"
        )
    return opened


# --- what a client keeps ---


def encode_state(me: Participant) -> ConfigRecord:
    """Return a client's private state as a record, for the entry `EXCHANGE_KEY` of Flower's `Context.state`."""
    plain = {key: value for key, value in asdict(me).items() if key not in ("peers", "shares")}
    plain |= {"peers": list(me.peers), "masks": [keys.mask for keys in me.peers.values()]}
    plain |= {"channels": [keys.share for keys in me.peers.values()], "holders": list(me.shares)}
    plain |= {"keys": [shares.key for shares in me.shares.values()], "seeds": [shares.seed for shares in me.shares.values()]}
    return ConfigRecord(plain)


def decode_state(state: RecordDict) -> Participant | None:
    """Return the client's private state in the entry `EXCHANGE_KEY` of `state`; None if there is no such entry."""
    if EXCHANGE_KEY not in state:
        return None
    record: Mapping[str, Any] = _find_record(state)
    plain = {key: record[key] for key in ("context", "threshold", "done", "mask_key", "share_key", "seed", "number")}
    peers = zip(record["peers"], map(PublicKeys, record["masks"], record["channels"]), strict=True)
    shares = zip(record["holders"], map(Shares, record["keys"], record["seeds"]), strict=True)
    return Participant(**plain, peers=dict(peers), shares=dict(shares))


def _find_record(content: RecordDict) -> ConfigRecord:
    record = content.get(EXCHANGE_KEY)
    if not isinstance(record, ConfigRecord):
        raise ValueError(
            f"the message contains no record {EXCHANGE_KEY!r}, which every message of secure aggregation has; give server and "
            "clients the same experiment file"
        )
    return record


def _read_by_member(record: ConfigRecord, members: str, values: str) -> dict[int, bytes]:
    numbers, entries = _check_numbers(record[members], members), record[values]
    if not isinstance(entries, list) or len(entries) != len(numbers):
        given = f"{len(entries)} values" if isinstance(entries, list) else type(entries).__name__
        raise ValueError(
            f"field {values!r} in a message of secure aggregation must be a list of {len(numbers)} values, one for each client "
            f"in field {members!r}, got {given}; {VERSION_ADVICE}"
        )
    return {number: _check_bytes(value, values) for number, value in zip(numbers, entries, strict=True)}


def _check_numbers(value: object, field: str) -> list[int]:
    """Return a field of a message, checked to be a list of numbers of clients. field: its name, for messages."""
    if not isinstance(value, list):
        raise ValueError(
            f"field {field!r} in a message of secure aggregation must be a list of clients, got {type(value).__name__}; "
            f"{VERSION_ADVICE}"
        )
    if repeated := sorted(number for number in set(value) if value.count(number) > 1):
        raise ValueError(
            f"field {field!r} in a message of secure aggregation lists client {repeated[0]} more than once; {VERSION_ADVICE}"
        )
    return [_check_number(number) for number in value]


def _check_number(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(
            f"a client has the number {value!r} in a message of secure aggregation, which numbers clients from 1; "
            f"{VERSION_ADVICE}"
        )
    return value


def _check_bytes(value: object, field: str) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(
            f"field {field!r} in a message of secure aggregation must hold bytes, got {type(value).__name__}; {VERSION_ADVICE}"
        )
    return value

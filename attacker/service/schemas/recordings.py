"""Types of responses about recordings: what the server of a federation recorded, round by round."""

from typing import Any

from typing_extensions import TypedDict

from attacker.service.schemas.general import Page


class Data(TypedDict):
    shape: list[int]
    num_classes: int
    is_image: bool


class RecordingSummary(TypedDict):
    """One recording. If its manifest cannot be read, fields from it are null, `name` is the id, and `trouble` states the reason.

    truth: whether the service was given a record of which examples each client trained on, without which nothing is scored.
    rounds, clients, observations: how many of each were recorded. updated: when the last observation was recorded, UTC.
    trouble: messages about damaged files.
    """

    id: str
    name: str
    model: str | None
    data: Data | None
    defense: str | None
    gradient: str | None
    network: str | None
    inputs: str | None
    secure_aggregation: dict[str, Any] | bool | None
    training: dict[str, Any] | None
    rounds: int
    last_round: int | None
    clients: int
    observations: int
    updated: str | None
    truth: bool
    trouble: list[str]


class Recordings(Page[RecordingSummary]):
    """A page of the list of recordings.

    trouble: messages about folders below the root that cannot be
    served. root: path of the folder in which the service looks for recordings if it has found none; else null.
    """

    trouble: list[str]
    root: str | None


class ObservationSummary(TypedDict):
    """What the server received from one client in one round.

    client: name of the client; "sum" for the sum over the clients of a round under secure aggregation.
    status: "complete" if the server received an update, "masked" if it received the update only as part of the round's sum,
            "failed" if the client sent an error or a malformed message, or if the round's sum could not be computed, "late" if an
            answer did not come in time.
    num_examples: number of distinct examples behind the update, derived from what the client reported; null if unknown.
    bytes:  size of the client's reply. time: when the reply, or that there was none, was recorded, UTC.
    reason: why the client failed or was late, also if it failed after its update had entered the sum; for a sum, why there is
            none; else empty.
    """

    round: int
    client: str
    status: str
    num_examples: int | None
    bytes: int
    time: str | None
    reason: str

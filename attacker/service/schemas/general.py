"""Types of responses of all kinds: pages of lists, the health of the service, and errors."""

from typing import Generic, Literal, TypeVar

from typing_extensions import TypedDict

ItemT = TypeVar("ItemT")


class Page(TypedDict, Generic[ItemT]):
    """One page of a list. next: value of `after` for the next page; null on the last one, and for lists that are sent whole."""

    items: list[ItemT]
    next: str | None


class Health(TypedDict):
    status: Literal["ok"]
    version: str
    token: bool


class ErrorDetails(TypedDict):
    """The error in a response. message: what is wrong, where possible with a remedy.

    field: the wrong field of the request; null if the error is not in one field. known: the allowed values of this field; null if
    they cannot be listed.
    """

    message: str
    field: str | None
    known: list[str] | None


class Problem(TypedDict):
    error: ErrorDetails

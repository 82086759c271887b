"""Types of responses about the service itself, and of errors."""

from typing import Literal

from typing_extensions import TypedDict


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

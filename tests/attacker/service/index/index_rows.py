"""Rows of an index that tests of the service's views show."""

from fedsim.recording import Row


def make_row(number: int, client: str, status: str = "complete") -> Row:
    stored = {"file": None, "sha256": None, "codec": None, "metrics": {}, "bytes": 8, "received_at": 0.0}
    return Row(round=number, client=client, node="", attempt=1, status=status, reason="", num_examples=1, **stored)  # type: ignore[arg-type]

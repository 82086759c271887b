"""Rows of an index and of scores that tests of the service's views show."""

from typing import Any

from attacker.service.index.json_lines import ShownScore
from fedsim.recording import Row


def make_row(number: int, client: str, status: str = "complete") -> Row:
    stored = {"file": None, "sha256": None, "codec": None, "metrics": {}, "bytes": 8, "received_at": 0.0}
    return Row(round=number, client=client, node="", attempt=1, status=status, reason="", num_examples=1, **stored)


def make_score(case: str, example: int, **fields: Any) -> ShownScore:
    """Return the scores of an example of client a in round 1, of a finished case. fields: fields that differ."""
    defaults: dict[str, Any] = {
        "state": "done", "rounds": (1,), "client": "a", "batch": 1, "position": 0, "label_true": "cat", "label": "cat",
        "success": False, "label_success": True, "psnr": None, "ssim": None, "lpips": None, "confidence": None, "failure": None,
        "pair": None,
    }  # fmt: skip
    return ShownScore(case=case, example=example, **{**defaults, **fields})

"""Files with the results of audits, in the service's state folder."""

import re
from pathlib import Path
from typing import NamedTuple


class AuditPaths(NamedTuple):
    """Paths of the result of one audit: its page, and the same as JSON."""

    page: Path
    data: Path


def make_audit_base(state: Path, job: str) -> Path:
    """Return the path, without suffix, of the result of an audit. Raises ValueError if `job` is not a valid id."""
    if re.fullmatch("[0-9a-f]{16}", job) is None:
        raise ValueError(f"{job!r} is not the id of a job: ids have 16 hexadecimal digits")
    return state / "audits" / job


def make_audit_paths(base: Path) -> AuditPaths:
    """Return the files of a path that `make_audit_base` returned."""
    return AuditPaths(base.with_suffix(".html"), base.with_suffix(".json"))

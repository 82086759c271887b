"""Paths of the files with the results of audits, jobs that check and attack a whole recording, in the service's state folder."""

import re
from pathlib import Path
from typing import NamedTuple


class AuditPaths(NamedTuple):
    """Paths of the result of one audit: its HTML page, and the same as JSON."""

    page: Path
    data: Path


def make_audit_base(state: Path, job: str) -> Path:
    """Return the path, without suffix, of an audit's result, given the id of its job. Raises ValueError for an invalid id."""
    if re.fullmatch("[0-9a-f]{16}", job) is None:
        raise ValueError(f"{job!r} is not the id of a job: ids have 16 hexadecimal digits")
    return state / "audits" / job


def make_audit_paths(base: Path) -> AuditPaths:
    """Return the paths of an audit's files, given their common path without suffix, see `make_audit_base`."""
    return AuditPaths(base.with_suffix(".html"), base.with_suffix(".json"))

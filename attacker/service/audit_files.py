"""Paths of the files with the results of audits, in the service's state folder.

An audit is a job that checks a recording and attacks it within a budget of time, for a graded verdict on what leaks.
"""

import re
from pathlib import Path
from typing import NamedTuple


class AuditPaths(NamedTuple):
    """Paths of the result of one audit. page: HTML. data: the verdict as JSON."""

    page: Path
    data: Path


def make_audit_base(state: Path, job: str) -> Path:
    """Return the common path of an audit's files without suffix, given the state folder and the id of the audit's job.

    Raises ValueError if `job` is not 16 hexadecimal digits in lower case.
    """
    if re.fullmatch("[0-9a-f]{16}", job) is None:
        raise ValueError(f"{job!r} is not the id of a job: ids have 16 hexadecimal digits")
    return state / "audits" / job


def make_audit_paths(base: Path) -> AuditPaths:
    """Return the paths of an audit's files, given their common path without suffix, see `make_audit_base`."""
    return AuditPaths(base.with_suffix(".html"), base.with_suffix(".json"))

"""A line on skipped tests at the end of every run, a lock for tests that start many processes, and a fixture for small models."""

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

LOCK_FILE = Path(tempfile.gettempdir()) / f"fedleak-tests-{os.getuid()}.lock"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run one test with a cluster or a deployment at a time, also among parts of the gate that run side by side.

    Ray and Flower give up on processes that do not answer in time, so that two clusters on two cores make each other fail.
    """
    if not any(item.iter_markers("ray")) and not any(item.iter_markers("deploy")):
        return (yield)
    with LOCK_FILE.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:  # closing alone would leave it to processes that the test has forked
            fcntl.flock(lock, fcntl.LOCK_UN)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models that are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the line also where nothing was skipped: a gate that says nothing may have looked at nothing."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    told = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"tests skipped: {sum(reasons.values())}{': ' if told else ''}{told}")


def _reason(report: Any) -> str:
    """The reason of a skip, which pytest keeps as (file, line, "Skipped: reason")."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(told).removeprefix("Skipped: ")

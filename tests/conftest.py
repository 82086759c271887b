"""A line on skipped tests at the end of every run, locks for tests that start many processes, and one thread for PyTorch."""

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets the tests that run beside a cluster starve it
LOCKS = Path(tempfile.gettempdir())
SERIAL_MARKS = ("ray", "deploy")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run at most one test that starts Ray, and at most one that starts a deployment, at a time across all pytest processes.

    Ray and Flower give up on processes that do not answer in time. Two clusters at once on two cores would make each other fail.
    A deployment mostly waits, so a cluster may run beside it.
    """
    mark = next((mark for mark in SERIAL_MARKS if any(item.iter_markers(mark))), None)
    if mark is None:
        return (yield)
    with (LOCKS / f"fedleak-tests-{os.getuid()}-{mark}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:  # closing the file alone would leave the lock to processes that the test has forked
            fcntl.flock(lock, fcntl.LOCK_UN)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One PyTorch thread, also after a test that sets another number: the models are too small to gain from more."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of large data: FEDLEAK_DATA, or shared/data beside the repository; tests that need it are skipped without it."""
    given = os.environ.get("FEDLEAK_DATA")
    folder = Path(given) if given else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; FEDLEAK_DATA can name another folder")
    return folder


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests were skipped and why, also if none were, so that a missing line shows that nothing was counted."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    listed = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"tests skipped: {sum(reasons.values())}{': ' if listed else ''}{listed}")


def _reason(report: Any) -> str:
    """Return the reason of a skip, which pytest keeps as (file, line, "Skipped: reason")."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")

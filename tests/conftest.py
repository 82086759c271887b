"""A line on skipped tests at the end of every run, and a fixture for small models."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch


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

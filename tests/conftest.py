"""Says at the end of every run, in one line, how many tests were skipped and why."""

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the line also where nothing was skipped: a gate that says nothing may have looked at nothing."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    told = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"tests skipped: {sum(reasons.values())}{': ' if told else ''}{told}")


def _reason(report: Any) -> str:
    """The reason of a skip, which pytest keeps as (file, line, "Skipped: reason")."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(told).removeprefix("Skipped: ")

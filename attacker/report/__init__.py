"""The report: one HTML page, without other files, that shows what attacks recovered from a recording."""

from attacker.report.render import build

__all__ = ["build"]

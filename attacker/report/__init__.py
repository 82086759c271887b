"""The report: what leaked, on one self-contained page."""

from attacker.report.render import build

__all__ = ["build"]

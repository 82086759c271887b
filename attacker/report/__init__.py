"""The report: one HTML page that needs no other files and shows what attacks recovered from one or several recordings."""

from attacker.report.render import build

__all__ = ["build"]

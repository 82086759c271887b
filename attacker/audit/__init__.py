"""Audit of a recorded federation: what its server could learn about the clients' data, the evidence, and what to change."""

from attacker.audit.audit import Audit, audit, check_recording
from attacker.audit.findings import GRADES, Finding, Grade, NotChecked, PassedCheck

__all__ = ["GRADES", "Audit", "Finding", "Grade", "NotChecked", "PassedCheck", "audit", "check_recording"]

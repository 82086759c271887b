"""Calls of the commands `attacker` and `fedsim` in the process of a test, which saves seconds of imports."""

from typing import Any

from typer.testing import CliRunner, Result

from attacker.cli import app as attacker_app
from fedsim.cli import app as fedsim_app


def run_attacker(*words: object, **settings: Any) -> Result:
    """Run `attacker` with these words. settings: those of `CliRunner.invoke`, such as `env`."""
    return CliRunner().invoke(attacker_app, [str(word) for word in words], **settings)


def run_fedsim(*words: object, **settings: Any) -> Result:
    """Run `fedsim` as `run_attacker` runs `attacker`."""
    return CliRunner().invoke(fedsim_app, [str(word) for word in words], **settings)


def join_lines(text: str) -> str:
    """Return a text that was wrapped to the width of the terminal as one line with single spaces."""
    return " ".join(text.split())

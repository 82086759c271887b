"""Whether processes that a test has started still run, and waiting for what they do."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], describe: Callable[[], object] | str = "", *, seconds: float = 300) -> T:
    """Wait until `condition()` is true and return its value; after the time limit, fail with the description.

    The default time limit is generous for busy machines.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, describe if isinstance(describe, str) else describe()
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; False for a zombie, which has ended but was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

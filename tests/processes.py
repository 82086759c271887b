"""Whether processes that a test has started still run."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process runs; False for a zombie, which has ended but was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

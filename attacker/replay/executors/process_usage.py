"""What a process and all that it started take, by the kernel's own count, and what this machine has."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Usage:
    """Of a process and its descendants. megabytes: resident now; cpu_seconds: since each began."""

    megabytes: float = 0.0
    cpu_seconds: float = 0.0


def measurable() -> bool:
    """Whether this system tells."""
    return (PROC / "self" / "stat").exists()


def cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> float | None:
    """Megabytes that this process and all that it starts may take: the machine's, or the limit of its control group."""
    found = []
    with suppress(OSError, StopIteration, ValueError):
        lines = (PROC / "meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")))
    for path in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" is no number
            found.append(int(path.read_text()))
    return min(found) / 1e6 if found else None


def oom_kills() -> dict[str, int]:
    """Processes that the kernel has killed for lack of memory so far, by where it counts them; empty where it does not tell."""
    found = {}
    for path in (PROC / "vmstat", CGROUP / "memory.events"):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                found[str(path)] = int(counts["oom_kill"])
    return found


def describe_kill(megabytes: float | None, limit: float | None, before: dict[str, int]) -> str:
    """What is known of a process that was killed by SIGKILL, which the kernel, a user or another program may have sent.

    megabytes: its memory when it was last measured; None: never. limit: what it might take. before: `oom_kills` at its start.
    """
    took = "its memory was not measured" if megabytes is None else f"it had {megabytes:.0f} MB when it was last measured"
    allowed = "" if limit is None else f", and might take {limit:.0f} MB"
    now = oom_kills()
    moved = [f"{where} by {now[where] - count}" for where, count in before.items() if now.get(where, count) > count]
    if moved:
        kernel = f"killed processes for lack of memory meanwhile ({', '.join(moved)})"
    else:
        kernel = "killed none for lack of memory meanwhile" if before else "does not tell whether it was out of memory"
    return f"{took}{allowed}; the kernel {kernel}"


def usage(process: int) -> Usage:
    """Zeros where the process is gone, or the system does not tell."""
    pages, ticks, tree = 0, 0, [process]
    while tree:
        at = PROC / str(tree.pop())
        try:
            text = (at / "stat").read_text()
            for children in at.glob("task/*/children"):
                tree += map(int, children.read_text().split())
        except OSError:  # it has ended meanwhile
            continue
        fields = text[text.rindex(")") + 2 :].split()  # its name, before, may hold anything
        pages += int(fields[21])
        ticks += sum(map(int, fields[11:15]))  # its own, and of children that have ended
    return Usage(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, ticks / os.sysconf("SC_CLK_TCK"))

"""Memory and processor time of a process tree, as counted by the kernel, and the limits of this machine."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC_FOLDER = Path("/proc")
CGROUP_FOLDER = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Usage:
    """The resources used by a process and its running descendants together.

    megabytes: resident memory now. cpu_seconds: processor time since each process began, plus the processor time of its children
    that have ended.
    """

    megabytes: float = 0.0
    cpu_seconds: float = 0.0


def is_measurable() -> bool:
    """Return whether this system has /proc, from which the usage of processes is read."""
    return (PROC_FOLDER / "self" / "stat").exists()


def count_cores() -> int:
    """Return the number of processor cores that this process may run on, or of all cores if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_memory_limit() -> int:
    """Return how many bytes of memory this process and its children may use.

    It is the smaller of the machine's memory and the limit in `CGROUP_FOLDER`, such as a container's limit, if there is one.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (CGROUP_FOLDER / "memory.max", CGROUP_FOLDER / "memory" / "memory.limit_in_bytes"):  # versions 2 and 1
        with suppress(OSError, ValueError):  # the file contains "max" if there is no limit
            limits.append(int(path.read_text()))
    return min(limits)


def count_oom_kills() -> dict[str, int]:
    """Return how many processes the kernel has killed for lack of memory, as a dict from a file with a count to this count.

    The keys are paths. The dict is empty if there is no such file.
    """
    kills = {}
    for path in (PROC_FOLDER / "vmstat", CGROUP_FOLDER / "memory.events"):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                kills[str(path)] = int(counts["oom_kill"])
    return kills


def describe_kill(megabytes: float | None, limit: float | None, kills_at_start: dict[str, int]) -> str:
    """Return as text how much memory a process that was killed by SIGKILL had used, and whether the kernel lacked memory.

    The text says by how much the counts of `count_oom_kills` grew since the process started; these kills may be of other
    processes.

    megabytes: memory of the process in MB when it was last measured; None if never. limit: its memory limit in MB, or None.
    kills_at_start: what `count_oom_kills` returned when the process started.
    """
    if megabytes is None:
        took = "its memory was not measured"
    else:
        allowed = "" if limit is None else f" of at most {limit:.0f} MB"
        took = f"it used {megabytes:.0f} MB{allowed} when it was last measured"
    now = count_oom_kills()
    moved = [f"{where} by {now[where] - count}" for where, count in kills_at_start.items() if now.get(where, count) > count]
    if moved:
        kernel = f"killed processes for lack of memory in the meantime ({', '.join(moved)})"
    else:
        kernel = "killed no process for lack of memory in the meantime" if kills_at_start else "does not report lack of memory"
    return f"{took}; the kernel {kernel}"


def measure_usage(process: int) -> Usage:
    """Return the resources used by the process with this id and its descendants; zeros if /proc does not show it."""
    pages, ticks, tree = 0, 0, [process]
    while tree:
        at = PROC_FOLDER / str(tree.pop())
        try:
            text = (at / "stat").read_text()
        except OSError:  # the process has ended
            continue
        tree += list_children(int(at.name))
        fields = text[text.rindex(")") + 2 :].split()  # the process name in parentheses may contain any character
        pages += int(fields[21])
        ticks += sum(map(int, fields[11:15]))  # CPU time of the process and of its children that have ended
    return Usage(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, ticks / os.sysconf("SC_CLK_TCK"))


def list_children(process: int) -> list[int]:
    """Return the ids of the child processes of the process with this id; none if /proc does not show it."""
    children: list[int] = []
    for path in (PROC_FOLDER / str(process)).glob("task/*/children"):
        with suppress(OSError):  # the thread has ended since the folder was listed
            children += map(int, path.read_text().split())
    return children

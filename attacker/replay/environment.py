"""Facts about the environment of a computation: package versions, machine and commit of the code."""

import platform
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attacker.replay.executors.process_usage import count_cores

VERSIONED_PACKAGES = ("fedleak", "torch", "torchvision", "numpy", "flwr", "lpips")
SOURCE_ROOT = Path(__file__).parents[2]
CODE_PACKAGES = ("attacker", "fedsim", "defenses")


def describe_environment() -> dict[str, Any]:
    """Return a flat dict of plain JSON values: the version of each package by its name, processor, cores, gpu and commit.

    The packages are "python" and those of `VERSIONED_PACKAGES`; the version is None if one is not installed.
    cores:  number of cores that this process may use, or of all cores of the machine if the system does not tell. gpu: name of
    the GPU if this process used one, else None.
    commit: commit of this project's source tree, with "+dirty" if its code was changed; None if it is unknown.
    """
    return {**_describe_machine(), "gpu": _read_gpu()}


@lru_cache(maxsize=1)
def _describe_machine() -> dict[str, Any]:
    """Return the entries of `describe_environment` except `gpu`, as they were at the first call."""
    return {
        "python": platform.python_version(),
        **{package: _read_version(package) for package in VERSIONED_PACKAGES},
        "processor": _read_processor(),
        "cores": count_cores(),
        "commit": read_commit(SOURCE_ROOT),
    }


def _read_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read_processor() -> str:
    """Return the processor's name; where the system does not tell it, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, named), platform.processor() or platform.machine())


def _read_gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def read_commit(root: Path) -> str | None:
    """Return the commit of the git work tree at `root`; None if there is none, or git fails.

    "+dirty" is added if files in the folders `CODE_PACKAGES` were changed or added.
    """
    if not (root / ".git").exists():
        return None
    head = _run_git(root, "rev-parse", "HEAD")
    changed = _run_git(root, "status", "--porcelain", "--", *CODE_PACKAGES)
    return head if head is None or changed == "" else f"{head}+dirty"


def _run_git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()

"""Where downloaded data sets are kept, and how they get there: whole, or not at all."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

TIMEOUT = 15.0
"""Seconds without an answer after which a server counts as out of reach."""


def cache_folder(root: str | None = None) -> Path:
    """`root`, or the environment's FEDLEAK_CACHE, or `~/.cache/fedleak/datasets`."""
    return Path(root or os.environ.get("FEDLEAK_CACHE") or "~/.cache/fedleak/datasets").expanduser()


def fetched(name: str, root: str | None, part: str, fetch: Callable[[str], None]) -> Path:
    """The cache folder, in which `part` is there: fetched where it was not.

    fetch: from a folder, puts `part` into it. It works in a folder of its own, which becomes the cache's only when whole.

    Raises FileNotFoundError, in one line, where the data cannot be had.
    """
    folder = cache_folder(root)
    place = folder / part
    if place.exists():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{name}-", dir=folder, ignore_cleanup_errors=True) as own:
            with _patience(TIMEOUT):
                fetch(own)
            _move(Path(own) / part, place)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileNotFoundError(
            f"{name}: {place} does not exist, and downloading it failed: {reason}. "
            "Run again where there is a network, or copy that folder from a machine that has it (argument root, or FEDLEAK_CACHE)"
        ) from None
    return folder


def _move(whole: Path, place: Path) -> None:
    try:
        whole.rename(place)
    except OSError:
        if not place.exists():  # else another process was quicker
            raise


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """What is opened in here gives up on a silent server; neither torchvision nor scikit-learn can be told to."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it tries again
            yield
    finally:
        socket.setdefaulttimeout(before)

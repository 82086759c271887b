"""The folder of downloaded data sets, to which each part is added only when it is complete."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

TIMEOUT_SECONDS = 15.0
"""Seconds without an answer after which a server counts as out of reach."""


def cache_folder(root: str | None = None) -> Path:
    """Return `root`, or else the environment's FEDLEAK_CACHE, or else `~/.cache/fedleak/datasets`."""
    return Path(root or os.environ.get("FEDLEAK_CACHE") or "~/.cache/fedleak/datasets").expanduser()


def fetched(name: str, root: str | None, part: str, fetch: Callable[[str], None]) -> Path:
    """Return the cache folder, after `part` has been downloaded into it where it was missing.

    fetch: called with a temporary folder, into which it puts `part`; `part` is moved into the cache when `fetch` returns.

    Raises FileNotFoundError, in one line, if the data cannot be had.
    """
    folder = cache_folder(root)
    place = folder / part
    if place.exists():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{name}-", dir=folder, ignore_cleanup_errors=True) as own:
            with _patience(TIMEOUT_SECONDS):
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
    """Limit the time of connections that are opened inside the context: torchvision and scikit-learn have no such option."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it tries again
            yield
    finally:
        socket.setdefaulttimeout(before)

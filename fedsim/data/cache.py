"""Cache of downloaded data sets. A data set appears in it only after it was downloaded completely."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

TIMEOUT_SECONDS = 15.0
"""Seconds without an answer after which a download fails."""


def _find_cache(root: str | None) -> Path:
    """Return the cache folder: `root`, or the environment variable FEDLEAK_CACHE, or `~/.cache/fedleak/datasets`."""
    return Path(root or os.environ.get("FEDLEAK_CACHE") or "~/.cache/fedleak/datasets").expanduser()


def fetch_once(name: str, root: str | None, part: str, fetch: Callable[[str], None]) -> Path:
    """Return the cache folder, after downloading `part` into it unless it is there.

    name:  name of the data set, for messages. root: see `_find_cache`. part: path below the cache folder.
    fetch: function that downloads `part` into a given folder. This is a temporary folder, from which the complete result is moved
           into the cache.
    Raises FileNotFoundError, with a message of one line, if the download fails or cannot be written.
    """
    folder = _find_cache(root)
    place = folder / part
    if place.exists():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{name}-", dir=folder, ignore_cleanup_errors=True) as own:
            with _set_timeout(TIMEOUT_SECONDS):
                fetch(own)
            _move(Path(own) / part, place)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileNotFoundError(
            f"{name}: {place} does not exist, and downloading it failed: {reason}. Run the command again with network "
            f"access, or copy {place} from another machine to the same place. The argument root or the environment "
            "variable FEDLEAK_CACHE names another folder for downloads"
        ) from None
    return folder


def _move(whole: Path, place: Path) -> None:
    """Move a downloaded data set into the cache, unless another process has done so."""
    try:
        whole.rename(place)
    except OSError:
        if not place.exists():  # otherwise another process has finished the same download
            raise


@contextmanager
def _set_timeout(seconds: float) -> Iterator[None]:
    """Set the default timeout of sockets within a `with` block, and ignore warnings there.

    torchvision and scikit-learn have no option for the timeout, and warn about each retry.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about retries
            yield
    finally:
        socket.setdefaulttimeout(before)

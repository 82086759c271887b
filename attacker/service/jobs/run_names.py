"""Ids of recordings: names of nested folders joined by ~, so that an id cannot name a folder outside the root."""

import re
from pathlib import Path

MAX_FOLDER_DEPTH = 3
"""Largest depth of a recording's folder below the root: with 3, ROOT/a/b/c may be a recording."""
FOLDER_NAME_PATTERN = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"
ID_PATTERN = rf"^{FOLDER_NAME_PATTERN}(~{FOLDER_NAME_PATTERN}){{0,{MAX_FOLDER_DEPTH - 1}}}$"
"""Pattern of an id: names of nested folders. None begins with a dot, so that `..` and hidden folders are excluded."""


def make_run_path(root: Path, recording: str) -> Path:
    """Return the folder of the run with the id `recording`, below `root`.

    Raises ValueError if the id is malformed, there is no such folder, or a folder on its path below `root` is a symbolic link.
    """
    if re.fullmatch(ID_PATTERN[1:-1], recording) is None:
        raise ValueError(
            f"{recording!r} is not an id of a recording: write the names of folders below the root, with ~ between them"
        )
    folder = root
    for part in recording.split("~"):
        folder = folder / part
        if folder.is_symlink():
            raise ValueError(f"{recording!r} contains a symbolic link, which is not followed")
    if not folder.is_dir():
        raise ValueError(f"there is no recording {recording!r}")
    return folder


def find_id(root: Path, folder: Path) -> str | None:
    """Return the id of the run in `folder`: the names of the folders on its path below `root`, joined by ~.

    None if it lies more than `MAX_FOLDER_DEPTH` folders deep, or a folder has a name that ids cannot hold
    (`FOLDER_NAME_PATTERN`).
    """
    name = "~".join(folder.relative_to(root).parts)
    return name if re.fullmatch(ID_PATTERN[1:-1], name) else None

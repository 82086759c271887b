"""Tests of the service's state folder: it is accepted only if the service made it and it is private."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attacker.service.state_folder import MARK_FILE, claim_folder, read_private


def test_folder_made_by_the_service_is_accepted_again(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path / "state")
    (folder / "token").touch(mode=0o600)
    (folder / "reports").mkdir(mode=0o700)
    assert claim_folder(folder) == folder
    os.rename(folder, tmp_path / "moved")
    claim_folder(tmp_path / "moved")


def unpacked(folder: Path) -> None:
    """Replace the folder by a copy, as if unpacked from an archive: owner and modes are right, but it has another inode."""
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    os.mkdir(folder.with_name("between"))  # so that the file system does not reuse the inode
    os.rename(folder.with_name("copy"), folder)


def replace_by_link(folder: Path) -> None:
    os.rename(folder, folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


HARMS: dict[str, Callable[[Path], object]] = {
    "open to others": lambda folder: folder.chmod(0o750),
    "unpacked": unpacked,
    "a link": replace_by_link,
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "a fifo": lambda folder: (shutil.rmtree(folder), os.mkfifo(folder)),
    "no mark": lambda folder: (folder / MARK_FILE).unlink(),
    "a wrong mark": lambda folder: (folder / MARK_FILE).write_text(json.dumps({"inode": folder.stat().st_ino + 1})),
    "nonsense for a mark": lambda folder: (folder / MARK_FILE).write_text("[" * 1000),
    "a fifo for a mark": lambda folder: ((folder / MARK_FILE).unlink(), os.mkfifo(folder / MARK_FILE)),
    "a link for a mark": lambda folder: (
        os.rename(folder / MARK_FILE, folder.with_name("mark")),
        (folder / MARK_FILE).symlink_to(folder.with_name("mark")),
    ),
    "a link within": lambda folder: (folder / "queue.sqlite").symlink_to(folder.with_name("theirs")),
    "a link below": lambda folder: ((folder / "locks").mkdir(mode=0o700), (folder / "locks" / "a").symlink_to("/etc/passwd")),
    "a fifo within": lambda folder: os.mkfifo(folder / "service.lock"),
    "a hard link": lambda folder: (folder.with_name("theirs").touch(), os.link(folder.with_name("theirs"), folder / "token")),
    "an open folder within": lambda folder: (folder / "previews").mkdir() or (folder / "previews").chmod(0o777),
    "an open folder around": lambda folder: folder.parent.chmod(0o777),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_or_foreign_folder_is_refused_with_advice(tmp_path: Path, harm: str) -> None:
    folder = claim_folder(tmp_path / "root" / "state")
    (folder / "queue.sqlite-wal").touch(mode=0o600)
    HARMS[harm](folder)
    with pytest.raises(ValueError, match=r"--state"):
        claim_folder(folder)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, own = claim_folder(tmp_path / "state"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ValueError, match=f"belongs to user {own}"):
        claim_folder(folder)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (os.rename(path, path.with_name("b")), path.symlink_to(path.with_name("b"))),
        lambda path: os.link(path, path.with_name("b")),
        lambda path: path.chmod(0o640),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_only_private_regular_files_are_read(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    path = tmp_path / "a"
    path.write_text("content")
    path.chmod(0o600)
    assert read_private(path, 3) == b"con"
    harm(path)
    with pytest.raises(ValueError, match=r"move it away|delete it"):
        read_private(path, 3)

"""Lists of the files that each party of a deployment sees, and a way to hide all other files from processes on one machine."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fedsim.deployment.folders import RUN_NAME


class Mount(NamedTuple):
    """A file or folder relative to the deployment's folder, and whether the party may write to it."""

    path: str
    writable: bool = False


def list_mounts(party: str, *, secure: bool) -> tuple[Mount, ...]:
    """Return the files and folders of a deployment that a party sees.

    party:  "superlink", "enrol", "server", "client-N" or "runner".
    secure: whether there are TLS and keys.
    Raises ValueError for any other party.
    """
    public, trust = Mount("public"), (Mount("trust"),) if secure else ()
    secret = (Mount("secret"),) if secure else ()
    if party.startswith("client-"):
        home = f"clients/{int(party.removeprefix('client-'))}"
        key = (Mount(f"{home}/key"),) if secure else ()
        return (public, *trust, *key, Mount(f"{home}/data"), Mount(f"{home}/private", True), Mount(f"{home}/truth", True))
    known = {
        "superlink": (Mount("superlink", True), *trust, *secret),
        "enrol": (Mount("keys"), *trust),
        "server": (public, *trust, *secret, Mount("server", True), Mount(f"attacks/{RUN_NAME}/recording", True)),
        "runner": (public, *trust),
    }
    if party not in known:
        raise ValueError(f"unknown party {party!r}. Known: {', '.join(known)}, client-N")
    return known[party]


MOUNT_SCRIPT = """set -eu
root=$1; shift
stage=$(mktemp -d)
mount -t tmpfs -o mode=755 none "$stage"
while [ "$1" != -- ]; do
  mode=$1 path=$2; shift 2
  if [ -d "$root/$path" ]; then mkdir -p "$stage/$path"; else mkdir -p "$stage/$(dirname "$path")"; : > "$stage/$path"; fi
  mount --bind "$root/$path" "$stage/$path"
  if [ "$mode" = ro ]; then mount -o remount,bind,ro "$stage/$path"; fi
done
shift
mount --rbind "$stage" "$root"
umount -l "$stage"
rmdir "$stage"
cd "$root"
exec "$@"
"""
"""Script for a mount namespace of its own: below the folder only the mounts remain, and everything else is unchanged."""


def make_isolation_prefix(root: Path, mounts: Sequence[Mount]) -> tuple[str, ...]:
    """Return words to put before a command, on Linux, so that it sees only `mounts` of what is below `root`.

    The command starts in the folder `root`. Files outside `root` stay visible.
    """
    options = [word for mount in mounts for word in ("rw" if mount.writable else "ro", mount.path)]
    return (*_make_unshare_command(), "sh", "-c", MOUNT_SCRIPT, "sh", str(root), *options, "--")


@lru_cache(maxsize=1)
def explain_missing_isolation() -> str:
    """Return why this system cannot hide folders from single processes (by mount namespaces); empty if it can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed; it comes with util-linux, on Linux only"
    done = subprocess.run([*_make_unshare_command(), "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"this system lets you make no mounts of your own: {done.stderr.strip()}"


def _make_unshare_command() -> tuple[str, ...]:
    own = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ("unshare", *own, "--mount", "--propagation", "private")

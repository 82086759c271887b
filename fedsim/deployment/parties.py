"""Start of one party of a deployment on its own machine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fedsim.data.export import read_split
from fedsim.deployment import commands
from fedsim.deployment.folders import Layout
from fedsim.deployment.processes import Processes, find_free_port, is_free
from fedsim.deployment.superlink import read_network
from fedsim.recording.files import make_private

PARTY_NAMES = "superlink, server, or client-0, client-1, ..."


def make_command(
    party: str, layout: Layout, superlink: str, *, bind: str = "127.0.0.1", secure: bool = True, control_from: Sequence[str] = ()
) -> list[str]:
    """Return the command that starts `party`: "superlink", "server", or "client-N" with N from 0. Creates the party's folders.

    layout:       folders, whose paths the command contains.
    superlink:    address HOST:PORT of the SuperLink.
    bind:         address on which the SuperLink listens; for "superlink" only, otherwise ignored.
    secure:       whether to use TLS and keys.
    control_from: networks that may send Flower's commands to the SuperLink, besides its own machine; for "superlink" only.
    Raises ValueError for an unknown party, a missing file that the party needs, a port of the SuperLink that is in use, an
    invalid network, or `control_from` for another party.
    """
    link, made = layout.make_link(superlink, secure=secure), layout.certificates
    port = int(superlink.rpartition(":")[2])
    if control_from and party != "superlink":
        raise ValueError(f"--control-from is an option of `fedsim start superlink` only; omit it for {party}")
    if party == "superlink":
        _check_files(made.certificate, made.key, made.secret, secure=secure)
        if not is_free(bind, port):
            raise ValueError(
                f"something listens on {bind}:{port} already, or {bind} is not an address of this machine; choose another port "
                "with --superlink HOST:PORT, or another address with --bind"
            )
        for network in control_from:
            read_network(network)
        make_private(layout.database.parent)
        identity = layout.find_identity() if secure else None
        return commands.make_superlink_command(
            host=bind, port=port, database=str(layout.database), identity=identity, control_from=control_from
        )
    if party == "server":
        _check_files(made.authority, made.secret, secure=secure)
        return commands.make_server_command(link, secret=str(made.secret) if secure else None)
    number = party.removeprefix("client-")
    if party == number or not number.isdecimal():
        raise ValueError(f"unknown party {party!r}. Known: {PARTY_NAMES}")
    count, home = read_split(layout.root).clients.count, layout.make_client_path(int(number))
    if int(number) >= count:
        raise ValueError(f"{party}: there are {count} clients, from client-0 to client-{count - 1}")
    _check_files(made.authority, layout.make_key_path(int(number)), secure=secure)
    _check_files(home / "data")
    for name in ("private", "truth"):
        make_private(home / name)
    key = str(layout.make_key_path(int(number))) if secure else None
    return commands.make_client_command(
        link, key=key, port=find_free_port(), config=layout.make_client_config(int(number), count)
    )


def replace_process(command: list[str], layout: Layout, party: str) -> NoReturn:
    """Replace this process by `command`, run in the folder flower/PARTY below the root of `layout`.

    The environment variable FLWR_HOME, Flower's folder for its configuration, is set to this folder.
    Raises FileNotFoundError if there is no such program.
    """
    home = make_private(layout.root / "flower" / party)
    environment = {**Processes(home).environment, "FLWR_HOME": str(home)}
    os.chdir(home)
    os.execvpe(command[0], command, environment)


def _check_files(*paths: Path, secure: bool = True) -> None:
    for path in paths if secure else ():
        if not path.exists():
            raise ValueError(f"{path} does not exist; create it with `fedsim prepare`, or copy it to this machine")

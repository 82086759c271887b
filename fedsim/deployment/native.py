"""SuperLink, server and clients of a deployment as processes on one machine, without containers.

On request, each process runs in its own mount namespace and sees only its party's files in the deployment's folder.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fedsim.deployment import commands
from fedsim.deployment.commands import Link
from fedsim.deployment.folders import Layout
from fedsim.deployment.health import is_healthy
from fedsim.deployment.mounts import Mount, list_mounts, make_isolation_prefix
from fedsim.deployment.processes import RUNNER_NAME, Processes, find_free_port
from fedsim.recording.files import make_private

START_SECONDS = 120.0
"""Time limit in seconds for a process to start; all processes load at once, possibly on one core."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """A client that `NativeDeployment` starts as a SuperNode.

    number: the client's number, from 0.
    key:    file of its private key; not used without TLS, and then it may be None.
    config: its own configuration, see `commands.make_client_config`.
    home:   folder in which its process runs.
    """

    number: int
    key: Path | None
    config: dict[str, str | int]
    home: Path


class NativeDeployment:
    """Running SuperLink, server and clients, as a context manager that starts and stops them.

    layout:   folders.
    parties:  the clients to start.
    secure:   whether to use TLS and the keys in `layout`.
    isolated: whether each process sees only those folders of `layout` that its container would see, besides a folder for Flower.
    """

    bind = "127.0.0.1"
    """Address on which the SuperLink listens."""
    address = "127.0.0.1"
    """Address at which the other parties reach the SuperLink."""

    def __init__(self, layout: Layout, parties: Sequence[Party], *, secure: bool = True, isolated: bool = False) -> None:
        self.layout, self.parties, self.secure, self.isolated = layout, parties, secure, isolated
        self.port = find_free_port()
        self.home = make_private(layout.root / "flower")
        environment = {"FLWR_HOME": str(self.home / "server"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        self.processes = Processes(layout.root / "logs", environment)

    @property
    def link(self) -> Link:
        """Return the address at which the other parties reach the SuperLink, with the authority's certificate if `secure`."""
        return self.layout.make_link(f"{self.address}:{self.port}", secure=self.secure)

    def start_superlink(self) -> None:
        """Start the SuperLink, with the runs and clients that its database holds, if any, and wait until it answers.

        Raises ProcessEnded if it exits or does not answer within `START_SECONDS`.
        """
        make_private(self.layout.database.parent)
        identity = self.layout.find_identity() if self.secure else None
        database = str(self.layout.database)
        command = commands.make_superlink_command(host=self.bind, port=self.port, database=database, identity=identity)
        self._start("superlink", command, self.layout.database.parent)
        self.processes.wait_for("superlink", self.is_answering, timeout=START_SECONDS)

    def start_server(self) -> None:
        """Start the server's process, which takes its work from the SuperLink, and return without waiting for it."""
        secret = str(self.layout.certificates.secret) if self.secure else None
        self._start("server", commands.make_server_command(self.link, secret=secret), make_private(self.layout.run.parent))

    def start_client(self, party: Party) -> None:
        """Start a client's SuperNode as the process `client-N`, and return without waiting for it to join the SuperLink."""
        key = str(party.key) if party.key and self.secure else None
        command = commands.make_client_command(self.link, key=key, port=find_free_port(), config=party.config)
        self._start(f"client-{party.number}", command, party.home)

    def enrol(self) -> None:
        """Register the public keys of all clients, which are in the folder `keys` of `layout`, at the SuperLink.

        Raises ValueError if there are no keys, and NotReached if the SuperLink does not register them.
        """
        from fedsim.deployment.flower_commands import enrol

        prefix = self.make_prefix("enrol")
        enrol(self.link, self.layout.keys, home=self.home / "enrol", prefix=prefix)

    def start(self) -> None:
        """Start the SuperLink, register the clients' keys if `secure` is set, then start the server and all clients.

        Raises ProcessEnded, with the last output of the SuperLink, if it does not answer in time or exits, and NotReached if it
        does not register the keys.
        """
        self.start_superlink()
        if self.secure:
            self.enrol()
        self.start_server()
        for party in self.parties:
            self.start_client(party)

    def is_answering(self) -> bool:
        """Return whether the SuperLink answers a health check."""
        return is_healthy(self.link.address, self.link.authority)

    def run(self, watch: Callable[[], None] = lambda: None) -> int:
        """Run the prepared federation until it finishes; return the exit status of `fedsim run`, which waits for it.

        watch: called several times a second.
        Raises ProcessEnded if the process of the SuperLink, the server or a client exits, unless `watch` stopped it.
        """
        layout = self.layout
        where = {"out": str(layout.run), "public": str(layout.public)}
        command = commands.make_runner_command(self.link, experiment=str(layout.experiment), **where)
        self._start(RUNNER_NAME, command, make_private(self.home / RUNNER_NAME))
        while (status := self.processes.find_status(RUNNER_NAME)) is None:
            watch()
            self.processes.check()
            time.sleep(0.2)
        return status

    def make_prefix(self, party: str) -> tuple[str, ...]:
        """Return the words to put before the command of a party.

        These words set Flower's and the user's home folder and, if `isolated` is set, hide what the party may not see of the
        deployment's folder.
        """
        home = make_private(self.home / party)
        own = ("env", f"FLWR_HOME={home}", f"HOME={home}")
        if not self.isolated:
            return own
        seen = list_mounts(party, secure=self.secure)
        flower = Mount(str(home.relative_to(self.layout.root)), True)
        return (*make_isolation_prefix(self.layout.root, (*seen, flower)), *own)

    def _start(self, name: str, command: list[str], home: Path) -> None:
        self.processes.start(name, command, cwd=home, prefix=self.make_prefix(name))

    def __enter__(self) -> "NativeDeployment":
        try:
            self.start()
        except BaseException:
            self.processes.end_all()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.processes.end_all()


def list_parties(layout: Layout, count: int, *, seed: int | None = None) -> list[Party]:
    """Return the first `count` clients of a prepared deployment, each with its own folder.

    seed: number from which each client derives its secrets, for reproducible runs; None for random secrets.
    """
    return [
        Party(
            number=number,
            key=layout.make_key_path(number),
            config=layout.make_client_config(number, count, seed=seed),
            home=layout.make_client_path(number),
        )
        for number in range(count)
    ]

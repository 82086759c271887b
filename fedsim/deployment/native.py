"""SuperLink, server and clients of a deployment as processes on one machine, without containers.

On request, each process runs in its own mount namespace and sees only its party's files in the deployment's folder.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fedsim.deployment import commands
from fedsim.deployment.commands import Link
from fedsim.deployment.folders import Layout
from fedsim.deployment.mounts import Mount, list_mounts, make_isolation_prefix
from fedsim.deployment.processes import RUNNER_NAME, Ended, Processes, find_free_port, is_healthy
from fedsim.recording.files import make_private

START_SECONDS = 120.0
"""Time limit in seconds for a process to start; all processes load at once, possibly on one core."""

JOINED_LINE = "SuperNode ID:"
"""Line in a client's log after the SuperLink accepted it."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """A client that `Native` starts as a SuperNode.

    number: the client's number, from 0.
    key:    file of its private key; not used without TLS, and then it may be None.
    config: its own configuration, see `commands.make_client_config`.
    home:   folder in which its process runs.
    """

    number: int
    key: Path | None
    config: dict[str, str | int]
    home: Path


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Where processes run and how they reach the SuperLink.

    bind:    address on which the SuperLink listens.
    address: address at which the other parties reach the SuperLink.
    prefix:  function from a party's name ("superlink", "server", "client-0", ...) to words before the command of its process,
             which run it in a network of its own, for example; empty for none.
    """

    bind: str = "127.0.0.1"
    address: str = "127.0.0.1"
    prefix: Callable[[str], Sequence[str]] = lambda party: ()


LOOPBACK_HOSTS = Hosts()


class Native:
    """Running SuperLink, server and clients, as a context manager that starts and stops them.

    layout:   folders.
    parties:  the clients to start.
    secure:   whether to use TLS and the keys in `layout`.
    isolated: whether each process sees only those folders of `layout` that its container would see, besides a folder for Flower.
    hosts:    addresses of the SuperLink, and where processes run.
    port:     port of the SuperLink; None for a free one.
    """

    def __init__(
        self,
        layout: Layout,
        parties: Sequence[Party],
        *,
        secure: bool = True,
        isolated: bool = False,
        hosts: Hosts = LOOPBACK_HOSTS,
        port: int | None = None,
    ) -> None:
        self.layout, self.parties, self.secure, self.isolated, self.hosts = layout, parties, secure, isolated, hosts
        self.port = port or find_free_port()
        self.home = make_private(layout.root / "flower")
        environment = {"FLWR_HOME": str(self.home / "server"), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        self.processes = Processes(layout.root / "logs", environment)

    @property
    def link(self) -> Link:
        """Return the address at which the other parties reach the SuperLink, with the authority's certificate if `secure`."""
        return self.layout.make_link(f"{self.hosts.address}:{self.port}", secure=self.secure)

    def start_superlink(self) -> None:
        """Start the SuperLink, with the runs and clients that its database holds, if any, and wait until it answers.

        Raises Ended if it exits or does not answer within `START_SECONDS`.
        """
        make_private(self.layout.database.parent)
        identity = self.layout.find_identity() if self.secure else None
        database = str(self.layout.database)
        command = commands.make_superlink_command(host=self.hosts.bind, port=self.port, database=database, identity=identity)
        self._start("superlink", command, self.layout.database.parent)
        self.processes.wait_for("superlink", self._is_answering, timeout=START_SECONDS)

    def start_server(self) -> None:
        """Start the server's process, which takes its work from the SuperLink, and return without waiting for it."""
        secret = str(self.layout.certificates.secret) if self.secure else None
        self._start("server", commands.make_server_command(self.link, secret=secret), make_private(self.layout.run.parent))

    def start_client(self, party: Party) -> None:
        """Start a client's SuperNode as the process `client-N`, and return without waiting for it to join the SuperLink."""
        key = str(party.key) if party.key and self.secure else None
        command = commands.make_client_command(self.link, key=key, port=find_free_port(), config=party.config)
        self._start(f"client-{party.number}", command, party.home)

    def restart_client(self, party: Party) -> None:
        """Start a client again that was killed, and wait until the SuperLink accepts it.

        The SuperLink refuses the client's key for about a minute, until it notices that the old connection is lost; the client's
        process then exits and is started again. Raises Ended if it has not joined after twice `START_SECONDS`.
        """
        name = f"client-{party.number}"
        before, seconds = self._count_joins(name), 2 * START_SECONDS
        deadline = time.monotonic() + seconds
        while True:
            self.start_client(party)
            while self.processes.find_status(name) is None:
                if self._count_joins(name) > before:
                    return
                if time.monotonic() > deadline:
                    raise Ended(
                        f"{name} runs, but the SuperLink has not accepted it within {seconds:g} seconds; start the federation "
                        f"again\n{self.processes.read_last_lines(name)}"
                    )
                time.sleep(0.2)
            if time.monotonic() > deadline:
                raise Ended(
                    f"{name} cannot join again within {seconds:g} seconds, because the SuperLink still holds its old "
                    f"connection; start the federation again\n{self.processes.read_last_lines(name)}"
                )
            time.sleep(3)

    def _count_joins(self, name: str) -> int:
        return self.processes.find_log(name).read_text(errors="replace").count(JOINED_LINE)

    def kill(self, name: str) -> None:
        """Kill the process `name`, such as "client-0", and its child processes at once, like `kill -9`."""
        self.processes.end(name, signal.SIGKILL)

    def enrol(self) -> None:
        """Register the public keys of all clients, which are in the folder `keys` of `layout`, at the SuperLink.

        Raises ValueError if there are no keys, and NotReached if the SuperLink does not register them.
        """
        from fedsim.deployment.flower_commands import enrol

        prefix = self.make_prefix("enrol")
        enrol(self.link, self.layout.keys, home=self.home / "enrol", prefix=prefix)

    def start(self) -> None:
        """Start the SuperLink, register the clients' keys if `secure` is set, then start the server and all clients.

        Raises Ended, with the last output of the SuperLink, if it does not answer in time or exits, and NotReached if it does not
        register the keys.
        """
        self.start_superlink()
        if self.secure:
            self.enrol()
        self.start_server()
        for party in self.parties:
            self.start_client(party)

    def _is_answering(self) -> bool:
        """Return whether the SuperLink answers a health check that is sent from where the server's process runs.

        If `Hosts.prefix` runs the server in a network of its own, the check is sent from that network. The SuperLink is Flower's
        relay, to which clients and server connect; the server is the process of the strategy.
        """
        prefix, address, authority = self.hosts.prefix("server"), self.link.address, self.link.authority
        if not prefix:
            return is_healthy(address, authority)
        asked = [address] if authority is None else [address, authority]
        return subprocess.run([*prefix, sys.executable, "-m", "fedsim.deployment.health", *asked]).returncode == 0

    def run(self, watch: Callable[[], None] = lambda: None, *, more: Sequence[str] = ()) -> int:
        """Run the prepared federation until it finishes; return the exit status of `fedsim run`, which waits for it.

        watch: called several times a second.
        more:  further arguments of `fedsim run`.
        Raises Ended if the process of the SuperLink, the server or a client exits, unless `watch` stopped it by `kill`.
        """
        layout = self.layout
        where = {"out": str(layout.run), "public": str(layout.public)}
        command = commands.make_runner_command(self.link, experiment=str(layout.experiment), **where)
        self._start(RUNNER_NAME, [*command, *more], make_private(self.home / RUNNER_NAME))
        while (status := self.processes.find_status(RUNNER_NAME)) is None:
            watch()
            self.processes.check()
            time.sleep(0.2)
        return status

    def make_prefix(self, party: str) -> tuple[str, ...]:
        """Return the words to put before the command of a party.

        These words run the command in the party's network (`Hosts.prefix`), set Flower's and the user's home folder and, if
        `isolated` is set, hide what the party may not see of the deployment's folder.
        """
        home = make_private(self.home / party)
        own = ("env", f"FLWR_HOME={home}", f"HOME={home}")
        if not self.isolated:
            return (*self.hosts.prefix(party), *own)
        seen = list_mounts(party, len(self.parties), secure=self.secure)
        flower = Mount(str(home.relative_to(self.layout.root)), True)
        return (*self.hosts.prefix(party), *make_isolation_prefix(self.layout.root, (*seen, flower)), *own)

    def _start(self, name: str, command: list[str], home: Path) -> None:
        self.processes.start(name, command, cwd=home, prefix=self.make_prefix(name))

    def __enter__(self) -> "Native":
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

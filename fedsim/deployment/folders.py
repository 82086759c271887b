"""The folder of a deployment: what each party gets, in a folder of its own, ready to be carried or mounted."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.config.experiment import Experiment
from fedsim.data import export as splitting
from fedsim.deployment import certificates
from fedsim.deployment.commands import Link, TlsIdentity, config_of_client
from fedsim.recording.files import make_private

RUN = "federation"
"""Name of the run on the server, and of its recording for the attacker."""


@dataclass(frozen=True)
class Layout:
    """Who gets what below `root`.

    public/      experiment and public facts on the data: everybody's.
    trust/       certificate of the authority: everybody's. authority/: its key, which nobody needs any more.
    keys/        the clients' public keys, for `fedsim enrol`.
    clients/N/   data, key, private, truth: client N's, and after the federation the scorer's.
    superlink/   certificate, key and database. secret/: what the SuperLink and the server share.
    server/      the run, as `fedsim run` writes it, save its recording, which is in
    attacks/     the attacker's: recordings, which it only reads, and what it reconstructs of them.
    scores/      the scorer's.
    """

    root: Path

    @property
    def public(self) -> Path:
        return self.root / "public"

    @property
    def experiment(self) -> Path:
        return self.public / splitting.EXPERIMENT

    @property
    def certificates(self) -> certificates.ServerFiles:
        return certificates.ServerFiles(self.root)

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    def client(self, number: int) -> Path:
        return splitting.client_folder(self.root, number)

    def key(self, number: int) -> Path:
        return self.client(number) / "key"

    @property
    def database(self) -> Path:
        return self.root / "superlink" / "state.db"

    @property
    def run(self) -> Path:
        return self.root / "server" / RUN

    @property
    def attacked(self) -> Path:
        return self.root / "attacks" / RUN

    @property
    def scored(self) -> Path:
        return self.root / "scores" / RUN

    def config(self, number: int, count: int, *, seed: int | None = None) -> dict[str, str | int]:
        """The configuration of client `number` of `count`."""
        return config_of_client(number, count, str(self.client(number)), experiment=str(self.experiment), seed=seed)

    def truths(self, count: int) -> list[str]:
        """The folders of truth of `count` clients."""
        return [str(self.client(number) / "truth") for number in range(count)]

    def link(self, address: str, *, secure: bool = True) -> Link:
        """How to reach the SuperLink at `address`."""
        return Link(address=address, authority=str(self.certificates.authority) if secure else None)

    def identity(self) -> TlsIdentity:
        """What the SuperLink shows."""
        m = self.certificates
        return TlsIdentity(authority=str(m.authority), certificate=str(m.certificate), key=str(m.key), secret=str(m.secret))


def prepare(experiment: Experiment, root: Path, *, hosts: Sequence[str] = (), days: int = 365) -> Layout:
    """Make the folder of a deployment: data, certificates, keys, and an empty folder for everything that is written.

    hosts: names and addresses of the SuperLink, beside those of this machine. Raises ValueError where data lie there already.
    """
    layout = Layout(root.absolute())
    splitting.split(experiment, layout.root)
    certificates.make_server(layout.root, hosts, days=days)
    for number in range(experiment.clients.count):
        certificates.make_client(layout.key(number), layout.keys / f"{number}.pub")
        for name in ("private", "truth"):
            make_private(layout.client(number) / name)
    for folder in (layout.run, layout.attacked / "recording", layout.attacked / "reconstructions", layout.scored):
        make_private(folder)
    for name, reader in (("recording", layout.run), ("reconstructions", layout.scored)):  # in containers, these are mounts
        (reader / name).symlink_to(os.path.relpath(layout.attacked / name, reader))
    return layout

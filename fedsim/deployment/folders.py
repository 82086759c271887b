"""Folder of a deployment, with subfolders that can be copied to the machine of a party or mounted in its container."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.config.experiment import Experiment
from fedsim.data import export as splitting
from fedsim.deployment import certificates
from fedsim.deployment.commands import Link, TlsIdentity, make_client_config
from fedsim.recording.files import make_private

RUN_NAME = "federation"
"""Name of the run on the server, and of its recording for the attacker."""


@dataclass(frozen=True)
class Layout:
    """Subfolders of `root`, the folder of a deployment, with their readers and contents.

    public/            server, clients and `fedsim run`: the experiment, and public facts about the data.
    trust/             SuperLink, and every party that connects to it: certificate of the authority.
    authority/         nobody: private key of the authority, needed only to sign further certificates.
    keys/              `fedsim enrol`: public keys of the clients.
    clients/N/data/    client N, and after the federation the scorer: the client's examples.
    clients/N/truth/   client N, and after the federation the scorer: indices of the examples that the client used.
    clients/N/private/ client N: its identity, secret and state. The file clients/N/key is its private key.
    superlink/         SuperLink: its certificate, private key and database.
    secret/            SuperLink and server: the secret that they share.
    server/            server: the run as `fedsim run` writes it, except its recording.
    attacks/           attacker: recordings, which only the server may write, and reconstructions, which the scorer reads too.
    scores/            scorer: the run's scores.
    """

    root: Path

    @property
    def public(self) -> Path:
        return self.root / "public"

    @property
    def experiment(self) -> Path:
        return self.public / splitting.EXPERIMENT_FILE

    @property
    def certificates(self) -> certificates.ServerFiles:
        return certificates.ServerFiles(self.root)

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    def make_client_path(self, number: int) -> Path:
        return splitting.make_client_path(self.root, number)

    def make_key_path(self, number: int) -> Path:
        return self.make_client_path(number) / "key"

    @property
    def database(self) -> Path:
        return self.root / "superlink" / "state.db"

    @property
    def run(self) -> Path:
        return self.root / "server" / RUN_NAME

    @property
    def attacked(self) -> Path:
        return self.root / "attacks" / RUN_NAME

    @property
    def scored(self) -> Path:
        return self.root / "scores" / RUN_NAME

    def make_client_config(self, number: int, count: int, *, seed: int | None = None) -> dict[str, str | int]:
        """Return Flower's node config of client `number` (from 0) of `count`, a dict, with paths in the client's folder.

        seed: the same for all clients, from which each derives its secrets (the seeds of its noise and of its order of examples),
              for reproducible runs; None for random secrets.
        """
        return make_client_config(number, count, str(self.make_client_path(number)), experiment=str(self.experiment), seed=seed)

    def list_truths(self, count: int) -> list[str]:
        """Return the paths of the folders `clients/N/truth`, N from 0 to `count` - 1."""
        return [str(self.make_client_path(number) / "truth") for number in range(count)]

    def list_links(self) -> list[Path]:
        """Return the links to folders of `attacked`: the server's to the recording, and the scorer's to the reconstructions."""
        return [self.run / "recording", self.scored / "reconstructions"]

    def list_made(self) -> list[Path]:
        """Return what `prepare` makes anew; certificates and keys, which an earlier command may have made, are left out."""
        return [self.public, self.make_client_path(0) / "data", self.run, self.attacked, self.scored]

    def make_link(self, address: str, *, secure: bool = True) -> Link:
        """Return the connection to the SuperLink at `address`, HOST:PORT. secure: whether it uses TLS and keys."""
        return Link(address=address, authority=str(self.certificates.authority) if secure else None)

    def find_identity(self) -> TlsIdentity:
        """Return the paths of the SuperLink's TLS files."""
        m = self.certificates
        return TlsIdentity(authority=str(m.authority), certificate=str(m.certificate), key=str(m.key), secret=str(m.secret))


def prepare(experiment: Experiment, root: Path, *, hosts: Sequence[str] = (), days: int = 365) -> Layout:
    """Make the folder of a deployment: data, certificates, keys, and empty folders for everything that is written later.

    experiment: its data set is loaded and split among the clients.
    root:       the folder to make. If it holds certificates and keys already, such as those of `fedsim keys`, these are kept.
    hosts:      names and addresses of the SuperLink, besides `certificates.DEFAULT_HOST_NAMES`, at which clients may reach it.
    days:       validity of new certificates in days, 1 to 825.
    Raises ValueError, and writes nothing, if `root` holds the folder `public` or another part of an earlier deployment, or a run.
    Raises ValueError if a client gets no examples, or for invalid `days`.
    """
    layout = Layout(root.absolute())
    if earlier := next((path for path in layout.list_made() if os.path.lexists(path)), None):
        raise ValueError(f"{earlier} exists already, from an earlier deployment; choose another folder, or delete {layout.root}")
    if part := next((name for name in ("recording", "experiment.toml") if os.path.lexists(layout.root / name)), None):
        raise ValueError(f"{layout.root} is the folder of a run, since it holds {part}; choose another folder")
    certificates.make_server(layout.root, hosts, days=days)
    splitting.split(experiment, layout.root)
    for number in range(experiment.clients.count):
        certificates.make_client(layout.make_key_path(number), layout.keys / f"{number}.pub")
        for name in ("private", "truth"):
            make_private(layout.make_client_path(number) / name)
    for folder in (layout.run, layout.attacked / "recording", layout.attacked / "reconstructions", layout.scored):
        make_private(folder)
    for link in layout.list_links():  # in containers, these are mounts
        link.symlink_to(os.path.relpath(layout.attacked / link.name, link.parent))
    return layout

"""Commands of each party of a deployment.

The module `native` runs them. The compose file repeats them for containers, and tests check that both agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment of every process: no network look-ups, no installation, one thread per client."""


@dataclass(frozen=True, kw_only=True)
class TlsIdentity:
    """TLS files of a SuperLink, as paths that its process sees.

    authority: certificate of the authority that signed `certificate`, whose private key is `key`.
    secret:    file with the secret that the SuperLink shares with the server; it gives tasks only to processes that know it.
    """

    authority: str
    certificate: str
    key: str
    secret: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """Connection of a party to the SuperLink.

    address:   host and port. authority: path of the certificate of the authority (see `TlsIdentity`), by which the party verifies
               the SuperLink's certificate; None for a connection without TLS and keys.
    """

    address: str
    authority: str | None

    def list_options(self) -> list[str]:
        return ["--insecure"] if self.authority is None else ["--root-certificates", self.authority]


def make_superlink_command(
    *, host: str, port: int, database: str, identity: TlsIdentity | None, control_from: Sequence[str] = ()
) -> list[str]:
    """Return the command of the SuperLink, which stores runs and nodes in `database`; without `identity`, no TLS.

    host, port:   where the SuperLink listens.
    control_from: networks that may send it Flower's commands, besides its own machine; see `fedsim.deployment.superlink`.
    """
    admitted = [word for network in control_from for word in ("--control-from", network)]
    guarded = ["python", "-m", "fedsim.deployment.superlink", *admitted]
    where = [*guarded, "--host", host, "--port", str(port), "--isolation", "process", "--database", database]
    if identity is None:
        return [*where, "--insecure"]
    return [
        *where,
        *("--ssl-ca-certfile", identity.authority),
        *("--ssl-certfile", identity.certificate),
        *("--ssl-keyfile", identity.key),
        "--enable-supernode-auth",
        *("--superexec-auth-secret-file", identity.secret),
    ]


def make_server_command(link: Link, *, secret: str | None) -> list[str]:
    """Return the command of the server, which aggregates and writes the recording.

    secret: path of the file with the secret shared with the SuperLink; None without TLS.
    """
    words = ["flower-superexec", "--runtime-api-address", link.address, *link.list_options()]
    return words if secret is None else [*words, "--superexec-auth-secret-file", secret]


def make_client_command(link: Link, *, key: str | None, port: int, config: Mapping[str, str | int]) -> list[str]:
    """Return the command of a client's SuperNode.

    key:    path of the client's private key; None without TLS.
    port:   local port on which the SuperNode serves the client's processes.
    config: the client's own configuration; `fedsim.engine.flower_app` lists its keys.
    """
    words = ["flower-supernode", "--superlink", link.address, *link.list_options()]
    words += [] if key is None else ["--auth-supernode-private-key", key]
    return [*words, "--host", "127.0.0.1", "--port", str(port), "--node-config", format_config(config)]


def make_client_config(number: int, count: int, home: str, *, experiment: str, seed: int | None = None) -> dict[str, str | int]:
    """Return the configuration of client `number` (from 0) of `count`, a dict with the keys in `fedsim.engine.flower_app`.

    home: folder of the client's files. experiment: path of the experiment that the client agrees to. seed: the same for all
    clients, each of which derives its secrets from it and its number, for reproducible runs; None for random secrets.
    """
    own: dict[str, str | int] = {"partition-id": number, "num-partitions": count, "experiment": experiment}
    own |= {"data": f"part:{home}/data", "private": f"{home}/private", "truth": f"{home}/truth"}
    return own if seed is None else own | {"client-seed": seed}


def format_config(config: Mapping[str, str | int]) -> str:
    """Return a configuration as Flower's command line reads it: TOML values separated by spaces.

    Raises ValueError for a text with a quotation mark, a backslash or a line break, which Flower cannot read.
    """
    for key, value in config.items():
        if isinstance(value, str) and set(value) & set("'\"\\\n"):
            raise ValueError(
                f"{key} = {value!r}: Flower cannot read quotation marks, backslashes and line breaks on its command line; use "
                "a value without them"
            )
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in config.items())


def make_enrol_command(link: Link, *, keys: str) -> list[str]:
    """Return the command that registers the clients' public keys in the folder `keys` at the SuperLink."""
    return ["fedsim", "enrol", keys, "--superlink", link.address, *link.list_options()]


def make_runner_command(link: Link, *, experiment: str, out: str, public: str) -> list[str]:
    """Return the command that starts a federation on the SuperLink, or resumes an interrupted one, and waits until it finishes.

    experiment: path of the experiment's TOML file, read by this command. out, public: the run's folder and the folder of public
    facts about the data, as paths on the server's machine.
    """
    words = ["fedsim", "run", experiment, "--engine", "deployment", "--superlink", link.address, *link.list_options()]
    return [*words, "--out", out, "--public", public, "--resume"]


def make_attacker_command(*, root: str, host: str, port: int) -> list[str]:
    """Return the command of the attacker's service for the recordings below `root`."""
    return ["attacker", "serve", root, "--host", host, "--port", str(port)]


def make_page_command(*, port: int, attacker: str) -> list[str]:
    """Return the command that forwards the service's page at `attacker`, HOST:PORT, to a port of this machine."""
    return ["python", "-m", "fedsim.deployment.forward", str(port), attacker]


def make_scorer_command(*, run: str, truth: list[str]) -> list[str]:
    """Return the command that compares reconstructions with the examples that the clients used.

    run:   folder of the run with the reconstructions.
    truth: folder of each client that tells which examples the client used, in any order.
    """
    return ["attacker", "score", run, *(word for folder in truth for word in ("--truth", folder))]

"""Command lines, as lists of words, of the parties of a deployment: SuperLink (Flower's relay), server, clients and others.

The compose file repeats them for containers, and tests check that both agree.
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

    certificate, key: certificate of the SuperLink, and its private key.
    authority:        certificate of the authority that signed `certificate`.
    secret:           file with the secret that SuperLink and server share; the SuperLink gives tasks only to processes that know
                      it.
    """

    authority: str
    certificate: str
    key: str
    secret: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """Connection of a party to the SuperLink, Flower's relay between server and clients.

    address:   HOST:PORT.
    authority: path of the certificate of the authority that signed the SuperLink's certificate; None for a connection without TLS
               and keys.
    """

    address: str
    authority: str | None

    def list_options(self) -> list[str]:
        return ["--insecure"] if self.authority is None else ["--root-certificates", self.authority]


def make_superlink_command(
    *, host: str, port: int, database: str, identity: TlsIdentity | None, control_from: Sequence[str] = ()
) -> list[str]:
    """Return the command of the SuperLink, Flower's relay between server and clients.

    host, port:   where the SuperLink listens.
    database:     file in which the SuperLink keeps runs and clients.
    identity:     TLS files of the SuperLink; None for a SuperLink without TLS and keys.
    control_from: networks, such as 10.0.0.0/8, that may send it Flower's commands (start a run, ...), besides its own machine.
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
    """Return the command of the server's process, which waits for runs at the SuperLink, aggregates, and writes the recording.

    secret: path of the file with the secret shared with the SuperLink; None without TLS.
    """
    words = ["flower-superexec", "--runtime-api-address", link.address, *link.list_options()]
    return words if secret is None else [*words, "--superexec-auth-secret-file", secret]


def make_client_command(link: Link, *, key: str | None, port: int, config: Mapping[str, str | int]) -> list[str]:
    """Return the command of a client's SuperNode, the process that connects the client to the SuperLink.

    key:    path of the client's private key; None without TLS.
    port:   port of 127.0.0.1 on which the SuperNode serves the client's other processes.
    config: the client's own configuration, such as `make_client_config` returns.
    """
    words = ["flower-supernode", "--superlink", link.address, *link.list_options()]
    words += [] if key is None else ["--auth-supernode-private-key", key]
    return [*words, "--host", "127.0.0.1", "--port", str(port), "--node-config", format_config(config)]


def make_client_config(number: int, count: int, home: str, *, experiment: str, seed: int | None = None) -> dict[str, str | int]:
    """Return the configuration of client `number` (from 0) of `count`, a dict for the node config of its SuperNode.

    home:       folder of the client: examples in home/data, identity and state in home/private, indices of used examples in
                home/truth.
    experiment: path of the experiment that the client agrees to; it refuses others.
    seed:       the same for all clients, for reproducible runs; each client derives its secrets from it and its number. None for
                random secrets.
    """
    own: dict[str, str | int] = {"partition-id": number, "num-partitions": count, "experiment": experiment}
    own |= {"data": f"part:{home}/data", "private": f"{home}/private", "truth": f"{home}/truth"}
    return own if seed is None else own | {"client-seed": seed}


def format_config(config: Mapping[str, str | int]) -> str:
    """Return a configuration as Flower's command line reads it: key=value pairs separated by spaces, with texts in quotes.

    Raises ValueError for a text with a single or double quotation mark, a backslash or a line break, which Flower cannot read.
    """
    for key, value in config.items():
        if isinstance(value, str) and set(value) & set("'\"\\\n"):
            raise ValueError(
                f"{key} = {value!r}: Flower cannot read quotation marks, backslashes and line breaks on its command line; use "
                "a value without them"
            )
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in config.items())


def make_runner_command(link: Link, *, experiment: str, out: str, public: str) -> list[str]:
    """Return the command that starts a federation on the SuperLink, or resumes an interrupted one, and waits until it finishes.

    experiment: path of the experiment's TOML file, read by this command.
    out:        folder of the run, on the server's machine.
    public:     folder that describes the clients' data, on the server's machine.
    """
    words = ["fedsim", "run", experiment, "--engine", "deployment", "--superlink", link.address, *link.list_options()]
    return [*words, "--out", out, "--public", public, "--resume"]


def make_scorer_command(*, run: str, truth: list[str]) -> list[str]:
    """Return the command that compares reconstructions with the examples that the clients used.

    run:   folder of the run with the reconstructions.
    truth: the folders, one of each client and in any order, that tell which examples the client used.
    """
    return ["attacker", "score", run, *(word for folder in truth for word in ("--truth", folder))]

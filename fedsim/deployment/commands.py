"""What each party of a deployment runs: one table, which the native run executes and the containers are checked against."""

from collections.abc import Mapping
from dataclasses import dataclass

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
"""For every process: nothing is looked up outside, nothing installed, and clients on one machine do not fight for its cores."""


@dataclass(frozen=True, kw_only=True)
class TlsIdentity:
    """What a SuperLink shows to prove who it is, and whom it trusts. Paths as the process sees them.

    authority: certificate of the authority that signed `certificate`, whose private key is `key`.
    secret:    file with what the server's own processes prove themselves with: tasks are handed to nobody else.
    """

    authority: str
    certificate: str
    key: str
    secret: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """How a party reaches the SuperLink. authority: the certificate that it trusts; None goes without TLS and without keys."""

    address: str
    authority: str | None

    def options(self) -> list[str]:
        return ["--insecure"] if self.authority is None else ["--root-certificates", self.authority]


def superlink(*, host: str, port: int, database: str, identity: TlsIdentity | None) -> list[str]:
    """The SuperLink: passes messages, keeps runs and nodes in `database`, computes nothing. Without `identity`, no TLS."""
    where = ["flower-superlink", "--host", host, "--port", str(port), "--isolation", "process", "--database", database]
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


def server(link: Link, *, secret: str | None) -> list[str]:
    """What runs the server's app, which aggregates and writes the recording."""
    words = ["flower-superexec", "--runtime-api-address", link.address, *link.options()]
    return words if secret is None else [*words, "--superexec-auth-secret-file", secret]


def client(link: Link, *, key: str | None, port: int, config: Mapping[str, str | int]) -> list[str]:
    """A SuperNode, which starts the client's app for each message. config: the client's own, see `fedsim.engine.flower_app`."""
    words = ["flower-supernode", "--superlink", link.address, *link.options()]
    words += [] if key is None else ["--auth-supernode-private-key", key]
    return [*words, "--host", "127.0.0.1", "--port", str(port), "--node-config", written(config)]


def config_of_client(number: int, count: int, home: str, *, experiment: str, seed: int | None = None) -> dict[str, str | int]:
    """The configuration of client `number` of `count`, which keeps all that is its own below `home`.

    experiment: file with what it agrees to take part in. seed: draws its secrets, in runs that are to repeat.
    """
    own: dict[str, str | int] = {"partition-id": number, "num-partitions": count, "experiment": experiment}
    own |= {"data": f"part:{home}/data", "private": f"{home}/private", "truth": f"{home}/truth"}
    return own if seed is None else own | {"client-seed": seed}


def written(config: Mapping[str, str | int]) -> str:
    """As Flower reads a configuration from a command line: values as TOML has them, between blanks.

    Raises ValueError for a text with a quotation mark, a backslash or a line break, which Flower could not read.
    """
    for key, value in config.items():
        if isinstance(value, str) and set(value) & set("'\"\\\n"):
            raise ValueError(f"{key} = {value!r}: Flower reads no quotation marks, backslashes and line breaks here")
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in config.items())


def enrol(link: Link, *, keys: str) -> list[str]:
    """Tell the SuperLink of the clients that may take part: the public keys in the folder `keys`."""
    return ["fedsim", "enrol", keys, "--superlink", link.address, *link.options()]


def runner(link: Link, *, experiment: str, out: str, public: str) -> list[str]:
    """Starts a federation on the SuperLink and waits for its end; the exit status is the federation's. Paths are the server's."""
    words = ["fedsim", "run", experiment, "--engine", "deployment", "--superlink", link.address, *link.options()]
    return [*words, "--out", out, "--public", public, "--resume"]


def attacker(*, root: str, host: str, port: int) -> list[str]:
    """The attacker's service over the recordings below `root`; on any address but loopback it asks for a token."""
    return ["attacker", "serve", root, "--host", host, "--port", str(port)]


def scorer(*, run: str, truth: list[str]) -> list[str]:
    """Compares what the attacker reconstructed with what the clients used."""
    return ["attacker", "score", run, *(word for folder in truth for word in ("--truth", folder))]

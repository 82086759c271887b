"""Commands that prepare and start a deployment, and the check of their options.

A deployment is a federation whose SuperLink (Flower's hub), server and clients are separate processes, on one machine or several.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedsim.commands.console import Json, format_count, out, parse_assignment, print_json, report_errors

if TYPE_CHECKING:
    from fedsim.deployment.commands import Link

Address = Annotated[str, typer.Option(metavar="ADDRESS", help="Address of the SuperLink, HOST:PORT.")]
Certificate = Annotated[Path | None, typer.Option(help="Certificate of the authority that signed the SuperLink's certificate.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Connect to the SuperLink without TLS.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the experiment.")]
HostNames = Annotated[
    list[str] | None, typer.Option("--host", help="Further host name or address of the SuperLink; may be repeated.")
]
Days = Annotated[int, typer.Option(min=1, help="Days that the certificates are valid, at most 825.")]


def prepare(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    folder: Annotated[Path, typer.Option("--out", help="New folder of the deployment.")],
    overrides: Overrides = None,
    hosts: HostNames = None,
    days: Days = 365,
) -> None:
    """Create the folder of a deployment: clients' data and its public description, certificates, keys, and result folders."""
    with report_errors():
        from fedsim.config.experiment import read
        from fedsim.deployment.folders import prepare as make

        resolved = read(experiment, [*map(parse_assignment, overrides or ())], trusted=True)
        make(resolved, folder, hosts=hosts or (), days=days)
        count = format_count(resolved.clients.count, "client")
        out.print(f"[bold]{escape(str(folder))}[/]  for {count}; its folders: docs/deployment.md")


def split(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder to write public/ and clients/NUMBER/data/ to.")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Split the data of an experiment into one folder per client, and one folder with what the server may know."""
    with report_errors():
        from fedsim.config.experiment import read
        from fedsim.data.export import split as cut

        handed = cut(read(experiment, [*map(parse_assignment, overrides or ())], trusted=True), folder)
        if as_json:
            print_json({"public": str(handed.public), "clients": list(map(str, handed.clients)), "sizes": list(handed.sizes)})
            return
        out.print(f"[bold]{escape(str(handed.public))}[/]  for all parties: experiment, specification, held-out examples")
        for path, size in zip(handed.clients, handed.sizes, strict=True):
            out.print(f"[bold]{escape(str(path))}[/]  {format_count(size, 'example')}, for this client only")


def part(
    data: Annotated[
        str,
        typer.Argument(
            help="Your data: npz:FILE, csv:FILE, imagefolder:FOLDER, or a data set by name; with arguments as in "
            "\"imagefolder(path='FOLDER', size=32)\"."
        ),
    ],
    public: Annotated[Path, typer.Option(help="The folder public/ of fedsim split, which describes the data.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder to write the client's part to.")],
) -> None:
    """Convert this machine's own data, held-out examples included, into one client's training examples. Nothing is sent."""
    with report_errors():
        from fedsim.data.export import write_own_part

        out.print(f"[bold]{escape(str(folder))}[/]  {format_count(write_own_part(data, public, folder), 'example')}")


def keys(
    folder: Annotated[Path, typer.Option("--out", help="Folder of the deployment; existing keys are kept.")],
    clients: Annotated[int, typer.Option(min=0, help="Number of clients to create key pairs for; may be 0.")],
    hosts: HostNames = None,
    days: Days = 365,
) -> None:
    """Create certificates for TLS, and a key pair for each client. Existing ones are kept."""
    with report_errors():
        from fedsim.deployment import certificates

        made = certificates.make_server(folder, hosts or (), days=days)
        for number in range(clients):
            certificates.make_client(folder / "clients" / str(number) / "key", folder / "keys" / f"{number}.pub")
        for path, whose in (
            (made.authority, "everybody's"),
            (made.certificate.parent, "the SuperLink's"),
            (made.secret.parent, "the SuperLink's and the server's"),
            (made.authority_key.parent, "for no party: it signs further certificates"),
        ):
            out.print(f"[bold]{escape(str(path))}[/]  {whose}")


def enrol(
    folder: Annotated[Path, typer.Argument(help="Folder of public keys, *.pub.")],
    superlink: Address,
    root_certificates: Certificate = None,
    insecure: Insecure = False,
) -> None:
    """Register the clients' public keys at a SuperLink, which refuses clients whose key was never registered.

    Keys that were registered earlier remain valid. A SuperLink that was started with --insecure accepts all clients.
    """
    with report_errors():
        from tempfile import TemporaryDirectory

        from fedsim.deployment.flower_commands import enrol as tell

        link = make_link(superlink, root_certificates, insecure=insecure)
        assert link is not None
        with TemporaryDirectory(prefix="fedleak-") as home:
            number = tell(link, folder, home=Path(home))
        out.print(f"{format_count(number, 'client')} may take part at {escape(superlink)}")


def start(
    party: Annotated[str, typer.Argument(help="superlink, server, or client-0, client-1, ...")],
    folder: Annotated[Path, typer.Argument(help="Folder of the deployment, or the part of it that was copied here.")],
    superlink: Address = "127.0.0.1:8000",
    bind: Annotated[
        str, typer.Option(metavar="HOST", help="Address that the SuperLink listens on; 0.0.0.0 for other machines.")
    ] = "127.0.0.1",
    control_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NETWORK",
            help="For superlink only: a network, such as 10.0.0.0/24, whose machines may start runs and enrol keys; by default "
            "only this machine. Flower asks them for no password, so the network must not contain clients. May be repeated.",
        ),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Start one party of a deployment: the SuperLink, the server or a client. It runs until Ctrl-C."""
    with report_errors():
        from fedsim.deployment.folders import Layout
        from fedsim.deployment.parties import make_command, replace_process

        layout = Layout(folder.absolute())
        _check_address(superlink)
        command = make_command(party, layout, superlink, bind=bind, secure=not insecure, control_from=control_from or ())
        replace_process(command, layout, party)


def _check_address(superlink: str) -> None:
    """Raise ValueError if `superlink` is not of the form HOST:PORT."""
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--superlink {superlink}: write it as HOST:PORT, such as 127.0.0.1:8000")


def make_link(superlink: str | None, root_certificates: Path | None, *, insecure: bool) -> "Link | None":
    """Return the connection to a SuperLink from the command's options, or None if all of them are left out.

    Raises ValueError for an invalid address, if not exactly one of certificate and `insecure` is given with an address, if either
    is given without an address, or if the certificate does not exist.
    """
    from fedsim.deployment.commands import Link

    if superlink is None:
        if root_certificates or insecure:
            raise ValueError("--root-certificates and --insecure require --superlink ADDRESS")
        return None
    _check_address(superlink)
    if insecure == (root_certificates is not None):
        raise ValueError("--superlink needs either --root-certificates FILE or --insecure, and not both")
    if root_certificates is not None and not root_certificates.is_file():
        raise ValueError(f"--root-certificates {root_certificates} is no file; give the SuperLink's certificate (PEM)")
    return Link(address=superlink, authority=str(root_certificates) if root_certificates else None)

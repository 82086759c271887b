"""The commands that hand out what the parties of a deployment need: data, certificates, keys."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedsim.commands.console import Json, out, parse_assignment, print_json, report_errors

if TYPE_CHECKING:
    from fedsim.deployment.commands import Link

Address = Annotated[str, typer.Option(metavar="ADDRESS", help="Of the SuperLink, HOST:PORT.")]
Certificate = Annotated[Path | None, typer.Option(help="Certificate that the SuperLink's is signed by.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Reach the SuperLink without TLS.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the experiment.")]
HostNames = Annotated[
    list[str] | None,
    typer.Option("--host", help="Name or address of the SuperLink, beside those of its own machine; repeatable."),
]
Days = Annotated[int, typer.Option(min=1, help="For which the certificates hold, 825 at most.")]


def prepare(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder of the deployment, new.")],
    overrides: Overrides = None,
    hosts: HostNames = None,
    days: Days = 365,
) -> None:
    """Make the folder of a deployment: split, keys, and an empty folder for all that is written."""
    with report_errors():
        from fedsim.config.experiment import read
        from fedsim.deployment.folders import prepare as make

        resolved = read(experiment, [*map(parse_assignment, overrides or ())], own=True)
        make(resolved, folder, hosts=hosts or (), days=days)
        out.print(f"[bold]{escape(str(folder))}[/]  for {resolved.clients.count} clients; its folders: docs/deployment.md")


def split(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder that gets public/ and clients/NUMBER/data/.")],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Cut the data of an experiment into one folder for each client, and one with what the server may know."""
    with report_errors():
        from fedsim.config.experiment import read
        from fedsim.data.export import split as cut

        handed = cut(read(experiment, [*map(parse_assignment, overrides or ())], own=True), folder)
        if as_json:
            print_json({"public": str(handed.public), "clients": list(map(str, handed.clients)), "sizes": list(handed.sizes)})
            return
        out.print(f"[bold]{escape(str(handed.public))}[/]  for all parties: experiment, specification, held-out examples")
        for path, size in zip(handed.clients, handed.sizes, strict=True):
            out.print(f"[bold]{escape(str(path))}[/]  {size} examples, for this client only")


def part(
    data: Annotated[str, typer.Argument(help="Your data: npz:FILE, csv:FILE, imagefolder:FOLDER, or a data set by name.")],
    public: Annotated[Path, typer.Option(help="What the server told of the data: the folder public/ of fedsim split.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder that gets the client's part.")],
) -> None:
    """Make a client's part of data that only this machine has; nothing of it is sent anywhere."""
    with report_errors():
        from fedsim.data.export import own_part

        out.print(f"[bold]{escape(str(folder))}[/]  {own_part(data, public, folder)} examples")


def keys(
    folder: Annotated[Path, typer.Option("--out", help="Folder of the deployment; what is there is kept.")],
    clients: Annotated[int, typer.Option(min=0, help="Number of clients: 0 makes no keys.")],
    hosts: HostNames = None,
    days: Days = 365,
) -> None:
    """Make certificates for TLS, and a key for each client."""
    with report_errors():
        from fedsim.deployment import certificates

        made = certificates.make_server(folder, hosts or (), days=days)
        for number in range(clients):
            certificates.make_client(folder / "clients" / str(number) / "key", folder / "keys" / f"{number}.pub")
        for path, whose in (
            (made.authority, "everybody's"),
            (made.certificate.parent, "the SuperLink's"),
            (made.secret.parent, "the SuperLink's and the server's"),
            (made.authority_key.parent, "nobody's: signs further certificates"),
        ):
            out.print(f"[bold]{escape(str(path))}[/]  {whose}")


def enrol(
    folder: Annotated[Path, typer.Argument(help="Folder of public keys, *.pub.")],
    superlink: Address,
    root_certificates: Certificate = None,
    insecure: Insecure = False,
) -> None:
    """Tell a SuperLink which clients may take part."""
    with report_errors():
        from tempfile import TemporaryDirectory

        from fedsim.deployment.flower_commands import enrol as tell

        link = link_of(superlink, root_certificates, insecure=insecure)
        assert link is not None
        with TemporaryDirectory(prefix="fedleak-") as home:
            number = tell(link, folder, home=Path(home))
        out.print(f"{number} clients may take part at {escape(superlink)}")


def start(
    party: Annotated[str, typer.Argument(help="superlink, server, or client-0, client-1, ...")],
    folder: Annotated[Path, typer.Argument(help="Folder of the deployment, or what was carried here of it.")],
    superlink: Address = "127.0.0.1:8000",
    bind: Annotated[
        str, typer.Option(metavar="HOST", help="Address that the SuperLink listens on; 0.0.0.0 for other machines.")
    ] = "127.0.0.1",
    control_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NETWORK",
            help="Of superlink: network that may start runs and enrol keys, beside this machine: 10.0.0.0/24; repeatable. "
            "Flower asks for no password there: name none that a client is in.",
        ),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Start one party of a deployment; it goes on until Ctrl-C."""
    with report_errors():
        from fedsim.deployment.folders import Layout
        from fedsim.deployment.parties import become, command_of

        layout = Layout(folder.absolute())
        check_address(superlink)
        command = command_of(party, layout, superlink, bind=bind, secure=not insecure, control_from=control_from or ())
        become(command, layout, party)


def check_address(superlink: str) -> None:
    """Raises ValueError where `superlink` is no HOST:PORT."""
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--superlink {superlink}: write it as HOST:PORT, such as 127.0.0.1:8000")


def link_of(superlink: str | None, root_certificates: Path | None, *, insecure: bool) -> "Link | None":
    """How to reach a SuperLink; None where none is named. Raises ValueError for no address, or no way to trust it."""
    from fedsim.deployment.commands import Link

    if superlink is None:
        if root_certificates or insecure:
            raise ValueError("--root-certificates and --insecure go with --superlink ADDRESS")
        return None
    check_address(superlink)
    if insecure == (root_certificates is not None):
        raise ValueError("reach the SuperLink with --root-certificates FILE, or with --insecure, and not both")
    if root_certificates is not None and not root_certificates.is_file():
        raise ValueError(f"--root-certificates {root_certificates}: there is no such file")
    return Link(address=superlink, authority=str(root_certificates) if root_certificates else None)

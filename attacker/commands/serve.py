"""attacker serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from attacker.commands.options import device_of
from fedsim.commands.console import err, errors_told, out

if TYPE_CHECKING:
    from fastapi import FastAPI

    from attacker.service.settings import ServiceSettings

GOES_ON = "jobs that were under way go on at the next start"


def serve(
    root: Annotated[Path, typer.Argument(help="Folder of runs, or of folders of runs.")],
    host: Annotated[str, typer.Option(help="Address to listen on; any but this machine's own needs the token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8600,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that attack; by default one for each GPU, or for each core. 0: none.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    stand_by: Annotated[
        bool, typer.Option(help="Keep one more worker started, so that a first job begins at once; it takes 0.8 GB.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is one.")] = "auto",
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Attack on this Ray cluster; local: one of this machine's own.")
    ] = None,
    rules: Annotated[Path | None, typer.Option(help="File that says which attacks run on new rounds by themselves.")] = None,
    truth: Annotated[
        list[str] | None,
        typer.Option(help="Score what is found, with this folder of truth; own: each run's own. May be given more than once."),
    ] = None,
    token: Annotated[
        bool,
        typer.Option(
            "--token/--no-token",
            help="Whether requests need the token, which the link that is printed holds. Without it every user and every program "
            "of this machine sees all results (with --truth own: the private originals) and can start jobs.",
        ),
    ] = True,
    token_file: Annotated[Path | None, typer.Option(help="Where the token lies; by default below the service's folder.")] = None,
    certfile: Annotated[Path | None, typer.Option(help="Certificate for TLS, with its chain.")] = None,
    keyfile: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    state: Annotated[Path | None, typer.Option(help="The service's own folder; by default .attacker below the root.")] = None,
    max_queued: Annotated[int, typer.Option(min=1, help="Jobs that may wait.")] = 1000,
    job_seconds: Annotated[
        float | None, typer.Option(help="A job that takes longer is stopped, and its best so far kept; by default after a day.")
    ] = None,
    job_megabytes: Annotated[
        int | None,
        typer.Option(
            help="A job that takes more memory is stopped; by default more than an equal share of 80 % of the machine's. "
            "Its worker alone takes 800."
        ),
    ] = None,
    job_limits: Annotated[
        bool, typer.Option("--job-limits/--no-job-limits", help="Whether jobs have the limits above where none is given.")
    ] = True,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="The network of somebody else's federation; imports that code."),
    ] = None,
) -> None:
    """Serve the runs below a folder as a web page and an API: watch them, attack them, show what leaks."""
    with errors_told(kept=GOES_ON):
        from attacker.service.http.app import create_app
        from attacker.service.server import address_of, listening, serve_until_told
        from attacker.service.settings import ServiceSettings

        settings = ServiceSettings(
            root=root,
            host=host,
            port=port,
            token=token,
            token_file=token_file,
            certfile=certfile,
            keyfile=keyfile,
            truth="own" if truth == ["own"] else tuple(map(Path, truth or ())),
            rules=rules,
            workers=workers,
            threads=threads,
            stand_by=stand_by,
            device=device_of(device),
            ray=ray,
            model=model,
            state=state,
            max_queued=max_queued,
            job_seconds=job_seconds,
            job_megabytes=job_megabytes,
            job_limits=job_limits,
        )
        listener = listening(settings)
        app = create_app(settings)
        serve_until_told(app, settings, listener, lambda: _tell(app, settings, address_of(listener, settings)))


def _tell(app: "FastAPI", settings: "ServiceSettings", address: str) -> None:
    """Where the service is, what it watches, and who can see that."""
    runs = len(app.state.parts.catalogue.runs())
    keys = app.state.parts.keys
    out.print(escape(address if keys is None else f"{address}#token={keys.token}"), soft_wrap=True)
    watched = "1 run is" if runs == 1 else f"{runs} runs are"
    err.print(f"watching {escape(str(settings.folder))}: {watched} there now; Ctrl-C ends it")
    if keys is None:
        shown = "all results" if not settings.truth else "all results, private originals among them,"
        err.print(f"[bold yellow]without a token[/] every user and program of this machine sees {shown} and can start jobs")
    else:
        err.print(f"the link holds the token: keep it to yourself. It is also in {escape(str(settings.token_path))}")
    if not settings.is_loopback and not settings.certfile:
        err.print(
            "[bold yellow]without TLS[/] whoever is on the way reads the token and all that is shown: "
            "give --certfile and --keyfile, or put it behind something that has them"
        )

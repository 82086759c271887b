"""Command `attacker serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from attacker.commands.options import Device, OwnModel, resolve_device
from fedsim.commands.console import err, out, report_errors

if TYPE_CHECKING:
    from fastapi import FastAPI

    from attacker.service.settings import ServiceSettings

KEPT_ON_INTERRUPT = "unfinished jobs continue at the next start"


def serve(
    root: Annotated[Path, typer.Argument(help="Folder of runs, or of folders of runs.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address other than the loopback address requires the token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8600,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Worker processes that run attacks; by default one per GPU, or per core without a GPU. 0: none."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads per worker.")] = 1,
    stand_by: Annotated[
        bool, typer.Option(help="Keep one spare worker started, so that the first job begins at once; it takes 0.8 GB.")
    ] = True,
    device: Device = "auto",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run attacks on the Ray cluster at this address; local starts one on this machine."),
    ] = None,
    rules: Annotated[Path | None, typer.Option(help="File of rules: attacks that start automatically on new rounds.")] = None,
    truth: Annotated[
        list[str] | None,
        typer.Option(
            help="Score with this folder of truth, in which a client lists the examples it used; own stands for the folder of "
            "truth of each run. May be repeated."
        ),
    ] = None,
    token: Annotated[
        bool,
        typer.Option(
            "--token/--no-token",
            help="Whether requests need the token, which is part of the printed link. Without a token every user and every "
            "program on this machine can see all results (with --truth own: the private originals) and start jobs.",
        ),
    ] = True,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token; by default in the service's folder.")
    ] = None,
    certfile: Annotated[Path | None, typer.Option(help="TLS certificate with its chain.")] = None,
    keyfile: Annotated[Path | None, typer.Option(help="Private key of the certificate.")] = None,
    state: Annotated[Path | None, typer.Option(help="The service's own folder; by default .attacker below the root.")] = None,
    adopt_state: Annotated[
        bool,
        typer.Option(
            "--adopt-state",
            help="Take a folder of the service that an earlier version wrote or that you moved or copied here. Only for a folder "
            "that is your own: whoever wrote it knows its token and its jobs.",
        ),
    ] = False,
    max_queued: Annotated[int, typer.Option(min=1, help="Largest number of queued jobs.")] = 1000,
    job_seconds: Annotated[
        float | None,
        typer.Option(
            help="Time limit of a job in seconds, by default a day. The job is stopped then, and its best result so far is kept."
        ),
    ] = None,
    job_megabytes: Annotated[
        int | None,
        typer.Option(
            help="Memory limit of a job in megabytes; by default 80 % of the machine's memory divided by the number of workers. "
            "An idle worker takes 800 MB."
        ),
    ] = None,
    job_limits: Annotated[
        bool,
        typer.Option(
            "--job-limits/--no-job-limits",
            help="Whether the defaults of --job-seconds and --job-megabytes apply; values given for them always do.",
        ),
    ] = True,
    model: OwnModel = None,
) -> None:
    """Serve a web page and an API for the runs in a folder: watch federations, start attacks, see results."""
    with report_errors(kept=KEPT_ON_INTERRUPT):
        from attacker.service.http.app import create_app
        from attacker.service.server import format_address, open_listener, serve_until_stopped
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
            device=resolve_device(device),
            ray=ray,
            model=model,
            state=state,
            adopt_state=adopt_state,
            max_queued=max_queued,
            job_seconds=job_seconds,
            job_megabytes=job_megabytes,
            job_limits=job_limits,
        )
        listener = open_listener(settings)
        app = create_app(settings)
        serve_until_stopped(app, settings, listener, lambda: _print_address(app, settings, format_address(listener, settings)))


def _print_address(app: "FastAPI", settings: "ServiceSettings", address: str) -> None:
    """Print the link to the service with its token, what it watches, and warnings if other users can read the results."""
    runs = len(app.state.components.catalogue.list_runs())
    keys = app.state.components.keys
    out.print(escape(address if keys is None else f"{address}#token={keys.token}"), soft_wrap=True)
    watched = "1 run is" if runs == 1 else f"{runs} runs are"
    err.print(f"watching {escape(str(settings.folder))}: {watched} there now; Ctrl-C stops it")
    if keys is None:
        shown = "all results" if not settings.truth else "all results, private originals among them,"
        err.print(f"[bold yellow]without a token[/] every user and program on this machine can see {shown} and start jobs")
    else:
        err.print(f"the link holds the token: keep it to yourself. It is also in {escape(str(settings.token_path))}")
    if not settings.is_loopback and not settings.certfile:
        err.print(
            "[bold yellow]without TLS[/] the token and all results can be read on the network: "
            "give --certfile and --keyfile, or run the service behind a reverse proxy with TLS"
        )

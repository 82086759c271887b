"""Command `fedsim run`, which runs the federation of an experiment and records it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedsim.commands.console import (
    ALLOW_FAILURES,
    EXIT_FAILURES,
    Json,
    err,
    format_count,
    out,
    parse_assignment,
    print_json,
    report_errors,
    show_progress_bar,
)
from fedsim.commands.deploy import make_link
from fedsim.commands.show import describe_run

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment
    from fedsim.deployment.commands import Link
    from fedsim.engine.run import FederationRun


def run(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file; examples are in deploy/experiments/.")],
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default in runs/.")] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="ray: clients in parallel; local: clients one after the other in this process; deployment: one process per "
            "party."
        ),
    ] = "ray",
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="HOST:PORT of the SuperLink of a running deployment; --out and --public are then folders on its server.",
        ),
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="Certificate of the authority that signed the SuperLink's certificate.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Connect to the SuperLink without TLS.")] = False,
    public: Annotated[
        Path | None, typer.Option(help="Folder with the public description of the clients' data, from fedsim split.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the experiment.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an unfinished run after its last complete round.")] = False,
    record_rounds: Annotated[str | None, typer.Option(metavar="R", help="Record only these rounds: 1-20 or 1-3,7.")] = None,
    record_clients: Annotated[
        str | None,
        typer.Option(
            metavar="C",
            help="Record only this number of clients, the first that send an update, or the named clients (see fedsim show): 5 "
            "or 3f2a,77b0.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA if it is available.")] = "auto",
    client_cpus: Annotated[float, typer.Option(help="CPUs reserved per client on Ray.")] = 1,
    client_gpus: Annotated[
        float | None, typer.Option(help="GPUs reserved per client on Ray; by default all clients share them.")
    ] = None,
    client_seed: Annotated[
        int | None, typer.Option(help="Draw the clients' secrets from this seed, so that the run can be repeated exactly.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="PyTorch threads per client.")] = 1,
    print_config: Annotated[bool, typer.Option(help="Print the resolved experiment and exit.")] = False,
    verbose: Annotated[bool, typer.Option(help="Show messages of Flower and Ray, and tracebacks of errors.")] = False,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help=ALLOW_FAILURES)] = False,
    as_json: Json = False,
) -> None:
    """Run a federation to its end and record it.

    Exit status: 0 if every sampled client sent an update in time; 1 if the federation failed, or, unless --allow-failures
    is given, if updates are missing or the model diverged; 2 for wrong settings or folders; 130 after Ctrl-C.
    """
    with report_errors(verbose=verbose, kept="what was recorded so far can be attacked; continue with --resume"):
        if engine not in ("ray", "local", "deployment"):
            from defenses.registry import suggest_name

            hint = suggest_name(engine, ("ray", "local", "deployment"))
            raise ValueError(f"--engine {engine!r} is unknown.{hint} Known: ray, local, deployment")
        if engine != "deployment" and (superlink or root_certificates or insecure or public):
            raise ValueError("--superlink, --root-certificates, --insecure and --public require --engine deployment")
        link = make_link(superlink, root_certificates, insecure=insecure)
        from fedsim.config.experiment import read

        recorded = {"record.rounds": record_rounds, "record.clients": record_clients}
        chosen = [
            *map(parse_assignment, overrides or ()),
            *((key, value) for key, value in recorded.items() if value is not None),
        ]
        resolved = read(experiment, chosen, trusted=True)
        if print_config:
            print(resolved.to_toml(), end="")
            return
        folder = out_folder or Path("runs") / experiment.stem
        if resume and not folder.exists():
            err.print(f"{escape(str(folder))} holds no run to resume; starting a new one")
        reported = federate(
            resolved, folder, engine=engine, device=device, client_seed=client_seed, threads=threads,
            client_cpus=client_cpus, client_gpus=client_gpus, resume=resume, verbose=verbose, superlink=link, public=public,
        )  # fmt: skip
        if not (folder / "recording").exists():
            err.print(f"done; {escape(str(folder))} is on the server")
            _exit_if_failed(reported, allow_failures=allow_failures)
            return
        result = describe_run(folder)
        if as_json:
            print_json(result)
        else:
            out.print(
                f"[bold]{escape(str(folder))}[/]  {format_count(result['complete'], 'observation')} of "
                f"{format_count(len(result['clients']), 'client')} in {format_count(result['rounds'], 'round')}, "
                f"{result['megabytes']:.1f} MB"
            )
        from fedsim.server.outcome import find_failures

        _exit_if_failed(find_failures(folder), allow_failures=allow_failures)


def _exit_if_failed(failures: str, *, allow_failures: bool) -> None:
    """Print what failed in a finished run and exit with `EXIT_FAILURES`; do nothing if `failures` is "" or allowed."""
    if failures and not allow_failures:
        err.print(f"[yellow]{escape(failures)}[/]; with --allow-failures the exit status would be 0")
        raise typer.Exit(EXIT_FAILURES)


def federate(
    experiment: "Experiment",
    folder: Path,
    *,
    engine: str,
    device: str = "auto",
    client_seed: int | None = None,
    threads: int = 1,
    client_cpus: float = 1,
    client_gpus: float | None = None,
    resume: bool = False,
    verbose: bool = False,
    superlink: "Link | None" = None,
    public: Path | None = None,
) -> str:
    """Run a federation with a progress bar, unless the run in `folder` is already done.

    engine, client_cpus, client_gpus, superlink, verbose: see `fedsim.engine.engines.run`.
    device, client_seed, threads, resume: see `FederationRun`. public: folder of public facts about the data, see
    `PartyLocations`. Returns the failure that the server of a deployment reported, such as missing updates; "" if there was none.
    With the engines "ray" and "local" the result is always "", since the caller can read the recording itself.
    Raises ValueError or FileNotFoundError if the experiment cannot be run or `folder` holds another run, DiskFull if there is not
    enough disk space at the start, EngineError if the federation fails, for example because no client answered or the disk
    became full, and EmptyRunError if the run in `folder` is already done and no client answered in it or nothing was recorded.
    """
    from fedsim.engine import engines
    from fedsim.engine.locations import PartyLocations
    from fedsim.engine.run import FederationRun
    from fedsim.server import outcome as ending

    federation = FederationRun(
        experiment=experiment, out=folder.absolute(), device=device, client_seed=client_seed, threads=threads, resume=resume,
        locations=PartyLocations(public=public.absolute() if public else None),
    )  # fmt: skip
    printed, reported = list[str](), list[str]()

    def print_warning(message: str) -> None:
        if message.startswith(ending.FAILURE_PREFIX):
            reported.append(message.removeprefix(ending.FAILURE_PREFIX))
            return
        printed.append(message)
        err.print(f"[yellow]{escape(message)}[/]")

    def check_end() -> None:
        if (folder / "recording").exists():
            ending.check_end(folder, lambda words: None if words in printed else print_warning(words))

    if federation.is_done():
        check_end()
        err.print(f"{escape(str(folder))} is done already")
        return ""
    engines.set_verbosity(verbose)
    federation.check()
    _announce(federation, folder, print_warning)
    with show_progress_bar() as bar:
        task = bar.add_task(f"federation ({engine})", total=experiment.rounds, words="starting")

        def show_round(row: dict[str, Any]) -> None:
            bar.update(task, completed=row["round"], words=f"loss {row['loss']:.3f}, accuracy {row['accuracy']:.3f}")

        engines.run(
            federation,
            engine=engine,  # type: ignore[arg-type]
            client_cpus=client_cpus,
            client_gpus=client_gpus,
            superlink=superlink,
            on_round=show_round,
            on_words=print_warning,
            verbose=verbose,
        )
    check_end()
    return reported[-1] if reported else ""


def _announce(federation: "FederationRun", folder: Path, print_warning: Callable[[str], None]) -> None:
    """Print the size of a federation and warnings about its settings, and check that there is enough disk space for it."""
    from fedsim.recording.disk_space import check_room

    experiment, megabytes = federation.experiment, federation.count_megabytes()
    size = f"{format_count(experiment.clients.count, 'client')}, {format_count(experiment.rounds, 'round')}"
    err.print(f"{size}; writes up to {megabytes:.1f} MB to {escape(str(folder))}")
    if agreement := experiment.settle_agreement():
        for message in agreement.list_warnings():
            print_warning(message)
    check_room(
        folder,
        int(1e6 * megabytes),
        "the rest of the run writes" if federation.resume else "the run writes",
        "resume later" if federation.resume else "record less with --record-rounds, --record-clients",
    )

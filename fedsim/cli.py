"""The command line of the federation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedsim.console import Json, assignment, command_line, err, errors_told, out, print_json, progress_bar, run_to_the_end

if TYPE_CHECKING:
    from defenses.registry import Registry
    from fedsim.experiment import Experiment

app = command_line("Run a federation and write down what its honest-but-curious server sees.")


@app.command(
    epilog="Example:  fedsim run deploy/experiments/photos.toml --out runs/first --set 'defense=clip(1) | gaussian(0.1)'"
)
def run(
    experiment: Annotated[Path, typer.Argument(help="The experiment, a TOML file; examples in deploy/experiments/.")],
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default in runs/.")] = None,
    engine: Annotated[str, typer.Option(help="ray: clients in parallel; local: one after the other in this process.")] = "ray",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the experiment.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is one.")] = "auto",
    client_cpus: Annotated[float, typer.Option(help="CPUs that one client occupies on Ray.")] = 1,
    client_gpus: Annotated[
        float | None, typer.Option(help="GPUs that one client occupies; by default all clients share.")
    ] = None,
    client_seed: Annotated[
        int | None, typer.Option(help="Draw the clients' secrets from this number, so that the run repeats exactly.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one client.")] = 1,
    print_config: Annotated[bool, typer.Option(help="Print the resolved experiment and stop.")] = False,
    verbose: Annotated[bool, typer.Option(help="Show Flower's and Ray's own messages, and where errors come from.")] = False,
    as_json: Json = False,
) -> None:
    """Run a federation to its end and record it."""
    with errors_told(verbose=verbose, kept="what was recorded so far can be attacked; to run again, delete it first"):
        if engine not in ("ray", "local"):
            raise ValueError(f"--engine {engine!r} is unknown. Known: ray, local")
        from fedsim.experiment import read

        resolved = read(experiment, [assignment(text) for text in overrides or ()])
        if print_config:
            print(resolved.to_toml(), end="")
            return
        folder = out_folder or Path("runs") / experiment.stem
        federate(
            resolved, folder, engine=engine, device=device, client_seed=client_seed, threads=threads,
            client_cpus=client_cpus, client_gpus=client_gpus, verbose=verbose,
        )  # fmt: skip
        result = shown(folder)
        if as_json:
            print_json(result)
        else:
            out.print(
                f"[bold]{escape(str(folder))}[/]  {result['complete']} observations of {len(result['clients'])} clients "
                f"in {result['rounds']} rounds, {result['megabytes']:.1f} MB"
            )


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
    verbose: bool = False,
) -> None:
    """Run a federation under a progress bar, unless it has run in `folder` already."""
    from fedsim import engine as engines
    from fedsim.app import Run

    federation = Run(experiment=experiment, out=folder.absolute(), device=device, client_seed=client_seed, threads=threads)
    if federation.is_done():
        err.print(f"{escape(str(folder))} is done already")
        return
    engines.set_verbosity(verbose)
    federation.check()
    size = f"{experiment.clients.count} clients, {experiment.rounds} rounds"
    err.print(f"{size}; writes up to {federation.megabytes():.1f} MB to {escape(str(folder))}")
    with progress_bar() as bar:
        task = bar.add_task(f"federation ({engine})", total=experiment.rounds, words="starting")

        def on_round(row: dict[str, Any]) -> None:
            bar.update(task, completed=row["round"], words=f"loss {row['loss']:.3f}, accuracy {row['accuracy']:.3f}")

        engines.run(
            federation,
            engine=engine,  # type: ignore[arg-type]
            client_cpus=client_cpus,
            client_gpus=client_gpus,
            on_round=on_round,
            verbose=verbose,
        )
    _tell_missing(folder)


def _tell_missing(folder: Path) -> None:
    """Say which clients did not answer. Raises EngineError where none ever did."""
    from fedsim.engine import EngineError
    from fedsim.wire import Recording

    rows = Recording(folder / "recording").rows()
    missing = [row for row in rows if row.status != "complete"]
    if missing:
        err.print(f"[yellow]{len(missing)} of {len(rows)} replies are missing[/], the first: {escape(missing[0].reason)}")
    if rows and len(missing) == len(rows):
        raise EngineError(f"no client ever answered; the first said: {missing[0].reason}")


@app.command(epilog="Example:  fedsim show runs/first")
def show(folder: Annotated[Path, typer.Argument(help="Folder of a run.")], as_json: Json = False) -> None:
    """Show what was recorded."""
    with errors_told():
        result = shown(folder)
        if as_json:
            print_json(result)
            return
        for key in ("model", "data", "training", "defense", "created"):
            out.print(f"[dim]{key:>9}[/]  {escape(str(result[key]) or 'none')}")
        table = Table("round", "complete", "failed", "late", "bytes up", "loss", "accuracy")
        for row in result["per_round"]:
            scores = [f"{row[key]:.3f}" if row.get(key) is not None else "" for key in ("loss", "accuracy")]
            table.add_row(*(str(row[key]) for key in ("round", "complete", "failed", "late", "bytes")), *scores)
        out.print(table)


def shown(folder: Path) -> dict[str, Any]:
    """What a run holds, as data."""
    from dataclasses import asdict

    from fedsim.wire import Recording
    from fedsim.wire.files import read_json_lines

    recording = Recording(folder / "recording")
    rows, m = recording.rows(), recording.manifest
    metrics = {row["round"]: row for row in read_json_lines(folder / "metrics.jsonl")}
    rounds = sorted({row.round for row in rows})
    per_round = []
    for number in rounds:
        own = [row for row in rows if row.round == number]
        counts = {status: sum(row.status == status for row in own) for status in ("complete", "failed", "late")}
        utility = {key: metrics.get(number, {}).get(key) for key in ("loss", "accuracy")}
        per_round.append({"round": number, **counts, "bytes": sum(row.bytes for row in own), **utility})
    return {
        "run": str(folder),
        "model": str(m.model),
        "data": {"shape": list(m.data.shape), "num_classes": m.data.num_classes},
        "training": {key: value for key, value in asdict(m.training).items() if value is not None},
        "defense": str(m.defense),
        "created": m.created,
        "rounds": len(rounds),
        "complete": sum(row.status == "complete" for row in rows),
        "clients": sorted({row.client for row in rows}),
        "megabytes": sum(path.stat().st_size for path in recording.folder.rglob("*") if path.is_file()) / 1e6,
        "per_round": per_round,
    }


@app.command("list", epilog="Example:  fedsim list defenses")
def list_(
    kind: Annotated[str, typer.Argument(help="models, datasets, defenses, partitions or strategies.")], as_json: Json = False
) -> None:
    """List what an experiment can name."""
    with errors_told():
        found = _listed(kind)
        if as_json:
            print_json(found)
            return
        for name, words in found.items():
            out.print(f"[bold]{name:<14}[/] {escape(words)}")


def _listed(kind: str) -> dict[str, str]:
    from defenses.registry import summary
    from defenses.spec import DEFENSES
    from fedsim.datasets import DATASETS
    from fedsim.models import MODELS
    from fedsim.partition import PARTITIONS
    from fedsim.server import strategies

    registries: dict[str, Registry[Any]] = {
        "models": MODELS,
        "datasets": DATASETS,
        "partitions": PARTITIONS,
        "defenses": DEFENSES,
    }
    if kind == "strategies":
        return dict.fromkeys(strategies.NAMES, "Flower's own")
    if kind not in registries:
        raise ValueError(f"cannot list {kind!r}. Known: {', '.join([*registries, 'strategies'])}")
    registry = registries[kind]
    return {name: summary(registry[name].defense if kind == "defenses" else registry[name]) for name in registry}


def main() -> None:
    """Entry point."""
    run_to_the_end(app)

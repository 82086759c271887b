"""Command `attacker sweep`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from attacker.commands.options import parse_duration
from fedsim.commands.console import EXIT_FAILURES, EXIT_UNFINISHED, Json, err, out, print_json, report_errors, show_progress_bar

if TYPE_CHECKING:
    from attacker.sweep import SweepGrid, SweepProgress, SweepResults


def sweep(
    grid: Annotated[Path, typer.Argument(help="A grid (TOML): defenses, training settings, attacks and seeds.")],
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Folder of all federations and tables; runs/GRID by default.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wall-clock time after which no further training or attack begins, such as 30m or 8h."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with one federation at a time.")] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster that runs the attacks; local starts one here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train, record, attack and score every federation of a grid, and compare the defenses.

    Tables (CSV, LaTeX, HTML with the plot of leakage against utility) are written into the folder. Repeating the command
    continues where it stopped, also after a crash.

    Exit status: 0 if every federation succeeded; 3 if the time budget was used up before the grid was finished; otherwise 1 if a
                 federation failed; 2 for wrong arguments; 130 after Ctrl-C.
    """
    with report_errors(kept="finished federations are kept; repeat the command to continue"):
        from attacker.sweep import compare_settings, read_grid
        from attacker.sweep.tables import describe_comparison, describe_training, list_cells, write_tables

        if ray is not None and workers > 1:
            raise ValueError("--workers starts processes on this machine and --ray uses a cluster: give only one of them")
        seconds = float("inf") if budget is None else parse_duration("--budget", budget)
        resolved = read_grid(grid)
        target = folder or Path("runs") / grid.stem
        results = _run_shown(resolved, target, workers=workers, ray=ray, seconds=seconds)
        settings, comparisons = compare_settings(resolved, results)
        files = write_tables(resolved, settings, comparisons, target)
        if as_json:
            print_json(
                {
                    "settings": [list_cells(setting) for setting in settings],
                    "comparisons": [describe_comparison(comparison) for comparison in comparisons],
                }
            )
        else:
            for setting in settings:
                out.print(escape(", ".join(filter(None, list_cells(setting)))), soft_wrap=True)
            for comparison in comparisons:
                out.print(
                    f"{describe_training(comparison.winner.training)}: {escape(describe_comparison(comparison))}", soft_wrap=True
                )
            for file in files:
                out.print(str(file), soft_wrap=True)
        failed = [setting for setting in settings if setting.failed]
        for setting in failed:
            err.print(f"[yellow]{escape(setting.name)} failed[/]: {escape(setting.failed)}")
        unfinished = sum(result is None for _, result in results)
        if unfinished:
            err.print(f"{unfinished} of {len(resolved.federations)} federations are not finished; repeat the command")
            raise typer.Exit(EXIT_UNFINISHED)
        if failed:
            raise typer.Exit(EXIT_FAILURES)


def _run_shown(grid: "SweepGrid", folder: Path, *, workers: int, ray: str | None, seconds: float) -> "SweepResults":
    """Run a sweep with a progress bar, and return its results. seconds: time budget, after which no training or attack begins."""
    from attacker.sweep import run_sweep

    attacks = ", ".join(attack.name for attack in grid.attacks)
    err.print(f"{len(grid.federations)} federations, each attacked by {escape(attacks)}; writes to {escape(str(folder))}")
    with show_progress_bar() as bar:
        task = bar.add_task("sweep", total=len(grid.federations), words="")

        def show(progress: "SweepProgress") -> None:
            left = "" if progress.seconds_left is None else f", about {progress.seconds_left / 60:.0f} min left"
            bar.update(task, completed=progress.done, words=f"{escape(progress.name)}{left}")

        return run_sweep(grid, folder, workers=workers, ray=ray, seconds=seconds, watch=show)

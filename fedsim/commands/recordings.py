"""Commands `fedsim verify`, `fedsim delete` and `fedsim import`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedsim.commands.console import Json, err, format_count, out, print_json, report_errors


def verify(folder: Annotated[Path, typer.Argument(help="Folder of a run, or a recording.")], as_json: Json = False) -> None:
    """Check that the files of a recording are intact, and list the damaged ones. Exit status 1 if any is damaged."""
    with report_errors():
        from fedsim.commands import maintenance

        result = maintenance.verify(folder)
        if as_json:
            print_json(result.to_json())
        else:
            for file, reason in result.damaged:
                out.print(f"[bold red]damaged[/] {escape(file)}: {escape(reason)}")
            for file in result.unexpected:
                out.print(f"[yellow]not part of the recording[/] {escape(file)}")
            seen = format_count(result.observations, "observation")
            out.print(f"{result.intact} of {seen} of {format_count(result.rounds, 'round')} are intact")
        if result.damaged:
            raise typer.Exit(1)


def delete(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or a recording.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a run or a recording, with everything in its folder."""
    with report_errors(kept="run the command again to delete the rest"):
        from fedsim.commands import maintenance

        kind = maintenance.identify_kind(folder)
        if not yes and not typer.confirm(f"Delete the {kind} {folder} with everything in it?", err=True):
            raise typer.Exit(1)
        maintenance.delete(folder)
        err.print(f"{escape(str(folder))} is deleted")


def import_(
    before: Annotated[Path, typer.Argument(help="State dict that the server sent to a client: .safetensors, .npz or .pt.")],
    after: Annotated[Path, typer.Argument(help="State dict that the client sent back.")],
    settings: Annotated[Path, typer.Option(help="TOML file with model, data and training; an example is deploy/import.toml.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the run to write the recording to.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function that builds the network, which is imported; the settings may leave out the model then."
        ),
    ] = None,
) -> None:
    """Write a recording of one update, given as two state dicts of any framework."""
    with report_errors():
        from fedsim import models
        from fedsim.commands.import_updates import ImportSettings, import_recording

        given = ImportSettings.read(settings, model)
        if model is not None:
            models.admit(model, name=given.model.name)
        import_recording(before, after, given, out_folder)
        attack = f"attacker replay {out_folder} --attack cpl{f' --model {model}' if model else ''}"
        out.print(f"[bold]{escape(str(out_folder))}[/]  1 observation; attack it with: {escape(attack)}")

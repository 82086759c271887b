"""Commands `attacker report`, `attacker rank` and `attacker demo`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from attacker.commands.replay import KEPT_ON_INTERRUPT
from fedsim.commands.console import Json, err, out, parse_assignment, print_json, report_errors


def report(
    runs: Annotated[list[Path], typer.Argument(help="Runs, or recordings; several are shown side by side.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="The page to write; by default report.html in the first run.")
    ] = None,
) -> None:
    """Write one self-contained HTML page on the attacks on one or several runs, with scores where they have been scored."""
    with report_errors():
        from attacker.report import build

        out.print(str(build(runs, out_file)), soft_wrap=True)


def rank(
    model: Annotated[str, typer.Argument(help="A model's name, or MODULE:FUNCTION, which imports that code.")],
    shape: Annotated[str, typer.Option("--input", metavar="SHAPE", help="Shape of one example: 3x32x32, or 30 for table rows.")],
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of the model.")] = None,
    dead: Annotated[float, typer.Option(help="Assumed share of zero outputs of a ReLU.")] = 0.5,
    prove: Annotated[
        bool,
        typer.Option(help="Compute the rank of each layer's equations (seconds per layer) instead of only counting equations."),
    ] = True,
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Draw the layers into this file: .png, .svg or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare each layer's equations with its unknowns, to see whether a gradient of the network can determine the network's
    input (R-GAP)."""
    with report_errors():
        from attacker.commands import rank_output as ranks

        size = ranks.parse_shape(shape)
        if out_file is not None:
            ranks.check_picture(out_file)
        chain = ranks.load_chain(model, size, classes, dict(map(parse_assignment, overrides or [])))
        with err.status("proving the rank of each layer" if prove else "counting"):
            report = ranks.analyse_chain(chain, dead=dead, prove=prove)
        if out_file is not None:
            ranks.draw(report, chain, out_file, title=f"{model}, input {shape}")
        if as_json:
            print_json(ranks.to_json(report, model))
            return
        out.print(ranks.make_table(report, chain))
        out.print(f"[bold]{ranks.write_headline(report)}[/]")
        for sentence in ranks.write_verdict(report):
            out.print(escape(sentence))


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder of the demonstration.")] = Path("runs/demo"),
    engine: Annotated[str, typer.Option(help="Engine that runs the clients: ray or local.")] = "ray",
) -> None:
    """Run, attack and score four small federations of a face detector, and write one report: a few minutes."""
    with report_errors(kept=KEPT_ON_INTERRUPT):
        from attacker.commands.demo import run

        out.print(str(run(folder, engine=engine)), soft_wrap=True)

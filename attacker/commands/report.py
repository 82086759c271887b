"""attacker report, rank and demo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from attacker.commands.replay import GOES_ON
from fedsim.commands.console import Json, assignment, err, errors_told, out, print_json


def report(
    runs: Annotated[list[Path], typer.Argument(help="One run or more, side by side; or recordings.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="The page; by default report.html of the first run.")] = None,
) -> None:
    """Make one self-contained page out of attacked runs, scored or, where there is no truth, as they are."""
    with errors_told():
        from attacker.report import build

        out.print(str(build(runs, out_file)), soft_wrap=True)


def rank(
    model: Annotated[str, typer.Argument(help="A model's name, or MODULE:FUNCTION, which imports that code.")],
    shape: Annotated[str, typer.Option("--input", metavar="SHAPE", help="Of one example: 3x32x32, or 30 for table rows.")],
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of the model.")] = None,
    dead: Annotated[float, typer.Option(help="Share of a ReLU's outputs that is taken to be 0.")] = 0.5,
    prove: Annotated[bool, typer.Option(help="Prove the ranks, seconds a layer, and not only count them.")] = True,
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Draw the layers: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Could this network leak at all? Count each layer's equations, before any attack."""
    with errors_told():
        from attacker.report import rank_report as ranks

        size = ranks.shape_of(shape)
        if out_file is not None:
            ranks.check_picture(out_file)
        chain = ranks.opened(model, size, classes, dict(map(assignment, overrides or [])))
        with err.status("proving the rank of each layer" if prove else "counting"):
            report = ranks.analysed(chain, dead=dead, prove=prove)
        if out_file is not None:
            ranks.draw(report, chain, out_file, title=f"{model}, input {shape}")
        if as_json:
            print_json(ranks.as_json(report, model))
            return
        out.print(ranks.table(report, chain))
        out.print(f"[bold]{ranks.headline(report)}[/]")
        for sentence in ranks.verdict(report):
            out.print(escape(sentence))


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder of the demonstration.")] = Path("runs/demo"),
    engine: Annotated[str, typer.Option(help="ray or local.")] = "ray",
) -> None:
    """Two federations on photographs, undefended and defended, attacked, scored and shown: a few minutes."""
    with errors_told(kept=GOES_ON):
        from attacker.commands.demo import run

        out.print(str(run(folder, engine=engine)), soft_wrap=True)

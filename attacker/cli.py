"""The command line of the attacker."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from fedsim.console import Json, assignment, command_line, err, errors_told, out, print_json, progress_bar, run_to_the_end

if TYPE_CHECKING:
    from attacker.scoring import Scorer, Summary
    from fedsim.wire import Recording

app = command_line("Attack a recording, score what came out, and show it.")

GOES_ON = "what is done is kept, and the same command goes on from there"

Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An argument of the attack.")]


@app.command("list", epilog="Example:  attacker list")
def list_(as_json: Json = False) -> None:
    """List the attacks, with their arguments, what each needs, and its source."""
    import inspect

    from attacker.attacks import ATTACKS
    from defenses.registry import summary

    found: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": summary(ATTACKS[name]),
            "arguments": {p.name: p.default for p in inspect.signature(ATTACKS[name]).parameters.values()},
            "needs": sorted(need.name.lower() for need in ATTACKS[name]().needs),
        }
        for name in ATTACKS
    ]
    if as_json:
        print_json(found)
        return
    for attack in found:
        arguments = ", ".join(f"{key}={value!r}" for key, value in attack["arguments"].items())
        out.print(f"[bold]{attack['name']}[/]  {escape(attack['summary'])}")
        out.print(f"    arguments  {escape(arguments)}", style="dim")
        out.print(f"    needs      {', '.join(attack['needs'])}", style="dim")


@app.command(epilog="Example:  attacker replay runs/first/recording --attack cpl --set restarts=2 --rounds 1-3")
def replay(
    recording: Annotated[Path, typer.Argument(help="A recording, or the run that holds it.")],
    attack: Annotated[str, typer.Option(help="Name of the attack; see attacker list.")],
    overrides: Overrides = None,
    rounds: Annotated[str, typer.Option(help="Rounds to attack: 1-20, 1-3,7 or all.")] = "all",
    client: Annotated[list[str] | None, typer.Option(help="Only this client; may be given more than once.")] = None,
    route: Annotated[
        str | None,
        typer.Option(help="Of the attack exact: auto, or only linear, layers, peeled or optimisation; says which one answered."),
    ] = None,
    null: Annotated[bool, typer.Option(help="Run the same attack without any gradient beside it, as a baseline.")] = True,
    oracle: Annotated[list[str] | None, typer.Option(help="Tell the attack what no server knows: labels.")] = None,
    truth: Annotated[list[Path] | None, typer.Option(help="Truth, for an oracle only; by default the run's own.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder of reconstructions; by default the run's own.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds the attack.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default PyTorch's choice.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Cases attacked at once; by default by the model's size.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="The network of somebody else's federation; imports that code."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack every recorded observation; what is done already is skipped."""
    with errors_told(kept=GOES_ON):
        from attacker.attacks import AttackSpec
        from attacker.progress import replay_with_progress
        from fedsim.wire import Recording
        from fedsim.wire.selection import parse_rounds

        recording = recording / "recording" if (recording / "recording").is_dir() else recording
        opened = Recording(recording)
        _check_model(opened, model)
        arguments = dict(map(assignment, overrides or []))
        if route is not None:
            _check_takes_route(attack)
            arguments["route"] = route
        oracle_labels = _oracle(oracle or [], opened, truth)
        if threads is not None:
            _set_threads(threads)
        results = [
            replay_with_progress(
                opened,
                AttackSpec(name=attack, arguments=arguments, null=is_null),
                folder or recording.parent / "reconstructions",
                seed=seed,
                device=_device(device),
                rounds=parse_rounds(rounds),
                clients=frozenset(client or ()) or None,
                chunk=chunk,
                oracle_labels=oracle_labels,
            )
            for is_null in ((False, True) if null else (False,))
        ]
        if as_json:
            print_json([{**asdict(result), "folder": str(result.folder)} for result in results])
        if not results[0].done + results[0].skipped:
            raise RuntimeError("no case could be attacked")


def _check_takes_route(attack: str) -> None:
    from inspect import signature

    from attacker.attacks import ATTACKS

    if "route" not in signature(ATTACKS[attack]).parameters:
        raise ValueError(f"--route chooses among the routes of the attack exact, and {attack} has none")


def _check_model(recording: "Recording", reference: str | None) -> None:
    """Have the recording's model at hand before anything else is done; code is imported only where the user names it."""
    from fedsim import models

    manifest = recording.manifest
    if reference is not None:
        models.admit(reference, name=manifest.model.name)
    models.layout(manifest.model, manifest.data)


def _oracle(names: list[str], recording: "Recording", truth: list[Path] | None) -> Callable[[Any], Any] | None:
    if unknown := sorted(set(names) - {"labels"}):
        raise ValueError(f"unknown oracle {unknown[0]!r}. Known: labels")
    if not names:
        return None
    from attacker.scoring import Scorer
    from attacker.scoring.oracle import true_labels
    from fedsim.wire.masked import SUM

    run = recording.folder.parent
    scorer = Scorer(run, _truth(run, truth))
    return lambda row: true_labels(scorer, row, recording.summed(row.round) if row.client == SUM else ())


@app.command(epilog="Example:  attacker score runs/first")
def score(
    folder: Annotated[Path, typer.Argument(help="A run, its reconstructions, or one attack's folder of them.")],
    truth: Annotated[list[Path] | None, typer.Option(help="What the clients wrote down; by default the run's own.")] = None,
    data: Annotated[str | None, typer.Option(help="The data set, where truth names another path: npz:TRAIN.")] = None,
    lpips_net: Annotated[str, typer.Option(help="The network of LPIPS: alex or vgg.")] = "alex",
    lpips_weights: Annotated[
        Path | None,
        typer.Option(help="Its convolution layers, in safetensors; by default torchvision's file in torch's hub cache."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare reconstructions with what the clients really used: one row an example."""
    with errors_told():
        from attacker.scoring import Scorer, summarise

        run, sources = _sources(folder)
        described = (data, dict[str, Any]()) if data else None
        scorer = Scorer(run, _truth(run, truth), described, lpips_net=lpips_net, lpips_weights=lpips_weights)
        summaries = summarise(_scores(scorer, sources))
        if as_json:
            print_json([{**one.as_json(), "untold": scorer.untold[one.source]} for one in summaries])
            return
        _print_summaries(summaries)
        if scorer.data.spec.is_image and isinstance(scorer.lpips, str):
            err.print(f"LPIPS {escape(scorer.lpips)}", style="dim")


def _scores(scorer: "Scorer", sources: list[Path]) -> list[dict[str, Any]]:
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
    if untold := sorted({key for keys in scorer.untold.values() for key in keys}):
        many = "1 case has no truth and is" if len(untold) == 1 else f"{len(untold)} cases have no truth and are"
        hint = "was --truth given for every client?"
        err.print(f"[bold yellow]{many} not scored[/], the first: {escape(untold[0])}; {hint}")
    return rows


def _truth(run: Path, given: list[Path] | None) -> list[Path]:
    """Folders of truth. Raises ValueError where none is given and the run has none of its own."""
    if not given and not (run / "truth").exists():
        raise ValueError(
            f"{run} has no truth of its own: name that of the clients with --truth FOLDER; "
            f"what was reconstructed is shown without it by: attacker report {run}"
        )
    return given or [run / "truth"]


def _print_summaries(summaries: "list[Summary]") -> None:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("attack", overflow="fold", min_width=26)
    for title in ("examples", "success", "null's", "labels", "quality"):
        table.add_column(title, justify="right")
    table.add_column("oracles", overflow="fold")
    for one in summaries:
        null = f"{one.null.success.value:.0%}" if one.null else "not run"
        success = f"{one.success.value:.0%} ({one.success.low:.0%}-{one.success.high:.0%})"
        quality = f"{one.psnr.value:.1f} dB" if one.psnr else f"MSE {one.mse.value:.2g}" if one.mse else ""
        oracles = f"[red]{escape(', '.join(one.oracles))}[/]" if one.oracles else "none"
        labels = "told" if "labels" in one.oracles else f"{one.label_success.value:.0%}"
        name = escape(one.spec) + (f"\n[dim]{escape(one.ways)}[/]" if one.ways else "")
        table.add_row(name, str(one.examples), success, null, labels, quality, oracles)
    out.print(table)


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

    from fedsim.wire import Manifest

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


@app.command(epilog="Example:  attacker report runs/first runs/second --out report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run or more, side by side; or recordings.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="The page; by default report.html of the first run.")] = None,
) -> None:
    """Make one self-contained page out of attacked runs, scored or, where there is no truth, as they are."""
    with errors_told():
        from attacker.report import build

        out.print(str(build(runs, out_file)), soft_wrap=True)


@app.command(epilog="Example:  attacker rank cnn6_d --input 3x32x32 --out rank.png")
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
        from attacker import rank as ranks

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


@app.command(epilog="Example:  attacker demo --out runs/demo")
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder of the demonstration.")] = Path("runs/demo"),
    engine: Annotated[str, typer.Option(help="ray or local.")] = "ray",
) -> None:
    """Two federations on photographs, undefended and defended, attacked, scored and shown: a few minutes."""
    with errors_told(kept=GOES_ON):
        from attacker.demo import run

        out.print(str(run(folder, engine=engine)), soft_wrap=True)


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted != "cpu" and not (wanted.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"--device {wanted!r} is not to be had here; use cpu")
    return wanted


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def main() -> None:
    """Entry point."""
    run_to_the_end(app)

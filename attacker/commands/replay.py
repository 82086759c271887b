"""attacker replay."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attacker.commands.options import Overrides, check_takes_route, device_of, truth_of
from fedsim.commands.console import ALLOW_FAILURES, IN_PART, Json, assignment, errors_told, print_json

if TYPE_CHECKING:
    from attacker.attacks import AttackSpec
    from fedsim.recording import Recording

GOES_ON = "what is done is kept, and the same command goes on from there"


def replay(
    recording: Annotated[Path, typer.Argument(help="A recording, or the run that holds it.")],
    attack: Annotated[str, typer.Option(help="Name of the attack; see attacker list.")],
    overrides: Overrides = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Settings by name, which --set overrides: tuned, those for the recording's kind of network (chosen on tuning "
            "images for sigmoid LeNets, estimates for the others), or published, those of the attack's paper.",
        ),
    ] = None,
    rounds: Annotated[str, typer.Option(help="Rounds to attack: 1-20, 1-3,7 or all.")] = "all",
    client: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this client, by its name or a unique beginning of it (see fedsim show); may be given more than once. "
            "Of attacks such as agic, all its rounds together."
        ),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(help="Of the attack exact: auto, or only linear, layers, peeled or optimisation; says which one answered."),
    ] = None,
    null: Annotated[bool, typer.Option(help="Run the same attack without any gradient beside it, as a baseline.")] = True,
    oracle: Annotated[list[str] | None, typer.Option(help="Tell the attack what no server knows: labels, logits.")] = None,
    truth: Annotated[list[Path] | None, typer.Option(help="Truth, for an oracle only; by default the run's own.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder of reconstructions; by default the run's own.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds the attack.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is one.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each worker; by default 1, or PyTorch's choice for a single chunk.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Cases attacked at once; by default by the model, the memory and the cores.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one for each core, where there is enough work.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Work on this Ray cluster instead; local: one of this machine's own.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="The network of somebody else's federation; imports that code."),
    ] = None,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help=ALLOW_FAILURES)] = False,
    as_json: Json = False,
) -> None:
    """Attack every recorded observation, or client; what is done already is skipped, and what was cut off goes on.

    Exit status: 0 where every case has an answer; 3 where some failed, of the attack or of its null, unless --allow-failures is
    given; 1 where no case could be attacked; 2 for wrong arguments; 130 after Ctrl-C.
    """
    with errors_told(kept=GOES_ON):
        from attacker.attacks import AttackSpec
        from attacker.commands.progress_bar import replay_with_progress
        from defenses._registry import references
        from fedsim.recording import Recording
        from fedsim.recording.selection import parse_rounds

        recording = recording / "recording" if (recording / "recording").is_dir() else recording
        opened = Recording(recording)
        _check_model(opened, model)
        if references.is_reference(attack):  # the user names it
            references.admit(attack)
        given = dict(map(assignment, overrides or []))
        if references.is_reference(str(given.get("decoder", ""))):
            references.admit(str(given["decoder"]))
        arguments = _preset(attack, preset, opened) | given
        if route is not None:
            check_takes_route(attack)
            arguments["route"] = route
        if ray is not None and workers is not None:
            raise ValueError("--workers are processes of this machine, and --ray hands the work to a cluster: give one of them")
        told = _oracles(oracle or [], opened, truth, AttackSpec(name=attack, arguments=arguments))
        results = [
            replay_with_progress(
                opened,
                AttackSpec(name=attack, arguments=arguments, null=is_null),
                recording.parent / "reconstructions" if folder is None else folder.resolve(),
                seed=seed,
                device=device_of(device),
                rounds=parse_rounds(rounds),
                clients=frozenset(client or ()) or None,
                chunk=chunk,
                **told,
                threads=threads,
                workers=workers,
                ray=ray,
                model=model,
            )
            for is_null in ((False, True) if null else (False,))
        ]
        if as_json:
            print_json([{**asdict(result), "folder": str(result.folder)} for result in results])
        if not results[0].done + results[0].skipped:
            raise RuntimeError("no case could be attacked")
        if any(result.failed for result in results) and not allow_failures:
            raise typer.Exit(IN_PART)


def _preset(attack: str, preset: str | None, recording: "Recording") -> dict[str, Any]:
    """The arguments that a preset stands for, of an attack on a recording."""
    from attacker.attacks import ATTACKS, presets

    if preset is None:
        return {}
    _ = ATTACKS[attack]
    manifest = recording.manifest
    return presets.arguments_of(attack, preset, manifest.model, manifest.data)


def _check_model(recording: "Recording", reference: str | None) -> None:
    """Have the recording's model at hand before anything else is done; code is imported only where the user names it."""
    from fedsim import models

    manifest = recording.manifest
    if reference is not None:
        models.admit(reference, name=manifest.model.name)
    models.layout(manifest.model, manifest.data)


def _oracles(
    names: list[str], recording: "Recording", truth: list[Path] | None, attack: "AttackSpec"
) -> dict[str, Callable[[Any], Any]]:
    """From a row, what each oracle asked for tells of it, as arguments of a replay."""
    if unknown := sorted(set(names) - {"labels", "logits"}):
        from defenses._registry import suggest

        raise ValueError(f"unknown oracle {unknown[0]!r}.{suggest(unknown[0], ('labels', 'logits'))} Known: labels, logits")
    if not names:
        return {}
    if "logits" in names and not attack.argument("agreement"):
        raise ValueError(f"{attack} makes nothing of the oracle logits: they are for cpl's label regulariser, --set agreement=1")
    from attacker.scoring import Scorer
    from attacker.scoring.oracle import true_labels, true_logits
    from fedsim.recording.masked_vectors import SUM

    run = recording.folder.parent
    scorer = Scorer(run, truth_of(run, truth))

    def cohort(row: Any) -> tuple[str, ...]:
        return tuple(recording.summed(row.round)) if row.client == SUM else ()

    known = {
        "labels": lambda row: true_labels(scorer, row, cohort(row)),
        "logits": lambda row: true_logits(scorer, recording, row, cohort(row)),
    }
    return {f"oracle_{name}": known[name] for name in names}

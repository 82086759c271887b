"""Command `attacker replay`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attacker.commands.options import AttackArguments, Device, OwnModel, check_takes, resolve_device, resolve_truth
from fedsim.commands.console import ALLOW_FAILURES, EXIT_FAILURES, Json, parse_assignment, print_json, report_errors

if TYPE_CHECKING:
    from attacker.attacks import AttackSpec
    from fedsim.recording import Recording

KEPT_ON_INTERRUPT = "finished work is kept; run the same command again to continue"


def replay(
    recording: Annotated[Path, typer.Argument(help="A recording, or the run that holds it.")],
    attack: Annotated[str, typer.Option(help="Name of the attack; see attacker list.")],
    overrides: AttackArguments = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Named settings of the attack, which --set overrides. tuned: settings for the recording's kind of network; for "
            "sigmoid and ReLU networks they were chosen on tuning images, for others they are mostly estimates. published: those "
            "of the attack's paper.",
        ),
    ] = None,
    rounds: Annotated[str, typer.Option(help="Rounds to attack: 1-20, 1-3,7 or all.")] = "all",
    client: Annotated[
        list[str] | None,
        typer.Option(
            help="Attack only this client, given by its name or a unique beginning of it (see fedsim show); may be repeated. "
            "Attacks on many rounds, such as agic, use all its rounds together."
        ),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            help="Only with --attack exact: its method, which is auto (the default), a closed form (linear, layers, peeled, "
            "features or layer_input), or optimisation."
        ),
    ] = None,
    anonymous: Annotated[
        bool,
        typer.Option(
            "--anonymous",
            help="Hide from the attack which client sent an update: only with --attack spans, which then attacks all updates "
            "together and groups them by the examples that they share. Stands for --set anonymous=true.",
        ),
    ] = False,
    null: Annotated[
        bool, typer.Option(help="Also run the attack's null, the same attack without the gradient, as a baseline.")
    ] = True,
    oracle: Annotated[
        list[str] | None, typer.Option(help="Give the attack information that no server has: labels or logits.")
    ] = None,
    truth: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of truth, in which clients list the examples they used, for --oracle; by default the run's."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for the reconstructions; by default the run's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the attack.")] = 0,
    device: Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads per worker; by default 1, or PyTorch's choice if there is a single chunk of cases."),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cases (rounds, or clients for attacks on many rounds) in one batch; by default from model, memory and cores.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; by default one per core if there is enough work.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the Ray cluster at this address; local starts one on this machine."),
    ] = None,
    model: OwnModel = None,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help=ALLOW_FAILURES)] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Attack in this process, and show the traceback of every error of the attack.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Attack the recorded observations, one by one or all of a client together. Finished cases are skipped, interrupted ones
    resumed.

    Exit status: 0 if every case has a reconstruction; 1 if some cases of the attack or of its null failed (0 with
    --allow-failures), or if no case could be attacked (also with --allow-failures); 2 for wrong arguments; 130 after Ctrl-C.
    """
    with report_errors(verbose=verbose, kept=KEPT_ON_INTERRUPT), _show_tracebacks() if verbose else nullcontext():
        from attacker.attacks import AttackSpec
        from attacker.commands.progress_bar import replay_with_progress
        from attacker.replay.replay import Replay
        from fedsim.recording import Recording, find_recording, find_run
        from fedsim.recording.selection import parse_rounds

        run, recorded = find_run(recording), Recording(find_recording(recording))
        _check_model(recorded, model)
        arguments = _collect_arguments(attack, recorded, preset, overrides or [], route=route, anonymous=anonymous)
        _check_processes(ray, workers, verbose=verbose)
        oracles = _make_oracles(oracle or [], recorded, truth, AttackSpec(name=attack, arguments=arguments))
        results = [
            replay_with_progress(
                Replay(
                    recording=recorded,
                    spec=AttackSpec(name=attack, arguments=arguments, null=is_null),
                    out=run / "reconstructions" if folder is None else folder.resolve(),
                    seed=seed,
                    device=resolve_device(device),
                    rounds=parse_rounds(rounds),
                    clients=frozenset(client or ()) or None,
                    chunk=chunk,
                    **oracles,
                    threads=threads,
                    workers=1 if verbose else workers,
                    ray=ray,
                    model=model,
                )
            )
            for is_null in ((False, True) if null else (False,))
        ]
        if as_json:
            print_json([{**asdict(result), "folder": str(result.folder)} for result in results])
        if not results[0].done + results[0].skipped:
            raise RuntimeError("no case could be attacked, for the reasons that are printed above")
        if any(result.failed for result in results) and not allow_failures:
            raise typer.Exit(EXIT_FAILURES)


@contextmanager
def _show_tracebacks() -> Iterator[None]:
    """Print on stderr, within a `with` block, the tracebacks of errors that a replay otherwise only records as failed cases."""
    logger = logging.getLogger("attacker.replay.task_runner")
    handler, previous_level = logging.StreamHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(previous_level)


def _collect_arguments(
    attack: str, recording: "Recording", preset: str | None, overrides: list[str], *, route: str | None, anonymous: bool
) -> dict[str, Any]:
    """Return the arguments of the attack, and admit the code that they and its name refer to.

    Arguments of `overrides`, and those with an option of their own, take precedence over those of the preset. Raises ValueError
    if the attack does not take one with an option of its own.
    """
    from defenses.registry import references

    overriding = dict(map(parse_assignment, overrides))
    for reference in (attack, *(str(overriding.get(name, "")) for name in ("decoder", "enhancer", "denoiser"))):
        if references.is_reference(reference):  # naming it on the command line admits it
            references.admit(reference)
    arguments = _resolve_preset(attack, preset, recording) | overriding
    if route is not None:
        check_takes(attack, "route", owner="exact")
        arguments["route"] = route
    if anonymous:
        check_takes(attack, "anonymous", owner="spans")
        arguments["anonymous"] = True
    return arguments


def _check_processes(ray: str | None, workers: int | None, *, verbose: bool) -> None:
    """Raise ValueError if the options on processes contradict each other, or if --verbose would show nothing."""
    if ray is not None and workers is not None:
        raise ValueError("--workers starts processes on this machine and --ray uses a cluster: give only one of them")
    if verbose and (ray is not None or (workers or 1) > 1):
        raise ValueError(
            "--verbose shows only errors in this process, and --workers and --ray attack in other processes: leave them out, "
            "or leave out --verbose"
        )


def _resolve_preset(attack: str, preset: str | None, recording: "Recording") -> dict[str, Any]:
    """Return the attack arguments that a preset sets for the recording's kind of network; {} if `preset` is None."""
    from attacker.attacks import ATTACKS, presets

    if preset is None:
        return {}
    _ = ATTACKS[attack]
    manifest = recording.manifest
    return presets.get_arguments(attack, preset, manifest.model, manifest.data)


def _check_model(recording: "Recording", reference: str | None) -> None:
    """Raise ValueError if the recording's network cannot be built.

    reference: MODULE:FUNCTION of the option `--model`, which allows the import of the network's code; None without this option.
    """
    from fedsim import models

    manifest = recording.manifest
    if reference is not None:
        models.admit(reference, name=manifest.model.name)
    models.build_layout(manifest.model, manifest.data)


def _make_oracles(names: list[str], recording: "Recording", truth: list[Path] | None, attack: "AttackSpec") -> dict[str, Any]:
    """Return the keyword arguments of `Replay` for oracles (what the attack is told and no server knows); {} without `names`.

    The arguments are `oracle_labels` and `oracle_logits`, as far as named: functions from a row of the recording to the true
    labels or logits; and `oracle_truth`, a digest of the folders of truth.
    names: any of "labels" and "logits". truth: folders of truth; None for the run's own.
    Raises ValueError for other names, if there is no truth, or if `attack` does not use the logits.
    """
    if unknown := sorted(set(names) - {"labels", "logits"}):
        from defenses.registry import suggest_name

        raise ValueError(f"unknown oracle {unknown[0]!r}.{suggest_name(unknown[0], ('labels', 'logits'))} Known: labels, logits")
    if not names:
        return {}
    if "logits" in names and not attack.get_argument("agreement"):
        raise ValueError(
            f"{attack} does not use the true logits; leave out --oracle logits, or choose an attack that uses them: --attack cpl "
            "--set agreement=1"
        )
    from attacker.scoring import Scorer
    from attacker.scoring.oracle import compute_true_logits, digest_truth, read_true_labels
    from fedsim.recording.masked_vectors import SUM_CLIENT

    run = recording.folder.parent
    folders = resolve_truth(run, truth)
    scorer = Scorer(run, folders)

    def list_cohort(row: Any) -> tuple[str, ...]:
        return tuple(recording.list_summed(row.round)) if row.client == SUM_CLIENT else ()

    functions = {
        "labels": lambda row: read_true_labels(scorer, row, list_cohort(row)),
        "logits": lambda row: compute_true_logits(scorer, recording, row, list_cohort(row)),
    }
    return {f"oracle_{name}": functions[name] for name in names} | {"oracle_truth": digest_truth(folders)}

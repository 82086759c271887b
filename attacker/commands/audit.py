"""Command `attacker audit`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from attacker.commands.options import OwnModel, TruthFolders, parse_duration
from attacker.commands.replay import KEPT_ON_INTERRUPT
from fedsim.commands.console import EXIT_FAILURES, Json, err, out, print_json, report_errors

if TYPE_CHECKING:
    from attacker.audit import Audit
    from fedsim.config.experiment import Experiment

EXIT_ABOVE_GRADE = 4
"""Exit status of an audit whose grade is above that of `--fail-above`."""


def audit(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run or recording; or an experiment (TOML) or a folder with a recorded Flower app, which runs first."
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time for all attacks, such as 90s, 10m or 2h. Starting, checks and the page take at least 15 seconds more, and "
            "closed forms may use 30 seconds if it is less.",
        ),
    ] = "10m",
    out_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the audit here; .html, .json, .sarif or .xml (JUnit). May be repeated."
        ),
    ] = None,
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="GRADE",
            help="Exit with status 4 if the grade is worse: none, low, moderate or serious; otherwise with 1 if no attack "
            "produced an answer.",
        ),
    ] = None,
    truth: TruthFolders = None,
    model: OwnModel = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Only make the checks that need no attack, and print which attacks are planned.")
    ] = False,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="DEFENSE",
            help="Run the federation again with this defense, and audit that as well. The word recommended stands for clipping "
            "and noise derived from the recorded updates.",
        ),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Number of clients, if a Flower app is run first.")] = 10,
    as_json: Json = False,
) -> None:
    """Check a recorded federation, attack it within a time budget, and write a graded verdict with what to change.

    The page is written to audit.html in the folder of the run, also if --out names further files; with --plan, no page is
    written. Without truth, the verdict follows from the checks and from the confidence of the attacks. Repeating the command
    continues where it stopped.

    Exit status: 0 if the audit is complete; 4 if the grade is worse than --fail-above; 2 for wrong arguments; 1 for other errors,
                 and with --fail-above if no attack produced an answer; 130 after Ctrl-C.
    """
    with report_errors(kept=KEPT_ON_INTERRUPT):
        from attacker.audit import GRADES, output
        from attacker.audit import audit as make_audit
        from attacker.scoring import Scorer
        from fedsim.recording import Recording, find_recording, find_run

        limit = _parse_grade(fail_above, GRADES)
        if plan_only:
            _refuse_with_plan({"--what-if": what_if, "--fail-above": fail_above, "--out": out_files, "--json": as_json})
        seconds = parse_duration("--budget", budget)
        for file in out_files or []:
            output.check_suffix(file)  # before the attacks, which may take hours
            file.parent.mkdir(parents=True, exist_ok=True)
        if run.suffix == ".toml":
            run = _run_experiment(run)
        elif not (run / "recording" / "manifest.json").exists() and (run / "pyproject.toml").is_file():
            run, model = _run_flower_app(run, clients, model)
        folder, run = find_recording(run), find_run(run)
        if model is not None:
            from fedsim import models

            models.admit(model, name=Recording(folder).manifest.model.name)
        if truth:
            Scorer(run, truth)  # raises ValueError if a folder holds no truth
        known = list(truth or []) or ([run / "truth"] if (run / "truth").exists() else [])
        if plan_only:
            _print_plan_only(Recording(folder), run, seconds, nulls=bool(known))
            return
        change = None if what_if is None else _read_change(run, what_if)
        result = make_audit(run, seconds=seconds, truth=known, model=model, run_replay=_replay_shown, on_plan=_print_plan)
        if change is not None:
            result = _measure_change(result, run, *change, seconds)
        files = [run / "audit.html", *(out_files or [])]
        for file in files:
            output.write(result, run, file)
        if as_json:
            print_json(result.as_json())
        else:
            _print_audit(result, files)
        if limit is not None and GRADES.index(result.grade) > limit:
            raise typer.Exit(EXIT_ABOVE_GRADE)
        if limit is not None and not result.has_answer:
            err.print("no attack produced an answer, so that the grade follows from the checks alone: --fail-above cannot pass")
            raise typer.Exit(EXIT_FAILURES)


def _parse_grade(text: str | None, grades: tuple[str, ...]) -> int | None:
    if text is None:
        return None
    wanted = "none found" if text == "none" else text
    if wanted not in grades[:-1]:
        raise ValueError(f"--fail-above {text!r} is not a grade. Known: none, {', '.join(grades[1:-1])}")
    return grades.index(wanted)


def _refuse_with_plan(options: dict[str, Any]) -> None:
    """Raise ValueError if an option is given that has no effect with --plan. options: values of options by name."""
    if given := [name for name, value in options.items() if value]:
        raise ValueError(f"{given[0]} has no effect with --plan, which attacks nothing and writes no file; leave one of them out")


def _run_experiment(path: Path) -> Path:
    """Run the federation of an experiment file, unless it was run before, and return the folder of its run.

    The folder is runs/audit-NAME in the current directory. An interrupted federation is resumed.
    """
    from fedsim.commands.run import federate
    from fedsim.config.experiment import read

    folder = Path("runs") / f"audit-{path.stem}"
    federate(read(path, []), folder, engine="local", resume=True)
    return folder


def _run_flower_app(folder: Path, clients: int, model: str | None) -> tuple[Path, str]:
    """Run the Flower app in `folder`, which records itself, unless it has a recording already; return the folder of its run, and
    `model` or, if that is None, the name of the recorded network.

    `folder` is added to the path from which Python imports modules.
    """
    import sys

    from fedsim.engine.flower_projects import find_recorded, run_project
    from fedsim.recording import Recording

    run = find_recorded(folder)
    if not (run / "recording" / "manifest.json").exists():
        err.print(f"running the Flower app in {escape(str(folder))} with {clients} clients")
        run_project(folder, clients)
    sys.path.insert(0, str(folder.absolute()))
    return run, model or Recording(run / "recording").manifest.model.name


def _read_change(run: Path, defense: str) -> "tuple[str, Experiment]":
    """Return another defense for the federation of a run, as text, and the experiment with it.

    defense: a defense, or "recommended". Raises ValueError if it is not a defense, or if the run has no experiment.toml.
    """
    from attacker.audit.what_if import RECOMMENDED, recommend_defense
    from fedsim.config.experiment import read
    from fedsim.recording import Recording

    path = run / "experiment.toml"
    if not path.exists():
        raise ValueError(f"{run} has no experiment.toml, from which --what-if repeats the federation; omit --what-if")
    change = recommend_defense(Recording(run / "recording")) if defense == RECOMMENDED else defense
    try:
        return change, read(path, [("defense", change)])
    except ValueError as error:
        raise ValueError(f"--what-if {defense!r}: {error}; or write {RECOMMENDED}") from None


def _measure_change(found: "Audit", run: Path, change: str, experiment: "Experiment", seconds: float) -> "Audit":
    """Run a federation with another defense, audit it, and return `found` with a comparison in `what_if`.

    The comparison holds the verdict of `found` and the verdict with the other defense.

    found: audit of `run`. change, experiment: the other defense, as text, and the experiment with it (`_read_change`).
    seconds: time budget of the second audit.
    """
    from dataclasses import replace

    from attacker.audit import audit as make_audit
    from attacker.audit.what_if import MeasuredChange, describe_outcome, name_changed_run
    from fedsim.commands.run import federate

    changed = name_changed_run(run, change)
    err.print(f"what if: the same federation with {escape(change)}, in {escape(str(changed))}")
    federate(experiment, changed, engine="local", resume=True)
    truth = [changed / "truth"] if found.scored else []  # two grades compare only if both follow from the same evidence
    again = make_audit(changed, seconds=seconds, truth=truth, run_replay=_replay_shown, on_plan=_print_plan)
    before, after = (
        describe_outcome(result.grade, result.attacks, folder) for result, folder in ((found, run), (again, changed))
    )
    return replace(found, what_if=MeasuredChange(change=change, before=before, after=after))


def _replay_shown(replay: Any) -> Any:
    from attacker.commands.progress_bar import replay_with_progress

    return replay_with_progress(replay)


def _print_plan(plan: Any) -> None:
    """Print on stderr which attacks run on how many updates, and why the others do not run."""
    from attacker.audit import NotChecked

    for step in plan:
        if isinstance(step, NotChecked):
            err.print(f"not run: {escape(step.reason)}")
        else:
            count = f"{len(step.rows)} update{'s' * (len(step.rows) != 1)}"
            who = f"{step.spec}{' and its null' * (step.null_share > 0)} on {count}"
            cost = (
                f"at most {step.core_seconds:.0f} s of one core"
                if step.core_seconds >= 0.5
                else "less than a second of search; the time of closed forms is not forecast"
            )
            err.print(f"planned: {escape(who)}, {cost}")


def _print_plan_only(recording: Any, run: Path, seconds: float, *, nulls: bool) -> None:
    from attacker.audit import Finding, NotChecked, check_recording
    from attacker.audit.audit import UPDATES_RULE
    from attacker.audit.plan import plan_attacks

    # fails if the network cannot be built
    plan = list(plan_attacks(recording, run / "reconstructions", seconds=seconds, nulls=nulls))
    for result in check_recording(recording):
        if isinstance(result, Finding):
            out.print(f"[bold]{result.grade}[/]: {escape(result.title)} {escape(result.evidence)}", soft_wrap=True)
        elif isinstance(result, NotChecked) and result.rule == UPDATES_RULE:
            out.print(escape(result.reason), soft_wrap=True)
    _print_plan(plan)


def _print_audit(audit: "Audit", files: list[Path]) -> None:
    from attacker.audit.attack_findings import NO_ANSWER, RECOVERED_RULE
    from attacker.audit.attack_runs import NOT_STARTED, STOPPED
    from attacker.audit.audit import UPDATES_RULE
    from attacker.audit.plan import ATTACK_RULE

    out.print(f"[bold]{escape(audit.run)}: {audit.grade}[/]{'' if audit.has_answer else f'; {NO_ANSWER}'}", soft_wrap=True)
    for attack in audit.attacks:
        if attack.failed:
            out.print(f"{escape(attack.spec)} {escape(attack.failure_words)}", soft_wrap=True)
    for finding in audit.findings:
        out.print(
            f"[bold]{finding.grade}[/]: {escape(finding.title)}\n  {escape(finding.evidence)}\n  {escape(finding.advice)}",
            soft_wrap=True,
        )
    if not audit.findings:
        beaten = ", and no attack beat its null" if audit.has_answer and audit.scored else ""
        passed = f"{len(audit.passed)} check{'s' * (len(audit.passed) != 1)}"
        out.print(f"{passed} found nothing{beaten}; that is no proof that nothing leaks.")
    for unknown in audit.not_checked:
        if unknown.rule == UPDATES_RULE:
            out.print(escape(unknown.reason), soft_wrap=True)
        if unknown.rule == ATTACK_RULE and (STOPPED in unknown.reason or NOT_STARTED in unknown.reason):
            out.print(escape(unknown.reason), soft_wrap=True)
        if unknown.rule == RECOVERED_RULE and audit.has_answer and not audit.scored:
            out.print(escape(unknown.reason), soft_wrap=True)
    if audit.what_if is not None:
        from attacker.audit.what_if import describe_change

        out.print(f"[bold]what if[/]: {escape(describe_change(audit.what_if))}", soft_wrap=True)
    for file in files:
        out.print(str(file), soft_wrap=True)

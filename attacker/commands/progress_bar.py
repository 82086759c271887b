"""Replay of one attack with a progress bar and a summary on stderr."""

from collections.abc import Sequence

from rich.markup import escape

from attacker.attacks import AttackSpec
from attacker.replay.forecast import Forecast, describe_routes
from attacker.replay.replay import Replay, ReplayResult
from fedsim.commands.console import err, show_progress_bar

MAX_REASONS = 3
"""Largest number of different reasons of failed cases, and of omitted rounds, that are printed; the replay's files hold all."""


def replay_with_progress(replay: Replay) -> ReplayResult:
    """Run a replay, show its progress and a summary on stderr, and return its result."""
    spec = replay.spec
    observations, megabytes = replay.measure_extent()
    clients = " of whole clients" if replay.plan.whole else ""
    err.print(
        f"{escape(str(spec))}: {observations} observation{'s' * (observations != 1)}{clients} to attack; "
        f"writes up to {megabytes:.1f} MB to {escape(str(replay.folder))}"
    )
    forecast = replay.estimate_work()
    for line in (*describe_routes(forecast), describe_cost(forecast), forecast.memory):
        if line:
            err.print(f"  {escape(line)}")
    with show_progress_bar() as bar:
        task = bar.add_task(spec.name + (" (null)" if spec.null else ""), total=None, words="")
        try:
            result = replay.run(lambda done, total, message: bar.update(task, completed=done, total=total, words=escape(message)))
        except KeyboardInterrupt:
            left, total = replay.count_unfinished()
            err.print(f"  {left} of {total} cases {'is' if left == 1 else 'are'} not finished")
            raise
    _print_result(result, spec)
    return result


def describe_cost(forecast: Forecast) -> str:
    """Return a sentence with the number of cases, `Forecast.evaluations`, and the expected time on one core.

    The sentence is "" if no case is left, or if one evaluation is the largest number, as for attacks that do not search.
    """
    if not forecast.cases or forecast.evaluations <= 1:
        return ""
    seconds = forecast.core_seconds
    time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
    time = "a second" if seconds < 1 else time
    chunks = "1 chunk" if forecast.chunks == 1 else f"{forecast.chunks} chunks"
    cases = "1 case" if forecast.cases == 1 else f"{forecast.cases} cases in {chunks}"
    return (
        f"{cases}, each a search of at most {forecast.evaluations} evaluations of the gradient: very roughly {time} of one core, "
        "and less where a search converges or a closed form succeeds"
    )


def _print_result(result: ReplayResult, spec: AttackSpec) -> None:
    if not spec.null and result.routes:
        ways = (f"{count} by {route}" for route, count in sorted(result.routes.items(), key=lambda item: -item[1]))
        err.print(f"  {escape(', '.join(ways))}")
    err.print(f"  {result.done} done, {result.skipped} were done before, {len(result.failed)} failed")
    _print_reasons(list(result.failed.items()))
    left_out = [(key, round, reason) for key, rounds in result.left_out.items() for round, reason in rounds]
    if left_out:
        subject = "1 round was" if len(left_out) == 1 else f"{len(left_out)} rounds were"
        err.print(f"  {subject} not attacked together with the client's other rounds")
    _print_reasons([(key, reason if reason.startswith(f"round {n}") else f"round {n}: {reason}") for key, n, reason in left_out])
    for note in result.notes:
        err.print(f"  {escape(note)}")


def _print_reasons(reasons: Sequence[tuple[str, str]]) -> None:
    """Print the first `MAX_REASONS` different reasons, each with its first case and how many others have it.

    reasons: pairs of case and reason. How many cases have still other reasons is printed at the end.
    """
    cases: dict[str, list[str]] = {}
    for key, reason in reasons:
        cases.setdefault(reason, []).append(key)
    for reason, keys in list(cases.items())[:MAX_REASONS]:
        others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        err.print(f"  [yellow]{escape(keys[0])}[/]{others}: {escape(reason)}")
    if left := sum(len(keys) for keys in list(cases.values())[MAX_REASONS:]):
        err.print(f"  and {left} more for other reasons")

"""Replays under a progress bar."""

from pathlib import Path
from typing import Any

from rich.markup import escape

from attacker.attacks import AttackSpec, Progress
from attacker.replay import Replay, Replayed
from fedsim.console import err, progress_bar
from fedsim.wire import Recording


def replay_with_progress(recording: Recording, spec: AttackSpec, out: Path, **options: Any) -> Replayed:
    """Run a replay and say on stderr how it goes and what came of it; `options` are those of `Replay`."""
    replay = Replay(recording=recording, spec=spec, out=out, **options)
    cases, megabytes = replay.extent()
    err.print(
        f"{escape(str(spec))}: {cases} observations to attack; writes up to {megabytes:.1f} MB to {escape(str(replay.folder))}"
    )
    with progress_bar() as bar:
        task = bar.add_task(spec.name, total=None, words="")

        def chunk_bar(words: str) -> Progress:
            bar.reset(task, description=words)
            return lambda done, most, told: bar.update(task, completed=done, total=most, words=told)

        result = replay.run(chunk_bar)
    if not spec.null and result.routes:
        ways = (f"{count} by {route}" for route, count in sorted(result.routes.items(), key=lambda item: -item[1]))
        err.print(f"  {escape(', '.join(ways))}")
    err.print(f"  {result.done} done, {result.skipped} were done before, {len(result.failed)} failed")
    for key, reason in list(result.failed.items())[:3]:
        err.print(f"  [yellow]{escape(key)}[/]: {escape(reason)}")
    return result

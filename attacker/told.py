"""Replays under a progress bar."""

from pathlib import Path
from typing import Any

from rich.markup import escape

from attacker.attacks import AttackSpec, Progress
from attacker.replay import Replay, Replayed
from fedsim.console import err, progress_bar
from fedsim.wire import Recording


def replay_told(recording: Recording, spec: AttackSpec, out: Path, **options: Any) -> Replayed:
    """Run a replay and say on stderr how it goes and what came of it; `options` are those of `Replay`."""
    with progress_bar() as bar:

        def chunk_bar(words: str) -> Progress:
            task = bar.add_task(words, total=None, words="")
            return lambda done, most, told: bar.update(task, completed=done, total=most, words=told)

        result = Replay(recording=recording, spec=spec, out=out, **options).run(chunk_bar)
    err.print(f"{escape(str(result.folder))}  {result.done} done, {result.skipped} were done before, {len(result.failed)} failed")
    for key, reason in list(result.failed.items())[:3]:
        err.print(f"  [yellow]{escape(key)}[/]: {escape(reason)}")
    return result

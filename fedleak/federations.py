"""Federations: run one, open its recording, and report on it."""

import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.recording import Recording

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment


def run(
    experiment: "Experiment | Mapping[str, Any] | Path | str",
    out: Path | str | None = None,
    *,
    engine: str = "local",
    resume: bool = False,
    client_seed: int | None = None,
    **overrides: Any,
) -> Recording:
    """Run a federation to its end, record it, and return the recording.

    experiment: a TOML file, the same as a mapping, or an `Experiment`. overrides: keys of it, such as rounds=3, or
                training={"batch_size": 4}, which replaces the whole table.
    out:        folder of the run; by default a new folder for temporary files, which is not removed.
    engine:     local: clients one after the other in this process; ray: in parallel.

    Raises ExperimentError if the experiment cannot be run, and ValueError where `out` holds another one.
    """
    from fedsim.commands.run import federate
    from fedsim.config.experiment import Experiment, admit_code, read, validate

    if isinstance(experiment, Path | str):
        resolved = read(Path(experiment), list(overrides.items()), own=True)
    elif isinstance(experiment, Experiment):
        resolved = validate({**tomllib.loads(experiment.to_toml()), **overrides}, source="experiment")
    else:
        raw = {**experiment, **overrides}
        admit_code(raw)
        resolved = validate(raw, source="experiment")
    folder = Path(tempfile.mkdtemp(prefix="fedleak-")) / "run" if out is None else Path(out)
    federate(resolved, folder, engine=engine, resume=resume, client_seed=client_seed)
    return load(folder)


def load(path: Path | str) -> Recording:
    """Open a recording, or the one of a run. Raises ValueError if `path` holds none."""
    folder = Path(path)
    return Recording(folder / "recording" if (folder / "recording").is_dir() else folder)


def report(*runs: "Recording | Path | str", out: Path | str | None = None) -> Path:
    """Write one self-contained page on attacked runs, scored or not, and return its path.

    out: the page; by default report.html of the first run.
    """
    from attacker.report import build

    if not runs:
        raise ValueError("give at least one recording or run to report on")
    folders = [run_of(one) if isinstance(one, Recording) else Path(one) for one in runs]
    return build(folders, None if out is None else Path(out))


def run_of(recording: Recording) -> Path:
    """Return the run's folder: that of the recording's own, or the folder above."""
    return recording.folder.resolve().parent

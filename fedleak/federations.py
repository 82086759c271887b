"""Federations: run one, open its recording, report on it, and audit it."""

import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from defenses.registry import references
from fedsim.recording import Recording, find_recording

if TYPE_CHECKING:
    from attacker.audit import Audit
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
    """Run and record a federation until it has finished, and return the recording.

    experiment: path of a TOML file, a mapping with the same keys, or an `Experiment`. Code that a file or mapping names as
                `module:function` is imported.
    overrides:  keys of the experiment, such as rounds=3, or training={"batch_size": 4}, which replaces the whole table.
    out:        folder of the run; by default a new temporary folder, which is not removed. If it holds a finished run of the same
                experiment, its recording is returned.
    engine:     "local" runs the clients one after the other in this process; "ray" runs them in parallel; "deployment" runs each
                party as a process of its own.
    resume:     continue the unfinished run of this experiment in `out` after its last complete round.
    client_seed: seed of the clients' secrets, from which their noise and the order of their examples are drawn; None draws the
                secrets from the system.

    Raises ExperimentError for wrong keys or values of the experiment; ValueError or FileNotFoundError if its data, model or code
    cannot be loaded or do not fit, if `engine` is unknown, or if `out` holds a run of another experiment or an unfinished run
    without `resume`; DiskFull if there is not enough disk space at the start; EngineError if the federation fails, for
    example because no client answers or the disk becomes full; and EmptyRunError if `out` holds this run, finished without an
    answer of any client.
    """
    from fedsim.commands.run import federate
    from fedsim.config.experiment import Experiment, admit_code, read, validate

    if isinstance(experiment, Path | str):
        resolved = read(Path(experiment), list(overrides.items()), trusted=True)
    elif isinstance(experiment, Experiment):
        resolved = validate({**tomllib.loads(experiment.to_toml()), **overrides}, source="experiment")
    else:
        raw = {**experiment, **overrides}
        admit_code(raw)
        resolved = validate(raw, source="experiment")
    folder = Path(tempfile.mkdtemp(prefix="fedleak-")) / "run" if out is None else Path(out)
    federate(resolved, folder, engine=engine, resume=resume, client_seed=client_seed)
    return load(folder)


def load(path: Path | str, *, code: Sequence[str] = ()) -> Recording:
    """Open a recording, or the recording of a run.

    code: names `module:function` of code that the recording or its truth names, such as a defense or a data set of your own. The
          code that you name here is imported. Other code that a recording names is imported only if it was allowed before in this
          process or its parent.
    Raises ValueError if `path` holds neither a recording nor a run, if the manifest is damaged or names code that is not allowed,
    or if code cannot be imported.
    """
    folder = Path(path)
    for reference in code:
        references.admit(reference)
    return Recording(find_recording(folder))


def report(*runs: "Recording | Path | str", out: Path | str | None = None) -> Path:
    """Write one self-contained HTML page about runs and the attacks on them, if any, and return its path.

    runs: recordings, or folders of runs.
    out:  path of the page, which is replaced if it exists; by default report.html in the folder of the first run. Only the
          page's owner can read it, since it shows true examples.
    Raises ValueError without runs, or if one of them is neither a recording nor the folder of a run.
    """
    from attacker.report import build

    if not runs:
        raise ValueError("give at least one recording or run to report on")
    folders = [find_run(run) if isinstance(run, Recording) else Path(run) for run in runs]
    return build(folders, None if out is None else Path(out))


def audit(
    recording: "Recording | Path | str",
    *,
    seconds: float = 600,
    truth: "Sequence[Path | str] | None" = None,
    model: str | None = None,
) -> "Audit":
    """Look for leaks in a recorded federation, by checks of its updates and by attacks, and return the findings with a grade.

    The grade is that of the worst finding: "none found", "low", "moderate", "serious" or "severe", see docs/audit.md.

    Reconstructions and, with truth, scores are written into the folder of the run. Cases that an attack reconstructed there
    before are not attacked again.
    recording: a recording, or the folder of a run or a recording.
    seconds: time for all attacks, including their nulls (attacks without the update). The expected processor time of the chosen
             attacks on one core is at most this, except that one attack is always chosen. What still runs when this much
             wall-clock time is used up is stopped, if this is called in the main thread.
    truth:   folders of the clients' true examples; by default the folder `truth` of the run, if there is one. Without truth, the
             confidence of the attacks decides whether examples leak.
    model:   code "module:function" that builds the network, which is imported; for a recorded network that is not built in.
    Raises ValueError if `recording` holds no recording.
    """
    from attacker.audit import audit as audit_run
    from fedsim import models

    opened = recording if isinstance(recording, Recording) else load(recording)
    if model is not None:
        models.admit(model, name=opened.manifest.model.name)
    own = opened.folder.parent / "truth"
    folders = [Path(folder) for folder in truth] if truth is not None else [own] if own.is_dir() else []
    return audit_run(opened.folder, seconds=seconds, truth=folders, model=model)


def find_run(recording: Recording) -> Path:
    """Return the folder of the run that a recording belongs to, which is the folder above the recording."""
    return recording.folder.resolve().parent

"""Detection of planted faults by audits, their false alarms, and lower bounds on the error of attacks and on epsilon.

    faults     six federations with a planted fault each: the check of the audit that is meant for this fault must report it,
               without running an attack
    bounds     attacks on images of a known Gaussian distribution through a network of two layers, with noise, clipping and
               pruning, beside the Cramer-Rao bound on their error; labels are known
    canaries   lower bounds on epsilon from guesses which of two canaries (test examples) a client used, beside the accountant's
               epsilon
    sound      twelve federations without a fault, each with a defense that does what it declares (--quick: three): no check may
               report a finding that is graded serious or worse

The federations of `faults` and `sound` have 8 clients and 6 rounds on the embedded digits.
`worst_ratio` is the largest ratio, over defenses, of the best attack's error to the bound. `below_bound` is the number of pairs
of a defense and an attack for which the error, with its confidence interval, lies below the bound.
For each pair of a noise multiplier and a number of rounds, guesses of simulated canaries are repeated. The ratio of a pair is the
median over repetitions of the lower bound with 10,000 canaries, divided by the accountant's epsilon; `epsilon_ratio` is the
smallest ratio of a pair. `epsilon_above` is the share of repetitions, of all pairs, whose lower bound exceeds the accountant's
epsilon.
aims: faults_named 6, false_alarms 0, worst_ratio at most 1.5, below_bound 0, epsilon_ratio at least 0.8, epsilon_above
about 0.05.
"""

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.audit.canaries import NUM_CANARIES, measure_canaries
from support.audit.efficiency import measure_efficiency
from support.audit.faults import FAULTS, SOUND_SETTINGS, plant_fault
from support.contract import Options, ResultRow, measure_cpu, parse_options, print_results

from attacker.audit import GRADES, Finding, check_recording
from fedsim import models
from fedsim.config.experiment import validate
from fedsim.engine import engines
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording

BASE_EXPERIMENT: Mapping[str, Any] = {
    "rounds": 6,
    "model": {"name": "mlp", "hidden": [64]},
    "data": "digits",
    "clients": {"count": 8},
    "training": {"batch_size": 4, "steps": 1, "learning_rate": 0.1},
}
MIN_ALARM_GRADE = GRADES.index("serious")


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=("faults", "sound", "bounds", "canaries"))
    warnings.simplefilter("ignore")
    rows: list[ResultRow] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.table in (None, "faults"):
            rows += [_measure_fault(options, fault, Path(folder)) for fault in FAULTS]
        if options.table in (None, "sound"):
            rows += [_measure_sound(options, settings, Path(folder)) for settings in SOUND_SETTINGS[:: 4 if options.quick else 1]]
        if options.table in (None, "canaries"):
            rows += measure_canaries(options, Path(folder))
    faults, sound = ([row for row in rows if row["kind"] == kind] for kind in ("fault", "sound"))
    summary = {"faults": len(faults), "faults_named": sum(row["as expected"] for row in faults)}
    summary |= {"sound": len(sound), "false_alarms": sum(not row["as expected"] for row in sound)}
    if options.table in (None, "bounds"):
        rows += (bounds := measure_efficiency(options))
        summary |= {"worst_ratio": max(row["ratio"] for row in bounds), "below_bound": sum(row["below"] for row in bounds)}
    if simulated := [row for row in rows if "above" in row]:
        many = [row for row in simulated if row["canaries"] == max(NUM_CANARIES)]
        summary |= {"epsilon_ratio": min(row["ratio of medians"] for row in many)}
        summary |= {"epsilon_above": sum(row["above"] for row in simulated) / len(simulated)}
    print_results("audit", rows, summary, options)


def _measure_fault(options: Options, fault: Any, folder: Path) -> ResultRow:
    with plant_fault(fault):
        run = _federate(options, fault.settings, folder / fault.name.replace(" ", "-"))
    fault.report(run)
    return _check_recording("fault", fault.name, run, lambda found: fault.rule in found)


def _measure_sound(options: Options, settings: Mapping[str, Any], folder: Path) -> ResultRow:
    name = str(settings.get("defense") or settings["gradient"])
    run = _federate(options, settings, folder / f"sound-{SOUND_SETTINGS.index(settings)}")  # type: ignore[arg-type]
    return _check_recording("sound", name, run, lambda found: not found)


def _check_recording(kind: str, name: str, run: Path, expected: Any) -> ResultRow:
    """Run the audit's checks on the recording in `run`, and return its row of the table.

    Column named: names of the checks that report a finding graded serious or worse. Column "as expected": result of `expected`, a
    function from the set of these names to a boolean. kind: "fault" or "sound". name: of the federation in the table.
    """
    with measure_cpu() as clock:
        results = check_recording(Recording(run / "recording"))
    alarms = [result for result in results if isinstance(result, Finding) and GRADES.index(result.grade) >= MIN_ALARM_GRADE]
    rules = {alarm.rule for alarm in alarms}
    evidence = "; ".join(alarm.evidence for alarm in alarms)
    return {
        "kind": kind,
        "federation": name,
        "named": ", ".join(sorted(rules)),
        "as expected": expected(rules),
        "cpu_seconds": clock.seconds,
        "evidence": evidence,
    }


def _federate(options: Options, settings: Mapping[str, Any], out: Path) -> Path:
    """Run the federation with `BASE_EXPERIMENT`, in which `settings` replace or add keys, and return its folder `out`."""
    experiment = {**BASE_EXPERIMENT, "seed": options.seed, **settings}
    if isinstance(experiment["model"], str):
        models.admit(experiment["model"])
    engines.run(
        FederationRun(experiment=validate(experiment, source=out.name), out=out, device="cpu", client_seed=0), engine="local"
    )
    return out


if __name__ == "__main__":
    main()

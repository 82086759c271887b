"""Cost and effect of each defense at three strengths: accuracy, bytes and epsilon of a federation, and the success of attacks.

Each row is one federation (support/defenses/federation.py), which trains with the defense. Bytes are counted in the first
round; epsilon is over all rounds. The recorded updates, of one step on one example each, are attacked without and with knowledge
of the defense. Every attack is listed with its null on the same cases. The last columns are the attack with the highest mean PSNR
in the row, and its verdict against the null with the highest mean PSNR. With secure aggregation, sums over 2, 4, 6 and 8 clients
are attacked instead; with MixUp, batches of two.

The expected change of the PSNR from no defense to the strongest setting is declared in support/defenses/grid.py, for CPL and
Inverting Gradients with and without knowledge of the defense. `as_declared` is the share of these measured changes that agree
with the declared change, by equivalence tests with a margin (support/defenses/outcomes.py).

Many clipping norms and noise levels are multiples of the size of undefended updates. Results are stored in runs/benchmarks as
soon as they are measured, and later runs of the same version of the code reuse them. `--fresh` deletes all stored results first.
`--kept` prints stored results only. `--tuning` uses the part of the data on which settings are chosen. `--quick` measures only
two defenses, with smaller federations. A name as argument selects one defense.
"""

import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.contract import Options, parse_options, print_results
from support.defenses.federation import DataFiles, federate, make_settings, measure_units, write_data
from support.defenses.grid import DECLARED_PAIRS, GRID, Entry, fill_template
from support.defenses.measurements import MeasuredAttack, Measurement, MeasurementFile, attack_all
from support.defenses.outcomes import MARGIN_DB, Change, compare
from support.defenses.settings import BATCH_ATTACKS, SINGLE_EXAMPLE_ATTACKS, SUM_ATTACKS, describe_attacks, list_attacks

from attacker.attacks import AttackSpec
from attacker.scoring.statistics import Estimate
from attacker.scoring.verdict import Verdict

ATTACK_COLUMNS = (*(f"{attack} {'knowing' if knows else 'ignoring'}" for attack, knows in DECLARED_PAIRS), "exact", "CPL tuned")
"""Columns of the table: attacks that ignore or know the defense, and attacks for which this makes no difference.

Results without a defense stand in the columns "ignoring". "CPL tuned" attacks secure sums only.
"""
STRENGTH_NAMES = ("mild", "middle", "strong")
NUM_ATTACKED, NUM_ATTACKED_QUICK = 16, 2
"""Number of updates of the first round that are attacked."""
NUM_ATTACKED_SUMS = {2: 8, 4: 6, 6: 6, 8: 6}
"""Number of rounds whose sums are attacked, by the number of clients in each."""
QUICK_DEFENSES = ("clip", "top_k")


@dataclass(frozen=True)
class FederationJob:
    """One federation to run.

    entry:    its defense, from the grid; None for no defense. value: what the experiment's key `entry.key` is set to.
    strength: word for the setting in the table: "mild", "middle", "strong", or "sums of N"; "" for no defense.
    batch:    number of examples per client step. cohort: number of clients drawn per round; None for all.
    """

    entry: Entry | None
    strength: str
    value: Any
    batch: int = 1
    cohort: int | None = None

    @property
    def name(self) -> str:
        """Name of the job's row, such as "clip strong" or "none, batch 2"."""
        none = "none" + (f", batch {self.batch}" if self.batch > 1 else "") + (f", {self.cohort} a round" if self.cohort else "")
        return f"{self.entry.name} {self.strength}" if self.entry else none

    @property
    def none(self) -> "FederationJob":
        """The same federation without a defense."""
        return replace(self, entry=None, strength="", value="")


class NotMeasured(LookupError):
    """Error for a setting whose result is not stored, if only stored results are to be printed."""


class Bench:
    """The runner of jobs, which stores their results and reuses stored ones. folder: of temporary files."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.data: DataFiles = write_data(options, folder, "tuning" if "tuning" in options.flags else "report")
        self.kept = MeasurementFile(Path("runs/benchmarks/defenses.jsonl"), fresh="fresh" in options.flags)

    def measure(self, job: FederationJob) -> Measurement:
        """Return the stored result of a job; without one, run its federation and the attacks on it, and store the result.

        Raises NotMeasured if no result is stored and `--kept` is given.
        """
        experiment = self._make_experiment(job)
        spec = list_attacks(job.entry, batch=job.batch, cohort=job.cohort, quick=self.options.quick)
        identity = {"experiment": experiment, "attacks": describe_attacks(spec), "data": [self.data.part, self.data.name]}
        identity |= {} if self.options.device == "cpu" else {"device": self.options.device}
        measured = self.kept.find(identity, self.folder)
        if measured is None and "kept" in self.options.flags:
            raise NotMeasured(f"{job.name} was not measured yet; run without --kept")
        if measured is None:
            out = self.folder / job.name.replace(", ", "-").replace(" ", "-")
            federation = federate(experiment, out, self.options.device)
            attacked = attack_all(federation, spec, self.options.device)
            own = {"accuracy": federation.accuracy, "bytes_up": federation.bytes_up, "epsilon": federation.epsilon}
            measured = Measurement(own, measure_units(federation), attacked)
            self.kept.add(identity, self.folder, measured)
            print(f"{job.name}: {', '.join(f'{name} {one.psnr:.1f} dB' for name, one in attacked.items())}", file=sys.stderr)
        return measured

    def _make_experiment(self, job: FederationJob) -> dict[str, Any]:
        attacked = (
            NUM_ATTACKED_QUICK if self.options.quick else NUM_ATTACKED if job.cohort is None else NUM_ATTACKED_SUMS[job.cohort]
        )
        experiment = make_settings(self.data, attacked=attacked, batch=job.batch, cohort=job.cohort, quick=self.options.quick)
        return experiment if job.entry is None else {**experiment, job.entry.key: job.value}


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=[entry.name for entry in GRID], flags=("fresh", "kept", "tuning"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(options, Path(name))
        rows, checks = [], []
        nones: dict[FederationJob, Measurement] = {}
        for job, none, found in _measure_all(options, bench):
            if job.none not in nones:
                nones[job.none] = none
                rows.append(_make_row(job.none, none, None))
            rows.append(_make_row(job, found, none))
            if job.entry and job.strength == "strong":
                checks += list(_check_declarations(job.entry, none, found))
    losses = [row["accuracy lost"] for row in rows if row["strength"] == "mild"]
    print("\n".join([f"images: {bench.data.part} part of {bench.data.name}", *_list_attacks()]), end="\n\n")
    print_results(
        "defenses, PSNR from none to the strongest in dB", checks, {"margin_db": MARGIN_DB}, replace(options, json=False)
    )
    summary = {
        "as_declared": sum(check["holds"] for check in checks) / len(checks) if checks else None,
        "undecided": sum(check["outcome"] == "undecided" for check in checks),
        "pairs": len(checks),
        "worst_accuracy_loss": max(losses, default=None),
        "differs": "; ".join(_format_check(check) for check in checks if not check["holds"]) or "none",
    }
    print_results("defenses", rows, summary, options)


def _measure_all(options: Options, bench: Bench) -> Iterator[tuple[FederationJob, Measurement, Measurement]]:
    """Yield each job with two results: first of the same federation without a defense, then of the job itself.

    With `--kept`, a job is skipped if one of the two results is not stored.
    """
    for job in (job for entry in _select_entries(options) for job in _plan_jobs(entry, bench)):
        try:
            none, found = bench.measure(job.none), bench.measure(job)
        except NotMeasured as missing:
            print(missing, file=sys.stderr)
            continue
        yield job, none, found


def _select_entries(options: Options) -> Iterator[Entry]:
    for entry in GRID:
        if options.table in (None, entry.name) and (not options.quick or options.table or entry.name in QUICK_DEFENSES):
            yield entry


def _plan_jobs(entry: Entry, bench: Bench) -> Iterator[FederationJob]:
    if entry.cohorts:
        for cohort in entry.cohorts:
            yield FederationJob(entry, f"sums of {cohort}", True, cohort=cohort)
        return
    try:
        plain = bench.measure(FederationJob(None, "", "", batch=entry.batch))
    except NotMeasured as missing:
        print(missing, file=sys.stderr)
        return
    for strength, text in zip(STRENGTH_NAMES, entry.settings, strict=True):
        yield FederationJob(
            entry, strength, fill_template(text, public=f"npz:{bench.data.public}", **plain.units), batch=entry.batch
        )


def _list_attacks() -> list[str]:
    """Return one line of text for each attack: name, what it attacks, and its arguments.

    An attack is on updates of single examples, on updates of batches, or on the sums of secure aggregation.
    """
    kinds = {"single examples": SINGLE_EXAMPLE_ATTACKS, "batches": BATCH_ATTACKS, "sums": SUM_ATTACKS}
    return [f"{name} on {kind}: {AttackSpec(name=a, arguments=b)}" for kind, of in kinds.items() for name, (a, b) in of.items()]


def _make_row(job: FederationJob, measured: Measurement, none: Measurement | None) -> dict[str, Any]:
    """Return one row of the table of jobs. measured: result of the job.

    none: result of the same federation without a defense; None if `job` has no defense itself.
    """
    own = measured.own
    row: dict[str, Any] = {"defense": job.entry.name if job.entry else job.name, "strength": job.strength}
    row |= {"setting": _shorten(str(job.value)), **own}
    row |= {"accuracy lost": None if none is None else none.own["accuracy"] - own["accuracy"]}
    row |= {f"{column} (null)": _format_beside_null(measured.attacked, column) for column in ATTACK_COLUMNS}
    best, null = measured.attacked[measured.strongest], measured.attacked[measured.best_null]
    row |= {"strongest": measured.strongest, "dB": _format_interval(best.summary.psnr)}
    row |= {"best null dB": _format_interval(null.summary.null.psnr if null.summary.null else None)}
    verdict = measured.verdict
    row |= {"recovered": f"{verdict.recovered} of {verdict.examples}", "verdict": _format_verdict(verdict)}
    return row


def _shorten(value: str) -> str:
    """Return the text of a setting without the folder of its public images, which is temporary."""
    return re.sub(r"npz:[^']*/", "npz:", value)


def _format_beside_null(attacked: dict[str, MeasuredAttack], column: str) -> str | None:
    """Return a column's text: the mean PSNR in dB of an attack, with its null's in parentheses; None if either is missing.

    attacked: dict from the name of an attack to its scores. column: name of the attack. For "X ignoring", the attack X is taken
    if there is no "X ignoring", as without a defense or for secure sums.
    """
    one = attacked.get(column) or attacked.get(column.removesuffix(" ignoring"))
    if one is None or one.summary.null is None or one.summary.null.psnr is None:
        return None
    return f"{one.psnr:.1f} ({one.summary.null.psnr.value:.1f})"


def _format_interval(one: Estimate | None) -> str:
    return "" if one is None else f"{one.value:.1f} ({one.low:.1f} to {one.high:.1f})"


def _format_verdict(verdict: Verdict) -> str:
    """Return the outcome of a verdict; "partly leaked" is followed by the titles of the scores that show a leak."""
    leaked = ", ".join(one.title for one in verdict.leaked)
    return f"{verdict.outcome} ({leaked})" if verdict.outcome == "partly leaked" else verdict.outcome


def _check_declarations(entry: Entry, none: Measurement, strong: Measurement) -> Iterator[dict[str, Any]]:
    """Yield a row for each of CPL and Inverting Gradients, ignoring and knowing the defense.

    The row holds the PSNR at the strongest setting minus the PSNR without a defense, paired by example, as a mean over cases with
    a 95 % interval. It also holds the declared change, whether the measured change agrees with it, the number of cases, and the
    PSNR at the strongest setting minus the PSNR of the null that has the highest mean PSNR there ("over null").
    """
    for (attack, knows), declared in zip(DECLARED_PAIRS, entry.declared, strict=True):
        label = f"{attack} {'knowing' if knows else 'ignoring'}"
        before, after = none.attacked[attack], strong.attacked[label]
        null = strong.attacked[strong.best_null].scored.null
        change: Change = compare(before.scored, replace(after.scored, null=null))
        yield {
            "defense": entry.name,
            "attack": label,
            "declared": declared,
            "difference": change.from_none.value,
            "low": change.from_none.low,
            "high": change.from_none.high,
            "over null": _format_interval(change.over_null),
            "cases": change.cases,
            "outcome": change.outcome,
            "holds": change.is_as_declared(declared),
        }


def _format_check(check: dict[str, Any]) -> str:
    change = f"{check['difference']:+.1f} ({check['low']:+.1f} to {check['high']:+.1f}) dB, {check['outcome']}"
    return f"{check['defense']} against {check['attack']}: declared {check['declared']}, measured {change}"


if __name__ == "__main__":
    main()

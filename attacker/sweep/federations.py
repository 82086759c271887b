"""The work on one federation of a sweep: its training, the attacks on its recording and their scores, stored in a result file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from attacker.scoring import Scorer, ScoreRow, summarise
from attacker.scoring.row_pairs import average_by_example, fill_failures, pair_rows
from attacker.sweep.grid import GridAttack, GridFederation, SweepGrid
from fedsim.recording import Recording
from fedsim.recording.files import make_private, write_json
from fedsim.recording.round_metrics import read_metrics
from fedsim.recording.safe_files import read_json

RESULT_FILE = "sweep.json"
MAX_RESULT_BYTES = 100_000_000
RECONSTRUCTIONS_FOLDER, TUNING_FOLDER = "reconstructions", "tuning"
"""Folders of a run for the reconstructions that are reported, and for the reconstructions by which settings are chosen."""


class OutOfTime(Exception):
    """Error that is raised instead of beginning another part of the work after the deadline. Finished parts stay on disk.

    Parts are the training of a federation, and each replay of an attack or of its null. If the grid lists several settings of an
    attack, each of them has its own replays.
    """


@dataclass(frozen=True, kw_only=True)
class AttackScores:
    """The scores of one attack on one federation.

    spec:     the attack with its arguments as text; of several candidates, the one that was best on the tuning clients.
    knows:    whether the attack models the defense; False if it could not run.
    refused:  why the attack could not run; "" if it ran.
    outcome:  verdict against the null, see `attacker.scoring.verdict`; "no verdict" if there is none, "" if it could not run.
    examples: one mapping for each distinct example that the attack and its null finished: `index` in the data set, `case` (key
              of the last case with it), `rmse` and `null_rmse` (root of the squared error averaged over values and over its
              cases, data in [0, 1]; a case without a reconstruction counts with the null's error), `psnr` (mean over its cases,
              each at most 58.9 dB; None for rows of tables), `success` and `null_success` (share of its cases in which it was
              recovered), `labels` (share of its cases in which its label was right; None if unknown).
    """

    spec: str
    knows: bool
    refused: str = ""
    outcome: str = ""
    examples: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class FederationResult:
    """The results of one federation.

    accuracy, loss: of the global model on the test data, after the last finished round; None if unknown.
    bytes_up: number of bytes sent by all clients in all rounds.
    epsilon: epsilon of all rounds together; None if infinite or not computed.
    failed:  the error that stopped the training; "" if there was none. A federation that failed is not attacked.
    attacks: dict from the attack's name in the grid to its scores.
    """

    accuracy: float | None = None
    loss: float | None = None
    bytes_up: int = 0
    epsilon: float | None = None
    failed: str = ""
    attacks: Mapping[str, AttackScores]


def read_result(grid: SweepGrid, federation: GridFederation, out: Path) -> FederationResult | None:
    """Return the stored result of a federation, also if it failed; None if there is none, or the grid's settings differ now."""
    path = out / federation.name / RESULT_FILE
    if not path.exists():
        return None
    stored = read_json(path, limit=MAX_RESULT_BYTES)
    if stored.pop("digest", None) != grid.digest(federation):
        return None
    attacks = {
        name: AttackScores(**{**scores, "examples": tuple(scores["examples"])}) for name, scores in stored.pop("attacks").items()
    }
    return FederationResult(**stored, attacks=attacks)


def measure_federation(
    grid: SweepGrid, federation: GridFederation, out: Path, *, deadline: float = float("inf"), ray: str | None = None
) -> FederationResult:
    """Train, record, attack and score one federation; store and return its result. Finished parts are not done again.

    deadline: value of `time.monotonic` after which no further part begins, see `OutOfTime`; a part that has begun is finished.
    ray: address of a Ray cluster that runs the attacks; None for this machine. Raises OutOfTime if a part is left.
    """
    if (found := read_result(grid, federation, out)) is not None:
        return found
    run = out / federation.name
    _check_time(deadline)
    failed = _train(federation, run)
    attacks: dict[str, AttackScores] = {}
    for attack in () if failed else grid.attacks:
        _check_time(deadline)
        attacks[attack.name] = _measure_attack(grid, federation, attack, run, deadline=deadline, ray=ray)
    result = FederationResult(**_read_utility(run), failed=failed, attacks=attacks)
    make_private(run)
    write_json(run / RESULT_FILE, {"digest": grid.digest(federation), **asdict(result)}, below=run)
    return result


def _check_time(deadline: float) -> None:
    if monotonic() >= deadline:
        raise OutOfTime


def _train(federation: GridFederation, run: Path) -> str:
    """Train the federation to its last round, from where an earlier call stopped; return the error that prevents it, or ""."""
    from fedsim.engine import engines
    from fedsim.engine.run import FederationRun

    seed = federation.experiment.seed
    job = FederationRun(experiment=federation.experiment, out=run.absolute(), client_seed=seed, resume=True)
    try:
        if not job.is_done():
            engines.run(job, engine="local")
    except (engines.EngineError, ValueError) as error:
        return str(error)
    return ""


def _read_utility(run: Path) -> dict[str, Any]:
    rows = read_metrics(run)
    if not rows:
        return {}
    last, epsilon = rows[-1], rows[-1].get("privacy", {}).get("epsilon")
    return {
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "bytes_up": sum(row.get("bytes_up", 0) for row in rows),
        "epsilon": epsilon if isinstance(epsilon, int | float) and isfinite(epsilon) else None,
    }


def _measure_attack(
    grid: SweepGrid, federation: GridFederation, attack: GridAttack, run: Path, *, deadline: float, ray: str | None
) -> AttackScores:
    """Run one attack and its null on a federation's recording, and score both. If it cannot run, the result says why.

    If the attack is given with several settings (`attack.candidates`), each is first run on the updates of the tuning clients,
    whose scores are not reported. The setting with the smallest mean RMSE there is then used on the reported clients.
    """
    recording, scorer = Recording(run / "recording"), Scorer(run, [run / "truth"])
    reported, tuning = _choose_clients(recording, grid)

    def score(spec: AttackSpec, clients: Sequence[str], out: str) -> list[ScoreRow]:
        rows: list[ScoreRow] = []
        for null in (False, True):
            _check_time(deadline)
            replay = Replay(
                recording=recording, spec=replace(spec, null=null), out=run / out, clients=frozenset(clients), ray=ray
            )
            keys = {case.key for case in replay.plan.cases}
            rows += [row for row in scorer.score(replay.run().folder) if row.case in keys]
        return rows

    spec = attack.candidates[0]
    try:
        if len(attack.candidates) > 1:
            spec = min(attack.candidates, key=lambda spec: _compute_mean_error(score(spec, tuning, TUNING_FOLDER)))
        rows = score(spec, reported, RECONSTRUCTIONS_FOLDER)
    except ValueError as error:
        return AttackScores(spec=str(spec), knows=False, refused=str(error))
    (summary,) = summarise(rows)
    outcome = summary.verdict.outcome if summary.verdict else "no verdict"
    knows = attack.knows(federation.experiment, spec)
    return AttackScores(spec=str(spec), knows=knows, outcome=outcome, examples=tuple(_list_examples(rows)))


def _choose_clients(recording: Recording, grid: SweepGrid) -> tuple[list[str], list[str]]:
    """Return the names of the clients whose updates are attacked and reported, and of the clients that tune the attacks.

    No client is in both lists. Raises ValueError if no client is left to be reported; if there are only fewer than the grid asks
    for, these are reported.
    """
    names = list(
        dict.fromkeys(row.client for row in recording.read_rows(on_damage=lambda error: None) if row.status == "complete")
    )
    left = len(names) - grid.attacked.tuning_clients
    if left < 1:
        raise ValueError(
            f"only {len(names)} clients sent updates, and attacked.tuning_clients = {grid.attacked.tuning_clients} leaves none "
            "to attack; lower it"
        )
    return names[: min(grid.attacked.clients, left)], names[left:]


def _compute_mean_error(rows: Sequence[ScoreRow]) -> float:
    values = [row["rmse"] for row in _list_examples(rows)]
    return sum(values) / len(values) if values else float("inf")


def _list_examples(rows: Sequence[ScoreRow]) -> list[dict[str, Any]]:
    """Return the scores of each distinct example that attack and null finished, as in `AttackScores.examples`."""
    both = pair_rows(
        [row for row in rows if not row.null and row.is_finished], [row for row in rows if row.null and row.is_finished]
    )
    scores: dict[str, Mapping[int, float]] = {}
    for prefix, own in (("", both.attack), ("null_", fill_failures(both.null))):
        scores |= {f"{prefix}{score}": average_by_example(own, score) for score in ("mse", "psnr", "success", "label_success")}
    cases = {row.index: row.case for row in both.attack}
    return [
        {
            "index": index,
            "case": case,
            "rmse": scores["mse"][index] ** 0.5,
            "null_rmse": scores["null_mse"][index] ** 0.5,
            "psnr": scores["psnr"].get(index),
            "success": scores["success"].get(index, 0.0),
            "null_success": scores["null_success"].get(index, 0.0),
            "labels": scores["label_success"].get(index),
        }
        for index, case in cases.items()
        if index in scores["mse"] and index in scores["null_mse"]
    ]

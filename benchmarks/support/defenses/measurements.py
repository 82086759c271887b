"""The results of attacks on one federation, and the file in which measurements are stored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from support.defenses.federation import Federation
from support.defenses.outcomes import ExampleScores

from attacker.attacks import AttackSpec
from attacker.replay.identity import identify_version
from attacker.replay.replay import Replay
from attacker.scoring import Scorer, ScoreRow, summarise
from attacker.scoring.row_pairs import average_by_example, fill_failures
from attacker.scoring.summary import Summary
from attacker.scoring.verdict import Verdict, judge_attack

UNSTORED_FIELDS = ("environment", "notes", "pair")
"""Fields of score rows that are not stored: they are long, and no table shows them."""


@dataclass(frozen=True)
class MeasuredAttack:
    """The scores of one attack on one federation.

    own: score rows of the attack. null: score rows of its null on the same cases.
    """

    own: list[ScoreRow]
    null: list[ScoreRow]

    @cached_property
    def summary(self) -> Summary:
        """Summary of the attack's scores, which includes the summary of its null's scores, and the verdict."""
        return next(one for one in summarise([*self.own, *self.null]))

    @property
    def psnr(self) -> float:
        """Mean PSNR over the examples, each capped at 58.9 dB; if the attack gave no answer, the PSNR of the null counts."""
        assert self.summary.psnr is not None  # examples are images
        return self.summary.psnr.value

    @cached_property
    def scored(self) -> ExampleScores:
        """PSNR of each example by the attack and by its null; if the attack gave no answer, the null's PSNR counts for both."""
        psnr, its = (average_by_example(fill_failures(rows, self.null), "psnr") for rows in (self.own, self.null))
        cases = {str(row.index): row.case for row in self.own}
        return ExampleScores(cases, *({str(index): value for index, value in one.items()} for one in (psnr, its)))


@dataclass(frozen=True)
class Measurement:
    """The results of one federation.

    own: dict with its accuracy, bytes sent by clients (bytes_up) and epsilon. units: dict with the size of its updates, from
    `measure_units`. attacked: dict from the name of an attack to its scores.
    """

    own: dict[str, Any]
    units: dict[str, float]
    attacked: dict[str, MeasuredAttack]

    @property
    def strongest(self) -> str:
        """Name of the attack with the highest mean PSNR."""
        return max(self.attacked, key=lambda name: self.attacked[name].psnr)

    @property
    def best_null(self) -> str:
        """Name of the attack whose null has the highest mean PSNR.

        Verdicts compare with this null, since an attack may use a prior that its own null lacks, and the gain from that prior
        would be mistaken for a leak.
        """
        return max(self.attacked, key=lambda name: fmean(self.attacked[name].scored.null.values()))

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the attack with the highest mean PSNR, compared with the null that has the highest mean PSNR."""
        return judge_attack(self.attacked[self.strongest].own, self.attacked[self.best_null].null)


class MeasurementFile:
    """A file of measurements, each with a hash of its settings and of the code, so that a later run does not repeat them.

    fresh: whether to delete the measurements of earlier runs first.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {row["key"]: row for row in map(json.loads, lines)}

    def find(self, identity: Mapping[str, Any], folder: Path) -> Measurement | None:
        """Return the measurement that this version of the code stored for the settings `identity`, or None if there is none.

        folder: temporary folder; its path is left out when settings are compared.
        """
        row = self.known.get(_hash_identity(identity, folder))
        if row is None:
            return None
        attacked = {name: MeasuredAttack(_read(one["own"]), _read(one["null"])) for name, one in row["attacked"].items()}
        return Measurement(row["own"], row["units"], attacked)

    def add(self, identity: Mapping[str, Any], folder: Path, measured: Measurement) -> None:
        """Append a measurement to the file, with a hash of its settings `identity`.

        folder: temporary folder; its path is removed from the settings before they are hashed.
        """
        attacked = {
            name: {"own": _select_fields(one.own), "null": _select_fields(one.null)} for name, one in measured.attacked.items()
        }
        row = {"key": _hash_identity(identity, folder), "own": measured.own, "units": measured.units, "attacked": attacked}
        self.known[row["key"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _hash_identity(identity: Mapping[str, Any], folder: Path) -> str:
    text = json.dumps({**identity, "code": identify_version()}, sort_keys=True).replace(str(folder), "")
    return sha256(text.encode()).hexdigest()[:16]


def _select_fields(rows: list[ScoreRow]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.to_dict().items() if key not in UNSTORED_FIELDS} for row in rows]


def _read(rows: list[dict[str, Any]]) -> list[ScoreRow]:
    return [ScoreRow.from_dict(row) for row in rows]


def attack_all(federation: Federation, attacks: Mapping[str, AttackSpec], device: str) -> dict[str, MeasuredAttack]:
    """Run attacks, given by name, and their nulls on a federation's recording, and return the scores of each, by name."""
    out = federation.run.out
    scorer = Scorer(out, [out / "truth"])

    def score_attack(spec: AttackSpec) -> list[ScoreRow]:
        replay = Replay(recording=federation.recording, spec=spec, out=out / "reconstructions", device=device)
        return scorer.score(replay.run().folder)

    return {name: MeasuredAttack(score_attack(spec), score_attack(replace(spec, null=True))) for name, spec in attacks.items()}

"""Contents of a report: the recording of a run, its attacks, and their scores."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacker.report.hints import Hint, Record
from attacker.report.linked_cases import LinkedCase
from attacker.report.pairs import ExamplePair
from attacker.report.unscored import UnscoredResults
from attacker.scoring import GrowthPoint, ScoreRow, Summary
from fedsim.recording import Manifest, Row
from fedsim.recording.masked_vectors import SUM_CLIENT


@dataclass(frozen=True, kw_only=True)
class Example:
    """One true example in one case (observations that are attacked together), as the report shows it.

    row:  its scores. pair: original and reconstruction to be shown. null: the same example in the attack's null; None if the null
          has no score of it, and for examples of a null.
    """

    row: ScoreRow
    pair: ExamplePair
    null: "Example | None" = None

    @property
    def place(self) -> tuple[Any, ...]:
        """The case, rounds, batch, position and data set index of the example: equal in an attack and its null."""
        return self.row.case, self.row.rounds, self.row.batch, self.row.position, self.row.index

    @property
    def rounds_right(self) -> tuple[int, ...]:
        """The rounds to which the attack assigns its reconstruction of the example, and in which the example was used."""
        return tuple(round for round in self.row.rounds_claimed or () if round in self.row.rounds)

    @property
    def rounds_wrong(self) -> tuple[int, ...]:
        """The rounds to which the attack assigns its reconstruction of the example, and in which the example was not used."""
        return tuple(round for round in self.row.rounds_claimed or () if round not in self.row.rounds)


@dataclass(frozen=True, kw_only=True)
class AttackOnRun:
    """One attack on one run: its settings and its results.

    source:        name of the folder of its reconstructions. attack: registered name. spec: name with arguments, as text.
    summary:       None if nothing is scored yet. null: the results of the attack's null; None if the null has no scores.
    cases:         number of cases with a recorded update, without those whose rounds are all scored in other cases; None if its
                   attack.json is missing.
    states:        dict from each state (done, failed, interrupted, waiting) to the number of these cases in it; without
                   attack.json, of the scored cases.
    examples:      scored examples, without the examples of cases that were waiting when scored.
    losses:        for each reconstruction that can be read, the attack's own loss after each iteration; empty for a null.
    lpips_reasons: reasons for missing values of the image distance LPIPS.
    unscored:      reconstructions without scores.
    linked:        results of the cases of attacks on several rounds together. notes: dict from the key of each scored case that
                   is not in `linked` to the attack's notes on its reconstruction; cases without notes are left out.
    """

    source: str
    attack: str
    spec: str
    is_null: bool
    knows_defense: bool
    oracles: tuple[str, ...]
    withheld: tuple[str, ...]
    seed: int
    cases: int | None
    states: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    losses: tuple[NDArray[np.float64], ...] = ()
    lpips_reasons: tuple[str, ...] = ()
    unscored: UnscoredResults = field(default_factory=UnscoredResults)
    linked: tuple[LinkedCase, ...] = ()
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    summary: Summary | None = None
    null: "AttackOnRun | None" = None

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Reasons why examples of done or failed cases have no reconstruction, with their numbers of examples, largest first."""
        return Counter(row.failure for row in self.finished if row.failure is not None).most_common()

    @property
    def has_failed(self) -> bool:
        """Return whether at least one case failed, and none is done or interrupted. Waiting cases do not matter."""
        return bool(self.states.get("failed")) and not self.states.get("done") and not self.states.get("interrupted")

    @property
    def counted_notes(self) -> list[tuple[str, int]]:
        """The attack's notes on cases of one round, with their numbers of occurrences, most frequent first.

        Notes that differ only in the numbers within them are counted together, and the first of them is returned. Equal notes on
        one case count once.
        """
        first: dict[str, str] = {}
        count: Counter[str] = Counter()
        for note in (note for notes in self.notes.values() for note in dict.fromkeys(notes)):
            kind = re.sub(r"[-+]?[0-9][0-9.e+-]*", "#", note)
            first.setdefault(kind, note)
            count[kind] += 1
        return [(first[kind], many) for kind, many in count.most_common()]

    @property
    def distinct(self) -> int:
        """The number of different data set indices of the scored examples in done or failed cases."""
        return len({row.index for row in self.finished})

    @property
    def finished(self) -> list[ScoreRow]:
        """The scores of finished cases, those done or failed; shares and means are computed from them."""
        return [example.row for example in self.examples if example.row.is_finished]


@dataclass(frozen=True, kw_only=True)
class GrowthLine:
    """The share of examples that an attack recovers from a growing number of recorded rounds.

    joint:  whether the attack uses the rounds together. If not, an example counts as recovered after k rounds if it is recovered
            in at least one of the first k.
    points: share by number of rounds, ascending. null: the same for the null; empty without one.
    bound:  the privacy accountant's upper bound on the share, by number of rounds; empty if the federation declares no noise. The
            bound takes the null's share as the probability of success without the updates, but at least 1 / (n + 1) for n
            distinct examples of the attack.
    """

    attack: str
    spec: str
    joint: bool
    points: tuple[GrowthPoint, ...]
    null: tuple[GrowthPoint, ...] = ()
    bound: tuple[GrowthPoint, ...] = ()


def list_changes(manifest: Manifest) -> str:
    """Return the clients' defenses as text, separated by commas; "" if there are none.

    The order is: defense of the update, way of computing the gradient (if not "plain"), change of the network, change of inputs.
    """
    m = manifest
    gradient = m.gradient if m.gradient.strip() not in ("", "plain") else ""
    return ", ".join(part for part in (str(m.defense), gradient, m.network, m.inputs) if part.strip())


def describe_protection(manifest: Manifest) -> str:
    """Return as text the clients' defenses (`list_changes`) and secure aggregation, as far as used; "" for none."""
    return ", ".join(part for part in (list_changes(manifest), "secure aggregation" * bool(manifest.secure_aggregation)) if part)


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """The content of a report on one run.

    observations: rows of the recording that can be read.
    metrics: valid rows of `metrics.jsonl`, one per round: how good the trained model is. hints: on what is left to do or damaged.
    growth:  one line per attack that has scores for at least two numbers of rounds: share of examples recovered from that many.
    data:    name of the data set; "" if there are no scores. truth: whether truth (clients' examples) exists and may be shown.
    """

    folder: Path
    manifest: Manifest
    observations: tuple[Row, ...]
    metrics: tuple[Record, ...]
    attacks: tuple[AttackOnRun, ...]
    hints: tuple[Hint, ...]
    growth: tuple[GrowthLine, ...] = ()
    data: str = ""
    truth: bool = True

    @property
    def name(self) -> str:
        return self.manifest.name

    @cached_property
    def changes(self) -> str:
        """The specifications of the clients' defenses as text, see `list_changes`; "" if there are none."""
        return list_changes(self.manifest)

    @cached_property
    def protection(self) -> str:
        """What protects the run's updates: the clients' defenses, and secure aggregation; "" if nothing does."""
        return describe_protection(self.manifest)

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        return tuple(sorted({row.round for row in self.observations}))

    @cached_property
    def clients(self) -> tuple[str, ...]:
        return tuple(sorted({row.client for row in self.observations} - {SUM_CLIENT}))

    @cached_property
    def codecs(self) -> tuple[str, ...]:
        return tuple(sorted({row.codec for row in self.observations if row.codec is not None and row.status == "complete"}))

    def count_observations(self, status: str) -> int:
        return sum(row.status == status for row in self.observations)

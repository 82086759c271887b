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

from attacker.report.linked import Linked
from attacker.report.pairs import ExamplePair
from attacker.report.undone import Missing
from attacker.report.unscored import Unscored
from attacker.scoring import Summary
from attacker.scoring.states import FINISHED, State
from fedsim.recording import Manifest, Row
from fedsim.recording.masked_vectors import SUM

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of the scores: one true example in one case.

    rounds:  in which it was used, of those that the case puts together. claimed: those in which its reconstruction is said to
             have been; None where there is none, or nobody asked.
    state: of the case. psnr: in dB, None where there is none. failure: why there is no reconstruction, None where there is one.
    null: the same example as the null of the attack answered it; None where no null was run on the case, and of a null itself.
    """

    case: str
    state: State
    rounds: tuple[int, ...]
    client: str
    batch: int
    position: int
    index: int
    label_true: str
    label_recovered: str | None
    psnr: float | None
    success: bool
    label_success: bool
    failure: str | None
    pair: ExamplePair
    claimed: tuple[int, ...] | None = None
    null: "Example | None" = None

    @property
    def place(self) -> tuple[Any, ...]:
        """What an example has in common with the same example of another attack, as of the null."""
        return self.case, self.rounds, self.batch, self.position, self.index

    @property
    def rightly(self) -> tuple[int, ...]:
        """The rounds that its reconstruction is claimed to come from and that did use this example."""
        return tuple(round for round in self.claimed or () if round in self.rounds)

    @property
    def wrongly(self) -> tuple[int, ...]:
        """The rounds that its reconstruction is claimed to come from but that did not use this example."""
        return tuple(round for round in self.claimed or () if round not in self.rounds)


@dataclass(frozen=True, kw_only=True)
class AttackOnRun:
    """One attack on one run: what it was told, and what came of it.

    summary:       None where nothing is scored yet. null: the same attack without a gradient, where it is scored.
    cases:         complete observations that it was to attack; None where its attack.json is gone.
    states:        how many of these cases are done, failed, interrupted and waiting.
    examples:      scored ones, save those of cases that no attack has come to.
    losses:        the attack's own loss, once an iteration, of each case.
    lpips_reasons: why there is no LPIPS, where there is none.
    unscored:      reconstructions that nothing was compared with.
    linked:        cases of several rounds. notes: what the attack says of its answers to the others, by case.
    """

    source: str
    attack: str
    spec: str
    is_null: bool
    knows_defense: bool
    oracles: tuple[str, ...]
    seed: int
    cases: int | None
    states: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    losses: tuple[NDArray[np.float64], ...] = ()
    lpips_reasons: tuple[str, ...] = ()
    unscored: Unscored = field(default_factory=Unscored)
    linked: tuple[Linked, ...] = ()
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    summary: Summary | None = None
    null: "AttackOnRun | None" = None

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Why examples of finished cases have no reconstruction, and how many for each reason."""
        return Counter(example.failure for example in self.finished if example.failure is not None).most_common()

    @property
    def has_failed(self) -> bool:
        """Return whether every case that it came to failed."""
        return bool(self.states.get("failed")) and not self.states.get("done") and not self.states.get("interrupted")

    @property
    def said(self) -> list[tuple[str, int]]:
        """What the attack says of its answers, and of how many cases; numbers in it are those of the first of them."""
        first: dict[str, str] = {}
        count: Counter[str] = Counter()
        for note in (note for notes in self.notes.values() for note in dict.fromkeys(notes)):
            kind = re.sub(r"[-+]?[0-9][0-9.e+-]*", "#", note)
            first.setdefault(kind, note)
            count[kind] += 1
        return [(first[kind], many) for kind, many in count.most_common()]

    @property
    def distinct(self) -> int:
        """Examples of the data set among the finished: one that was attacked in three rounds is one."""
        return len({example.index for example in self.finished})

    @property
    def finished(self) -> list[Example]:
        """The examples that shares and means are of."""
        return [example for example in self.examples if example.state in FINISHED]


def changes(manifest: Manifest) -> str:
    """Return all that clients do to what a message is made of, as specifications; "" where that is nothing."""
    m = manifest
    gradient = m.gradient if m.gradient.strip() not in ("", "plain") else ""
    return ", ".join(part for part in (str(m.defense), gradient, m.network, m.inputs) if part.strip())


def protection(manifest: Manifest) -> str:
    """Return as text what protects the updates of a run: the clients' defenses (`changes`), and secure aggregation.

    Parts that the run does not use are left out; "" if nothing protects the updates.
    """
    return ", ".join(part for part in (changes(manifest), "secure aggregation" * bool(manifest.secure_aggregation)) if part)


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """One run. data: the data set's name, where scores tell it. truth: whether the folder has any of its own."""

    folder: Path
    manifest: Manifest
    observations: tuple[Row, ...]
    metrics: tuple[Record, ...]
    attacks: tuple[AttackOnRun, ...]
    missing: tuple[Missing, ...]
    data: str = ""
    truth: bool = True

    @property
    def name(self) -> str:
        return self.manifest.name

    @cached_property
    def changes(self) -> str:
        """All that clients do to what a message is made of, as specifications; "" where that is nothing."""
        return changes(self.manifest)

    @cached_property
    def protection(self) -> str:
        """What protects the run's updates: the clients' defenses, and secure aggregation; "" if nothing does."""
        return protection(self.manifest)

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        return tuple(sorted({row.round for row in self.observations}))

    @cached_property
    def clients(self) -> tuple[str, ...]:
        return tuple(sorted({row.client for row in self.observations} - {SUM}))

    @cached_property
    def codecs(self) -> tuple[str, ...]:
        return tuple(sorted({row.codec for row in self.observations if row.codec is not None and row.status == "complete"}))

    def observed(self, status: str) -> int:
        return sum(row.status == status for row in self.observations)

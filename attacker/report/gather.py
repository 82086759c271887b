"""All that a report shows of a run, read from its folder. Nothing here draws or formats."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attacker.reconstruction import Reconstruction
from attacker.report.commands import replay_command, score_command
from attacker.report.pairs import Pair, read_pair
from attacker.scoring import Estimate, Summary, summarise
from attacker.scoring.statistics import mean
from fedsim.wire import DamagedFile, Manifest, Recording, Row
from fedsim.wire.files import read_json_lines

SHOWN = 60
"""Examples of each attack whose pair is shown."""

Record = dict[str, Any]
Place = tuple[str, int, int, int]
"""Case, batch, position and index: the same example in every attack."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row of the scores: one true example in one case.

    psnr: in dB, None where there is none. failure: why there is no reconstruction, None where there is one.
    """

    case: str
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
    pair: Pair


@dataclass(frozen=True, kw_only=True)
class AttackOnRun:
    """One attack on one run: what it was told, and what came of it.

    summary:       None where nothing is scored yet. null: the same attack without a gradient, where it is scored.
    cases:         complete observations that it was to attack; None where its attack.json is gone.
    interrupted:   cases that the user stopped: the best so far.
    losses:        the attack's own loss, once an iteration, of each case.
    lpips_reasons: why there is no LPIPS, where there is none.
    """

    source: str
    attack: str
    spec: str
    is_null: bool
    knows_defense: bool
    oracles: tuple[str, ...]
    seed: int
    cases: int | None
    interrupted: int = 0
    examples: tuple[Example, ...] = ()
    losses: tuple[NDArray[np.float64], ...] = ()
    lpips: Estimate | None = None
    lpips_reasons: tuple[str, ...] = ()
    summary: Summary | None = None
    null: "AttackOnRun | None" = None

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Why examples have no reconstruction, and how many for each reason."""
        return Counter(example.failure for example in self.examples if example.failure is not None).most_common()

    @property
    def distinct(self) -> int:
        """Examples of the data set among the rows: one that was attacked in three rounds is one."""
        return len({example.index for example in self.examples})


@dataclass(frozen=True)
class Missing:
    """Something that a whole run has and this one lacks. command: makes it, where one does."""

    what: str
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. data: the data set's name, where scores tell it."""

    folder: Path
    manifest: Manifest
    observations: tuple[Row, ...]
    metrics: tuple[Record, ...]
    attacks: tuple[AttackOnRun, ...]
    missing: tuple[Missing, ...]
    data: str = ""

    @property
    def name(self) -> str:
        return self.manifest.name

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        return tuple(sorted({row.round for row in self.observations}))

    @cached_property
    def clients(self) -> tuple[str, ...]:
        return tuple(sorted({row.client for row in self.observations}))

    def observed(self, status: str) -> int:
        return sum(row.status == status for row in self.observations)


def gather(folder: Path) -> Run:
    """Read a run. Raises ValueError, naming the folder, where there is none."""
    if not (folder / "recording" / "manifest.json").is_file():
        raise ValueError(f"{folder} is not a run: it has no recording/manifest.json")
    recording = Recording(folder / "recording")
    missing: list[Missing] = []
    try:
        observations = recording.rows()
    except DamagedFile as error:
        observations = []
        missing.append(Missing(f"The index of the recording cannot be read: {error}"))
    if not (metrics := _lines(folder / "metrics.jsonl", missing)):
        missing.append(Missing("metrics.jsonl holds no rounds: the utility of the trained model is not known."))
    scores = _lines(folder / "scores.jsonl", missing)
    facts = _facts(folder, missing)
    attacks = _attacks(folder, recording.manifest, facts, scores, missing)
    missing += _undone(folder, facts, scores, attacks)
    return Run(
        folder=folder,
        manifest=recording.manifest,
        observations=tuple(observations),
        metrics=tuple(sorted(metrics, key=lambda row: int(row["round"]))),
        attacks=attacks,
        missing=tuple(missing),
        data=str(scores[0]["data"]) if scores else "",
    )


def _lines(path: Path, missing: list[Missing]) -> list[Record]:
    try:
        return read_json_lines(path)
    except ValueError as error:
        missing.append(Missing(f"{path.name} cannot be read: {error}"))
        return []


def _facts(folder: Path, missing: list[Missing]) -> dict[str, Record]:
    """What replay wrote down of each attack, by the name of its folder."""
    found = {}
    for path in sorted((folder / "reconstructions").glob("*/attack.json")):
        try:
            found[path.parent.name] = dict(json.loads(path.read_text()))
        except ValueError as error:
            missing.append(Missing(f"{path.relative_to(folder)} cannot be read: {error}"))
    return found


def _attacks(
    folder: Path, manifest: Manifest, facts: Mapping[str, Record], scores: Sequence[Record], missing: list[Missing]
) -> tuple[AttackOnRun, ...]:
    """Every attack, scored or not, its null beside it; nulls alone are left out."""
    rows: dict[str, list[Record]] = {}
    for row in sorted(scores, key=_order):
        rows.setdefault(str(row["source"]), []).append(row)
    pairs = _pairs(folder, manifest, rows)
    found = {
        source: _attack(folder, source, facts.get(source), rows.get(source, []), pairs, missing)
        for source in sorted({*facts, *rows})
    }
    summaries = {summary.source: summary for summary in summarise(scores)}

    def whole(attack: AttackOnRun) -> AttackOnRun:
        summary = summaries.get(attack.source)
        null = found.get(summary.null.source) if summary and summary.null else None
        return replace(attack, summary=summary, null=null)

    attacks = [whole(attack) for attack in found.values() if not attack.is_null]
    return tuple(sorted(attacks, key=lambda a: (a.attack, a.oracles, not a.knows_defense, a.spec, a.seed)))


def _attack(
    folder: Path,
    source: str,
    facts: Record | None,
    rows: Sequence[Record],
    pairs: Mapping[tuple[str, Place], Pair],
    missing: list[Missing],
) -> AttackOnRun:
    told = facts or rows[0]
    lpips = [row["lpips"] for row in rows if row["lpips"] is not None]
    return AttackOnRun(
        **{key: told[key] for key in ("attack", "spec", "knows_defense", "seed")},
        source=source,
        is_null=told["null"],
        oracles=tuple(told["oracles"]),
        cases=sum(case["status"] == "complete" for case in facts["cases"]) if facts else None,
        interrupted=len({row["case"] for row in rows if row.get("interrupted")}),
        examples=tuple(_example(row, pairs) for row in rows),
        losses=() if told["null"] else _losses(folder / "reconstructions" / source, missing),
        lpips=mean(lpips) if lpips else None,
        lpips_reasons=tuple(sorted({row["lpips_reason"] for row in rows if row["lpips"] is None and row["failure"] is None})),
    )


def _order(row: Record) -> tuple[Any, ...]:
    return row["rounds"], row["client"], row["batch"], row["position"]


def _place(row: Record) -> Place:
    return row["case"], row["batch"], row["position"], row["index"]


def _example(row: Record, pairs: Mapping[tuple[str, Place], Pair]) -> Example:
    pair = pairs.get((row["source"], _place(row)), Pair())
    if row["failure"] is not None:
        pair = pairs.get(("", _place(row)), Pair())
    return Example(
        **{
            key: row[key]
            for key in ("case", "client", "batch", "position", "index", "psnr", "success", "label_success", "failure")
        },
        rounds=tuple(row["rounds"]),
        label_true=str(row["label_true_name"]),
        label_recovered=None if row["label_recovered_name"] is None else str(row["label_recovered_name"]),
        pair=pair,
    )


def _pairs(folder: Path, manifest: Manifest, rows: Mapping[str, Sequence[Record]]) -> dict[tuple[str, Place], Pair]:
    """The pairs to be shown, by source and place; under no source the original alone, for attacks that failed on it."""
    columns = {column.name: column for column in manifest.data.columns}
    pairs: dict[tuple[str, Place], Pair] = {}
    for source, some in rows.items():
        for row in some[:SHOWN]:
            if row["pair"] is not None:
                pair = pairs[source, _place(row)] = read_pair(folder, row["pair"], columns)
                pairs["", _place(row)] = Pair(original=pair.original)
    return pairs


def _losses(folder: Path, missing: list[Missing]) -> tuple[NDArray[np.float64], ...]:
    losses = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            losses.append(Reconstruction.read(path).loss.double().numpy())
        except ValueError:
            missing.append(Missing(f"reconstructions/{folder.name}/{path.name} is not a reconstruction: its loss is not drawn."))
    return tuple(losses)


def _undone(folder: Path, facts: Mapping[str, Record], scores: Sequence[Record], attacks: Sequence[AttackOnRun]) -> list[Missing]:
    """What is left to replay and to score."""
    if not facts and not scores:
        return [Missing("No attack was replayed on this recording yet.", replay_command(folder))]
    scored = {(row["source"], row["case"]) for row in scores}
    undone = []
    for source, told in facts.items():
        keys = [case["key"] for case in told["cases"] if case["status"] == "complete"]
        files = {path.name for path in (folder / "reconstructions" / source).iterdir()}
        waiting = sum(f"{key}.safetensors" not in files and f"{key}.failed.json" not in files for key in keys)
        unscored = sum((source, key) not in scored for key in keys)
        if waiting:
            undone.append(
                Missing(f"{told['spec']}: {waiting} of {len(keys)} cases are not attacked yet.", replay_command(folder, told))
            )
        if unscored:
            undone.append(Missing(f"{told['spec']}: {unscored} of {len(keys)} cases are not scored yet.", score_command(folder)))
    for attack in attacks:
        told = facts.get(
            attack.source, {"attack": attack.attack, "spec": attack.spec, "seed": attack.seed, "oracles": attack.oracles}
        )
        if attack.interrupted:
            cases = "1 case was" if attack.interrupted == 1 else f"{attack.interrupted} cases were"
            undone.append(Missing(f"{attack.spec}: {cases} interrupted: the best so far is shown.", replay_command(folder, told)))
        if attack.summary and not attack.null:
            undone.append(Missing(f"{attack.spec} has no scored null.", replay_command(folder, told)))
    return undone

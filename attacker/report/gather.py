"""Reading of all data that a report on a run shows, from the run's folder, without drawing or formatting."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from shlex import join

import numpy as np
from numpy.typing import NDArray

from attacker.reconstruction import Reconstruction
from attacker.replay.metadata_reader import find_other_recording, make_attack_key, read_metadata
from attacker.report.contents import AttackOnRun, Example, ReportedRun
from attacker.report.growth import gather_growth
from attacker.report.hints import Hint, Record, list_unfinished, make_replay_command
from attacker.report.linked_cases import read_linked_cases
from attacker.report.pairs import ExamplePair, read_pair
from attacker.report.unscored import UnscoredResults, collect_unscored
from attacker.scoring import ScoreRow, read_rows, summarise
from attacker.scoring.states import CaseState, count_cases, read_case
from attacker.scoring.superseded_cases import find_superseded
from fedsim.recording import DamagedFile, Manifest, Recording, find_recording, find_run
from fedsim.recording.files import read_json_lines
from fedsim.recording.run_check import check_run
from fedsim.recording.safe_files import is_count

MAX_PAIRS = 60
"""Largest number of examples of each attack whose pair is shown."""

MAX_MEASURE = 1e300
"""Absolute value from which on a number is taken as damaged: rows of metrics that hold one are left out of charts."""

PlaceKey = tuple[str, int, int, int]
"""Key of an example within a case: key of the case, and `batch`, `position` and `index` of `ScoreRow`. An example has the same
key in all attacks with this case."""


def gather_run(folder: Path, *, scored: bool = True) -> ReportedRun:
    """Return all data of a report on one run.

    folder: a run (a folder with `recording/`), or a recording; reconstructions and scores are then read from the folder above it.
    scored: False leaves out scores and originals, which are derived from the truth (the clients' examples).

    Raises ValueError if `folder` is neither a run nor a recording, if its manifest is damaged, or if it holds links or other
    files that `check_run` rejects. Other damaged files are named in `ReportedRun.hints`.
    """
    at, requested, folder = find_recording(folder), folder, find_run(folder)
    check_run(folder)
    check_run(at)
    recording = Recording(at)
    hints: list[Hint] = []
    try:
        observations = recording.read_rows(on_damage=lambda error: hints.append(Hint(str(error))))
    except DamagedFile as error:
        observations = []
        hints.append(Hint(f"The index of the recording cannot be read: {error}"))
    if not (metrics := _read_metrics(folder / "metrics.jsonl", hints)):
        hints.append(Hint("metrics.jsonl holds no rounds: the utility of the trained model is not known."))
    scores = _read_scores(folder / "scores.jsonl", hints) if scored else []
    all_metadata = _read_all_metadata(folder, recording.manifest, hints)
    states = {source: _read_states(folder / "reconstructions" / source, metadata) for source, metadata in all_metadata.items()}
    attacks = _collect_attacks(folder, recording.manifest, all_metadata, states, scores, hints)
    growth = gather_growth(folder, recording, attacks, hints) if scored else ()
    mismatches = dict.fromkeys(row.mismatch for row in scores if row.mismatch)
    hints += [Hint(f"The scores may be worthless: {words}.") for words in mismatches]
    truth = scored and (folder / "truth").is_dir()
    if all_metadata or scores:
        hints += _list_hints(folder, requested, all_metadata, states, scores, attacks, truth=truth)
    else:
        command = make_replay_command(requested, model=recording.manifest.model.name)
        hints.append(Hint("No attack was replayed on this recording yet.", command))
    return ReportedRun(
        folder=folder,
        manifest=recording.manifest,
        observations=tuple(observations),
        metrics=tuple(sorted(metrics, key=lambda row: int(row["round"]))),
        attacks=attacks,
        growth=growth,
        hints=tuple(hints),
        data=scores[0].data if scores else "",
        truth=truth,
    )


def _read_metrics(path: Path, hints: list[Hint]) -> list[Record]:
    """Return the rows of `metrics.jsonl`, without rows whose round, loss, accuracy, bytes or seconds are damaged.

    The result is [] if the file does not exist or cannot be read. Damaged rows and a file that cannot be read are added to
    `hints`.
    """
    try:
        rows = read_json_lines(path)
    except ValueError as error:
        hints.append(Hint(f"{path.name} cannot be read: {error}"))
        return []
    valid = [row for row in rows if _is_measured(row)]
    if len(valid) < len(rows):
        reason = "their round or a measured value is not a valid number"
        hints.append(Hint(f"{path.name}: {len(rows) - len(valid)} rows are left out: {reason}."))
    return valid


def _is_measured(row: Record) -> bool:
    numbers = [row[key] for key in ("loss", "accuracy", "bytes_up", "seconds") if row.get(key) is not None]
    plain = all(type(number) in (int, float) and abs(number) < MAX_MEASURE for number in numbers)
    return plain and is_count(row.get("round"))


def _read_scores(path: Path, hints: list[Hint]) -> list[ScoreRow]:
    try:
        return read_rows(path)
    except ValueError as error:
        hints.append(Hint(f"{path.name} cannot be read: {error}"))
        return []


def _read_all_metadata(folder: Path, manifest: Manifest, hints: list[Hint]) -> dict[str, Record]:
    """Return a dict from the name of each attack's folder in `reconstructions/` to the content of its attack.json.

    Left out are attacks on a recording of another name or time of creation, and attacks whose attack.json cannot be read. Only
    files that cannot be read are added to `hints`.
    """
    all_metadata = {}
    for path in sorted((folder / "reconstructions").glob("*/attack.json")):
        try:
            metadata = read_metadata(path)
        except ValueError as error:
            hints.append(Hint(f"{path.relative_to(folder)} cannot be read: {error}"))
            continue
        if not find_other_recording(metadata, manifest):
            all_metadata[path.parent.name] = metadata
    return all_metadata


def _collect_attacks(
    folder: Path,
    manifest: Manifest,
    all_metadata: Mapping[str, Record],
    states: Mapping[str, Mapping[str, CaseState]],
    scores: Sequence[ScoreRow],
    hints: list[Hint],
) -> tuple[AttackOnRun, ...]:
    """Return every attack on the run that has an attack.json or scores.

    A null has no entry of its own. It becomes the field `null` of its attack's entry, if both have scores.

    all_metadata: dict from the name of an attack's folder to the content of its attack.json. states: dict from that name to a
    dict from the key of each case (one round of a client, or several attacked together) to its state. scores: rows of all
    attacks. hints: list to which problems are added.
    """
    rows: dict[str, list[ScoreRow]] = {}
    for row in sorted(scores, key=attrgetter("rounds", "client", "batch", "position")):
        rows.setdefault(row.source, []).append(row)
    pairs = _read_pairs(folder, manifest, rows)
    attacks_by_source = {
        source: _read_attack(folder, source, all_metadata.get(source), states.get(source), rows.get(source, []), pairs, hints)
        for source in sorted({*all_metadata, *rows})
    }
    for source, attack in attacks_by_source.items():
        if source in all_metadata and not attack.is_null:
            attacks_by_source[source] = replace(
                attack, unscored=_collect_unscored(folder, manifest, source, all_metadata, attack, hints)
            )
    summaries = {summary.source: summary for summary in summarise(scores)}

    def add_null(attack: AttackOnRun) -> AttackOnRun:
        summary = summaries.get(attack.source)
        null = attacks_by_source.get(summary.null.source) if summary and summary.null else None
        beside = {example.place: example for example in null.examples} if null else {}
        examples = tuple(replace(example, null=beside.get(example.place)) for example in attack.examples)
        return replace(attack, summary=summary, null=null, examples=examples)

    attacks = [add_null(attack) for attack in attacks_by_source.values() if not attack.is_null]
    return tuple(sorted(attacks, key=lambda a: (a.attack, a.oracles, not a.knows_defense, a.spec, a.seed)))


def _read_attack(
    folder: Path,
    source: str,
    metadata: Record | None,
    states: Mapping[str, CaseState] | None,
    rows: Sequence[ScoreRow],
    pairs: Mapping[tuple[str, PlaceKey], ExamplePair],
    hints: list[Hint],
) -> AttackOnRun:
    settings = metadata or rows[0].to_dict()
    linked_cases = read_linked_cases(folder / "reconstructions" / source, metadata) if metadata else ()
    other_cases = {row.case for row in rows} - {linked.case for linked in linked_cases}
    return AttackOnRun(
        **{key: settings[key] for key in ("attack", "spec", "knows_defense", "seed")},
        source=source,
        is_null=settings["null"],
        oracles=tuple(settings["oracles"]),
        withheld=tuple(settings.get("withheld", ())),
        cases=None if states is None else len(states),
        states=count_cases({row.case: row.state for row in rows}) if states is None else Counter(states.values()),
        examples=tuple(_make_example(row, pairs) for row in rows if row.state != "waiting"),
        losses=() if settings["null"] else _read_losses(folder / "reconstructions" / source, hints),
        linked=linked_cases,
        notes={row.case: row.notes for row in rows if row.notes and row.case in other_cases},
        lpips_reasons=tuple(sorted({str(row.lpips_reason) for row in rows if row.lpips is None and row.pair is not None})),
    )


def _read_states(folder: Path, metadata: Record) -> dict[str, CaseState]:
    """Return the present state of each case with an update, by key. Cases that others supersede wholly are left out."""
    whole = {key for key, other in find_superseded(folder, metadata["cases"]).items() if not other.rest}
    keys = [case["key"] for case in metadata["cases"] if case["status"] == "complete" and case["key"] not in whole]
    return {key: read_case(folder, key)[1] for key in keys}


def _collect_unscored(
    folder: Path, manifest: Manifest, source: str, all_metadata: Mapping[str, Record], attack: AttackOnRun, hints: list[Hint]
) -> UnscoredResults:
    """Return the reconstructions of an attack's cases without scores, each beside the null's reconstruction of the same case.

    A case is left out if it shares at least one round with a case of higher priority, see `find_superseded`.
    source: name of the attack's folder. all_metadata: dict from the names of all attacks' folders to the content of attack.json.
    attack: the attack with its scored examples. hints: list to which hints on files that cannot be shown are added.
    """
    metadata, reconstructions = all_metadata[source], folder / "reconstructions"
    key = make_attack_key(metadata.get)
    nulls = [name for name, other in all_metadata.items() if other["null"] and make_attack_key(other.get) == key]
    scored = {example.row.case for example in attack.examples} | set(find_superseded(reconstructions / source, metadata["cases"]))
    null = reconstructions / nulls[0] if nulls else None
    result = collect_unscored(reconstructions / source, metadata, scored, manifest.data, null=null, limit=MAX_PAIRS)
    hints += map(Hint, result.problems)
    return result


def _get_place(row: ScoreRow) -> PlaceKey:
    return row.case, row.batch, row.position, row.index


def _make_example(row: ScoreRow, pairs: Mapping[tuple[str, PlaceKey], ExamplePair]) -> Example:
    source = row.source if row.failure is None else ""
    return Example(row=row, pair=pairs.get((source, _get_place(row)), ExamplePair()))


def _read_pairs(
    folder: Path, manifest: Manifest, rows: Mapping[str, Sequence[ScoreRow]]
) -> dict[tuple[str, PlaceKey], ExamplePair]:
    """Return a dict from (name of an attack's folder, `PlaceKey` of an example) to the pair of original and reconstruction.

    Only the first `MAX_PAIRS` score rows of each attack are used, and of these only rows with a pair. For each example there is
    also an entry with "" in place of the folder's name: the original alone, to be shown for an attack that failed on the example.
    For table rows, this entry is empty. rows: dict from the name of an attack's folder to its score rows.
    """
    pairs: dict[tuple[str, PlaceKey], ExamplePair] = {}
    for source, source_rows in rows.items():
        for row in source_rows[:MAX_PAIRS]:
            if row.pair is not None:
                pair = pairs[source, _get_place(row)] = read_pair(folder, row.pair, manifest.data.columns)
                pairs["", _get_place(row)] = ExamplePair(original=pair.original)
    return pairs


def _read_losses(folder: Path, hints: list[Hint]) -> tuple[NDArray[np.float64], ...]:
    losses = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            losses.append(Reconstruction.read(path).loss.double().numpy())
        except ValueError:
            hints.append(Hint(f"reconstructions/{folder.name}/{path.name} is not a reconstruction: its loss is not drawn."))
    return tuple(losses)


def _list_hints(
    folder: Path,
    recording: Path,
    all_metadata: Mapping[str, Record],
    states: Mapping[str, Mapping[str, CaseState]],
    scores: Sequence[ScoreRow],
    attacks: Sequence[AttackOnRun],
    *,
    truth: bool,
) -> list[Hint]:
    """Return hints on what is left to replay and to score, each with the command for it.

    folder: folder of the run. recording: folder that the replay commands name. all_metadata: dict from the name of an attack's
    folder to the content of its attack.json. states: dict from that name to a dict from the key of each case to its state. truth:
    whether the run's truth (the clients' examples) is at hand, so that reconstructions can be scored.
    """
    scored = {(row.source, row.case): row.state for row in scores}
    score = join(["attacker", "score", str(folder)])
    undone = [
        hint
        for source, metadata in all_metadata.items()
        for hint in list_unfinished(
            metadata,
            states[source],
            {case: state for (of, case), state in scored.items() if of == source},
            replay=make_replay_command(recording, metadata),
            score=score if truth or scores else "",
        )
    ]
    if not truth and not scores:
        missing = "No truth was given, so that nothing could be scored; with the folder that the clients wrote it can be:"
        undone.append(Hint(missing, f"{score} --truth FOLDER"))
    for attack in attacks:
        metadata = all_metadata.get(
            attack.source, {"attack": attack.attack, "spec": attack.spec, "seed": attack.seed, "oracles": attack.oracles}
        )
        if attack.summary and not attack.null:
            undone.append(Hint(f"{metadata['spec']} has no scored null.", make_replay_command(recording, metadata)))
    return undone

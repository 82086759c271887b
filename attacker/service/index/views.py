"""Responses of the API about recordings, attacks and cases, composed from data that were read. All functions are pure."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import isfinite
from typing import NamedTuple

from attacker.report.pairs import ExamplePair
from attacker.service.index.attack_folders import CaseEntry, Source, find_null
from attacker.service.index.json_lines import Place, Scores, ShownScore
from attacker.service.index.means import average_labels, average_psnr, average_success, count_finished, mean
from attacker.service.index.reconstruction_files import WholeReconstruction
from attacker.service.index.recording_index import Index
from attacker.service.index.verdicts import RunVerdicts, VerdictSummary
from attacker.service.schemas.attacks import AttackOnRecording
from attacker.service.schemas.cases import CaseDetails, CaseExample, CaseOutcome, CaseSummary, NullExample, TableValue
from attacker.service.schemas.recordings import Data, ObservationSummary, RecordingSummary
from fedsim.recording import Manifest, Row


def _format_moment(seconds: float | None) -> str | None:
    """Return a Unix time in seconds as text in ISO 8601 and UTC; None for None, and for a time that cannot be written so."""
    if seconds is None or not isfinite(seconds):
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, OSError, ValueError):
        return None


def describe_recording(
    id: str, manifest: Manifest | None, index: Index, *, truth: bool, trouble: Sequence[str]
) -> RecordingSummary:
    """Return the summary of one recording for the API.

    id: of the recording. manifest: None if it cannot be read. index: the state of the recording's index. truth: whether the
    service was given the truth of this run (which examples each client trained on), so that its attacks can be scored. trouble:
    messages about damaged files.
    """
    m = manifest
    return RecordingSummary(
        id=id,
        name=m.name if m else id,
        model=str(m.model) if m else None,
        data=Data(shape=list(m.data.shape), num_classes=m.data.num_classes, is_image=m.data.is_image) if m else None,
        defense=str(m.defense) if m else None,
        gradient=m.gradient if m else None,
        network=m.network if m else None,
        inputs=m.inputs if m else None,
        secure_aggregation=(m.secure_aggregation if isinstance(m.secure_aggregation, bool) else dict(m.secure_aggregation))
        if m
        else None,
        training=asdict(m.training) if m else None,
        rounds=len(index.rounds),
        last_round=max(index.rounds, default=None),
        clients=len(index.clients),
        observations=index.observations,
        updated=_format_moment(index.updated),
        truth=truth,
        trouble=list(trouble),
    )


def describe_observation(row: Row) -> ObservationSummary:
    """Return one observation (what the server received from one client in one round) for the API."""
    return ObservationSummary(
        round=row.round,
        client=row.client,
        status=row.status,
        num_examples=row.num_examples,
        bytes=row.bytes,
        time=_format_moment(row.received_at),
        reason=row.reason,
    )


def describe_attacks(sources: Sequence[Source], scores: Scores, verdicts: RunVerdicts) -> list[AttackOnRecording]:
    """Return the results of each attack and null in numbers for the API.

    The scores of a null are over the cases that its attack has finished as well, as in the report, or over all its cases if the
    attack has no scores.
    """
    nulls = {null.name: source for source in sources if (null := find_null(source, sources)) is not None}
    results = []
    for source in sources:
        own_scores, attack = scores.get(source.name, {}), nulls.get(source.name)
        whose = scores.get(attack.name, {}) if attack is not None else {}
        counted = {key for key, rows in (whose or own_scores).items() if any(row.is_finished for row in rows)}
        results.append(_describe_attack(source, own_scores, counted, verdicts.by_source.get(source.name)))
    return results


def _describe_attack(
    source: Source, scores: Mapping[str, Sequence[ShownScore]], counted: Container[str], verdict: VerdictSummary | None
) -> AttackOnRecording:
    """Return the results of one attack in numbers for the API.

    scores: dict from the key of a case to its score rows. counted: keys of the cases whose scores count in shares and means.
    verdict: comparison of the attack with its null; None if there is none.
    """
    rows = [row for key, case_rows in scores.items() if key in source.cases and key in counted for row in case_rows]
    answered = [answer.confidence for answer in source.answers.values()]
    states = Counter(map(source.find_state, source.cases))
    return AttackOnRecording(
        source=source.name,
        attack=source.attack,
        spec=source.spec,
        seed=source.seed,
        null=source.null,
        oracles=list(source.oracles),
        withheld=list(source.withheld),
        knows_defense=source.knows_defense,
        cases=sum(case.status == "complete" for case in source.cases.values()),
        done=states["done"],
        failed=states["failed"],
        interrupted=states["interrupted"],
        waiting=states["waiting"] + states["running"],
        scored=sum(any(row.is_finished for row in scores.get(key, ())) for key in source.cases),
        examples=count_finished(rows),
        success=average_success(rows),
        labels=None if "labels" in source.oracles else average_labels(rows),
        psnr=average_psnr(rows),
        confidence=mean(answered),
        outcome=verdict.outcome if verdict else None,
        verdict=verdict.words if verdict else None,
    )


def describe_case(
    source: Source, facts: CaseEntry, scores: Sequence[ShownScore], null_scores: Sequence[ShownScore]
) -> CaseSummary:
    """Return one case for the API, without its examples.

    scores: score rows of the case. null_scores: score rows of this case for the attack's null.
    """
    answer = source.answers.get(facts.key)
    return {
        **_describe_outcome(source, facts, scores, null_scores),
        "examples": answer.examples if answer else facts.examples,
        "loss": answer.loss if answer else None,
    }


def _describe_outcome(
    source: Source, facts: CaseEntry, scores: Sequence[ShownScore], null_scores: Sequence[ShownScore]
) -> CaseOutcome:
    answer, status = source.answers.get(facts.key), source.find_state(facts.key)
    advice = "its search was interrupted; replay the attack to continue it" if status == "interrupted" else None
    return CaseOutcome(
        attack=source.name,
        case=facts.key,
        client=facts.client,
        rounds=list(facts.rounds),
        status=status,
        route=answer.route if answer else None,
        iterations=answer.iterations if answer else None,
        seconds=answer.seconds if answer else None,
        confidence=answer.confidence if answer else None,
        success=average_success(scores),
        psnr=average_psnr(scores),
        null_success=average_success(null_scores),
        null_psnr=average_psnr(null_scores),
        reason=source.failures.get(facts.key) or facts.reason or advice,
        null=source.null,
    )


def describe_whole_case(
    source: Source,
    facts: CaseEntry,
    whole: WholeReconstruction | None,
    scores: Sequence[ShownScore],
    null_scores: Sequence[ShownScore],
    examples: list[CaseExample],
) -> CaseDetails:
    """Return one case for the API, with its examples.

    whole: its reconstruction; None if there is none. scores, null_scores: as in `describe_case`. examples: the entries to show.
    """
    return {
        **_describe_outcome(source, facts, scores, null_scores),
        "examples": examples,
        "loss": list(whole.losses) if whole else [],
        "oracles": list(whole.oracles if whole else source.oracles),
        "notes": list(whole.notes) if whole else [],
        "spec": source.spec,
    }


class PictureLinks(NamedTuple):
    """The addresses of a case's images on the server.

    address: address of the case, with which they begin. version: text that differs after a change of the images; it is part of
    each address, so that browsers do not show an old image that they keep.
    """

    address: str
    version: str

    def to(self, kind: str, n: int) -> str:
        return f"{self.address}/{kind}/{n}.png?version={self.version}"


def describe_found(
    whole: WholeReconstruction,
    links: PictureLinks,
    cells: Mapping[int, ExamplePair],
    *,
    images: bool,
    nulls: Mapping[int, NullExample],
) -> Iterator[CaseExample]:
    """Yield each reconstructed example of a case that is not scored, without an original to compare it with.

    whole:  the reconstruction of the case. links: addresses of its images. images: whether the data are images.
    cells:  for table rows, a dict from the index of a reconstructed example to its values, which may lack examples; empty for
            images.
    nulls:  dict from the index of a reconstructed example to the example with this index that the attack's null reconstructed.
            Pages show both side by side, although they need not be of the same original.
    """
    for n, (label, confidence) in enumerate(zip(whole.labels, whole.confidence, strict=True)):
        place = whole.places.get(n)
        yield CaseExample(
            n=n,
            batch=place[2] if place else None,
            position=place[3] if place else None,
            rounds=list(whole.rounds.get(n, ())),
            label=str(label),
            confidence=confidence,
            image=links.to("images", n) if images else None,
            values=None if images else _list_values(cells[n]) if n in cells else None,
            original=None,
            label_true=None,
            success=None,
            psnr=None,
            ssim=None,
            lpips=None,
            failure=None,
            null=nulls.get(n),
        )


def describe_scored(
    scores: Sequence[ShownScore],
    links: PictureLinks,
    cells: Mapping[int, ExamplePair],
    *,
    images: bool,
    nulls: Mapping[Place, NullExample],
) -> Iterator[CaseExample]:
    """Yield each true example of a case that is scored, with the reconstruction assigned to it, if there is one.

    scores: one row for each true example. links: addresses of the case's images. images: whether the data are images.
    cells:  for table rows, a dict from the position of a row in `scores` to the values of reconstruction and original, which may
            lack examples; empty for images.
    nulls:  dict from `ShownScore.place`, the key of a true example, to the reconstruction of this example by the attack's null.
    """
    for n, row in enumerate(scores):
        pair = row.pair is not None and images
        yield CaseExample(
            n=n,
            batch=row.batch,
            position=row.position,
            rounds=list(row.rounds),
            label=row.label,
            confidence=row.confidence,
            image=links.to("pairs", n) if pair else None,
            values=_list_values(cells[n]) if not images and n in cells else None,
            original=links.to("originals", n) if pair else None,
            label_true=row.label_true,
            success=row.success,
            psnr=row.psnr,
            ssim=row.ssim,
            lpips=row.lpips,
            failure=row.failure,
            null=nulls.get(row.place),
        )


def reduce_to_null(example: CaseExample) -> NullExample:
    """Return what is shown of an example of a null beside the attack's example."""
    values = example["values"]
    return NullExample(
        image=example["image"],
        values=None if values is None else {value["column"]: value["reconstruction"] for value in values},
        label=example["label"],
        success=example["success"],
        psnr=example["psnr"],
    )


def _list_values(pair: ExamplePair) -> list[TableValue]:
    """Return each variable of a table row: name, reconstructed and true value as text, and whether it is right, if known."""
    return [
        TableValue(column=cell.column, reconstruction=cell.reconstruction, original=cell.original, right=cell.right)
        for cell in pair.cells
    ]

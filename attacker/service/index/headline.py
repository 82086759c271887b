"""The headline of a run: the verdict on its strongest attack, how much was attacked, and the examples to show first."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf

from attacker.service.index.attack_folders import ShownState, Source, find_null
from attacker.service.index.json_lines import Scores, ShownScore
from attacker.service.index.means import average_psnr, count_finished
from attacker.service.index.verdicts import RunVerdicts
from attacker.service.schemas.cases import Headline, ShownExample
from fedsim.recording import Row

NUM_HEADLINE_EXAMPLES = 6
"""Largest number of examples of the strongest attack that are shown."""


def find_strongest_source(sources: Sequence[Source], verdicts: RunVerdicts) -> Source | None:
    """Return the attack that the headline describes; None if no attack has a reconstruction or scores.

    It is the strongest scored one, which `verdicts` names, or else the first one in `sources` that has a reconstruction and is
    not a null.
    """
    scored = (source for source in sources if source.name == verdicts.strongest)
    return next(scored, None) or next((source for source in sources if source.answers and not source.null), None)


def find_worst_examples(source: Source, scores: Mapping[str, Sequence[ShownScore]]) -> list[tuple[str, int]]:
    """Return the examples that leaked worst, that is, that the attack reconstructed best: pairs (case key, index of the example).

    The index counts the rows of `scores[key]`, from 0. At most `NUM_HEADLINE_EXAMPLES` pairs are returned. Recovered examples
    come first, then those with higher PSNR; each distinct example is returned once. If no finished case has scores, the pairs are
    (key, 0), the first reconstructed example, for the cases with the highest confidence.
    """
    rows = [
        (key, n, row)
        for key, case_rows in scores.items()
        if key in source.cases
        for n, row in enumerate(case_rows)
        if row.is_finished
    ]
    if not rows:
        surest = sorted(source.answers.items(), key=lambda item: (-(item[1].confidence or 0.0), item[0]))
        return [(key, 0) for key, answer in surest if answer.examples][:NUM_HEADLINE_EXAMPLES]
    rows.sort(key=lambda row: (not row[2].success, inf if row[2].psnr is None else -row[2].psnr, row[0], row[1]))
    first: dict[int, tuple[str, int]] = {}
    for key, n, row in rows:
        first.setdefault(row.example, (key, n))
    return list(first.values())[:NUM_HEADLINE_EXAMPLES]


def make_headline(
    rows: Mapping[int, Sequence[Row]],
    sources: Sequence[Source],
    scores: Scores,
    verdicts: RunVerdicts,
    *,
    truth: bool,
    worst: list[ShownExample],
) -> Headline:
    """Return the headline of a run.

    rows: rows of the index by round. sources: results of all attacks and nulls. scores: dict from the folder of an attack or null
    to its scores. truth: whether the service was given the truth (which examples each client trained on), without which nothing
    can be scored. worst: the examples to show.
    """
    attacks = [source for source in sources if not source.null]
    states = Counter(
        source.find_state(key) for source in attacks for key, case in source.cases.items() if case.status == "complete"
    )
    finished = states["done"] + states["failed"]
    replies = Counter(row.status for row in chain.from_iterable(rows.values()))
    top = find_strongest_source(sources, verdicts) if verdicts.strongest else None
    mine = [row for case_rows in scores.get(top.name, {}).values() for row in case_rows] if top else []
    null = find_null(top, sources) if top else None
    counted = {row.case for row in mine if row.is_finished}
    null_rows = (
        [row for key, case_rows in scores.get(null.name, {}).items() if key in counted for row in case_rows] if null else []
    )
    judged = verdicts.by_source.get(top.name) if top else None
    return Headline(
        sentence=_write_sentence(attacks, states, replies["complete"], verdicts, truth=truth),
        outcome=judged.outcome if judged else None,
        attack=top.name if top else None,
        spec=top.spec if top else None,
        updates=replies["complete"],
        attacked=len(_list_attacked(attacks)),
        absent=replies["failed"] + replies["late"],
        attacks=len(attacks),
        cases=states.total(),
        finished=finished,
        failed=states["failed"],
        examples=count_finished(mine),
        psnr=average_psnr(mine),
        null_psnr=average_psnr(null_rows),
        worst=worst,
    )


def _list_attacked(attacks: Sequence[Source]) -> set[tuple[int, str]]:
    """Return pairs of round and client, one for each update that some attack has finished with.

    An attack has finished with an update if it returned a reconstruction or failed.
    """
    return {
        (number, case.client)
        for source in attacks
        for key, case in source.cases.items()
        if source.find_state(key) in ("done", "failed")
        for number in case.rounds
    }


def _write_sentence(
    attacks: Sequence[Source], states: Mapping[ShownState, int], updates: int, verdicts: RunVerdicts, *, truth: bool
) -> str:
    """Return the verdict on the strongest attack as text, or why there is none.

    attacks: results of attacks, without nulls. states: number of their cases in each state; cases without an update are not
    counted. updates: number of updates that can be attacked. truth: as in `make_headline`.
    """
    if not attacks:
        return (
            f"{updates:,} update{'s were' if updates != 1 else ' was'} recorded, and none attacked yet: what leaks is not known."
        )
    if not states["done"] and states["failed"]:
        reasons = Counter(reason for source in attacks for reason in source.failures.values())
        reason = reasons.most_common(1)[0][0].rstrip(".") if reasons else "not told"
        if states["failed"] == 1:
            return f"The only attacked case failed: it has no reconstruction. Reason: {reason}. What leaks is not known."
        failed = f"All {states['failed']:,} attacked cases failed: none has a reconstruction."
        return f"{failed} Most often because: {reason}. What leaks is not known."
    if verdicts.sentence:
        return verdicts.sentence
    if not states["done"]:
        return "Attacks run, and nothing is finished yet: what leaks is not known."
    reconstructed = sum(answer.examples for source in attacks for answer in source.answers.values())
    why = "nothing is scored yet" if truth else "nothing could be scored, because this service was given no truth"
    text = f"{reconstructed:,} example{'s were' if reconstructed != 1 else ' was'} reconstructed, and {why}"
    return f"{text}: their similarity to the originals is not known."

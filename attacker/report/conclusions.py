"""Conclusions of a report in sentences, and the choice of the strongest attack."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attacker.attacks.confidence import MIN_LIKELY
from attacker.report.contents import AttackOnRun, ReportedRun, describe_protection, list_changes
from attacker.report.formats import NO_BREAK_SPACE, format_attack_name, format_count, format_percent_interval, format_rate
from attacker.scoring import Estimate, Summary
from attacker.scoring.states import FINISHED_STATES, UNFINISHED_STATES, count_unfinished, format_counts
from fedsim.recording import Manifest


def find_best_attack(run: ReportedRun) -> AttackOnRun | None:
    """Return the attack of the run whose summary `find_strongest` chooses; None if no finished case is scored."""
    winner = find_strongest([attack.summary for attack in run.attacks if attack.summary])
    return next((attack for attack in run.attacks if attack.summary is winner), None) if winner else None


def find_strongest(summaries: Iterable[Summary]) -> Summary | None:
    """Return the summary of the strongest attack, usually the one that recovered the largest share of examples.

    An attack whose verdict is "not distinguishable from the null" comes after all others, whatever its share, and an attack that
    failed in every case after these. Attacks with an oracle are considered only if there are no others. The result is None if no
    attack has scores of a finished case (done or failed).
    """
    scored = [summary for summary in summaries if summary.success]
    fair = [summary for summary in scored if not summary.oracles] or scored
    return max(fair, key=_rank_strength, default=None)


def _rank_strength(summary: Summary) -> tuple[bool, bool, float, bool, float, bool, float, float]:
    """Return a sort key for `find_strongest`, largest for the strongest attack.

    Its entries, the most important first: whether some case has an answer, absence of the verdict "not distinguishable", share
    of examples recovered, verdict of a leak, share of labels recovered, existence of a null, lower end of the interval of the
    share of examples, mean PSNR or 0.
    """
    success, labels = _of(summary.success), _of(summary.label_success)
    order = (
        not summary.has_failed,
        not _is_indistinguishable(summary),
        success.value,
        summary.verdict is not None and summary.verdict.leaks,
        labels.value,
        summary.null is not None,
        success.low,
    )
    return *order, summary.psnr.value if summary.psnr else 0.0


def _is_indistinguishable(summary: Summary) -> bool:
    return summary.verdict is not None and summary.verdict.outcome.startswith("not distinguishable")


def describe_verdict(run: ReportedRun) -> str:
    """Return the conclusion on a run as text, drawn from the scores of its attacks.

    If every attack failed, or no finished case is scored, the text says instead what was done so far.
    """
    if run.attacks and all(attack.has_failed for attack in run.attacks):
        return _describe_failures(run)
    summaries = [attack.summary for attack in run.attacks if attack.summary]
    return describe_summaries(summaries, run.manifest) or _describe_unscored(run)


def describe_summaries(summaries: Sequence[Summary], manifest: Manifest) -> str:
    """Return the conclusion from the scores of the attacks on one run, as text; "" if no finished case is scored."""
    winner = find_strongest(summaries)
    if winner is None:
        return ""
    every = [summary for summary in summaries if summary.success and bool(summary.oracles) == bool(winner.oracles)]
    fair = [summary for summary in every if summary is winner or not summary.has_failed]
    under = describe_protection(manifest)
    text = (f"under {under}, " if under else "") + _describe_attack(winner, manifest)
    others = len(fair) - 1
    if others and all(map(_is_indistinguishable, fair)):
        rest = "The other attack is not" if others == 1 else f"None of the {others} other attacks is"
        text += f". {rest} distinguishable from its null either"
    if failed := len(every) - len(fair):
        text += f". {format_count(failed, 'attack')} failed in every case"
    return text[0].upper() + text[1:] + "." + _describe_oracle_attack(summaries, winner, manifest)


def _describe_attack(summary: Summary, manifest: Manifest) -> str:
    """Return the conclusion about one attack that has finished cases, without a full stop."""
    name, verdict = _name_attack(summary, manifest), summary.verdict
    facts = f"recovered {_format_recovered(_of(summary.success), manifest)}{_describe_labels(summary, 'read')}"
    if summary.null is None or summary.null.success is None or verdict is None:
        return f"{name} {facts}, with no null to compare it with"
    facts += f"; without the gradient it recovers {format_rate(summary.null.success)}{_describe_labels(summary.null, 'reads')}"
    if verdict.outcome == "recovered":
        return f"{name} {facts}"
    if verdict.outcome == "partly leaked":
        more = "; ".join(comparison.words for comparison in verdict.leaked[:2]) + (
            "; and more" if len(verdict.leaked) > 2 else ""
        )
        return f"{name} finds more than its null does: {more}. It {facts}"
    if _is_indistinguishable(summary):
        return f"{name} is {verdict.outcome}: it {facts}. {verdict.caveat}"
    return f"{name} {facts}; {verdict.words}"


def _describe_labels(summary: Summary, reads: str) -> str:
    """Return a clause such as " and read 3 of 4 labels", with the verb `reads`; "" if unknown or given by an oracle."""
    if summary.label_success is None or "labels" in summary.oracles:
        return ""
    return f" and {reads} {format_rate(summary.label_success)} labels"


def _describe_unscored(run: ReportedRun) -> str:
    shown = sum(attack.unscored.total for attack in run.attacks)
    if shown and not run.truth:
        protection = f"under {run.protection}, " if run.protection else ""
        noun, likely = "example was" if shown == 1 else "examples were", sum(attack.unscored.likely for attack in run.attacks)
        text = (
            f"{protection}{shown:,} {noun} reconstructed, {likely:,} with a confidence of at least {MIN_LIKELY}, "
            "and nothing could be scored, because no truth was given"
        )
        return f"{text[0].upper()}{text[1:]}: only the owners of the data can compare them with the originals."
    if run.attacks and not is_finished(run):
        return "Attacks were replayed, and nothing is finished yet: what leaks is not known."
    if run.attacks:
        return "Attacks were replayed, and nothing is scored yet: what leaks is not known."
    return (
        f"{format_count(run.count_observations('complete'), 'update')} recorded, and none attacked yet: what leaks is not known."
    )


def _describe_failures(run: ReportedRun) -> str:
    """Return the sentences for a run on which every attack failed, with the most frequent reason if one is known.

    A reason counts once for each scored example and for each case without scores.
    """
    cases = sum(attack.states["failed"] for attack in run.attacks)
    who = "The attack" if len(run.attacks) == 1 else f"Each of the {len(run.attacks)} attacks"
    reasons: Counter[str] = Counter()
    for attack in run.attacks:
        reasons.update(dict(attack.failures))
        reasons.update(dict(attack.unscored.failures))
    why = f" Most often because: {reasons.most_common(1)[0][0].rstrip('.')}." if reasons else ""
    return f"{who} failed: {format_count(cases, 'case')} attacked, and none has a reconstruction.{why} What leaks is not known."


def is_finished(run: ReportedRun) -> bool:
    """Return whether at least one case of the run's attacks is finished: done or failed."""
    return any(attack.states.get(state) for attack in run.attacks for state in FINISHED_STATES)


def describe_unfinished(run: ReportedRun) -> str:
    """Return the sentences on how many cases are not finished (waiting or interrupted); "" if all are finished."""
    states = sum((Counter(attack.states) for attack in run.attacks), Counter[str]())
    if not (left := count_unfinished(states)):
        return ""
    attacks = "the attack" if len(run.attacks) == 1 else f"the {len(run.attacks)} attacks"
    of = f"{left:,} of {format_count(states.total(), 'case')} of {attacks}"
    return f"Not finished: {of} ({format_counts(states, UNFINISHED_STATES)}). Shares and means are of finished cases alone."


def describe_coverage(run: ReportedRun) -> str:
    """Return one sentence on the attacks of a run and how many of their cases are finished and failed; "" without cases.

    If there are attacks on single rounds, the sentence also states the largest number of cases of any such attack, and the number
    of recorded updates (or secure sums), such as "on 3 of 8 updates". If replies of clients held no update, it states the number
    of these replies.
    """
    states = sum((Counter(attack.states) for attack in run.attacks), Counter[str]())
    if not (total := states.total()):
        return ""
    finished, failed = total - count_unfinished(states), f"{states['failed']:,}" if states["failed"] else "none"
    text = format_count(len(run.attacks), "attack")
    single = [attack.cases for attack in run.attacks if attack.cases is not None and not attack.linked]
    if single and (complete := run.count_observations("complete")):
        text += f" on {max(single):,} of {format_count(complete, 'secure sum' if run.manifest.secure_aggregation else 'update')}"
    text += f": {finished:,} of {format_count(total, 'case')} finished, {failed} failed"
    if absent := run.count_observations("failed") + run.count_observations("late"):
        text += f"; {format_count(absent, 'reply', 'replies')} of clients held no update"
    return f"{text}."


def _name_attack(summary: Summary, manifest: Manifest) -> str:
    """Return the attack's name as text for a sentence.

    ", ignoring the defense," is added if clients use a defense that the attack does not model. If the attack was given oracles
    (information that no server has), their names are added. The names of what was withheld from the attack are added, too.
    """
    name = format_attack_name(summary.attack)
    if summary.withheld:
        name = f"{name}, without {' and '.join(summary.withheld)},"
    if list_changes(manifest) and not summary.knows_defense:
        name = f"{name}, ignoring the defense,"
    return f"{name}, given {' and '.join(summary.oracles)} beyond the threat model," if summary.oracles else name


def _format_recovered(success: Estimate, manifest: Manifest) -> str:
    noun = "private images" if manifest.data.is_image else "private rows"
    return (
        f"{format_rate(success)} {noun} (95{NO_BREAK_SPACE}%{NO_BREAK_SPACE}CI{NO_BREAK_SPACE}{format_percent_interval(success)})"
    )


def _of(estimate: Estimate | None) -> Estimate:
    """Return `estimate`, which is never None for a summary with finished cases."""
    assert estimate is not None
    return estimate


def _describe_oracle_attack(summaries: Sequence[Summary], top: Summary, manifest: Manifest) -> str:
    """Return a sentence on the best attack with an oracle if it recovered a larger share than `top`, otherwise "".

    An oracle is information that no server has. The sentence begins with a space. top: summary that `find_strongest` chose. If
    `top` has an oracle itself, all scored attacks have one, and the result is "".
    """
    scored = [summary for summary in summaries if summary.oracles and summary.success]
    better = [summary for summary in scored if _of(summary.success).value > _of(top.success).value]
    if not better or top.oracles:
        return ""
    best = max(better, key=_rank_strength)
    return f" {_name_attack(best, manifest)} recovered {format_rate(_of(best.success))}."


def list_differences(runs: Sequence[ReportedRun]) -> list[str]:
    """Return which of model, data, training, recorded rounds and number of clients differ between the runs.

    If any of them differs, a comparison of the runs does not compare defenses alone.
    """
    known = next((run.data for run in runs if run.data), "")
    facts: dict[str, list[Any]] = {
        "model": [(run.manifest.model.name, run.manifest.model.arguments) for run in runs],
        "data": [(run.manifest.data, run.data or known) for run in runs],
        "training": [run.manifest.training for run in runs],
        "rounds": [run.rounds for run in runs],
        "number of clients": [len(run.clients) for run in runs],
    }
    return [name for name, values in facts.items() if any(value != values[0] for value in values)]

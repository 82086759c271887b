"""Text for numbers and verdicts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attacker.report.contents import AttackOnRun, ReportedRun, changes, protection
from attacker.scoring import Estimate, Summary
from attacker.scoring.states import FINISHED, STATES, UNFINISHED, State, count_unfinished, format_counts
from fedsim.recording import Manifest

EN_DASH = "\N{EN DASH}"
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
PAPER_NAMES = {
    "agic": "AGIC",
    "cpl": "CPL",
    "dlg": "DLG",
    "exact": "Exact",
    "hgap": "H-GAP",
    "idlg": "iDLG",
    "inverting_gradients": "Inverting Gradients",
    "rgap": "R-GAP",
}


def attack_name(attack: str) -> str:
    """Return an attack's name as its paper spells it, or the given name for attacks without a paper."""
    return PAPER_NAMES.get(attack, attack)


def recovered(estimate: Estimate) -> str:
    """Return a rate as text, such as "24 of 24"."""
    return f"{round(estimate.value * estimate.count)} of {estimate.count}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}{NO_BREAK_SPACE}%"


def percent_interval(estimate: Estimate) -> str:
    return f"{100 * estimate.low:.0f}{EN_DASH}{100 * estimate.high:.0f}{NO_BREAK_SPACE}%"


def interval(estimate: Estimate, digits: int) -> str:
    """Return an interval as text; if there are too few groups for one, the range of the values with a remark."""
    ends = f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"
    return ends if estimate.is_interval else f"values {ends}; no interval of {counted(estimate.clusters, 'group')}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 round" or "3 rounds"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Return seconds as text, such as "9.8 s", "1 min 33 s" or "2 h 5 min"."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def amount(count: float) -> str:
    """Return a number of bytes as text in powers of 1000, such as "73 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.1f} {unit}"


def best(run: ReportedRun) -> AttackOnRun | None:
    """Return the scored attack that `strongest` chooses; None if nothing is scored."""
    winner = strongest([attack.summary for attack in run.attacks if attack.summary])
    return next((attack for attack in run.attacks if attack.summary is winner), None) if winner else None


def strongest(summaries: Iterable[Summary]) -> Summary | None:
    """Return the summary of the attack that recovered most; attacks with an oracle are considered only if there are no others.

    An attack that is not distinguishable from its null comes after attacks that leak or have no verdict.
    """
    scored = [summary for summary in summaries if summary.success]
    fair = [summary for summary in scored if not summary.oracles] or scored
    return max(fair, key=_strength, default=None)


def _strength(summary: Summary) -> tuple[bool, float, bool, float, bool, float, float]:
    """Return a sort key for `strongest`. Among equal attacks, those with a null and those on more examples come first."""
    success, labels = _of(summary.success), _of(summary.label_success)
    told = (not _is_gone(summary), success.value, _leaks(summary), labels.value, summary.null is not None, success.low)
    return *told, summary.psnr.value if summary.psnr else 0.0


def _leaks(summary: Summary) -> bool:
    return summary.verdict is not None and summary.verdict.leaks


def _is_gone(summary: Summary) -> bool:
    return summary.verdict is not None and summary.verdict.outcome.startswith("not distinguishable")


def verdict(run: ReportedRun) -> str:
    """Return the conclusion from the scores of a run, as text."""
    if run.attacks and all(attack.has_failed for attack in run.attacks):
        return _failed(run)
    summaries = [attack.summary for attack in run.attacks if attack.summary]
    return verdict_of(summaries, run.manifest) or _unscored(run)


def verdict_of(summaries: Sequence[Summary], manifest: Manifest) -> str:
    """Return the conclusion from the scores of the attacks on one run, as text; "" if nothing is scored."""
    winner = strongest(summaries)
    if winner is None:
        return ""
    fair = [one for one in summaries if one.success and bool(one.oracles) == bool(winner.oracles)]
    under = protection(manifest)
    text = (f"under {under}, " if under else "") + _verdict_on(winner, manifest)
    others = len(fair) - 1
    if others and all(map(_is_gone, fair)):
        text += f". {'The other attack is' if others == 1 else f'None of the {others} other attacks is'}"
        text += f"{' not' if others == 1 else ''} distinguishable from its null either"
    return text[0].upper() + text[1:] + "." + _oracle(summaries, winner, manifest)


def _verdict_on(summary: Summary, manifest: Manifest) -> str:
    """Return the conclusion about one attack that has finished cases, without a full stop."""
    name, found = _told(summary, manifest), summary.verdict
    facts = f"recovered {_share(_of(summary.success), manifest)}{_labels(summary, 'read')}"
    if summary.null is None or summary.null.success is None or found is None:
        return f"{name} {facts}, with no null to compare it with"
    facts += f"; without the gradient it recovers {recovered(summary.null.success)}{_labels(summary.null, 'reads')}"
    if found.outcome == "recovered":
        return f"{name} {facts}"
    if found.outcome == "partly leaked":
        more = "; ".join(one.words for one in found.leaked[:2]) + ("; and more" if len(found.leaked) > 2 else "")
        return f"{name} finds more than its null does: {more}. It {facts}"
    return f"{name} is {found.words}. It {facts}" if _is_gone(summary) else f"{name} {facts}; {found.words}"


def _labels(summary: Summary, reads: str) -> str:
    """Return how many labels were recovered, as text; "" if an oracle supplied them."""
    if summary.label_success is None or "labels" in summary.oracles:
        return ""
    return f" and {reads} {recovered(summary.label_success)} labels"


def _unscored(run: ReportedRun) -> str:
    shown = sum(attack.unscored.total for attack in run.attacks)
    if shown and not run.truth:
        noun = "example was" if shown == 1 else "examples were"
        text = f"{_under(run)}{shown:,} {noun} reconstructed, and nothing could be scored, because no truth was given"
        return f"{text[0].upper()}{text[1:]}: how near they come only the owners of the data can tell."
    if run.attacks and not is_finished(run):
        return "Attacks were replayed, and nothing is finished yet: what leaks is not known."
    if run.attacks:
        return "Attacks were replayed, and nothing is scored yet: what leaks is not known."
    return f"{counted(run.observed('complete'), 'update')} recorded, and none attacked yet: what leaks is not known."


def _failed(run: ReportedRun) -> str:
    """Return the sentences for a run on which every attack failed, with the most frequent reason."""
    cases = sum(attack.states["failed"] for attack in run.attacks)
    who = "The attack" if len(run.attacks) == 1 else f"Each of the {len(run.attacks)} attacks"
    reasons: Counter[str] = Counter()
    for attack in run.attacks:
        reasons.update(dict(attack.failures))
        reasons.update(dict(attack.unscored.failures))
    why = f" Most often because: {reasons.most_common(1)[0][0].rstrip('.')}." if reasons else ""
    return f"{who} failed: {counted(cases, 'case')} attacked, and none has a reconstruction.{why} What leaks is not known."


def is_finished(run: ReportedRun) -> bool:
    """Return whether any attack has finished any case."""
    return any(attack.states.get(state) for attack in run.attacks for state in FINISHED)


def not_finished(run: ReportedRun) -> str:
    """Return a sentence on how many cases are not finished; "" if all are."""
    states = sum((Counter(attack.states) for attack in run.attacks), Counter[str]())
    if not (left := count_unfinished(states)):
        return ""
    attacks = "the attack" if len(run.attacks) == 1 else f"the {len(run.attacks)} attacks"
    of = f"{left:,} of {counted(states.total(), 'case')} of {attacks}"
    return f"Not finished: {of} ({in_states(states, UNFINISHED)}). Shares and means are of finished cases alone."


def coverage(run: ReportedRun) -> str:
    """Return how many observations the attacks cover and how many of their cases failed, in one sentence; "" without attacks."""
    states = sum((Counter(attack.states) for attack in run.attacks), Counter[str]())
    if not (total := states.total()):
        return ""
    finished, failed = total - count_unfinished(states), f"{states['failed']:,}" if states["failed"] else "none"
    text = counted(len(run.attacks), "attack")
    single = [attack.cases for attack in run.attacks if attack.cases is not None and not attack.linked]
    if single and (complete := run.observed("complete")):
        text += f" on {max(single):,} of {counted(complete, 'secure sum' if run.manifest.secure_aggregation else 'update')}"
    text += f": {finished:,} of {counted(total, 'case')} finished, {failed} failed"
    if absent := run.observed("failed") + run.observed("late"):
        text += f"; {counted(absent, 'reply', 'replies')} of clients held no update"
    return f"{text}."


def in_states(states: Mapping[str, int], wanted: Sequence[State] = STATES) -> str:
    """Return the number of cases by state as text, such as "2 done, 1 failed, 3 waiting"; states without cases are left out."""
    return format_counts(states, wanted)


def finished_of(states: Mapping[str, int]) -> str:
    """Return the number of finished cases as text, such as "3 of 6 cases finished; 2 waiting, 1 interrupted"."""
    total, left = sum(states.values()), count_unfinished(states)
    text = f"{total - left:,} of {counted(total, 'case')} finished"
    return f"{text}; {in_states(states, UNFINISHED)}" if left else text


def after(words: str, start: str) -> str:
    """Return `words` without `start` at the beginning; unchanged if `words` begins with something else."""
    return words.removeprefix(start)


def _under(run: ReportedRun) -> str:
    return f"under {run.protection}, " if run.protection else ""


def _told(summary: Summary, manifest: Manifest) -> str:
    """Return the attack's name, followed by its oracles, or by "ignoring the defense" if it does not model it."""
    name = attack_name(summary.attack)
    if changes(manifest) and not summary.knows_defense:
        name = f"{name}, ignoring the defense,"
    return f"{name}, told {' and '.join(summary.oracles)} beyond the threat model," if summary.oracles else name


def _share(success: Estimate, manifest: Manifest) -> str:
    noun = "private images" if manifest.data.is_image else "private rows"
    return f"{recovered(success)} {noun} (95{NO_BREAK_SPACE}%{NO_BREAK_SPACE}CI{NO_BREAK_SPACE}{percent_interval(success)})"


def _of(estimate: Estimate | None) -> Estimate:
    """Return `estimate`, which is never None for a summary with finished cases."""
    assert estimate is not None
    return estimate


def _oracle(summaries: Sequence[Summary], top: Summary, manifest: Manifest) -> str:
    """Return a sentence on the best attack with an oracle if it recovered more than `top`, otherwise "".

    An oracle is information that no server has. top: the strongest attack without one; if it has one too, the
    result is "".
    """
    scored = [one for one in summaries if one.oracles and one.success]
    told = [one for one in scored if _of(one.success).value > _of(top.success).value]
    if not told or top.oracles:
        return ""
    more = max(told, key=_strength)
    return f" {_told(more, manifest)} recovered {recovered(_of(more.success))}."


def privacy(row: Mapping[str, Any]) -> str:
    """Return a round's privacy accounting as text; "" if its row of metrics has none."""
    told = row.get("privacy")
    if not isinstance(told, Mapping):
        return ""
    text = _epsilon(told)
    if isinstance(central := told.get("central"), Mapping):
        text += f"; for an observer of the global model alone, {_epsilon(central)}"
    return text


def _epsilon(told: Mapping[str, Any]) -> str:
    epsilon, delta, prior, bound = (told.get(key) for key in ("epsilon", "delta", "prior", "bound"))
    if not isinstance(epsilon, int | float) or not isinstance(delta, int | float):
        return f"none: {told['why']}" if told.get("why") else "none"
    unit = {"client": "a client's whole update", "example": "one example"}.get(str(told.get("unit")), str(told.get("unit")))
    text = f"epsilon {epsilon:.3g} at delta {delta:g} for {unit}"
    if not isinstance(prior, int | float) or not isinstance(bound, int | float):
        return text
    guessed, found = (f"{100 * share:.3g}{NO_BREAK_SPACE}%" for share in (prior, bound))
    return f"{text}: a guess that is right {guessed} of the time becomes a reconstruction that is right at most {found}"


def differences(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of the settings, other than the defense, in which the runs differ.

    If there are any, a comparison of the runs does not compare defenses alone.
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

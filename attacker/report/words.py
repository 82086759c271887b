"""Numbers and verdicts in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from attacker.report.contents import AttackOnRun, Run
from attacker.scoring import Estimate, Summary

DASH = "\N{EN DASH}"
SPACE = "\N{NO-BREAK SPACE}"
NAMES = {
    "agic": "AGIC",
    "cpl": "CPL",
    "dlg": "DLG",
    "hgap": "H-GAP",
    "idlg": "iDLG",
    "inverting_gradients": "Inverting Gradients",
    "rgap": "R-GAP",
}


def attack_name(attack: str) -> str:
    """As the papers spell it, where known."""
    return NAMES.get(attack, attack)


def recovered(estimate: Estimate) -> str:
    """ "24 of 24", from a rate."""
    return f"{round(estimate.value * estimate.count)} of {estimate.count}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}{SPACE}%"


def percent_interval(estimate: Estimate) -> str:
    return f"{100 * estimate.low:.0f}{DASH}{100 * estimate.high:.0f}{SPACE}%"


def interval(estimate: Estimate, digits: int) -> str:
    return f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 round", "3 rounds"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """From seconds to "9.8 s", "1 min 33 s", "2 h 5 min"."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def amount(count: float) -> str:
    """From bytes to "73 kB": powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.1f} {unit}"


def best(run: Run) -> AttackOnRun | None:
    """The scored attack that recovered most, of those within the threat model where there are any."""
    scored = [attack for attack in run.attacks if attack.summary and attack.summary.success]
    fair = [attack for attack in scored if not attack.oracles] or scored
    return max(fair, key=_strength, default=None)


def _strength(attack: AttackOnRun) -> tuple[float, float, bool, float, float]:
    """Of equals, one that has a null beside it, and one on more examples: it says more."""
    assert attack.summary
    success, label_success = _of(attack.summary.success), _of(attack.summary.label_success)
    psnr = attack.summary.psnr
    return success.value, label_success.value, attack.summary.null is not None, success.low, psnr.value if psnr else 0.0


def verdict(run: Run) -> str:
    """What the scores of a run come to, in plain words."""
    winner = best(run)
    if winner is None or winner.summary is None:
        return _unscored(run)
    fair = [a.summary for a in run.attacks if a.summary and a.summary.success and bool(a.oracles) == bool(winner.oracles)]
    text = _nothing(fair, winner.summary, run) if all(map(_is_gone, fair)) else _something(winner.summary, run)
    return text[0].upper() + text[1:] + "." + _oracle(run, winner.summary)


def _unscored(run: Run) -> str:
    shown = sum(attack.unscored.total for attack in run.attacks)
    if shown and not run.truth:
        noun = "example was" if shown == 1 else "examples were"
        text = f"{_under(run)}{shown:,} {noun} reconstructed, and nothing could be scored, because no truth was given"
        return f"{text[0].upper()}{text[1:]}: how near they come only the owners of the data can tell."
    if run.attacks:
        return "Attacks were replayed, and nothing is scored yet: what leaks is not known."
    return f"{counted(run.observed('complete'), 'update')} recorded, and none attacked yet: what leaks is not known."


def _is_gone(summary: Summary) -> bool:
    return summary.verdict is not None and summary.verdict.outcome.startswith("not distinguishable")


def _nothing(fair: Sequence[Summary], top: Summary, run: Run) -> str:
    if len(fair) == 1:
        text = f"{_under(run)}{_told(top, run)} recovers no more than its null does: {_share(_of(top.success), run)}"
    else:
        text = f"{_under(run)}no attack recovers more than its null does: the best of them got {_share(_of(top.success), run)}"
    readers = [summary for summary in fair if _reads_labels(summary)]
    if not readers:
        return text
    reader = max(readers, key=lambda summary: _of(summary.label_success).value)
    return f"{text}; but {attack_name(reader.attack)} read {recovered(_of(reader.label_success))} labels"


def _something(top: Summary, run: Run) -> str:
    text = f"{_under(run)}{_told(top, run)} recovered {_share(_of(top.success), run)}"
    if _reads_labels(top):
        text += f" and read {recovered(_of(top.label_success))} labels"
    if top.null is None or top.null.success is None:
        return f"{text}, with no null to compare it with"
    text += f"; without the gradient it recovers {recovered(_of(top.null.success))}"
    if top.verdict is not None and top.verdict.leaks:
        return text if top.verdict.outcome == "recovered" else f"{text}; {top.verdict.words}"
    return text if _of(top.success).low > top.null.success.high else f"{text}, so that chance is not ruled out"


def _under(run: Run) -> str:
    return f"under {run.protection}, " if run.protection else ""


def _told(summary: Summary, run: Run) -> str:
    """The attack's name, with what it was told beyond the threat model, or did not use."""
    name = attack_name(summary.attack)
    if run.changes and not summary.knows_defense:
        name = f"{name}, ignoring the defense,"
    return f"{name}, told {' and '.join(summary.oracles)} beyond the threat model," if summary.oracles else name


def _share(success: Estimate, run: Run) -> str:
    noun = "private images" if run.manifest.data.is_image else "private rows"
    return f"{recovered(success)} {noun} (95{SPACE}%{SPACE}CI{SPACE}{percent_interval(success)})"


def _reads_labels(summary: Summary) -> bool:
    """Whether more labels were read than by the null, and none was told."""
    if summary.null is None or summary.null.label_success is None or "labels" in summary.oracles:
        return False
    return _of(summary.label_success).low > summary.null.label_success.high


def _of(estimate: Estimate | None) -> Estimate:
    """The share of a summary with finished cases."""
    assert estimate is not None
    return estimate


def _oracle(run: Run, top: Summary) -> str:
    """What more an attack got that was told more than a server knows."""
    scored = [a for a in run.attacks if a.oracles and a.summary and a.summary.success]
    told = [a for a in scored if a.summary and _of(a.summary.success).value > _of(top.success).value]
    if not told or top.oracles:
        return ""
    more = max(told, key=_strength).summary
    assert more is not None
    return f" {_told(more, run)} recovered {recovered(_of(more.success))}."


def privacy(row: Mapping[str, Any]) -> str:
    """What a round's row of metrics says of differential privacy so far; "" where it says nothing."""
    told = row.get("privacy")
    if not isinstance(told, Mapping):
        return ""
    text = _epsilon(told)
    if isinstance(central := told.get("central"), Mapping):
        text += f"; for who sees the global model alone, {_epsilon(central)}"
    return text


def _epsilon(told: Mapping[str, Any]) -> str:
    epsilon, delta, prior, bound = (told.get(key) for key in ("epsilon", "delta", "prior", "bound"))
    if not isinstance(epsilon, int | float) or not isinstance(delta, int | float):
        return f"none: {told['why']}" if told.get("why") else "none"
    unit = {"client": "a client's whole update", "example": "one example"}.get(str(told.get("unit")), str(told.get("unit")))
    text = f"epsilon {epsilon:.3g} at delta {delta:g} for {unit}"
    if not isinstance(prior, int | float) or not isinstance(bound, int | float):
        return text
    guessed, found = (f"{100 * share:.3g}{SPACE}%" for share in (prior, bound))
    return f"{text}, so that who would guess it {guessed} of the time reconstructs it {found} at most"


def differences(runs: Sequence[Run]) -> list[str]:
    """In what, beside the defense, the runs differ: then a comparison is not of defenses alone."""
    known = next((run.data for run in runs if run.data), "")
    facts: dict[str, list[Any]] = {
        "model": [(run.manifest.model.name, run.manifest.model.arguments) for run in runs],
        "data": [(run.manifest.data, run.data or known) for run in runs],
        "training": [run.manifest.training for run in runs],
        "rounds": [run.rounds for run in runs],
        "number of clients": [len(run.clients) for run in runs],
    }
    return [name for name, values in facts.items() if any(value != values[0] for value in values)]

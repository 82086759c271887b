"""Numbers, names and privacy accounting as text for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from attacker.scoring import Estimate, GrowthPoint
from attacker.scoring.states import UNFINISHED_STATES, count_unfinished, format_counts

EN_DASH = "\N{EN DASH}"
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
PAPER_NAMES = {
    "accumulate": "Accumulate",
    "agic": "AGIC",
    "cocktail_party": "Cocktail Party",
    "cohort_spans": "Cohort Spans",
    "cpl": "CPL",
    "dlg": "DLG",
    "exact": "Exact",
    "hgap": "H-GAP",
    "idlg": "iDLG",
    "inverting_gradients": "Inverting Gradients",
    "membership": "Membership",
    "rgap": "R-GAP",
    "feature_reconstruction": "Feature reconstruction",
    "robbing_the_fed": "Robbing the Fed (malicious server)",
    "rog": "ROG",
    "spans": "Spans",
}


def format_attack_name(attack: str) -> str:
    """Return an attack's name for display, such as "iDLG" for "idlg"; unchanged if it is not in `PAPER_NAMES`."""
    return PAPER_NAMES.get(attack, attack)


def format_rate(estimate: Estimate) -> str:
    """Return a share as the number of examples that it stands for, rounded, such as "18 of 24" for 0.75 of 24 examples."""
    return f"{round(estimate.value * estimate.count)} of {estimate.count}"


def describe_growth(points: Sequence[GrowthPoint]) -> str:
    """Return as text the share of recovered examples (`ScoreRow.success`), or the bound on it, of each point by number of rounds.

    An example is "0 % after 1, 20 % after 10, 100 % after 24 rounds". Without points, the text is "not counted".
    """
    shares = [f"{format_percent(point.share)} after {point.rounds}" for point in points]
    return f"{', '.join(shares)} {'round' if points and points[-1].rounds == 1 else 'rounds'}" if shares else "not counted"


def format_percent(share: float) -> str:
    return f"{100 * share:.0f}{NO_BREAK_SPACE}%"


def format_percent_interval(estimate: Estimate) -> str:
    return f"{100 * estimate.low:.0f}{EN_DASH}{100 * estimate.high:.0f}{NO_BREAK_SPACE}%"


def format_interval(estimate: Estimate, digits: int) -> str:
    """Return the confidence interval of an estimate as text, such as "0.83 to 0.97".

    If the examples form too few independent groups for an interval, the text is their smallest and largest value and says so:
    "values 0.71 to 0.99; no interval of 3 groups". digits: number of digits after the decimal point.
    """
    ends = f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"
    return ends if estimate.is_interval else f"values {ends}; no interval of {format_count(estimate.clusters, 'group')}"


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 round" or "3,000 rounds". plural: if not formed with "s"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text, such as "9.8 s", "1 min 33 s" or "2 h 5 min"."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_bytes(count: float) -> str:
    """Return bytes as text in B, kB, MB or GB (powers of 1000), such as "73 B", "73.0 kB" or "730 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.1f} {unit}"


def format_finished(states: Mapping[str, int]) -> str:
    """Return numbers of cases, by state, as text: "3 of 6 cases finished; 2 waiting, 1 interrupted"."""
    total, left = sum(states.values()), count_unfinished(states)
    text = f"{total - left:,} of {format_count(total, 'case')} finished"
    return f"{text}; {format_counts(states, UNFINISHED_STATES)}" if left else text


def describe_privacy(row: Mapping[str, Any]) -> str:
    """Return a round's privacy accounting as text, such as "epsilon 2.1 at delta 1e-05 for one example".

    The text is "none", with the reason if it is known, if there is no epsilon, and "" if the row has no accounting. row: the
    round's row of `metrics.jsonl`.
    """
    privacy = row.get("privacy")
    if not isinstance(privacy, Mapping):
        return ""
    text = _format_epsilon(privacy)
    if isinstance(central := privacy.get("central"), Mapping):
        text += f"; for an observer of the global model alone, {_format_epsilon(central)}"
    return text


def _format_epsilon(privacy: Mapping[str, Any]) -> str:
    epsilon, delta, prior, bound = (privacy.get(key) for key in ("epsilon", "delta", "prior", "bound"))
    if not isinstance(epsilon, int | float) or not isinstance(delta, int | float):
        return f"none: {privacy['why']}" if privacy.get("why") else "none"
    unit = {"client": "a client's whole update", "example": "one example"}.get(str(privacy.get("unit")), str(privacy.get("unit")))
    text = f"epsilon {epsilon:.3g} at delta {delta:g} for {unit}"
    if not isinstance(prior, int | float) or not isinstance(bound, int | float):
        return text
    guessed, reconstructed = (f"{100 * share:.3g}{NO_BREAK_SPACE}%" for share in (prior, bound))
    return f"{text}: a guess that is right {guessed} of the time becomes a reconstruction that is right at most {reconstructed}"

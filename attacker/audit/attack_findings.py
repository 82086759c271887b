"""Findings from the scores of attacks, or from their confidence if the true examples are not given."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import torch
from torch import Tensor

from attacker.attacks.confidence import MIN_LIKELY, WOULD_FILL, find_other_normalisation, is_far_outside, is_standardised
from attacker.audit.findings import CheckResult, Finding, Grade, NotChecked
from attacker.audit.plan import ATTACK_RULE, JOINT_ATTACKS
from attacker.reconstruction import Reconstruction
from attacker.replay.cases import PlannedCase
from attacker.replay.results import make_reconstruction_path
from attacker.scoring import ScoreRow, Summary
from fedsim.recording import DataSpec, Row

RECOVERED_RULE, PARTLY_RULE, LABELS_RULE = "examples-recovered", "partly-leaked", "labels-leak"
NORMALISATION_RULE = "normalisation-misstated"
NO_ANSWER = "no conclusion from attacks: no attack produced an answer"
MAX_REASON = 200
"""Number of characters after which the reason why an attack failed is cut; "..." is then added."""
MIN_CONFIDENCE = 0.95
"""Smallest confidence with which a reconstruction counts as recovered if the true examples are not given."""
MIN_EXPLAINED = 0.99
"""Smallest share of the gradient's power that a reconstruction with values outside [0, 1] must explain to be reported."""
ESTIMATING_ROUTES = frozenset({"features", "layer_input"})
"""Routes of `exact` whose answers are the most probable examples under a smoothness prior that has no limits of 0 and 1. Behind
saturated layers they may explain the gradient with values of any size, which say nothing about the clients' normalisation."""
MIN_FITTING = 0.5
"""Share of the gradient's power below which the best answers of all attacks fit so badly that settings may be misstated."""
FAILED_GAP = 1.0
"""Difference in dB by which the mean PSNR of an attack must be below the mean PSNR of its null to count as worse."""
ADVICE = (
    "Try these defenses one by one, each by `attacker audit --what-if` on a short run, and keep what leaks least: secure "
    "aggregation over many clients, so that the server sees only a sum; clipping and noise, or more noise; and, in addition, "
    "larger batches and more local steps."
)
NORMALISATION_ADVICE = (
    "State the clients' normalisation as mean and std of the data: (x - mean) / std, x from 0 to 1 (for inputs from 0 to 255, "
    "std is 1/255), record or import again, and repeat the audit."
)


@dataclass(frozen=True, kw_only=True)
class AuditedAttack:
    """The results of one attack on a sample of updates, and of its null, the same attack without the gradient.

    spec:           the attack with its arguments, as text.
    updates:        number of updates in the sample. failed: how many of them have no reconstruction because the attack failed.
    failure:        why it failed on the first such update, cut after `MAX_REASON` characters; "" if it failed on none.
    outcome, words: outcome of the comparison with the null and the whole result as text, see `Verdict`; "" without the true
                    examples.
    examples:       number of distinct true examples compared. recovered, null_recovered: how many of them the attack and the
                    null recovered at least once; an image is recovered if the mean squared error is at most 0.009, see
                    `attacker.scoring.metrics.is_recovered`. All three are 0 without the true examples.
    confident, likely, undecided: numbers of reconstructed examples with a confidence of at least `MIN_CONFIDENCE`, with a smaller
                    one of at least `MIN_LIKELY`, and with an undecided one, so that nothing is known about them without the true
                    examples. likely is 0 with the true examples.
    doubt:          the attack's first note on why a confidence is undecided; "" if there is none, and with the true examples.
    outside:        how many of the undecided examples are images that explain the gradient, but whose values lie far outside the
                    range [0, 1]; 0 with the true examples, and for `ESTIMATING_ROUTES`.
    outside_values: the smallest and largest values of these.
    standardised:   how many of the undecided examples are images that explain the gradient, and whose normalised values have mean
                    0 and deviation 1; counted as `outside`.
    misread:        how many reconstructed images look complete by another common normalisation than the stated one, over all
                    updates (`find_other_normalisation`); they are not in `confident` and `likely`, but in `undecided`.
    misread_as:     why, and by which normalisation; "" if there are none.
    explained:      largest share of the gradient's power that an example explains; None if unknown, and with the true examples.
    psnr, null_psnr: mean PSNR of attack and null in dB; None for data that are not images, and without the true examples.
    leaked:         titles of the scores that show a leak, see `Comparison`.
    efficiency:     mean of the lower bounds on the mean squared error, divided by the attack's mean squared error over the same
                    examples, see `Summary`; None if no bound is known.
    picture:        path of the picture, or for table rows of the JSON file, that holds the best example and its original,
                    relative to the run; "" if there is none. If the attack recovered examples, only these are considered. An
                    example nearly of one colour is shown only if all examples considered are.
    """

    spec: str
    updates: int
    failed: int = 0
    failure: str = ""
    outcome: str = ""
    words: str = ""
    examples: int = 0
    recovered: int = 0
    null_recovered: int = 0
    confident: int = 0
    likely: int = 0
    undecided: int = 0
    doubt: str = ""
    outside: int = 0
    outside_values: tuple[float, float] | None = None
    standardised: int = 0
    misread: int = 0
    misread_as: str = ""
    explained: float | None = None
    psnr: float | None = None
    null_psnr: float | None = None
    leaked: tuple[str, ...] = ()
    efficiency: float | None = None
    picture: str = ""

    @property
    def has_answer(self) -> bool:
        """Return whether the attack reconstructed at least one update."""
        return self.failed < self.updates

    @property
    def failure_words(self) -> str:
        """Return on how many updates the attack failed, and why; "" if it failed on none."""
        return f"failed on {self.failed} of {_count(self.updates, 'update')}: {self.failure}" if self.failed else ""

    @property
    def is_joint(self) -> bool:
        """Return whether the attack is one of `JOINT_ATTACKS`, which use the recorded rounds of a client together."""
        return self.spec.partition("(")[0] in JOINT_ATTACKS

    @property
    def recovers_all(self) -> bool:
        """Return whether the attack recovered every compared true example, and its null missed at least one of them."""
        return 0 < self.examples == self.recovered > self.null_recovered

    @property
    def is_worse_than_null(self) -> bool:
        """Return whether the attack's mean PSNR is more than `FAILED_GAP` dB below the null's; false if either is unknown."""
        return self.psnr is not None and self.null_psnr is not None and self.psnr < self.null_psnr - FAILED_GAP

    @classmethod
    def of(cls, summary: Summary, rows: Sequence[ScoreRow], updates: int) -> "AuditedAttack":
        """Return the result of a scored attack.

        summary: summary of the scores of the attack and its null. rows: scores of the attack alone.
        updates: number of updates attacked.
        """
        verdict = summary.verdict
        shown = [row for row in rows if row.pair and (row.success or not verdict or not verdict.recovered)]
        best = min(shown, key=lambda row: (bool(row.flat), row.mse or 0.0), default=None)
        return cls(
            spec=summary.spec,
            updates=updates,
            outcome=verdict.outcome if verdict else "no verdict",
            words=verdict.words if verdict else "",
            examples=verdict.examples if verdict else 0,
            recovered=verdict.recovered if verdict else 0,
            null_recovered=verdict.null_recovered if verdict else 0,
            confident=sum((row.confidence or 0.0) >= MIN_CONFIDENCE for row in rows),
            undecided=sum(row.confidence is None and row.failure is None for row in rows),
            psnr=summary.psnr.value if summary.psnr else None,
            null_psnr=summary.null.psnr.value if summary.null and summary.null.psnr else None,
            efficiency=summary.efficiency,
            leaked=tuple(comparison.title for comparison in verdict.leaked) if verdict else (),
            picture=(best.pair or "") if best else "",
        )


def judge_alone(spec: str, updates: int, folder: Path, cases: Sequence[str], data: DataSpec) -> AuditedAttack:
    """Return the result of an attack without the true examples: the numbers of confident, likely and undecided examples.

    spec: the attack as text. updates: number of updates attacked. folder: the folder with the attack's reconstructions.
    cases: keys of the cases to count; those without a reconstruction add 0. data: the stated specification of the data.
    """
    answers = [Reconstruction.read(path) for case in cases if (path := make_reconstruction_path(folder, case)).exists()]
    notes = [note for answer in answers for note in answer.notes if note.startswith("confidence is undecided")]
    fitting = [answer.x[_is_right_but_undecided(answer)] for answer in answers]
    far = [x[is_far_outside(x)] for x in fitting]
    values = torch.cat([x.flatten() for x in far]) if far else torch.zeros(0)
    confidence, misread, misread_as = _doubt_normalisation(answers, data)
    shares = [
        share for answer in answers if answer.explained is not None for share in answer.explained.tolist() if not isnan(share)
    ]
    return AuditedAttack(
        spec=spec,
        updates=updates,
        confident=int((confidence >= MIN_CONFIDENCE).sum()),
        likely=int(((confidence >= MIN_LIKELY) & (confidence < MIN_CONFIDENCE)).sum()),
        undecided=int(confidence.isnan().sum()),
        doubt=notes[0] if notes else "",
        misread=misread,
        misread_as=misread_as,
        outside=sum(map(len, far)),
        standardised=sum(int(is_standardised(x, data).sum()) for x in fitting if len(x)),
        outside_values=(float(values.min()), float(values.max())) if len(values) else None,
        explained=max(shares, default=None),
    )


def _doubt_normalisation(answers: Sequence[Reconstruction], data: DataSpec) -> tuple[Tensor, int, str]:
    """Return the confidence in all examples, (N,), and how many are misread, and why: see `AuditedAttack.misread`.

    All likely images, and those that are undecided for this reason alone, are judged together: one photograph of little contrast
    may fit to another normalisation by chance, and several do not. The confidence in misread images becomes NaN.
    """
    if not answers:
        return torch.zeros(0), 0, ""
    x, confidence = torch.cat([answer.x for answer in answers]), torch.cat([answer.confidence for answer in answers])
    suspected = [answer.confidence.isnan() & any(WOULD_FILL in note for note in answer.notes) for answer in answers]
    judged = (confidence >= MIN_LIKELY) | torch.cat(suspected)
    other = find_other_normalisation(x[judged], data)
    if other is None:
        return confidence, 0, ""
    misread = judged.masked_scatter(judged, other.differing)
    return confidence.masked_fill(misread, torch.nan), int(misread.sum()), str(other)


def _is_right_but_undecided(answer: Reconstruction) -> Tensor:
    """Return a mask (N,) of the undecided images that explain the gradient; false for answers of `ESTIMATING_ROUTES`."""
    if answer.x.ndim != 4 or answer.explained is None or answer.route in ESTIMATING_ROUTES:  # only images have a known range
        return torch.zeros(len(answer.x), dtype=torch.bool)
    return answer.confidence.isnan() & (answer.explained >= MIN_EXPLAINED)


def describe_failures(rows: Sequence[Row], cases: Sequence[PlannedCase], failed: Mapping[str, str]) -> tuple[int, str]:
    """Return on how many updates an attack failed, and why it failed on the first; 0 and "" if it failed on none.

    The reason is that of the first failed case in `cases`, cut after `MAX_REASON` characters.
    rows: the updates of the sample. cases: the cases of these updates; all updates of one client are in one case.
    failed: dict from the key of each failed case to the reason.
    """
    lost = {case.rows[0].client: " ".join(failed[case.key].split()) for case in cases if case.key in failed}
    reason = next(iter(lost.values()), "")
    return sum(row.client in lost for row in rows), reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


def judge_results(
    attacks: Sequence[AuditedAttack], *, scored: bool, defense: str = "", is_random: bool = False
) -> Iterator[CheckResult]:
    """Yield a `NotChecked` for each attack that failed on some updates, and then one result, on the strongest attack.

    The result is a `Finding` if the strongest attack reveals examples, their labels or other parts of them. It is a `NotChecked`
    if that attack reveals nothing, or if no attack reconstructed anything.
    scored:  whether the attacks were compared with the true examples. If not, the strongest attack is the one with the most
             confident examples, and the result is a `Finding` if it has at least one.
    defense: the declared defense of the update, which the advice names as insufficient; "" for none.
    is_random: whether clients draw random numbers while they train, such as dropout. Values outside the stated range then say
             nothing about the normalisation.
    """
    advice = f"The declared defense, {defense}, does not prevent this. {ADVICE}" if defense else ADVICE
    for attack in attacks:
        if attack.failed:
            yield NotChecked(rule=ATTACK_RULE, reason=f"{attack.spec} {attack.failure_words}", kind="inconclusive")
    attacks = [attack for attack in attacks if attack.has_answer]
    if not attacks:
        yield NotChecked(rule=RECOVERED_RULE, reason=NO_ANSWER, kind="inconclusive")
        return
    if not scored:
        yield _judge_confidence(attacks, advice, is_random=is_random)
        return
    strongest = max(attacks, key=_measure_strength)
    graded = _grade(strongest)
    if graded is None:
        reason = "; ".join(f"{attack.spec}: {attack.words}" for attack in attacks)
        yield NotChecked(rule=RECOVERED_RULE, reason=reason, kind="inconclusive")
        return
    rule, grade, title = graded
    evidence = f"{strongest.spec} on {_count(strongest.updates, 'update')}: {strongest.words}."
    yield Finding(rule=rule, grade=grade, title=title, evidence=evidence, advice=advice, picture=strongest.picture)


def _grade(strongest: AuditedAttack) -> tuple[str, Grade, str] | None:
    """Return rule (identifier of the check), grade and title of a finding on an attack; None if its outcome shows no leak."""
    if strongest.outcome == "recovered":
        return RECOVERED_RULE, "severe", _title_recovered(strongest)
    if strongest.outcome != "partly leaked":
        return None
    if set(strongest.leaked) == {"labels"}:
        return LABELS_RULE, "moderate", "Updates reveal the labels of the private examples."
    return PARTLY_RULE, "serious", "Updates reveal part of the private examples."


def _title_recovered(strongest: AuditedAttack) -> str:
    source = "the recorded rounds together" if strongest.is_joint else "one update of one client"
    return f"Private examples can be reconstructed from {source}."


def _judge_confidence(attacks: Sequence[AuditedAttack], advice: str, *, is_random: bool) -> CheckResult:
    strongest = max(attacks, key=lambda attack: attack.confident)
    if strongest.confident:
        return Finding(
            rule=RECOVERED_RULE,
            grade="severe",
            title=_title_recovered(strongest),
            evidence=f"{strongest.spec} on {_count(strongest.updates, 'update')}: "
            f"{_count(strongest.confident, 'reconstruction')} with a calibrated probability of at least {MIN_CONFIDENCE:g} that "
            "they are recovered, if clients normalise their examples as stated. The true examples to compare them with were not "
            "given (--truth).",
            advice=advice,
        )
    far = max(attacks, key=lambda attack: attack.outside)
    own = max(attacks, key=lambda attack: attack.standardised)
    if own.standardised and own.standardised >= own.outside and not is_random:
        return Finding(
            rule=PARTLY_RULE,
            grade="serious",
            title="Private examples can be reconstructed up to their brightness and contrast.",
            evidence=f"{own.spec} on {_count(own.updates, 'update')}: {_count(own.standardised, 'reconstruction')} with at least "
            f"{MIN_EXPLAINED:.0%} of the gradient explained, whose normalised values have mean 0 and deviation 1, as if clients "
            "standardised each image by its own mean and deviation. The update does not show these two numbers, and no mean and "
            "std of the data can state them.",
            advice=advice,
        )
    if far.outside and far.outside_values and not is_random:
        least, most = far.outside_values
        return Finding(
            rule=NORMALISATION_RULE,
            grade="serious",
            title="Attacks find inputs that explain the updates, with values that the stated normalisation does not allow.",
            evidence=f"{far.spec} on {_count(far.updates, 'update')}: {_count(far.outside, 'reconstruction')} with at least "
            f"{MIN_EXPLAINED:.0%} of the gradient explained and values from {least:.3g} to {most:.3g}, where the stated mean "
            "and std allow 0 to 1. They are probably the clients' examples, normalised otherwise than stated.",
            advice=NORMALISATION_ADVICE,
        )
    misread = max(attacks, key=lambda attack: attack.misread)
    if misread.misread and not is_random:
        return Finding(
            rule=NORMALISATION_RULE,
            grade="serious",
            title="Attacks find inputs that explain the updates, and that look complete by another normalisation than stated.",
            evidence=f"{misread.spec} on {_count(misread.updates, 'update')}: {_count(misread.misread, 'reconstruction')}; "
            f"{misread.misread_as}. They are probably the clients' examples.",
            advice=NORMALISATION_ADVICE,
        )
    likely = [f"{attack.likely} of {attack.spec}" for attack in attacks if attack.likely]
    undecided = [
        f"{attack.undecided} of {attack.spec}{f' ({attack.doubt})' * bool(attack.doubt)}"
        for attack in attacks
        if attack.undecided
    ]
    reason = (
        f"whether examples leak is not known: no attack returned an example with a confidence of at least {MIN_CONFIDENCE:g}"
        ", and the true examples to compare with were not given (--truth)"
    )
    if likely:
        reason += f"; reconstructions with a lower confidence, but of at least {MIN_LIKELY:g}: {', '.join(likely)}"
    if undecided:
        reason += f"; reconstructions that may be right or wrong, since their confidence is undecided: {', '.join(undecided)}"
    if far.outside:  # only if clients draw random numbers, which may explain such values
        reason += (
            f"; {far.outside} of them have values outside 0 to 1, from the random numbers that clients draw (dropout or the like)"
            " or from a misstated normalisation"
        )
    shares = [attack.explained for attack in attacks if attack.explained is not None]
    if shares and max(shares) < MIN_FITTING:
        reason += (
            f"; no answer explains more than {max(shares):.0%} of an update's gradient: the attacks had too little time, or "
            "clients train otherwise than stated: compare learning rate, clipping, steps, batch size, loss and "
            "normalisation with the app"
        )
    return NotChecked(rule=RECOVERED_RULE, reason=reason, kind="needs information")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def find_strongest_attack(attacks: Sequence[AuditedAttack]) -> AuditedAttack | None:
    """Return the scored attack that reveals most, by outcome, recovered examples, then leaks; None without any."""
    return max(attacks, key=_measure_strength, default=None)


def _measure_strength(attack: AuditedAttack) -> tuple[int, int, int]:
    """Return a sort key, larger for stronger attacks: rank of the outcome, number of recovered examples, number of leaks."""
    outcomes = ("no verdict", "not distinguishable from the null at this sample", "partly leaked", "recovered")
    return outcomes.index(attack.outcome), attack.recovered, len(attack.leaked)

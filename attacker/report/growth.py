"""Lines of a chart by number of rounds: the shares of examples that an attack and its null recover, and a privacy bound."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attacker.bounds import find_declared_noise
from attacker.report.contents import AttackOnRun, GrowthLine
from attacker.report.hints import Hint
from attacker.scoring import CaseGrowth, GrowthPoint, read_growth, summarise_growth
from attacker.scoring.growth import GROWTH_FILE
from defenses.privacy.accounting import compute_bound
from fedsim.recording import DamagedFile, Recording


def gather_growth(
    folder: Path, recording: Recording, attacks: Sequence[AttackOnRun], hints: list[Hint]
) -> tuple[GrowthLine, ...]:
    """Return one line for each attack whose share of examples recovered is known for at least two numbers of rounds.

    For attacks on several rounds at once, the shares come from growth.jsonl, and for other attacks from their scores. If
    growth.jsonl cannot be read, the reason is added to `hints`. folder: folder of the run.
    """
    try:
        counted = read_growth(folder) if (folder / GROWTH_FILE).is_file() else []
    except ValueError as error:
        hints.append(Hint(str(error)))
        counted = []
    lines = [_make_line(attack, counted) for attack in attacks]
    drawn = [line for line in lines if len(line.points) > 1]
    return tuple(_add_bound(line, attack, recording) for line, attack in zip(lines, attacks, strict=True) if line in drawn)


def _make_line(attack: AttackOnRun, counted: Sequence[CaseGrowth]) -> GrowthLine:
    points, null = _count(attack, counted), _count(attack.null, counted) if attack.null else []
    return GrowthLine(attack=attack.attack, spec=attack.spec, joint=bool(attack.linked), points=tuple(points), null=tuple(null))


def _count(attack: AttackOnRun, counted: Sequence[CaseGrowth]) -> list[GrowthPoint]:
    if attack.linked:
        return summarise_growth([case for case in counted if case.source == attack.source])
    return _accumulate_examples(attack)


def _accumulate_examples(attack: AttackOnRun) -> list[GrowthPoint]:
    """Return, for each k, the share of distinct examples that an attack on single rounds recovers in one of the first k rounds.

    k counts only rounds that have a finished case (done or failed). The denominator is the number of distinct examples of all
    these rounds.
    """
    finished = attack.finished
    total, rounds = attack.distinct, sorted({round for row in finished for round in row.rounds})
    points = []
    for number, last in enumerate(rounds, start=1):
        recovered = {row.index for row in finished if row.success and max(row.rounds) <= last}
        points.append(GrowthPoint(number, len(recovered) / max(1, total)))
    return points


def _add_bound(line: GrowthLine, attack: AttackOnRun, recording: Recording) -> GrowthLine:
    """Return the line with an upper bound on the share at each number of rounds, from the noise that the federation declares.

    The line is returned unchanged if no noise is declared, or no recorded round can be read. The bound depends on the probability
    that a guess recovers an example. This probability is taken as the null's share at the same number of rounds, but at least
    1 / (n + 1), where n is the number of distinct examples of the attack (`AttackOnRun.distinct`), and below 1.
    """
    try:
        noise, uses = find_declared_noise(recording)
    except (DamagedFile, IndexError, KeyError):  # no recorded round that can be read; the report says so elsewhere
        return line
    if not noise.multiplier > 0:
        return line
    minimum = 1 / (max(1, attack.distinct) + 1)
    shares = {point.rounds: point.share for point in line.null}
    bound = []
    for point in line.points:
        prior = min(max(shares.get(point.rounds, 0.0), minimum), 1 - 1e-9)
        bound.append(GrowthPoint(point.rounds, compute_bound(noise, prior=prior, times=uses * point.rounds)))
    return replace(line, bound=tuple(bound))

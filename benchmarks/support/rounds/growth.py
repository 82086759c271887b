"""Leakage by number of recorded rounds: attacks on the first n rounds of the same recordings, for growing n."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from support.contract import Options, ResultRow, measure_cpu
from support.matches import count_exact, run_if_applicable
from support.pictures import open_picture
from support.rounds.cohorts import CohortSetting, load_holdings, record
from support.rounds.federation import make_mlp_client, pretrain, record_epochs
from support.rounds.spans import LEARNING_RATE, TRAINING_STEPS
from support.splits import Images, load_images

from attacker.attacks import AttackSpec, Case
from fedsim.recording import Training

EPOCHS = 3
BATCH, EXAMPLES = 8, 64
SUM_ROUNDS = (1, 5, 10, 15, 20, 30)
CLIENT_ROUNDS = (1, 4, 8, 10, 12, 16, 20, 24)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the picture: a federation, and the attack on it.

    federation: its description in words. attack: name of the attack. case: all rounds. rounds: numbers of rounds n; for each, the
    first n rounds are attacked. images: the examples of all clients.
    """

    federation: str
    attack: str
    case: Case
    images: Images
    rounds: Sequence[int]


def make_lines(options: Options) -> list[Line]:
    """Simulate the federations of the picture, and return one line for each, with the attack on it; with --quick only the first.

    Four federations have one client each, with an untrained network, a trained one, and an untrained one with noise in the
    updates at a signal-to-noise ratio of 40 or 20 dB. In the other two the server sees only sums over groups of clients, which
    change from round to round or are always the same.
    """
    images = load_images(options, "cifar10", EXAMPLES)
    training = Training(learning_rate=LEARNING_RATE, batch_size=BATCH, steps=1)
    plain = make_mlp_client(images.data, training, seed=options.seed)
    trained = plain if options.quick else pretrain(plain, images, steps=TRAINING_STEPS, seed=options.seed)
    lines = []
    for words, client, defense in (
        ("no defense", plain, ""),
        ("no defense, trained network", trained, ""),
        ("noise of 40 dB", plain, "gaussian(snr_db=40)"),
        ("noise of 20 dB", plain, "gaussian(snr_db=20)"),
    ):
        case, _ = record_epochs(client, images, (BATCH,) * EPOCHS, "c", seed=options.seed, defense=defense)
        lines.append(Line(federation=words, attack="spans", case=case, images=images, rounds=CLIENT_ROUNDS))
    for fixed in (False, True):
        setting = CohortSetting(fixed=fixed)
        own, holdings = load_holdings(options, setting)
        words = f"secure sums, {'fixed' if fixed else 'changing'} cohorts"
        case = record(options, setting, holdings)
        lines.append(Line(federation=words, attack="cohort_spans", case=case, images=own, rounds=SUM_ROUNDS))
    return lines[:1] if options.quick else lines


def make_growth_rows(options: Options) -> list[ResultRow]:
    """Return a row for each federation and number of rounds: the shares of exact images of the attack and of its null."""
    rows = []
    for line in make_lines(options):
        attack, null = (AttackSpec(name=line.attack, null=is_null).build() for is_null in (False, True))
        for count in line.rounds[:: 4 if options.quick else 1]:
            first = replace(line.case, observations=line.case.observations[:count])
            with measure_cpu() as clock:
                answer = run_if_applicable(attack, first, options)
            total = len(line.images)
            rows.append(
                {
                    "federation": line.federation,
                    "attack": line.attack,
                    "rounds": count,
                    "exact": count_exact(answer, line.images.x) / total,
                    "null": count_exact(run_if_applicable(null, first, options), line.images.x) / total,
                    "cpu_seconds": clock.seconds,
                    "part": line.images.part,
                }
            )
    return rows


def draw_growth(rows: Sequence[ResultRow], path: Path) -> None:
    """Draw the share of exact images against the number of recorded rounds, and write the picture to `path`.

    The picture has one line per federation. A grey dashed line shows the largest share of a null for each number of rounds.
    """
    with open_picture(path, 8.8, 3.8) as axes:
        for federation in dict.fromkeys(row["federation"] for row in rows):
            own = [row for row in rows if row["federation"] == federation]
            axes.plot([row["rounds"] for row in own], [row["exact"] for row in own], marker="o", markersize=3, label=federation)
        counts = sorted({row["rounds"] for row in rows})
        worst = [max(row["null"] for row in rows if row["rounds"] == count) for count in counts]
        axes.plot(counts, worst, color="#8a8f98", linestyle="--", label="null of all")
        axes.set_xlabel("recorded rounds")
        axes.set_ylabel("exact images (above 60 dB)")
        axes.set_ylim(-0.03, 1.03)

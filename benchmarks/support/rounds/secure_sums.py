"""Tables of rounds.py on secure sums: `isolation`, with a picture, and `disaggregation`.

The first has the rounds in which each client takes part, and after which of them its examples' span is isolated. The second has
single updates that are computed from secure sums by least squares, for growing learning rates.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from support.contract import Options, ResultRow, measure_cpu
from support.pictures import open_picture
from support.rounds.accumulation import make_lenet_client
from support.rounds.cohorts import CohortSetting, load_holdings, measure_isolation, record
from support.rounds.federation import record_sums
from support.splits import load_images
from torch import Generator

from attacker.attacks import Case, exact
from attacker.attacks.multi_round.disaggregation import disaggregate
from attacker.scoring.metrics import psnr

CLIENTS, COHORT, ROUNDS = 8, 3, 16
LEARNING_RATES = (1e-5, 1e-4, 1e-3, 1e-2)


def make_isolation_rows(options: Options) -> list[ResultRow]:
    """Return a row for each client of random cohorts: the rounds it takes part in, and the first after which it is isolated.

    isolated_after: the smallest number of recorded rounds with which the attack `cohort_spans` separates the linear span of the
    client's examples from the spans of all other clients; None if the attack never does.
    """
    setting = CohortSetting(clients=8, cohort=2, rounds=8) if options.quick else CohortSetting(steps=4, batch=2)
    images, holdings = load_holdings(options, setting)
    case = record(options, setting, holdings)
    after: dict[str, int] = {}
    for count in range(1, setting.rounds + 1):
        first = replace(case, observations=case.observations[:count])
        for name in measure_isolation(first, Generator().manual_seed(options.seed)):
            after.setdefault(name, count)
        if len(after) == setting.clients:
            break
    return [
        {
            "client": name,
            "rounds": " ".join(str(observation.round) for observation in case.observations if name in observation.cohort),
            "isolated_after": after.get(name),
            "part": images.part,
        }
        for name in holdings
    ]


def draw_isolation(rows: Sequence[ResultRow], path: Path) -> None:
    """Draw clients against rounds, and write the picture to `path`: a circle for each round in which a client takes part.

    Circles are filled from the round on with which the client is isolated, see `make_isolation_rows`, which returns `rows`.
    """
    with open_picture(path, 7.2, 4.2) as axes:
        last = max(int(round) for row in rows for round in row["rounds"].split())
        for place, row in enumerate(rows):
            rounds, after = [int(round) for round in row["rounds"].split()], row["isolated_after"]
            axes.scatter(rounds, [place] * len(rounds), s=22, facecolors="white", edgecolors="#8a8f98", zorder=3)
            if after is not None:
                axes.plot([after, last], [place, place], color="#c0392b", linewidth=3, alpha=0.35, solid_capstyle="butt")
                seen = [round for round in rounds if round >= after]
                axes.scatter(seen, [place] * len(seen), s=22, color="#c0392b", zorder=4)
        axes.set_yticks(range(len(rows)), [row["client"] for row in rows], fontsize=7)
        axes.set_xlabel("recorded rounds")
        axes.set_title("takes part (circle); span isolated from the other clients' (red)", fontsize=9)
        axes.set_xlim(0.5, last + 0.5)


def make_disaggregation_rows(options: Options) -> list[ResultRow]:
    """Return a row for each learning rate: how well single clients' updates are computed from secure sums of random cohorts.

    Each client trains CPL's LeNet on one image, the same in each round. determined: number of clients whose updates the sums
    determine. error: largest relative error of the computed update of such a client: norm of the difference to the true update,
    divided by the norm of the true update. residual: norm of the difference between the sums and
    those of the computed updates, relative to the norm of the sums. psnr: mean PSNR in dB of the images that `exact` reconstructs
    from computed updates.
    """
    images = load_images(options, "cifar10", CLIENTS)
    rows = []
    for rate in LEARNING_RATES[:1] if options.quick else LEARNING_RATES:
        rng, client = Generator().manual_seed(options.seed + 1), make_lenet_client(images, options.seed, 1, rate)
        batches = {f"c{i}": [(images.x[i : i + 1], images.y[i : i + 1])] for i in range(CLIENTS)}
        cohorts = [torch.randperm(CLIENTS, generator=rng)[:COHORT].tolist() for _ in range(ROUNDS)]
        case = record_sums(client, [{f"c{i}": batches[f"c{i}"] for i in sorted(cohort)} for cohort in cohorts])
        with measure_cpu() as clock:
            found = disaggregate(case.observations)
            (*answers,) = exact(route="layers")([Case((one,)) for one in found.clients.values()], rng=Generator().manual_seed(0))
        errors, each = [], []
        for (name, one), answer in zip(found.clients.items(), answers, strict=True):
            true = replace(client, weights=one.weights).compute_update(batches[name])
            missed, size = (
                torch.cat([part.flatten() for part in parts.values()]).norm()
                for parts in ({key: u - one.update[key] for key, u in true.items()}, true)
            )
            errors.append(float(missed / size))
            each.append(float(psnr(answer.x.clamp(0, 1), batches[name][0][0])[0]))
        rows.append(
            {
                "learning_rate": rate,
                "clients": CLIENTS,
                "cohort": COHORT,
                "rounds": ROUNDS,
                "determined": len(found.clients),
                "residual": found.residual,
                "error": max(errors),
                "psnr": mean(each),
                "each": " ".join(f"{value:.1f}" for value in each),
                "cpu_seconds": clock.seconds,
                "part": images.part,
            }
        )
    return rows

"""The table `disaggregation` of rounds.py: single updates from secure sums by least squares, for growing learning rates."""

from dataclasses import replace
from statistics import mean

import torch
from support.contract import Options, ResultRow, measure_cpu
from support.rounds.accumulation import make_lenet_client
from support.rounds.federation import record_sums
from support.splits import load_images
from torch import Generator

from attacker.attacks import Case, exact
from attacker.attacks.multi_round.disaggregation import disaggregate
from attacker.scoring.metrics import psnr

CLIENTS, COHORT, ROUNDS = 8, 3, 16
LEARNING_RATES = (1e-5, 1e-4, 1e-3, 1e-2)


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

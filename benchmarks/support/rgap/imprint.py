"""Robbing the Fed: examples read off an imprint layer by batch size and number of bins, and the client's check of the model.

A malicious server puts the layer before CPL's LeNet. The layer's k neurons compare the mean of the image to k thresholds, between
which lie bins. The thresholds are shifted and scaled by the mean and the standard deviation of image means over images of the
tuning part. A client takes one step on a batch of B images of the report part. `expected` is the share of examples alone in their
bins if all bins are equally probable, (1 - 1/k)^(B-1). An example is certified if it alone, with one label, explains the gradient
of its bin's bias up to a relative error of 1e-3. `certified_wrong` is the number of certified examples that are not in the batch.
`flagged` is the share of imprinted models in which `fedleak.inspect_model` finds tampering, `false_alarms` the number of
torchvision networks (with initial weights) in which it finds tampering. aims: recovered_64_1024 0.9 for each data set,
certified_wrong 0, flagged 1, false_alarms 0.
"""

from typing import Any

import torch
from support.attacked import match_examples, match_images, run_attack
from support.contract import Options, TableAndSummary
from support.cpl.cases import Originals, make_batch_cases
from support.single_cases import make_client
from support.splits import load_images
from torchvision import models as vision

from attacker.attacks import robbing_the_fed
from attacker.attacks.closed_form.imprint import CERTIFIED_CONFIDENCE
from attacker.scoring.metrics import is_recovered, mse
from attacker.scoring.statistics import estimate_share
from fedsim import models
from fedsim.models.imprint import STATISTICS
from fedsim.models.tampering import inspect_model
from fedsim.recording import ModelSpec

DATA_SETS = ("cifar10", "cifar100", "lfw")
CELLS = ((16, 1024), (64, 128), (64, 1024), (128, 1024))
"""Pairs of batch size and number of bins."""
BATCHES = 10
MAX_REPORT_IMAGES = 560
"""Number of images that the report part of every data set holds at least."""
TUNING_IMAGES = 64
"""Number of images of the tuning part from which location and scale of the statistic are estimated."""


def measure_imprint(options: Options) -> TableAndSummary:
    """Return a row for each data set, batch size and number of bins, and a summary, after the attacks and the inspections."""
    rows = [row for name in DATA_SETS[: 1 if options.quick else None] for row in measure_data_set(name, options)]
    summary: dict[str, Any] = {f"recovered_{row['batch']}_{row['bins']}_{row['data']}": row["recovered"] for row in rows}
    summary |= {"certified_wrong": sum(row["certified_wrong"] for row in rows)}
    summary |= {"flagged": sum(row["flagged"] for row in rows) / len(rows), **count_false_alarms(options)}
    return rows, summary


def measure_data_set(name: str, options: Options) -> list[dict[str, Any]]:
    """Return one row for each pair of batch size and number of bins in `CELLS`, on the data set `name`; one row with --quick."""
    public = load_images(options, name, TUNING_IMAGES, part="tuning")
    direction = STATISTICS["average"][0](public.data.size)
    values = public.data.normalise(public.x).flatten(1) @ direction
    scaled = {"centre": float(values.mean()), "spread": float(values.std())}
    rows = []
    for size, bins in CELLS[:1] if options.quick else CELLS:
        data = load_images(options, name, size * min(2 if options.quick else BATCHES, MAX_REPORT_IMAGES // size))
        arguments = {"base": "lenet_cpl", "bins": bins, **scaled}
        client = make_client("imprint", data.data, seed=options.seed, batch=size, arguments=arguments)
        flagged = bool(inspect_model(models.build(ModelSpec(name="imprint", arguments=arguments), data.data)))
        rows.append({"data": name, "part": data.part, "batch": size, "bins": bins, "flagged": flagged})
        rows[-1] |= measure_readout(make_batch_cases(data, client, size), options) | {"expected": (1 - 1 / bins) ** (size - 1)}
    return rows


def measure_readout(originals: Originals, options: Options) -> dict[str, Any]:
    """Read the imprint layer for each case (one batch), and return the columns on success of a row.

    recovered, null, certified: shares of all examples that are recovered, by the attack and by its null, and that are certified.
    low, high: 95 % interval of `recovered`. certified_wrong: number of certified examples that are not in their batch.
    labels_of_recovered, median_mse_of_recovered: share of right labels and median MSE of the recovered examples.
    cpu_seconds: per example.
    """
    answers, seconds = run_attack(robbing_the_fed(), originals.cases, options)
    guessed_alone, _ = run_attack(robbing_the_fed().null(), originals.cases, options)
    null = is_recovered(match_images(guessed_alone, originals.x), torch.cat(originals.x)).float()
    recovered, certified, wrong, errors, labels = [], [], 0, [], []
    for answer, x, y in zip(answers, originals.x, originals.y, strict=True):
        guesses, guessed = match_examples(answer, x)
        good = is_recovered(guesses, x)
        sure = answer.confidence >= CERTIFIED_CONFIDENCE - 1e-6
        nearest = torch.cdist(answer.x[sure].flatten(1), x.flatten(1)).amin(dim=1) if sure.any() else torch.zeros(0)
        wrong += int((nearest > 0.01 * x[0].numel() ** 0.5).sum())
        recovered.append(good.float())
        certified.append(sure.float())
        errors.append(mse(guesses, x)[good])
        labels.append((guessed == y)[good].float())
    batches = [i for i, one in enumerate(recovered) for _ in one]
    share = estimate_share(torch.cat(recovered).tolist(), batches)
    return {
        "batches": len(recovered),
        "recovered": share.value,
        "low": share.low,
        "high": share.high,
        "null": float(null.mean()),
        "certified": float(torch.cat(certified).mean()),
        "certified_wrong": wrong,
        "labels_of_recovered": float(torch.cat(labels).mean()),
        "median_mse_of_recovered": float(torch.cat(errors).median()),
        "cpu_seconds": seconds / len(batches),
    }


def count_false_alarms(options: Options) -> dict[str, int]:
    """Return a dict with the number of torchvision classifiers inspected, and of those in which tampering is found.

    All of them take about seven CPU-minutes. With --quick only every twentieth is inspected.
    """
    names = vision.list_models(module=vision)[:: 20 if options.quick else 1]
    alarms = 0
    for name in names:
        more = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        alarms += bool(inspect_model(vision.get_model(name, weights=None, **more)))
    return {"false_alarms": alarms, "torchvision_networks": len(names)}

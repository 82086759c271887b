"""Share of a large batch's images that closed forms recover, over batch size, width, training of the network, and rounds.

The network is an MLP with one hidden layer with ReLU on CIFAR-10. The attack `exact` runs its closed form for a first linear
layer, without a search. Where a client uses the same images in several `rounds`, the attack is `spans`. The column `exact` is the
share of images recovered above 60 dB, `certified` the number of answers with a confidence above 0.9, and `false_certificates` the
number of certified answers with a PSNR of at most 60 dB. `null` is the value of `exact` for the attack's null, which answers with
grey images. `steps` is the number of local steps of FedAvg, each on its own batch. Rows with different values of `draw` have
different images and different initial weights.

Table `cocktail`: what `cocktail_party` separates, without (`refine` false) and with the zeros of ReLU, as mean and median PSNR of
the images of a batch (a PSNR above 100 dB counts as 100), the shares of images with a higher PSNR than grey (`above_null`), above
20 dB and above 60 dB (`exact`). No answer is assigned to two images. `null` is here the mean PSNR of grey images.

Table `learned`: mean PSNR of `learning_to_invert` and of `inverting_gradients`, which both know the defense, on batches of one to
four images behind an untrained LeNet, beside the mean PSNR of their nulls (support/learned_inversion.py).

Table `batch_norm`: mean PSNR of `inverting_gradients` on clients that train in mode "train" and return the running statistics of
their batch norm layers, with and without the term for these statistics, beside the null (support/returned_statistics.py).

Table `local_epochs`: mean PSNR of `inverting_gradients` on clients that train for several local epochs on all of their images at
once, with simulated local steps and with all steps taken for one, beside the null (support/local_epochs.py).

Table `several_batches`: the same on clients whose local epochs have two batches of two images each, so that the order of the
images is searched for before steps are simulated.

Table `several_rounds`: mean PSNR of `agic` on four rounds of such clients, beside the best round alone, and beside rounds whose
steps are taken for one.
"""

import tempfile
from pathlib import Path

from support.batches import list_batch_settings, list_separated, make_batch_row, make_separated_row
from support.contract import Options, ResultRow, TableAndSummary, run_selected_table
from support.learned_inversion import list_learned_settings, make_learned_row
from support.local_epochs import (
    EpochSetting,
    list_epoch_settings,
    list_round_settings,
    list_shuffled_settings,
    make_epoch_row,
    make_rounds_row,
)
from support.returned_statistics import list_statistics_settings, make_statistics_row


def measure_exact(options: Options) -> TableAndSummary:
    """Measure the table of closed forms; the summary has its values for a batch of 128 and for four rounds of a batch of 32."""
    rows = [make_batch_row(options, setting) for setting in list_batch_settings(quick=options.quick)]
    summary: ResultRow = {"false_certificates": sum(row["false_certificates"] for row in rows)}
    for row in rows:
        if (row["batch"], row["width"], row["network"], row["defense"]) == (128, 1024, "untrained", "none"):
            summary |= {"exact_b128": row["exact"], "cpu_seconds_b128": row["cpu_seconds"]}
    again = [
        row["exact"] for row in rows if (row["network"], row["rounds"], row["rate"], row["batch"]) == ("trained", 4, 0.05, 32)
    ]
    summary |= {"exact_b32_trained_4_rounds": sum(again) / len(again)} if again else {}
    return rows, {**summary, "worst_null": max(row["null"] for row in rows)}


def measure_separated(options: Options) -> TableAndSummary:
    rows = [make_separated_row(options, setting) for setting in list_separated(quick=options.quick)]
    return rows, {"worst_null": max(row["null"] for row in rows)}


def measure_learned(options: Options) -> TableAndSummary:
    with tempfile.TemporaryDirectory() as folder:
        rows = [make_learned_row(options, *one, Path(folder)) for one in list_learned_settings(quick=options.quick)]
    return rows, {"worst_gain": min(row["learned"] - row["learned_null"] for row in rows)}


def measure_statistics(options: Options) -> TableAndSummary:
    rows = [make_statistics_row(options, *setting) for setting in list_statistics_settings(quick=options.quick)]
    return rows, {"worst_gain": min(row["psnr with"] - row["psnr without"] for row in rows)}


def measure_epochs(options: Options, settings: list[EpochSetting]) -> TableAndSummary:
    rows = [make_epoch_row(options, setting) for setting in settings]
    return rows, {"worst_gain": min(row["psnr simulated"] - row["psnr one batch"] for row in rows)}


def measure_rounds(options: Options) -> TableAndSummary:
    rows = [make_rounds_row(options, setting) for setting in list_round_settings(quick=options.quick)]
    return rows, {"gained": sum(row["recovered together"] - row["recovered best alone"] for row in rows)}


TABLES = {
    "exact": measure_exact,
    "cocktail": measure_separated,
    "learned": measure_learned,
    "batch_norm": measure_statistics,
    "local_epochs": lambda options: measure_epochs(options, list_epoch_settings(quick=options.quick)),
    "several_batches": lambda options: measure_epochs(options, list_shuffled_settings(quick=options.quick)),
    "several_rounds": measure_rounds,
}


if __name__ == "__main__":
    run_selected_table("batches", __doc__ or "", TABLES)

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

from support.batches import list_batch_settings, make_batch_row
from support.cocktail import list_separated, make_separated_row
from support.contract import ResultRow, parse_options, print_results
from support.learned_inversion import list_learned_settings, make_learned_row
from support.local_epochs import (
    list_epoch_settings,
    list_round_settings,
    list_shuffled_settings,
    make_epoch_row,
    make_rounds_row,
)
from support.returned_statistics import list_statistics_settings, make_statistics_row


def main() -> None:
    """Run the benchmark."""
    options = parse_options(
        __doc__ or "",
        tables=("exact", "cocktail", "learned", "batch_norm", "local_epochs", "several_batches", "several_rounds"),
    )
    if options.table == "cocktail":
        separated = [make_separated_row(options, setting) for setting in list_separated(quick=options.quick)]
        print_results("batches cocktail", separated, {"worst_null": max(row["null"] for row in separated)}, options)
        return
    if options.table == "learned":
        with tempfile.TemporaryDirectory() as folder:
            settings = list_learned_settings(quick=options.quick)
            learned = [make_learned_row(options, *one, Path(folder)) for one in settings]
        print_results("batches learned", learned, {"worst_gain": min(r["learned"] - r["learned_null"] for r in learned)}, options)
        return
    if options.table == "batch_norm":
        returned = [make_statistics_row(options, *setting) for setting in list_statistics_settings(quick=options.quick)]
        gain = min(row["psnr with"] - row["psnr without"] for row in returned)
        print_results("batches batch_norm", returned, {"worst_gain": gain}, options)
        return
    if options.table in ("local_epochs", "several_batches"):
        list_settings = list_epoch_settings if options.table == "local_epochs" else list_shuffled_settings
        trained = [make_epoch_row(options, setting) for setting in list_settings(quick=options.quick)]
        gain = min(row["psnr simulated"] - row["psnr one batch"] for row in trained)
        print_results(f"batches {options.table}", trained, {"worst_gain": gain}, options)
        return
    if options.table == "several_rounds":
        joint = [make_rounds_row(options, setting) for setting in list_round_settings(quick=options.quick)]
        gain = sum(row["recovered together"] - row["recovered best alone"] for row in joint)
        print_results("batches several_rounds", joint, {"gained": gain}, options)
        return
    rows = [make_batch_row(options, setting) for setting in list_batch_settings(quick=options.quick)]
    summary: ResultRow = {"false_certificates": sum(row["false_certificates"] for row in rows)}
    for row in rows:
        if (row["batch"], row["width"], row["network"], row["defense"]) == (128, 1024, "untrained", "none"):
            summary |= {"exact_b128": row["exact"], "cpu_seconds_b128": row["cpu_seconds"]}
    again = [
        row["exact"] for row in rows if (row["network"], row["rounds"], row["rate"], row["batch"]) == ("trained", 4, 0.05, 32)
    ]
    summary |= {"exact_b32_trained_4_rounds": sum(again) / len(again)} if again else {}
    print_results("batches", rows, {**summary, "worst_null": max(row["null"] for row in rows)}, options)


if __name__ == "__main__":
    main()

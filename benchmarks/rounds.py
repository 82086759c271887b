"""What many recorded rounds give away that one does not: row spaces of first-layer updates, of clients and of secure sums.

`spans`: each client trains an MLP of 256 neurons, one step on one batch a round, over two or three shuffled epochs. The rows of a
first-layer update lie in the span of the images of its batch. `overlap_exact` is the share of pairs of rounds whose number of
shared images is counted exactly. `intersections` is the share of images recovered above 60 dB as intersections of such spans;
`with_relu` also uses the zeros of ReLU in batches of which some images are known. Beside them stand the null and
`(1 - (B-1)/(N-1))^(B-1)`, the expected share of images that are alone in an intersection of two epochs of N images in batches of
B. `certain_and_wrong` counts answers with a confidence above 0.9 that are not recovered.

`cohorts`: secure sums over cohorts that change from round to round; the server knows the sum and who took part. `isolated` is the
share of clients for which the span of their own images was separated from the span of the others' images, `exact` the share of
images above 60 dB, `exact_with_owner` the share of images that are also assigned to the right client. Counter-measures are rows
of the same table: fixed groups of clients that are never summed with others, a layer with fewer neurons than a sum has images,
noise, and rounding as in our secure aggregation and in Flower's. In SRATTA's configuration an implementation of SRATTA attacks
the same sums.

`isolation`: the same secure sums with four local steps, client by client: the rounds in which the client takes part, and
after how many recorded rounds its span is isolated. With `--picture` the table is drawn into `docs/cohorts.png`.

`disaggregation`: secure sums over random cohorts of a LeNet's clients, each with one image, which are solved for the updates of
single clients at several learning rates.

`anonymous`: the updates of six clients in three epochs, without their names, attacked together by `spans` and grouped by the
examples that they share.

`feedback`: top-k of 1 % with and without error feedback, and DGC, attacked by `accumulate` over up to 100 rounds. A gap is the
PSNR of the uncompressed reconstruction of one round minus that of the attack. `stochastic`: stochastic signs and
QSGD, and the gain in PSNR of the largest number of rounds over one round.

`private`: clipped updates with Gaussian noise. An attacker who knows that the image is one of 100 names the most likely image,
and the accountant bounds how often this image is the right one.

`convolution`: a LeNet and batches of 4 over five epochs of two rounds, whose examples the attack links by itself. Ten rounds
together stand against the best single round of each image. `link_rate` is the share of pairs (one image used in two rounds) that
the attack takes for the same image, after the examples of each round are assigned to its images by truth.

`scale`: CPU-seconds and peak memory of `attacker replay --attack spans` and of linking, on recordings of up to 10,000
observations of 100 clients. The images are noise, as only sizes matter. Cost grows with `pairs`, the pairs of rounds of a client;
with the batches of this table, nearly all of them have a label in common.

`practical`: Flower's PyTorch quickstart with the settings of its template (batches of 32, momentum, one local epoch), recorded
for up to 100 rounds. An attacker who has candidates names those that are among a client's 128 examples, by `membership`. `named`
is measured on the first client, all of whose examples are among 1,000 candidates: the attacker names 128 candidates, and `named`
is the share of the client's examples among them. `named_null` is this share for a random choice. `first_of_100` is measured on
the other clients, 20 of whose examples are candidates. Each of these examples is compared with 99 candidates that are examples of
no client; `first_of_100` is the share of the examples that score higher than all 99. Its null is 1 %. `last_round_alone` is this
share if only the last round is used, and `by_another_client` (a control) if the scores are those of another client's updates.
`bound` is the upper bound by differential privacy on `first_of_100`. `read` is the number of rounds that the attacker uses.
`certain` counts pairs of a client and a candidate with a confidence of at least 0.9, `certain_and_wrong` those of them in which
the candidate is not the client's. With `--picture` the table is drawn into `docs/membership.png`.

`pool`: the same federations, and an attacker who has 20 of a client's 128 images among all other images of the CIFAR-10 files.
`rank_first` is the share of these 20 that score higher than all `rivals`, images that no client has; `in_best_percent` is the
share of these 20 that score higher than 99 % of the rivals.

`growth`: the share of exact images (above 60 dB) after growing numbers of recorded rounds, one line per federation; with
`--picture` the shares are drawn into `docs/rounds.png`.

A table's name runs that table alone. In `feedback` and `stochastic`, clients are attacked in --workers processes.
"""

from pathlib import Path

from support.contract import Options, ResultRow, TableAndSummary, parse_options, print_results
from support.rounds.accumulation import FEEDBACK_ROWS, STOCHASTIC_ROWS, make_accumulated_rows, make_private_rows
from support.rounds.cohorts import make_cohort_rows
from support.rounds.convolution import make_convolution_rows
from support.rounds.growth import draw_growth, make_growth_rows
from support.rounds.pool import make_pool_rows
from support.rounds.practical import draw_practical, make_practical_rows
from support.rounds.scale import make_scale_rows
from support.rounds.secure_sums import draw_isolation, make_disaggregation_rows, make_isolation_rows
from support.rounds.spans import make_anonymous_rows, make_span_rows


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=tuple(TABLES), flags=("picture",), offers_workers=True)
    for name, table in TABLES.items():
        if options.table in (None, name):
            print_results(f"rounds {name}", *table(options), options)


def run_spans_table(options: Options) -> TableAndSummary:
    """Return the table `spans` and its summary.

    Over rows without a defense or dead neurons, the summary holds the smallest `overlap_exact`, the smallest share `with_relu`
    after three epochs, and for batches of 4, 8 and 16 the smallest `intersections` after two epochs, minus the expected share.
    `certain`, `certain_and_wrong` and `cpu_seconds` are sums over all rows, including those with a defense or dead neurons.
    """
    rows = list(make_span_rows(options))
    plain = [row for row in rows if row["defense"] == "none" and "dead" not in row["network"]]
    summary: ResultRow = {"span_overlap_exact": min(row["overlap_exact"] for row in plain)}
    for batch in (4, 8, 16):
        gains = [
            row["intersections"] - row["expected_two_epochs"] for row in plain if row["batch"] == batch and row["epochs"] == 2
        ]
        if gains:
            summary[f"span_recovered_b{batch}_over_expected"] = min(gains)
    three = [row["with_relu"] for row in plain if row["epochs"] == 3]
    summary["span_recovered_3_epochs"] = min(three)
    summary["certain"] = sum(row["certain"] for row in rows)
    summary["certain_and_wrong"] = sum(row["certain_and_wrong"] for row in rows)
    summary["cpu_seconds"] = sum(row["cpu_seconds"] for row in rows)
    return rows, summary


def run_cohorts_table(options: Options) -> TableAndSummary:
    """Return the table `cohorts`, of the attack `cohort_spans` on secure sums, and its summary.

    `secagg_isolated` and `secagg_examples` are the smallest values of the columns `isolated` and `exact_with_owner`, in the rows
    of random cohorts with the largest number of rounds. `wrong_owner` is the largest value, in all rows, of the column of the
    same name: the share of examples that are exact, but only under the name of another client. `sratta_ratio` is our share of
    exact examples divided by SRATTA's, on the same sums of 20 trainings. `sratta_grouped_ratio` is our value of the column
    `grouped` divided by SRATTA's: the number of answers that are put into a group of one client, as a share of all examples.
    """
    rows = list(make_cohort_rows(options))
    random = [row for row in rows if row["federation"] == "random cohorts"]
    random = [row for row in random if row["rounds"] == max(one["rounds"] for one in random)]
    summary: ResultRow = {
        "secagg_isolated": min(row["isolated"] for row in random),
        "secagg_examples": min(row["exact_with_owner"] for row in random),
        "wrong_owner": max(row["wrong_owner"] for row in rows),
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
    }
    if compared := [row for row in rows if row["sratta_exact"]]:
        last = compared[-1]
        summary["sratta_ratio"] = last["exact"] / last["sratta_exact"]
        summary["sratta_grouped_ratio"] = last["grouped"] / last["sratta_grouped"] if last["sratta_grouped"] else None
    return rows, summary


def run_isolation_table(options: Options) -> TableAndSummary:
    """Return the table of isolated clients, and its summary: after how many rounds half of the clients and all are isolated.

    A number of rounds is None if fewer clients are isolated after all rounds. With `--picture` the table is drawn as well.
    """
    rows = make_isolation_rows(options)
    if "picture" in options.flags:
        draw_isolation(rows, Path(__file__).parents[1] / "docs" / "cohorts.png")
    after = sorted(row["isolated_after"] for row in rows if row["isolated_after"] is not None)
    return rows, {
        "half_isolated_after": after[len(rows) // 2 - 1] if len(after) >= len(rows) // 2 else None,
        "all_isolated_after": after[-1] if len(after) == len(rows) else None,
    }


def run_disaggregation_table(options: Options) -> TableAndSummary:
    """Return the table of secure sums that are solved for single updates, and its summary: the best mean PSNR in dB."""
    rows = make_disaggregation_rows(options)
    return rows, {"best_psnr": max(row["psnr"] for row in rows)}


def run_anonymous_table(options: Options) -> TableAndSummary:
    """Return the table of updates without names, and its summary: columns of the row without noise, and the CPU time.

    grouped: share of pairs of updates of one client that are put into one group.
    wrong:   share of pairs of updates in one group that are of different clients.
    """
    rows = make_anonymous_rows(options)
    return rows, {
        "grouped": rows[0]["grouped"],
        "wrong": rows[0]["wrong"],
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
    }


def run_feedback_table(options: Options) -> TableAndSummary:
    """Return the table of error feedback and DGC, and a summary of the gaps in dB.

    A gap is the PSNR of the reconstruction from one uncompressed round minus the PSNR of the reconstruction from the largest
    number of compressed rounds.
    """
    rows = make_accumulated_rows(options, FEEDBACK_ROWS)
    last = {row["defense"]: row for row in rows}
    plain = rows[0]["psnr"]
    summary: ResultRow = {
        "ef_gap_db": plain - last["top_k(0.01, error_feedback=True)"]["psnr"],
        "dgc_gap_db": plain - last["dgc(0.01)"]["psnr"],
        "without_feedback_gap_db": plain - last["top_k(0.01)"]["psnr"],
        "rounds": last["dgc(0.01)"]["rounds"],
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
    }
    return rows, summary


def run_stochastic_table(options: Options) -> TableAndSummary:
    """Return the table of stochastic signs and QSGD, and a summary with one gain in dB for each defense.

    A gain is the PSNR of the reconstruction from the largest number of rounds minus the PSNR from a single round.
    """
    rows = make_accumulated_rows(options, STOCHASTIC_ROWS)
    first = {row["defense"]: row["psnr"] for row in reversed(rows)}
    last = {row["defense"]: row["psnr"] for row in rows}
    gains = {f"{defense}_gain_db": last[defense] - first[defense] for defense in last}
    return rows, {**gains, "cpu_seconds": sum(row["cpu_seconds"] for row in rows)}


def run_private_table(options: Options) -> TableAndSummary:
    """Return the table of Gaussian noise and its summary.

    dp_never_above_bound: whether, in every row, the rate of rightly named images exceeds the accountant's bound by at most two
    standard errors.
    largest_share_of_bound: largest ratio, over rows, of the rate to its bound.
    """
    rows = make_private_rows(options)
    summary: ResultRow = {
        "dp_never_above_bound": all(row["named_rightly"] - 2 * row["standard_error"] <= row["bound"] for row in rows),
        "largest_share_of_bound": max(row["named_rightly"] / row["bound"] for row in rows),
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows if row["rounds"] == 1),
    }
    return rows, summary


def run_convolution_table(options: Options) -> TableAndSummary:
    """Return the table of a convolutional network in batches of 4, and its summary.

    conv_gain_db: mean PSNR of an attack on all rounds minus the mean PSNR of each image's best single round, in dB.
    link_rate:    mean share, over many clients, of pairs (one image used in two rounds) that linking claims to be the same image.
    wrong_links:  mean share of links that join different images.
    """
    rows = make_convolution_rows(options)
    best = next(row for row in rows if row["by"] == "best single round")
    joint = next(row for row in rows if row["by"].startswith("all rounds, linked"))
    summary: ResultRow = {
        "conv_gain_db": joint["psnr"] - best["psnr"],
        "link_rate": rows[-1]["link_rate"],
        "wrong_links": rows[-1]["wrong_links"],
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
    }
    return rows, summary


def run_scale_table(options: Options) -> TableAndSummary:
    """Return the table of growing recordings, and its summary: the ratio of the last row's costs to the first row's.

    pairs_growth: ratio of the numbers of pairs of rounds of a client.
    spans_growth, linking_growth, spans_memory_growth, linking_memory_growth: ratios of CPU-seconds and of peak memory.
    """
    rows = list(make_scale_rows(options))
    ratios = {"pairs": "pairs", "spans": "spans_seconds", "linking": "linking_seconds"}
    ratios |= {"spans_memory": "spans_peak_mb", "linking_memory": "linking_peak_mb"}
    return rows, {f"{name}_growth": rows[-1][column] / rows[0][column] for name, column in ratios.items()}


def run_pool_table(options: Options) -> TableAndSummary:
    """Return the table of re-identification among all images, and its summary: `rank_first` after the most rounds, by defense."""
    rows = list(make_pool_rows(options))
    return rows, {f"{row['defense']}_rank_first": row["rank_first"] for row in rows}


def run_practical_table(options: Options) -> TableAndSummary:
    """Return the table of Flower's quickstart, and its summary; with `--picture`, draw it, too.

    The summary holds four minima: of the columns `named` and `first_of_100` (shares of examples), each for one round and for the
    largest number of rounds. They are minima over the rows without a defense whose clients have as many examples as those of the
    first row. `certain` and `certain_and_wrong` are sums over all rows.
    """
    rows = make_practical_rows(options)
    if "picture" in options.flags:
        draw_practical(rows, Path(__file__).parents[1] / "docs" / "membership.png")
    plain = [row for row in rows if row["defense"] == "none" and row["examples"] == rows[0]["examples"]]
    summary: ResultRow = {}
    for count in (1, max(row["rounds"] for row in plain)):
        for column in ("named", "first_of_100"):
            summary[f"{column}_{count}_rounds"] = min(row[column] for row in plain if row["rounds"] == count)
    for column in ("certain", "certain_and_wrong"):
        summary[column] = sum(row[column] for row in rows)
    return rows, summary


def run_growth_table(options: Options) -> TableAndSummary:
    """Return the table of leakage against the number of recorded rounds, and its summary; with `--picture`, draw it, too.

    worst_null: largest share of exact images that the attack's null, which does not see the gradient, reaches in any row.
    exact: NAME: for each federation, the share of exact images after its largest number of rounds.
    """
    rows = make_growth_rows(options)
    if "picture" in options.flags:
        draw_growth(rows, Path(__file__).parents[1] / "docs" / "rounds.png")
    last = {row["federation"]: row["exact"] for row in rows}
    return rows, {"worst_null": max(row["null"] for row in rows), **{f"exact: {words}": exact for words, exact in last.items()}}


TABLES = {
    "spans": run_spans_table,
    "cohorts": run_cohorts_table,
    "isolation": run_isolation_table,
    "disaggregation": run_disaggregation_table,
    "anonymous": run_anonymous_table,
    "feedback": run_feedback_table,
    "stochastic": run_stochastic_table,
    "private": run_private_table,
    "convolution": run_convolution_table,
    "scale": run_scale_table,
    "practical": run_practical_table,
    "pool": run_pool_table,
    "growth": run_growth_table,
}


if __name__ == "__main__":
    main()

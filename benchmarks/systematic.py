"""The grid of the systematic evaluation (Liu et al. 2024): error of several attacks behind each defense, and its cost.

Each row attacks the same CIFAR-10 images, in batches of its size, each with a step of one client of its own: gradient clipping,
dropout, noise and pruning on the gradient of the batch, or several local steps on it. The attacks know the defense, and infer
labels. All networks are untrained. Each attack has the network that it needs:

- `feature_reconstruction`, the paper's own attack: CPL's LeNet with tanh, 128 features, and a wide Gaussian layer that the server
  has added; `untrained_prior` is the same attack on CPL's LeNet without that layer, matching its last layer's inputs.
- `inverting_gradients` and `cpl`: CPL's LeNet with tanh. `cocktail_party` and `exact`: a linear layer of width 512.
- `robbing_the_fed`: the imprint layer of a malicious server.

Columns with the name of an attack: mean root mean squared error of the images in [0, 1]. `rmse`: error of the `strongest` attack.
`rmse_papers`: error of the strongest of the paper's four, `feature_reconstruction`, `inverting_gradients`, `cocktail_party` and
`robbing_the_fed`. `null`: the smallest error of the attacks' nulls, which lack the update. `lpips`, `lpips_inverting`: LPIPS of
`feature_reconstruction` and `inverting_gradients`, with AlexNet, if DIR/lpips of --data has its weights; table 3 of the paper has
0.14 and 0.41 for batches of 16, 0.15 and 0.45 for 32. `loss`, `accuracy`: mean loss of the last tenth of the steps of a training
with the defense, and accuracy on held-out images. Four columns are from the paper's tables 4 and 5, on a ResNet-18: the smallest
error of its four attacks (`published`), the errors of `feature_reconstruction` (`published_own`) and of `inverting_gradients`
(`published_inverting`), and the loss (`published_loss`). The copy of the paper that was used lacks the batch sizes of these
tables, which are assumed to be in ascending order.

Table `features`: mean norm of the part of an example's features, scaled to norm 1, outside the span that the tensors recover,
beside table 2 of the paper, whose ratios of pruning are lost; three of our own take their place, with one threshold for all
tensors (`prune`) and with one for each (`top_k`). `flat`: largest over smallest error of a row.

The names of families of defenses (none, clip, dropout, noise, prune, local) run their rows alone. `--full`: all defenses, 48
images and long searches, for a GPU; otherwise eight defenses, eight images and short searches.

rows_with_an_error: number of rows in which `rmse_papers` is above 0.01. strongest_beats_papers_four: share of these rows in which
an attack that is not one of the paper's four has an error below `rmse_papers` by more than 0.01. As the four are among the
compared attacks, `rmse` is never above `rmse_papers`. below_published: share of the rows with a published number in which
`rmse` is at most `published`. feature_error_flat: `flat` without a defense.
"""

from support.contract import Options, ResultRow, parse_options, print_results, show_rows
from support.systematic.features import make_feature_row
from support.systematic.grid import BATCHES, FAMILIES, SMALL, make_grid_row
from support.systematic.paper import FEATURE_DEFENSES, PER_TENSOR

SAME_ERROR = 0.01
"""Difference of errors up to which two attacks count as equally strong."""
TABLES = ("features", "none", "clip", "dropout", "noise", "prune", "local")


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=TABLES, flags=("full",))
    if options.table == "features":
        rows = make_feature_rows(options)
        print_results("systematic features", rows, {"feature_error_flat": rows[0]["flat"]}, options)
        return
    rows = make_grid_rows(options)
    summary = summarise(rows)
    if options.table is None:
        features = make_feature_rows(options)
        print_results("systematic features", features, {}, Options(**{**vars(options), "json": False}))
        summary["feature_error_flat"] = features[0]["flat"]
    print_results("systematic", rows, summary, options)


def make_feature_rows(options: Options) -> list[ResultRow]:
    """Return the rows of the table of features: one for each defense on batches whose labels all differ.

    The last row is without a defense, on batches that may repeat labels. With --quick, only the first defense and this last row
    remain.
    """
    chosen = FEATURE_DEFENSES[:1] if options.quick else (*FEATURE_DEFENSES, *PER_TENSOR)
    return [make_feature_row(options, defense) for defense in chosen] + [make_feature_row(options, "none", distinct=False)]


def make_grid_rows(options: Options) -> list[ResultRow]:
    """Return the rows of the grid for the selected family of defenses, or for all; with --quick, a single row.

    Without --full, only the defenses in `SMALL` are taken. Each row is also printed on stderr at once.
    """
    families = FAMILIES.values() if options.table is None else (FAMILIES[options.table],)
    chosen = [defense for family in families for defense in family if "full" in options.flags or defense in SMALL]
    if options.quick:
        return list(show_rows([make_grid_row(options, chosen[0], BATCHES[0])]))
    return list(show_rows(make_grid_row(options, defense, batch) for defense in chosen for batch in BATCHES))


def summarise(rows: list[ResultRow]) -> ResultRow:
    """Return `rows`, the number of rows, and three numbers that the module's docstring describes.

    They are `rows_with_an_error`, `strongest_beats_papers_four`, which is None without such a row, and `below_published`, which
    is None if no row has a published number.
    """
    below = [row["rmse"] <= row["published"] for row in rows if row["published"] is not None]
    better = [row["rmse"] < row["rmse_papers"] - SAME_ERROR for row in rows if row["rmse_papers"] > SAME_ERROR]
    return {
        "strongest_beats_papers_four": sum(better) / len(better) if better else None,
        "rows_with_an_error": len(better),
        "below_published": sum(below) / len(below) if below else None,
        "rows": len(rows),
    }


if __name__ == "__main__":
    main()

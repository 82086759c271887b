"""The grid of the systematic evaluation (Liu et al. 2024): error of several attacks behind each defense, and its cost.

Each row attacks the same eight CIFAR-10 images, in batches of its size, each with a step of one client of its own: gradient
clipping, dropout, noise and pruning on the gradient of the batch, or several local steps on it. The attacks know the defense.
Inverting Gradients and CPL attack CPL's LeNet with tanh, `cocktail_party` and `exact` a linear layer of width 512, and
`robbing_the_fed` the imprint layer of a malicious server. All networks are untrained.

Columns with the name of an attack: mean root mean squared error of the images in [0, 1]. `rmse`: of the `strongest` attack.
`with_features`: Inverting Gradients with `feature_matching=0.1`, in place of the paper's own attack, which has a prior network as
well. `rmse_papers`: of the strongest of it and the three attacks that the paper compares it with.
`null`: the smallest error of the attacks without the update. `loss`, `accuracy`: mean loss of the last tenth of 2,000 steps of
training with the defense, and accuracy on held-out images. `published`, `published_inverting_gradients`, `published_loss`: the
paper's tables 4 and 5, on a ResNet-18 trained for one epoch; batch sizes are lost in the text at hand, and stand by rank.

strongest_beats_papers_four: share of the rows with a published number in which `rmse` is at most `published`.
"""

import sys

from support.contract import Options, ResultRow, TableAndSummary, parse_options, print_results
from support.systematic import BATCHES, DEFENSES, make_systematic_row


def main() -> None:
    """Run the benchmark."""
    asked = parse_options(__doc__ or "")
    rows, summary = run_grid(asked)
    print_results("systematic", rows, summary, asked)


def run_grid(asked: Options) -> TableAndSummary:
    """Return the rows for all defenses and batch sizes, and the summary. With --quick, there are three rows with one attack."""
    rows: list[ResultRow] = []
    for defense in DEFENSES[:: 7 if asked.quick else 1]:
        for batch in BATCHES[: 1 if asked.quick else None]:
            rows.append(make_systematic_row(asked, defense, batch))
            print(rows[-1], file=sys.stderr, flush=True)
    better = [row["rmse"] <= row["published"] for row in rows if row["published"] is not None]
    return rows, {"strongest_beats_papers_four": sum(better) / max(1, len(better)), "rows": len(rows)}


if __name__ == "__main__":
    main()

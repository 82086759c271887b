"""CPL's tables: our results beside the published numbers. Run `cpl.py TABLE` with TABLE from 1 to 9, by default 2.

    1  number of iterations needed             6  batch sizes, local iterations
    2  CPL, DLG, Inverting Gradients           7  gradients without the smallest theta per cent
    3  tables of attributes                    8  Gaussian and Laplace noise
    4  nine starts                             9  up to ten local steps before sharing
    5  variation of the number of iterations

Images are attacked through CPL's untrained LeNet with four convolutions, also where the paper uses an unpublished ResNet-20, and
rows of tables through a perceptron. asr_c is the share of examples whose content is recovered (images: mean squared error at most
0.009; rows: continuous attributes within 5 % of their range, all others right), asr_l the share of right labels; ssim, mse and
iterations are means over the examples with recovered content. Iterations are outer L-BFGS steps until the squared distance
between the gradients (D in the paper) is at most 1e-4. cpu_seconds is for one example, on one thread. `router` tries closed forms
first, and continues from their answer with the same search where they are not exact.
Three variants are not in the paper: `cpl tv` adds a total-variation prior, `cpl, defense known` a prior weighted by the known
variance of the noise, and `cpl simulated` simulates the local steps one by one. On a CPU a table has one to three data sets of
two to ten images; with `--device cuda` all sets, a hundred images, and every column. `--quick` is the first data set and one
image.
"""

from support.contract import parse_options, print_results
from support.cpl.tables import TABLES


def main() -> None:
    """Run the benchmark."""
    asked = parse_options(__doc__ or "", tables=tuple(TABLES))
    table = asked.table or "2"
    rows, summary = TABLES[table](asked)
    print_results(f"cpl table {table}", rows, summary, asked)


if __name__ == "__main__":
    main()

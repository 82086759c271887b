"""CPL's tables: our results beside the published numbers. Run `cpl.py TABLE` with TABLE from 1 to 9.

    1  number of iterations needed             6  batch sizes, local iterations
    2  CPL, DLG, Inverting Gradients           7  gradients without the smallest theta per cent
    3  tables of attributes                    8  Gaussian and Laplace noise
    4  nine starts                             9  up to ten local steps before sharing
    5  variation of the number of iterations

Every network is untrained and of CPL's four-convolution LeNet, also where the paper has a ResNet-20 of its own that it
does not publish; rows of tables go through a perceptron. asr_c and asr_l are the shares of examples whose content (mean
squared error at most 0.009; attributes all right within 5 %) and label are recovered; ssim and mse are means over those.
Iterations are outer L-BFGS steps until the paper's D < 1e-4, mean over the same. cpu_seconds is for one example, on one thread.
`router` tries closed forms first, and continues from their answer with the same search where they are not exact. `cpl tv` has a
prior, `cpl, defense known` has one whose weight is the variance of the known noise, and `cpl simulated` goes through local steps
one by one, which the paper does not. On a CPU a table has one to three data sets of two to ten images; with `--device cuda` all
sets, a hundred images, and every column. `--quick` is the first data set and one image.
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

"""CPL's tables: our results beside the published numbers. Run `cpl.py TABLE` with TABLE from 1 to 9, by default 2.

    1  number of iterations needed             6  batch sizes, local iterations
    2  CPL, DLG, Inverting Gradients           7  gradients without the smallest theta per cent
    3  tables of attributes                    8  Gaussian and Laplace noise
    4  nine starts                             9  up to ten local steps before sharing
    5  variation of the number of iterations

Images are attacked through CPL's untrained LeNet with four convolutions, also where the paper uses an unpublished ResNet-20, and
rows of tables through a perceptron. asr_c is the share of examples whose content is recovered (images: mean squared error at most
0.009; rows: continuous attributes within 5 % of their range, all others right), asr_l the share of right labels; ssim, mse and
iterations are means over the examples with recovered content. Iterations (of L-BFGS: outer steps) count until the attack's loss
is at most 1e-4; the loss of CPL and DLG is the squared distance between the gradients (D in the paper). cpu_seconds is for one
example, on one thread. `router` tries closed forms first and, where their answer is not exact, continues from it with the search
of `cpl`.
Some attacks are not in the paper: `router`, `features` (a closed form), `cpl wolfe` (L-BFGS with a line search), `cpl tuned` (our
preset), `cpl tv` (with a total-variation prior), `cpl, defense known` (models the defense), and `cpl simulated` (simulates the
local steps one by one). On a CPU, tables have fewer data sets, images and columns than with `--device cuda`. `--quick` is a few
images of one data set.
"""

from support.contract import run_selected_table
from support.cpl.tables import TABLES

if __name__ == "__main__":
    run_selected_table("cpl table", __doc__ or "", {"2": TABLES["2"], **TABLES})

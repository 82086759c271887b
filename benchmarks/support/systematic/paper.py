"""Numbers of Liu et al. 2024, "Data reconstruction attacks and defenses: a systematic evaluation", tables 2, 4 and 5.

The copy of the paper that was used lacks the batch sizes of tables 4 and 5 and the ratios of pruning of table 2. Both are assumed
to be in ascending order.
"""

DEFENSES = (
    *(f"clip({norm})" for norm in (2, 4, 8)),
    *(f"gradient_dropout({share})" for share in (0.3, 0.5, 0.7, 0.9)),
    *(f"gaussian({std})" for std in (0.001, 0.01, 0.1)),
    *(f"prune({share})" for share in (0.3, 0.5, 0.7, 0.9, 0.99)),
)
"""The columns of tables 4 and 5, as defenses of the batch gradient."""
PUBLISHED = {
    "feature_reconstruction": (
        (0.17, 0.17, 0.19, 0.16, 0.16, 0.18, 0.18, 0.17, 0.22, 0.28, 0.16, 0.17, 0.20, 0.26, 0.27),
        (0.16, 0.16, 0.16, 0.16, 0.16, 0.19, 0.19, 0.19, 0.24, 0.27, 0.16, 0.16, 0.21, 0.27, 0.27),
        (0.16, 0.16, 0.16, 0.16, 0.17, 0.19, 0.19, 0.19, 0.29, 0.30, 0.15, 0.16, 0.20, 0.29, 0.29),
    ),
    "inverting_gradients": (
        (0.19, 0.23, 0.25, 0.19, 0.20, 0.20, 0.21, 0.30, 0.32, 0.35, 0.19, 0.20, 0.24, 0.28, 0.27),
        (0.21, 0.22, 0.23, 0.21, 0.21, 0.21, 0.22, 0.31, 0.31, 0.31, 0.19, 0.18, 0.23, 0.29, 0.28),
        (0.22, 0.21, 0.21, 0.22, 0.22, 0.22, 0.23, 0.30, 0.31, 0.31, 0.20, 0.21, 0.25, 0.30, 0.30),
    ),
    "strongest": (
        (0.17, 0.17, 0.19, 0.16, 0.16, 0.18, 0.18, 0.17, 0.22, 0.27, 0.16, 0.17, 0.20, 0.26, 0.27),
        (0.16, 0.16, 0.16, 0.16, 0.16, 0.19, 0.19, 0.19, 0.19, 0.22, 0.16, 0.16, 0.21, 0.27, 0.27),
        (0.16, 0.16, 0.16, 0.16, 0.17, 0.19, 0.19, 0.16, 0.16, 0.24, 0.15, 0.16, 0.20, 0.29, 0.29),
    ),
    "loss": (
        (0.390, 0.481, 0.377, 0.466, 0.363, 0.564, 0.864, 0.445, 0.769, 1.889, 0.585, 0.430, 0.621, 0.763, 1.020),
        (0.408, 0.353, 0.329, 0.552, 0.316, 0.275, 0.460, 0.527, 0.551, 1.764, 0.253, 0.389, 0.561, 0.505, 0.935),
        (0.377, 0.201, 0.357, 0.259, 0.178, 0.231, 0.461, 0.365, 0.343, 1.540, 0.256, 0.161, 0.257, 0.344, 0.725),
    ),
}
"""RMSE of the paper's own attack, of Inverting Gradients and of the strongest of the paper's four attacks (table 4), and final
training loss (table 5): for three batch sizes, the defenses of `DEFENSES`."""

FEATURE_DEFENSES = (
    "none",
    *(f"prune({share})" for share in (0.9, 0.99, 0.999)),
    *(f"clip({norm})" for norm in (2, 4, 8)),
    *(f"gaussian({std})" for std in (0.001, 0.01, 0.1)),
    *(f"{steps} local steps" for steps in (3, 5)),
)
"""The columns of table 2, with ratios of pruning of our own."""
PER_TENSOR = {"top_k(0.1)": "prune(0.9)", "top_k(0.01)": "prune(0.99)", "top_k(0.001)": "prune(0.999)"}
"""Dict from pruning with a threshold for each tensor to pruning of the same ratio with one threshold for all tensors. The paper
does not say which of the two it uses. The code of Huang et al. 2021, "Evaluating gradient inversion attacks and defenses in
federated learning", which the paper cites, has a threshold for each tensor."""
FEATURE_ERRORS = {
    1: (0.171, 0.173, 0.173, 0.248, 0.173, 0.173, 0.173, 0.172, 0.174, 0.259, 0.181, 0.213),
    2: (0.171, 0.171, 0.218, 0.443, 0.169, 0.169, 0.170, 0.166, 0.252, 0.850, 0.186, 0.210),
    4: (0.174, 0.186, 0.277, 0.483, 0.174, 0.175, 0.177, 0.190, 0.252, 0.714, 0.192, 0.218),
    8: (0.175, 0.188, 0.266, 0.425, 0.179, 0.179, 0.179, 0.198, 0.499, 0.953, 0.202, 0.223),
}
"""Feature error of table 2 by batch size: mean norm of the part of a feature vector of norm 1 outside the recovered span."""


def find_feature_error(defense: str, batch: int) -> float:
    """Return the feature error of table 2 for a defense of `FEATURE_DEFENSES` or `PER_TENSOR`, and a batch size."""
    return FEATURE_ERRORS[batch][FEATURE_DEFENSES.index(PER_TENSOR.get(defense, defense))]


def find_published(what: str, defense: str, rank: int) -> float | None:
    """Return the number `what` of `PUBLISHED` for a defense and a batch size; None if the paper lacks the defense.

    rank: index of the batch size among the paper's three, in ascending order.
    """
    return PUBLISHED[what][rank][DEFENSES.index(defense)] if defense in DEFENSES else None

"""Criteria for how implausible reconstructions x (N, *shape) are, (N,), without a reference: lower is better."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from attacker.attacks.confidence.evidence import measure_outside

Criterion = Callable[[Tensor], Tensor]


def measure_roughness(x: Tensor) -> Tensor:
    """Return the mean squared difference between each image (N, C, H, W) and its 3x3 mean filter; it is large for noise.

    At borders, the mean is over the pixels inside. The attack `hgap` uses it by default to choose between the answers of a closed
    form and of a search (Zhu and Blaschko 2021, R-GAP, section 5).
    """
    return (x - functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)).flatten(1).square().mean(dim=1)


def total_variation(x: Tensor) -> Tensor:
    """Return, for each image (N, C, H, W), the mean absolute difference of vertical plus that of horizontal neighbours."""
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]
    return down.abs().flatten(1).mean(dim=1) + across.abs().flatten(1).mean(dim=1)


CRITERIA: dict[str, Criterion] = {"roughness": measure_roughness, "total_variation": total_variation, "outside": measure_outside}

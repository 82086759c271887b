"""How much an answer looks like data, without anything to compare it with. Of x (N, *shape) in [0, 1], (N,); lower is better."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

Criterion = Callable[[Tensor], Tensor]


def roughness(x: Tensor) -> Tensor:
    """Mean squared distance of images to their own 3x3 mean filter (R-GAP, section 5: how H-GAP chooses)."""
    return (x - functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)).flatten(1).square().mean(dim=1)


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbours in images, down plus across."""
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]
    return down.abs().flatten(1).mean(dim=1) + across.abs().flatten(1).mean(dim=1)


def outside(x: Tensor) -> Tensor:
    """Mean squared distance to [0, 1], in which all data lie."""
    return (x - x.clamp(0, 1)).flatten(1).square().mean(dim=1)


CRITERIA: dict[str, Criterion] = {"roughness": roughness, "total_variation": total_variation, "outside": outside}

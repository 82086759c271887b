"""Inner products of gradients, which are dicts from parameter name to tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GradientTensors = Mapping[str, Tensor]
"""dL/dw by parameter name."""


def compute_products(simulated: GradientTensors, observed: GradientTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return three inner products: <simulated, observed>, <simulated, simulated> and <observed, observed>.

    The sums run over the parameters in `observed`; other parameters of `simulated` are ignored. Autograd can compute
    first derivatives by `simulated`, but no second ones; `observed` counts as constant. Do not call it under `vmap` or
    `torch.func.grad`.
    """
    dot, simulated_square, observed_square = _Products.apply(*(simulated[name] for name in observed), *observed.values())
    return dot, simulated_square, observed_square


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        each = torch.stack(
            [torch.stack([s.dot(o), s.dot(s), o.dot(o)]) for s, o in (_flatten(*pair) for pair in _pair_up(tensors))]
        )
        return each.sum(dim=0).unbind()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Any) -> Any:
        of_dot, of_square, _ = (float(slope) for slope in slopes)
        pairs = _pair_up(ctx.saved_tensors)
        return *((o * of_dot).add_(s, alpha=2 * of_square) for s, o in pairs), *(None for _ in pairs)


def _pair_up(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    half = len(tensors) // 2
    return list(zip(tensors[:half], tensors[half:], strict=True))


def _flatten(simulated: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors flattened alike: in the memory order of `simulated` if this is channels last, else in index order."""
    if simulated.ndim == 4 and simulated.is_contiguous(memory_format=torch.channels_last):
        simulated, observed = (t.permute(0, 2, 3, 1) for t in (simulated, observed))
    return simulated.reshape(-1), observed.reshape(-1)

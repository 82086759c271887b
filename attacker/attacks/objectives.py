"""How far a simulated gradient is from the observed one. Both are dL/dw by parameter name."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Gradient = Mapping[str, Tensor]
Objective = Callable[[Gradient, Gradient], Tensor]


def squared_distance(simulated: Gradient, observed: Gradient) -> Tensor:
    """Sum of squared differences over all coordinates (DLG, eq. 3; CPL, algorithm 1 line 12)."""
    return torch.stack([(simulated[name] - observed[name]).square().sum() for name in observed]).sum()


def cosine_distance(simulated: Gradient, observed: Gradient) -> Tensor:
    """One minus the cosine between both gradients, each as one vector (Geiping et al. 2020, eq. 4)."""
    dot = torch.stack([(simulated[name] * observed[name]).sum() for name in observed]).sum()
    squares = [torch.stack([g[name].square().sum() for name in observed]).sum() for g in (simulated, observed)]
    return 1 - dot / (squares[0] * squares[1]).sqrt().clamp(min=torch.finfo(dot.dtype).tiny)


def squared_norm(gradient: Gradient) -> Tensor:
    """Sum of squares over all coordinates."""
    return torch.stack([g.square().sum() for g in gradient.values()]).sum()

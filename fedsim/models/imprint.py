"""The imprint module of a malicious server (Fowl et al. 2022, "Robbing the Fed: directly obtaining private data").

It is inserted before the first layer. All its neurons measure one linear statistic of the image; each reacts if the statistic
exceeds its threshold. The thresholds are quantiles of the statistic's distribution, except the first, which every example
exceeds. Two neighbouring neurons give the server the one example of a batch whose statistic lies between their thresholds, if the
statistic of no other example does: the example is the difference of the gradients of the two neurons' weights, divided by the
difference of the gradients of their biases.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

LOWEST_THRESHOLD = -10.0
"""Threshold of the first neuron, which reacts to every example, as in the paper's code."""


def _average(size: int) -> Tensor:
    return torch.full((size,), 1 / size)


def _compute_cosine(size: int, mode: int = 32) -> Tensor:
    """Return (4 mode / size) cos(pi mode (i + 0.5) / size) for i below `size`, as the weights in the paper's code, (size,)."""
    place = torch.arange(size) + 0.5
    return 4 * mode / size * torch.cos(math.pi / size * place * mode)


STATISTICS: Mapping[str, tuple[Callable[[int], Tensor], torch.distributions.Distribution]] = {
    "average": (_average, torch.distributions.Normal(0.0, 1.0)),
    "cosine": (_compute_cosine, torch.distributions.Laplace(0.0, 1 / math.sqrt(2))),
}
"""The linear statistic by name, with the distribution whose quantiles are the thresholds if its spread is 1."""


class Imprint(nn.Module):
    """A linear layer with one direction and many thresholds, ReLU, and a linear layer back to the shape of the input.

    size:           number of values of one input.
    bins:           number of neurons, each with one threshold. The server can read an example if no other example of the batch
                    lies between the same two neighbouring thresholds.
    statistic:      what the neurons measure: average (of all normalised values) or cosine (a wave over the flattened image).
    centre, spread: location and scale of the statistic on public data of the same kind. The thresholds are multiplied by
                    `spread`, then `centre` is added.
    """

    def __init__(self, size: int, *, bins: int, statistic: str, centre: float, spread: float) -> None:
        super().__init__()
        direction, distribution = STATISTICS[statistic]
        thresholds = centre + spread * _compute_thresholds(distribution, bins)
        self.sort = nn.Linear(size, bins)
        self.join = nn.Linear(bins, size)
        with torch.no_grad():
            self.sort.weight.copy_(direction(size).expand(bins, size))
            self.sort.bias.copy_(-thresholds)
            self.join.weight.fill_(1.0)
            self.join.bias.fill_(-float(thresholds.mean()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.join(torch.relu(self.sort(x.flatten(1)))).reshape(x.shape)
        return out


def _compute_thresholds(distribution: torch.distributions.Distribution, bins: int) -> Tensor:
    """Return increasing thresholds (bins,): `LOWEST_THRESHOLD`, then the quantiles 1/bins, 2/bins, ... of the distribution."""
    with torch.device("cpu"):
        quantiles = distribution.icdf(torch.arange(1, bins, dtype=torch.float64) / bins)
        return torch.cat([torch.tensor([LOWEST_THRESHOLD], dtype=torch.float64), quantiles]).float()

"""The term of a search that compares the features of its examples with those that the last layer's gradient determines.

Features are the inputs of the last linear layer. The source (Liu et al. 2024, "Data reconstruction attacks and defenses", section
4.2) computes them by tensor decomposition, which needs an additional layer with random Gaussian weights; here they are solved
from the gradient of the network's own last layer, see `solve_head_features`.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import MAX_MISFIT, read_features
from attacker.attacks.labels.probes import compute_head_inputs
from fedsim import models


def can_match_features(seen: ObservedGradients) -> bool:
    """Return whether the network has a last linear layer whose gradient the defense does not hide."""
    return models.has_head(seen.model, seen.data) and models.find_head(seen.model, seen.data)[0] not in seen.omitted


def solve_targets(seen: ObservedGradients, cases: Sequence[int], labels: Tensor, rngs: Sequence[Generator]) -> dict[str, Tensor]:
    """Return the features that the examples of each of P problems should have.

    seen: the gradients of all cases. cases: the case of each problem. labels: (P, N). rngs: one generator for each problem.
    targets:  (P, N, F).
    averages: (P, N, N). Row n holds the weights of the examples whose mean features should be targets[n]: a single 1, or equal
              weights of all examples with one label if only their mean is known.
    trust:    (P,), 1 if the targets explain most of the last layer's gradient, otherwise 0.
    """
    targets, averages, trust = [], [], []
    for case, y, rng in zip(cases, labels.cpu(), rngs, strict=True):
        read = read_features(seen, y, rng, known=True, i=case)
        together = (y[:, None] == y) & read.shared[:, None] | torch.eye(len(y), dtype=torch.bool)
        averages.append(together / together.sum(dim=1, keepdim=True))
        targets.append(read.features.float())
        trust.append(float(read.misfit <= MAX_MISFIT))
    return {"targets": torch.stack(targets), "averages": torch.stack(averages), "trust": torch.tensor(trust)}


def measure_feature_mismatch(
    seen: ObservedGradients, state: dict[str, Tensor], x: Tensor, targets: Tensor, averages: Tensor
) -> Tensor:
    """Return the mean over examples of 1 - c^2, with the cosine c between features and their target, a 0-d tensor.

    state: weights and buffers by name. x: examples (N, *shape) in [0, 1]. targets, averages: of one problem, see `solve_targets`.
    """
    features, _ = compute_head_inputs(seen.model, seen.data, state, seen.data.normalise(x))
    made = averages @ features
    power = made.square().sum(dim=1) * targets.square().sum(dim=1)
    return (1 - (made * targets).sum(dim=1).square() / power.clamp(min=torch.finfo(power.dtype).tiny)).mean()

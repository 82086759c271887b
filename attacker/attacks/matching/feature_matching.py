"""The term of a search that compares the features of its examples with those that the last layer's gradient determines.

The source (Liu et al. 2024, "Data reconstruction attacks and defenses", section 4.2) computes features by tensor decomposition,
which needs an additional wide layer with random Gaussian weights; the features are the inputs of this layer, see
`recover_features`. On any other network, features are the inputs of the last linear layer, and solved from its gradient, see
`solve_head_features`.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.gradients.tensor_features import RecoveredFeatures, recover_features
from attacker.attacks.labels.observed import MAX_MISFIT, read_features
from attacker.attacks.labels.probes import compute_head_inputs
from attacker.attacks.networks.gaussian_layer import find_gaussian_layer, find_wide_layer
from fedsim import models


def can_match_features(observed: ObservedGradients) -> bool:
    """Return whether the network has a last linear layer whose gradient the defense does not hide."""
    return (
        models.has_head(observed.model, observed.data)
        and models.find_head(observed.model, observed.data)[0] not in observed.omitted
    )


def solve_targets(
    observed: ObservedGradients, cases: Sequence[int], labels: Tensor, rngs: Sequence[Generator]
) -> dict[str, Tensor]:
    """Return a dict with the features (inputs of the last linear layer) that the examples of each of P problems should have.

    observed: the gradients of all cases. cases: the case of each problem. labels: (P, N). rngs: one generator for each problem.
    The dict holds:
    targets:  (P, N, F), the features.
    averages: (P, N, N). Row n holds the weights of the examples whose mean features should be targets[n]: a single 1, or equal
              weights of all examples with one label if only their mean is known.
    trust:    (P,), 1 if the targets explain most of the last layer's gradient, otherwise 0.
    """
    targets, averages, trust = [], [], []
    for case, y, rng in zip(cases, labels.cpu(), rngs, strict=True):
        head_features = read_features(observed, y, rng, known=True, i=case)
        together = (y[:, None] == y) & head_features.shared[:, None] | torch.eye(len(y), dtype=torch.bool)
        averages.append(together / together.sum(dim=1, keepdim=True))
        targets.append(head_features.features.float())
        trust.append(float(head_features.misfit <= MAX_MISFIT))
    return {"targets": torch.stack(targets), "averages": torch.stack(averages), "trust": torch.tensor(trust)}


def measure_feature_mismatch(
    observed: ObservedGradients, state: dict[str, Tensor], x: Tensor, targets: Tensor, averages: Tensor
) -> Tensor:
    """Return the mean over examples of 1 - c^2, with the cosine c between features and their target, a 0-d tensor.

    Features are the inputs of the last linear layer, averaged over examples as `averages` says.
    state: weights and buffers by name. x: examples (N, *shape) in [0, 1]. targets, averages: of one problem, see `solve_targets`.
    """
    features, _ = compute_head_inputs(observed.model, observed.data, state, observed.data.normalise(x))
    averaged = averages @ features
    power = averaged.square().sum(dim=1) * targets.square().sum(dim=1)
    return (1 - (averaged * targets).sum(dim=1).square() / power.clamp(min=torch.finfo(power.dtype).tiny)).mean()


def can_match_spans(observed: ObservedGradients) -> bool:
    """Return whether the defense does not hide the last layer's gradient, and all cases have a Gaussian layer before that layer.

    A Gaussian layer is a wide linear layer whose weights are random and normally distributed.
    """
    cases = 1 if observed.shared else len(next(iter(observed.gradients.values())))
    states = (observed.get_state(i)["weights"] for i in range(cases))
    return can_match_features(observed) and all(find_gaussian_layer(observed.model, weights) is not None for weights in states)


def recover_spans(
    observed: ObservedGradients, cases: Sequence[int], labels: Tensor, rngs: Sequence[Generator]
) -> dict[str, Tensor]:
    """Return a dict with the linear subspaces (spans) in which the features of the examples of P problems should lie.

    Features are the inputs of the Gaussian layer, a wide layer of random weights. They are estimated from this layer's weights
    and the gradient of the last layer. Arguments as in `solve_targets`.
    The dict holds:
    bases: (P, N, F, N), for each example orthonormal columns, followed by zeros: one column if the direction of its features is
           known (its label is unique, or examples with this label were separated), otherwise one column per example with its
           label.
    trust: (P,), from 0 to 1, mean over examples of the cosine between the estimates from both halves of the Gaussian layer's
           neurons; a cosine that is negative or NaN counts as 0.
    """
    bases, trust = [], []
    for case, y, rng in zip(cases, labels.cpu(), rngs, strict=True):
        recovered = recover_case_features(observed, y, rng, i=case)
        bases.append(torch.nn.functional.pad(recovered.bases.float(), (0, len(y) - recovered.bases.shape[2])))
        trust.append(float(recovered.agreement.nan_to_num().clamp(min=0).mean()))
    return {"bases": torch.stack(bases), "trust": torch.tensor(trust)}


def recover_case_features(observed: ObservedGradients, labels: Tensor, rng: Generator, *, i: int = 0) -> RecoveredFeatures:
    """Return what the gradient tells about the inputs of the Gaussian layer for the examples of case i. labels: (N,).

    Raises ValueError if the network has no Gaussian layer.
    """
    weights = {name: w.cpu() for name, w in observed.get_state(i)["weights"].items()}
    layer = find_gaussian_layer(observed.model, weights)
    if layer is None:
        raise ValueError(
            "the network has no wide layer with random Gaussian weights, such as a malicious server puts before the last layer; "
            "set matched=head, which needs none"
        )
    weight, bias = models.find_head(observed.model, observed.data)
    gradient = {name: g[i].cpu() for name, g in observed.gradients.items() if name in (weight, bias)}
    return recover_features(
        gradient[weight], None if bias is None else gradient[bias], labels, weight=weights[f"{layer}.weight"], rng=rng
    )


def measure_span_mismatch(observed: ObservedGradients, state: dict[str, Tensor], x: Tensor, bases: Tensor) -> Tensor:
    """Return how far the features of examples x, the inputs of the Gaussian layer, are outside their spans, 0-d, in [0, 1].

    This is the share of the squared norm of an example's features that lies outside the span of this example, as a mean over the
    examples.
    state, x: as in `measure_feature_mismatch`. bases: (N, F, R), one for each example's span, see `recover_spans`.
    """
    features, _ = compute_head_inputs(
        observed.model, observed.data, state, observed.data.normalise(x), layer=find_wide_layer(observed.model)
    )
    inside = torch.einsum("nfr,nf->nr", bases, features).square().sum(dim=1)
    return (1 - inside / features.square().sum(dim=1).clamp(min=torch.finfo(inside.dtype).tiny)).mean()

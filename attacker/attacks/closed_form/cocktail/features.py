"""Feature mode of the Cocktail Party attack, for networks without a linear layer with a bias that sees the images directly.

The inputs of the first linear layer (features) are separated instead of the images. The sign of an example's features follows
from the gradient of the bias; without a bias, it is chosen so that their sum is not negative, as after a ReLU. Their scale stays
unknown. Images are then searched for by maximising the cosine similarity of their features and the separated ones, with a
Gaussian prior of smooth images (feature inversion).
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from attacker.attacks.closed_form.observations import StackedObservations
from attacker.attacks.matching.smooth_images import build_smooth_spread
from attacker.attacks.networks.forward import list_linear, record_calls, run_forward_pass

PUBLIC_IMAGES = 256
"""Number of random images from which mean and deviation of the features are estimated."""
MIN_DEVIATION = 1e-2
"""Smallest deviation of a feature, relative to the largest; features below it would only be amplified noise."""
LEARNING_RATE = 0.1
"""Learning rate of Adam at the start of a cosine schedule, as in the paper."""
PRIOR_WEIGHT, RANGE_WEIGHT = 1e-2, 10.0
"""Weights of the smoothness prior and of values outside [0, 1], as in the route `layer_input`, not tuned for this attack."""
PRIOR_DECAY, PRIOR_COLOUR, START_DEVIATION = 1.2, 0.02, 0.3
"""Arguments `decay` and `colour_variance` of the prior (`build_smooth_spread`), and standard deviation of the start: the values
of the route `layer_input`, not tuned for this attack."""


@dataclass(frozen=True)
class FeatureLayer:
    """The linear layer whose inputs are separated. weight, bias: names of its parameters; `bias` is "" if it has none."""

    weight: str
    bias: str


def find_feature_layer(observed: StackedObservations) -> FeatureLayer:
    """Return the first linear layer that is called once with one vector per example. Raises ValueError if there is none."""
    probe = torch.rand(2, *observed.data.shape, generator=torch.Generator().manual_seed(0)).to(observed.device)
    for name, inputs in _record_inputs(observed, probe).items():
        weight, bias = f"{name}.weight", f"{name}.bias"
        if len(inputs) == 1 and inputs[0].ndim == 2 and len(inputs[0]) == 2 and weight in observed.gradient:
            return FeatureLayer(weight, bias if bias in observed.gradient else "")
    raise ValueError(
        "the Cocktail Party attack needs a linear layer that is called once with one vector per example, and this model has "
        "none; use an attack that searches, such as cpl"
    )


def standardise_features(observed: StackedObservations, layer: FeatureLayer, basis: Tensor, rng: Generator) -> Tensor:
    """Return the mixtures (R, F) of features, with a mean subtracted, divided by each feature's standard deviation.

    The mean and the deviation of each feature are estimated from random smooth images.
    basis: the mixtures. With a bias, (R, F + 1): the last column holds the sum of each mixture's coefficients, and this multiple
    of the features' means is subtracted. Without a bias, (R, F): the multiple is unknown, and each mixture's own mean over all
    features is subtracted.
    """
    images = 0.5 + build_smooth_spread(observed.data)(torch.randn(PUBLIC_IMAGES, *observed.data.shape, generator=rng))
    with torch.no_grad():
        inputs = _record_inputs(observed, images.clamp(0, 1).to(observed.device))
    typical = inputs[layer.weight.removesuffix(".weight")][0].double()
    deviation = typical.std(dim=0)
    deviation = deviation.clamp(min=MIN_DEVIATION * float(deviation.max()))
    if layer.bias:
        return (basis[:, :-1] - basis[:, -1:] * typical.mean(dim=0)) / deviation
    return (basis - basis.mean(dim=1, keepdim=True)) / deviation


def scale_features(vectors: Tensor, *, biased: bool) -> Tensor:
    """Return features z (R, F) up to a positive factor, from vectors that equal [z, 1] up to a factor of either sign.

    Only the sign is corrected: each z is multiplied by the sign of the last entry of its vector.
    biased: whether the layer has a bias. Without one, the vectors equal z up to a factor; the sign is then guessed, so that the
    sum of an example's features is not negative.
    """
    if not biased:
        return vectors * torch.where(vectors.sum(dim=1, keepdim=True) < 0, -1.0, 1.0).to(vectors)
    return vectors[:, :-1] * torch.where(vectors[:, -1:] < 0, -1.0, 1.0).to(vectors)


def invert_separated(
    observed: StackedObservations, layer: FeatureLayer, features: Tensor, *, steps: int, rng: Generator
) -> Tensor:
    """Search for images (R, *shape) in [0, 1] whose inputs of the layer have the directions of `features` (R, F)."""
    spread = build_smooth_spread(observed.data, decay=PRIOR_DECAY, colour_variance=PRIOR_COLOUR)
    target = features.float()
    z = (START_DEVIATION * torch.randn(len(target), *observed.data.shape, generator=rng)).to(target).requires_grad_()
    optimiser = torch.optim.Adam([z], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    name = layer.weight.removesuffix(".weight")
    for _ in range(steps):
        x = 0.5 + spread(z)
        inputs = _record_inputs(observed, x)[name][0]
        loss = (
            1 - functional.cosine_similarity(inputs, target, dim=1)
            + PRIOR_WEIGHT * z.square().flatten(1).mean(dim=1)
            + RANGE_WEIGHT * (x - x.clamp(0, 1)).square().flatten(1).mean(dim=1)
        ).sum()  # fmt: skip
        (z.grad,) = torch.autograd.grad(loss, [z])
        optimiser.step()
        schedule.step()
    result: Tensor = (0.5 + spread(z.detach())).clamp(0, 1)
    return result


def _record_inputs(observed: StackedObservations, x: Tensor) -> dict[str, list[Tensor]]:
    """Return a dict from the name of each linear layer to a list of its inputs, one per call, for images x (N, *shape).

    Layers that are not called are missing; the others are in the order of their first calls. The inputs are float32.
    """
    state = {**observed.get_buffers(0), **observed.get_weights(0)}
    single = {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
    with record_calls(list_linear(observed.model)) as seen:
        run_forward_pass(observed.model, single, observed.data.normalise(x.float()))
    return {name: [inputs for inputs, _ in calls] for name, calls in seen.items()}

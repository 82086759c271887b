"""Evidence on an answer: features that an attacker can compute without the truth.

"Power" is a squared Euclidean norm. An answer is a reconstruction before its confidence is known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.confidence.laplace import Posterior
from attacker.attacks.gradients.products import GradientTensors
from attacker.attacks.simulation.gradients import squared_norm
from fedsim.recording.observation import DataSpec

MAX_EXACT_MISFIT = 1e-10
"""Share of a gradient's power below which differences are rounding errors of float32."""
INSIDE = 1e-5
"""Mean squared distance to [0, 1] that is added to that of an image, whose logarithm is the feature `outside`."""
SAME = 1e-4
"""Mean squared distance that is added to that between two images, whose logarithm is the feature `alike`."""
MIN_EQUAL_SHARE = 0.9
"""Smallest share of the entries of an update with the largest magnitude of their tensor to take it for signs."""
FEATURE_NAMES = ("misfit", "drift", "examples", "equations", "error", "step", "outside", "roughness", "alike", "linked", "doubt")
"""Names of the features from which confidence may be estimated. All but `examples` and `linked` are decimal logarithms.

misfit:    share of the gradients' power that is not explained, beyond known noise.
drift:     power of the gradient's change over the client's local steps, relative to the gradient's power, if the attack treats
           these steps as one step.
equations: number of gradient entries that were sent, per value that is searched for.
error:     expected squared error of pixels under the Laplace approximation of the posterior.
step:      mean squared change that another Gauss-Newton step would make.
outside, roughness: mean squared distance to [0, 1], and total variation.
alike:     mean squared distance to the nearest other image of the answer with the same label; 1 if there is none.
doubt:     1 minus the certainty in [0, 1] that a closed form states for the example (`ClosedFormAnswer.stays`).
examples:  binary logarithm of the number of examples.
linked:    certainty of the links between rounds, in [0, 1].
"""


@dataclass(frozen=True, kw_only=True)
class SimulatedObservation:
    """One observation of a case, with the function that simulates it.

    observed:    the observed gradient, by parameter name, without the factors with which the search's objective weighs the
                 layers.
    simulate:    maps examples x to the gradient that would be observed, without these factors either.
    weight:      weight of the observation in the objective.
    variance:    variance of the known noise per gradient entry, 0-d.
    coordinates: number of gradient entries that are compared.
    """

    observed: GradientTensors
    simulate: Callable[[Tensor], GradientTensors]
    weight: Tensor
    variance: Tensor
    coordinates: int


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """The result of a search for one case, with the data from which confidence is estimated.

    x:           all examples that were searched for; if local epochs are simulated separately, one copy of each per epoch.
    labels:      label of each row of x.
    examples:    number of examples without these copies; the examples themselves are the first rows of x.
    compared:    the observations of the case.
    data, model: the data specification and the network.
    kept_evaluations: number of gradient evaluations of the start of the search that was kept.
    rng:         for random estimates.
    linked:      for each row of x, certainty in [0, 1] that the places in several rounds at which the attack assumes this example
                 hold the same example; 1 for an example of one round.
    unfamiliar:  the reason why the calibration does not apply, if the search knows one; otherwise empty.
    given_up:    whether the search was stopped because it was hopeless.
    drift:       function that returns how much the gradient of x changes over the client's local steps if the attack treats them
                 as one step, 0-d: squared norm of the change, relative to the squared norm of the gradient. It returns 0 in all
                 other cases.
    adaptive: whether clients state Adam or AdamW, whose updates hold little more than the signs of gradients.
    ordered: whether the answer rests on an assumed order in which the client used its examples in several local steps.
    inferred: whether this order was found by comparing simulated updates with the observed one.
    stopped: whether the user or a time limit stopped the search before its end.
    until: time on the clock `perf_counter` after which the curvature of the gradient is not computed any further.
    """

    x: Tensor
    labels: Tensor
    examples: int
    compared: Sequence[SimulatedObservation]
    data: DataSpec
    model: nn.Module
    kept_evaluations: int
    linked: Tensor
    rng: Generator
    unfamiliar: str
    given_up: bool
    drift: Callable[[], Tensor]
    adaptive: bool = False
    ordered: bool = False
    inferred: bool = False
    stopped: bool = False
    until: float = math.inf


def compute_shares(found: SearchAnswer) -> tuple[Tensor, Tensor, int]:
    """Return the unexplained share and the known noise's share of the gradients' power, 0-d, and the number of entries sent.

    The shares are means over the observations of the case, weighted by `SimulatedObservation.weight`. The number counts the
    nonzero entries of all observed gradients.
    """
    missed, noise, weights, sent = [], [], [], 0
    for compared in found.compared:
        made = compared.simulate(found.x)
        power = squared_norm(compared.observed).clamp(min=torch.finfo(found.x.dtype).tiny)
        off = squared_norm({name: made[name] - compared.observed[name] for name in compared.observed})
        weights.append(compared.weight)
        missed.append(compared.weight * torch.where(squared_norm(compared.observed) > 0, off / power, 1))
        noise.append(compared.weight * compared.variance * compared.coordinates / power)
        sent += sum(int(g.count_nonzero()) for g in compared.observed.values())
    whole = torch.stack(weights).sum()
    return torch.stack(missed).sum() / whole, torch.stack(noise).sum() / whole, sent


def fit_factor(found: SearchAnswer) -> tuple[float, float]:
    """Return the factor of the answer's gradient that comes closest to the observed one, and the share of power left unexplained.

    Both are NaN for several observations, and if the answer's gradient is zero or not finite.
    """
    if len(found.compared) > 1:
        return float("nan"), float("nan")
    made, observed = found.compared[0].simulate(found.x), found.compared[0].observed
    common = torch.stack([(made[name] * observed[name]).sum() for name in observed]).sum()
    factor = common / squared_norm({name: made[name] for name in observed})
    return float(factor), float(1 - factor * common / squared_norm(observed))


def holds_signs(found: SearchAnswer) -> bool:
    """Return whether the observed gradients are little more than signs, as those of Adam or signSGD.

    This is so if clients state such an optimiser, or if at least MIN_EQUAL_SHARE of the entries that were sent have, within one
    per cent, the largest magnitude of their tensor. Entries that are 0 were not sent.
    """
    equal, sent = 0, 0
    for gradient in (g for compared in found.compared for g in compared.observed.values()):
        equal += count_equal(gradient)
        sent += int(gradient.count_nonzero())
    return found.adaptive or equal >= MIN_EQUAL_SHARE * max(sent, 1)


def count_equal(gradient: Tensor) -> int:
    """Return the number of nonzero entries whose magnitude is, within one per cent, the largest one of the tensor."""
    size = gradient.abs()
    return int((size >= 0.99 * size.amax().clamp(min=torch.finfo(size.dtype).tiny)).sum())


def measure_curvature(found: SearchAnswer, variance: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three measures of how well the gradient determines each example, (N,) each.

    They are the mean posterior variance of its values (`Posterior.estimate_error`), their mean squared change by another
    Gauss-Newton step (`Posterior.estimate_next_step`), and the share of its values on which the gradient does not depend
    (`Posterior.estimate_unseen_share`).
    Residuals are differences between simulated and observed gradients, relative to the norm of the observed ones.
    variance: sum of the variances of all residuals: the unexplained share of power, or the known noise if that is more.
    iterations: of conjugate gradients.
    """
    tiny = torch.finfo(found.x.dtype).tiny
    shares = [
        observation.weight.sqrt() / squared_norm(observation.observed).sqrt().clamp(min=tiny) for observation in found.compared
    ]

    def compute_residuals(x: Tensor) -> tuple[Tensor, ...]:
        residuals: list[Tensor] = []
        for observation, share in zip(found.compared, shares, strict=True):
            simulated = observation.simulate(x)
            residuals += [share * (simulated[name] - observation.observed[name]) for name in observation.observed]
        return tuple(residuals)

    variance = variance.clamp(min=MAX_EXACT_MISFIT) / sum(observation.coordinates for observation in found.compared)
    posterior = Posterior(compute_residuals, found.x, variance, iterations, until=found.until)
    return posterior.estimate_error(found.rng), posterior.estimate_next_step(), posterior.estimate_unseen_share(found.rng)


def measure_appearance(x: Tensor, data: DataSpec) -> dict[str, Tensor]:
    """Return two features of examples x (N, *shape), decimal logarithms (N,): `outside` and, for images only, `roughness`.

    outside: mean squared distance of an example's values to [0, 1]. roughness: anisotropic total variation of the clamped image,
    that is the mean absolute difference of vertical neighbours plus that of horizontal ones.
    """
    outside = measure_outside(x)
    looks = {"outside": torch.log10(outside.nan_to_num(nan=1e3, posinf=1e3) + INSIDE)}
    if data.is_image:
        x = x.nan_to_num().clamp(0, 1)
        down, across = (x[..., 1:, :] - x[..., :-1, :]).abs(), (x[..., 1:] - x[..., :-1]).abs()
        total = sum(t.flatten(1).sum(dim=1) / max(1, t[0].numel()) for t in (down, across))
        looks["roughness"] = torch.log10(torch.as_tensor(total) + 1e-3)
    return looks


def measure_outside(x: Tensor) -> Tensor:
    """Return the mean squared distance of the values of each of N examples x (N, *shape) to [0, 1], (N,)."""
    return (x - x.clamp(0, 1)).flatten(1).square().mean(dim=1)


def measure_likeness(x: Tensor, labels: Tensor) -> Tensor:
    """Return the feature `alike` of N images x (N, *shape) with these labels (N,), a decimal logarithm (N,).

    It is 0 for an image that is the only one with its label. Searches mix images with equal labels: an update shows the sum of
    these far better than the differences between them, and two mixtures are more alike than two images.
    """
    values = x.nan_to_num().clamp(0, 1).flatten(1).double()
    apart = torch.cdist(values, values).square() / values.shape[1]
    others = (labels[:, None] == labels) & ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    nearest = apart.masked_fill(~others, torch.inf).amin(dim=1)
    return torch.log10((nearest + SAME).clamp(max=1)).float()

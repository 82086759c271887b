"""Route `features`: computes the features of each example from the last layer's gradient, and inverts each separately.

Features are the inputs of the last linear layer. `read_features` separates them by example; for some examples of one label it
finds only the mean of their features. Each example is then the maximum a posteriori (MAP) estimate given its own features and a
smoothness prior, computed by Gauss-Newton. The gradients of earlier layers are not used.
"""

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import Generator, Tensor, nn
from torch.func import jacrev

from attacker.attacks.cases import seed_generator
from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations
from attacker.attacks.closed_form.rgap.recursion import RgapSettings
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import MAX_MISFIT, read_features, read_labels
from attacker.attacks.labels.probes import compute_head_inputs
from attacker.attacks.labels.rules import infer_labels
from attacker.attacks.linking import HeadFeatures
from attacker.attacks.matching.smooth_images import Spread, build_smooth_spread
from fedsim import models

MAX_JACOBIAN_ENTRIES = 2**24
"""Largest number of entries of the Jacobian of the features with respect to the input; one per example is held in memory."""
MAX_FEATURES = 4096
"""Largest number of features; the cost of an iteration grows with its third power."""
MIN_FEATURE_RATIO = 0.1
"""Smallest number of features relative to the values of an example; with fewer, the answer is hardly more than the prior."""
DAMPING_FACTORS = (1e-2, 1e-4, 1e-5)
"""Assumed error of the features in each iteration, relative to their variation over examples (Levenberg-Marquardt damping)."""
FINAL_STEPS = 3
"""Number of final steps that reuse the last Jacobian, which hardly changes any more."""
STEP_LENGTHS = (1.0, 0.5, 0.25)
"""Step lengths, tried in this order until the distance to the features decreases."""
JACOBIAN_CHUNK = 256
"""Number of rows of the Jacobian that are computed at once."""
SEPARATING_NOISE = 0.1
"""Standard deviation, relative to the prior's, of noise that is added to examples of one label if only the mean of their features
is known. Without this noise, their answers would be equal."""

Features = Callable[[Tensor], Tensor]
"""Maps an example (*shape) in [0, 1] to its features (F,)."""


def invert_features(observed: StackedObservations, rng: Generator, rgap: RgapSettings) -> Sequence[ClosedFormAnswer]:
    """Compute the examples of each case from their features, the inputs of the last layer, and return one answer per case.

    An answer has no examples if the last layer's gradient is zero, or if the features found do not explain it. rgap: not used;
    other closed forms with this signature use it. Raises ValueError if model, training or defense do not allow the method
    (`require_features`).
    """
    require_features(observed)
    return [_answer(observed, i, seed_generator(rng, case, "features")) for i, case in enumerate(observed.cases)]


def require_features(observed: StackedObservations) -> None:
    """Raise ValueError with the reason if model, training or defense show that features cannot be computed and inverted."""
    first, model = observed.cases[0].observations[0], observed.model
    if not models.has_head(model, observed.data):
        raise ValueError(
            "the closed form 'features' needs a last linear layer whose outputs are the logits, and this model has none; a "
            "search, such as the attack dlg, does not need it"
        )
    weight, _ = models.find_head(model, observed.data)
    count, width = observed.weights[weight].shape[1:]
    if count == 1:
        raise ValueError(
            "the model has a single logit, whose gradient gives only a weighted mean of the features of the batch; a search, "
            "such as the attack cpl, has no such limit"
        )
    if weight in observed.omitted:
        raise ValueError(
            f"features are computed from the gradient of {weight}, which the defense distorts; choose another attack, such "
            "as exact with --set route=optimisation"
        )
    if first.training.mode == "train" and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise ValueError(
            "batch norm normalises with the mean and variance of the batch, so that the features of an example depend on the "
            "other examples; choose another attack"
        )
    if width < MIN_FEATURE_RATIO * observed.data.size:
        minimum = ceil(MIN_FEATURE_RATIO * observed.data.size)
        raise ValueError(
            f"the last layer has {width:,} inputs, and at least {minimum:,} are needed to determine an example of "
            f"{observed.data.size:,} values; a search, such as the attack cpl, has no such limit"
        )
    if width > MAX_FEATURES or width * observed.data.size > MAX_JACOBIAN_ENTRIES:
        raise ValueError(
            f"an example of {observed.data.size:,} values cannot be computed from the last layer's {width:,} inputs: the limits "
            f"are {MAX_FEATURES:,} inputs, and {MAX_JACOBIAN_ENTRIES:,} for inputs times values; a search, such as the attack "
            "cpl, has none"
        )


def _answer(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    """Return the answer for case i.

    It has no examples if the last layer's gradient is zero, or if the features read from this gradient do not explain it.
    """
    if not bool(observed.gradient[models.find_head(observed.model, observed.data)[0]][i].any()):
        zero = "the last layer's gradient, from which features are computed, is zero or was not sent"
        return ClosedFormAnswer.without_examples(observed.data, "features", zero)
    head_features = _read_head_features(observed, i, rng)
    if head_features.misfit > MAX_MISFIT:
        unexplained = f"the features found leave {head_features.misfit:.0%} of the last layer's gradient unexplained"
        return ClosedFormAnswer.without_examples(observed.data, "features", unexplained)
    spread = build_smooth_spread(observed.data)
    compute_features = _build_features(observed, i)
    each, place = torch.unique(head_features.features, dim=0, return_inverse=True)  # examples of one label may share their mean
    errors = [float(head_features.error[place == k].max()) for k in range(len(each))]
    pairs = zip(each.to(observed.device), errors, strict=True)
    x = torch.stack([find_map_estimate(compute_features, f, spread, observed.data.shape, error) for f, error in pairs])[place]
    noise = spread(torch.randn(x.shape, generator=rng, dtype=x.dtype).to(x))
    x[head_features.shared.to(x.device)] += SEPARATING_NOISE * noise[head_features.shared.to(x.device)]
    free = max(0.0, 1 - head_features.features.shape[1] / observed.data.size)
    return ClosedFormAnswer(
        x,
        head_features.labels.to(x.device),
        "features",
        doubts=_list_doubts(head_features, free),
        determined=1 - free,
        likeliest=True,
    )


def _list_doubts(head_features: HeadFeatures, free: float) -> tuple[str, ...]:
    notes = (
        [f"the features determine {1 - free:.0%} of an example's values; the smoothness prior determines the rest"]
        if free
        else []
    )
    if bool(head_features.shared.any()):
        notes.append(f"{int(head_features.shared.sum())} examples share a label, and only the mean of their features is known")
    return tuple(notes)


def _read_head_features(observed: StackedObservations, i: int, rng: Generator) -> HeadFeatures:
    case, device = observed.cases[i], str(observed.device)
    gradients = ObservedGradients([case.observations[0]], model=observed.model, device=device)
    known_labels = case.known_labels
    labels = read_labels(infer_labels, gradients, 0, gradients.model, rng) if known_labels is None else known_labels
    return read_features(gradients, labels.cpu(), rng, known=known_labels is not None)


def _build_features(observed: StackedObservations, i: int) -> Features:
    state = {**observed.get_buffers(i), **observed.get_weights(i)}
    by_type = {
        dtype: {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
        for dtype in (torch.float32, torch.float64)
    }

    def compute_features(x: Tensor) -> Tensor:
        return compute_head_inputs(observed.model, observed.data, by_type[x.dtype], observed.data.normalise(x[None]))[0][0]

    return compute_features


def find_map_estimate(
    compute_features: Features, target: Tensor, spread: Spread, shape: Sequence[int], error: float = 0.0
) -> Tensor:
    """Return an approximate MAP estimate x (*shape) for features `target` (F,) in float64.

    The prior is x = 0.5 + spread(z) with independent standard normal z. Each iteration solves the linearised features for z. The
    iterations end early if no step length brings the features nearer to `target`.
    compute_features: function that computes the features of an example.
    error: approximate norm of the error of `target`.
    """
    z = target.new_zeros(tuple(shape))
    off = target - compute_features(0.5 + z)
    for turn in range(len(DAMPING_FACTORS) + FINAL_STEPS):
        if turn < len(DAMPING_FACTORS):
            jacobian = _compute_jacobian(compute_features, spread, z)
            normal = jacobian @ jacobian.T
            normal.diagonal().add_(DAMPING_FACTORS[turn] ** 2 * normal.trace() + error**2 / len(target))
            factor = torch.linalg.cholesky(normal)
        solved = torch.cholesky_solve((off + jacobian @ z.flatten())[:, None], factor)[:, 0]
        step = (jacobian.T @ solved).reshape(z.shape) - z
        length = next(
            (
                candidate
                for candidate in STEP_LENGTHS
                if (target - compute_features(0.5 + spread(z + candidate * step))).norm() < off.norm()
            ),
            0.0,
        )
        if not length:
            break
        z = z + length * step
        off = target - compute_features(0.5 + spread(z))
    return 0.5 + spread(z)


def _compute_jacobian(compute_features: Features, spread: Spread, z: Tensor) -> Tensor:
    """Return the Jacobian (F, D) of the features of 0.5 + spread(z) with respect to the D values of z, computed in float32."""
    rows = jacrev(compute_features, chunk_size=JACOBIAN_CHUNK)((0.5 + spread(z)).float())
    return spread(rows).double().flatten(1)

"""Labels of a batch of which all or some inputs are known, chosen to explain the examples' parts of the gradient dL/dz.

L is the loss, and z the output of the first linear layer before its activation (its pre-activations).
The norm of an input that is known only up to a factor, as in layers without a bias, is found in the same way.
"""

from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.label_gradients import (
    MIN_SINGLE_MISFIT,
    compute_label_gradients,
    compute_output_gradient,
    find_mixed_labels,
)
from attacker.attacks.closed_form.linear.layer_gradient import LinearAnswer
from attacker.attacks.closed_form.rgap.system import apply_maps
from attacker.attacks.networks.chain import Chain
from defenses.base import Tensors

MAX_LABEL_COMBINATIONS = 3000
"""Largest number of combinations of labels that are tried for an example that occurs several times."""

NORM_RANGE = (1e-3, 1e3)
"""Range of norms that are tried if the norm is unknown, in units of the square root of the number of values."""

GRID_POINTS, REFINEMENTS = 121, 12
"""Number of norms tried first, and number of refinements around the best ones, each four times finer."""

MAX_SCALED_MISFIT = 0.3
"""Largest relative norm of what a label leaves unexplained at which the scale of the gradient counts as right. Above it, clients
train otherwise than stated, for example with another learning rate, and a single label is chosen by the direction alone."""

MIN_SINGULAR_VALUE = 1e-10
"""Singular values of the gradients for all labels, relative to the largest one, below which they are rounding errors."""

TWIN_TOLERANCE = 1e-4
"""Largest increase of the unexplained share at which a second norm counts as another solution (twin)."""

MAX_UNEXPLAINED = 1e-3
"""Largest unexplained share of a neuron's gradient at which the neuron is used to determine labels."""


@dataclass(frozen=True, kw_only=True)
class LabelledExamples:
    """Examples with their labels: x (N, F), y (N,). Examples that occur several times in the batch are repeated.

    source: (N,) index of each example among the `found` examples of the `LinearAnswer`.
    misfit: (found,) for each example of the `LinearAnswer`, the norm of the part of its gradient dL/dz that its labels do not
            explain, relative to the norm of this gradient.
    turned: (found,) sine of the angle between this gradient and that for the best label, or the misfit if that is less. Unlike
            the misfit, it is small for a right example whose gradient has been scaled, as by clipping or another learning rate.
    beside: (found,) the smallest norm of a difference of this gradient and one for any errors at the outputs, relative to its
            norm. It is small also for other losses, such as label smoothing or the squared error.
    twins:  (found,) whether the example scaled to another norm would explain this gradient about equally well; False if the norm
            is known.
    mixed:  (found,) whether this gradient combines the gradients for two labels with different weights, as for inputs that MixUp
            or CutMix made of two examples; False for fewer than three classes.
    """

    x: Tensor
    y: Tensor
    source: Tensor
    misfit: Tensor
    turned: Tensor
    beside: Tensor
    twins: Tensor
    mixed: Tensor


def explain_batch(
    chain: Chain, weights: Tensors, loss: str, answer: LinearAnswer, examples: int, *, bounds: tuple[Tensor, Tensor] | None = None
) -> LabelledExamples:
    """Choose the label of each example so that its simulated gradient at the first layer's pre-activations fits the observed one.

    chain, weights: the network and its weights by name. loss: name of the loss.
    answer: the examples found, with their parts of the gradient. examples: number of examples in the batch.
    bounds: lowest and highest possible inputs of the first layer.

    If fewer distinct examples than `examples` make up the whole gradient, an example may get several labels, one for each time
    that it seems to occur in the batch. If the layer has no bias, the norm of the example is chosen by the same criterion; of
    several possible norms, the one whose values leave `bounds` least, or the largest if they are equal in this.
    Raises ValueError if `answer` has no examples, or lacks the part of the gradient of one of its examples.
    """
    if not answer.found or not bool((answer.d != 0).any(dim=1).all()):
        reason = answer.note or "not all examples were separated"
        raise ValueError(
            f"labels cannot be found, because the batch's gradient was not split into those of its examples ({reason}); use "
            "assign_labels, which does not need them"
        )
    simulation = _LabelSimulation(chain, {name: w.double() for name, w in weights.items()}, loss)
    spare = max(examples - answer.found, 0) if answer.rank == answer.found else 0
    x, y, source, misfit, turned, beside, twins, mixed = [], [], [], [], [], [], [], []
    for i in range(answer.found):
        if answer.scaled:
            example, twin = answer.x[i], False
        else:
            example, twin = simulation.find_norm(answer.x[i], answer.d[i] * examples, bounds)
        length = 1.0 if answer.scaled else float(example.norm())
        part = answer.d[i] * examples / length
        by_label = simulation.simulate_all_labels(example[None])[0]
        labels, missed = _find_labels(by_label, part, spare)
        spare -= len(labels) - 1
        x += [example] * len(labels)
        y += list(labels)
        source += [i] * len(labels)
        misfit.append(missed)
        turned.append(min(missed, _measure_angle(by_label, part)))
        beside.append(
            _measure_distance(torch.cat([by_label, compute_output_gradient(chain, simulation.weights, example[None])]), part)
        )
        twins.append(twin)
        mixed.append(missed > MIN_SINGLE_MISFIT and bool(find_mixed_labels(by_label[:, None], part[None])))
    return LabelledExamples(
        x=torch.stack(x), y=torch.tensor(y), source=torch.tensor(source), misfit=torch.tensor(misfit, dtype=torch.float64),
        turned=torch.tensor(turned, dtype=torch.float64),
        beside=torch.tensor(beside, dtype=torch.float64), twins=torch.tensor(twins), mixed=torch.tensor(mixed),
    )  # fmt: skip


class AssignedLabels(NamedTuple):
    """Labels y (K,) of inputs, and a mask (K,) of the inputs with gradients for two labels each (`find_mixed_labels`)."""

    y: Tensor
    mixed: Tensor


def assign_labels(
    chain: Chain, weights: Tensors, gradient: Tensors, x: Tensor, *, loss: str, classes: int, examples: int
) -> AssignedLabels:
    """Return labels of those inputs x (K, F) of a batch that are known, while others may be unknown, and which are mixed.

    The first layer's gradient is D^T [X, 1], and the row of D of an example depends on its label. Only neurons whose gradient the
    known inputs explain are used, since unknown examples do not affect them. If every label leaves more than the share
    MAX_SCALED_MISFIT of an example's row unexplained, the label whose gradient has the most similar direction is chosen.
    loss: name of the loss. classes: number of labels. examples: batch size, which may exceed K.
    """
    layer = chain.layers[0]
    inputs = apply_maps(layer.before, x.reshape(len(x), *layer.inputs)).flatten(1)
    rows = gradient[layer.weight]
    if layer.bias is not None:
        rows = torch.cat([rows, gradient[layer.bias][:, None]], dim=1)
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    d = rows @ torch.linalg.pinv(inputs)
    missed, length = (rows - d @ inputs).norm(dim=1), rows.norm(dim=1)
    seen = (missed <= MAX_UNEXPLAINED * length) & (length > 0)
    expected = compute_label_gradients(chain, weights, x, loss, classes).transpose(0, 1) / examples
    expected, part = expected[..., seen], d.T[:, seen]
    off: Tensor = (expected - part).norm(dim=-1)
    scaled = off.amin(dim=0) <= MAX_SCALED_MISFIT * part.norm(dim=-1)
    y = torch.where(scaled, off.argmin(dim=0), torch.cosine_similarity(expected, part[None], dim=-1).argmax(dim=0))
    unexplained = off.amin(dim=0) > MIN_SINGLE_MISFIT * part.norm(dim=-1)
    return AssignedLabels(y, unexplained & find_mixed_labels(expected, part))


@dataclass(frozen=True)
class _LabelSimulation:
    """Simulation of gradients with each label: the network, its weights by name, and the name of the loss."""

    chain: Chain
    weights: Tensors
    loss: str

    @property
    def classes(self) -> int:
        return 2 if self.loss == "logistic" else self.chain.layers[-1].shape[0]

    def simulate_all_labels(self, x: Tensor) -> Tensor:
        """Return dL/dz of each of the examples x (N, F) with each of the K labels, each as a batch of one, (N, K, width)."""
        return compute_label_gradients(self.chain, self.weights, x, self.loss, self.classes)

    def find_norm(self, x: Tensor, observed: Tensor, bounds: tuple[Tensor, Tensor] | None) -> tuple[Tensor, bool]:
        """Return the input s x, the unit vector x (F,) scaled to its unknown norm s, and whether a second norm fits as well.

        s is the norm for which s dL/dz, simulated for the input s x and the best label, has the smallest misfit to `observed`
        (width,): the observed dL/dz times the unknown norm. Of several norms that fit about equally well (twins), the one for
        which the values of s x leave `bounds` (lowest and highest possible inputs) least is chosen, or the largest one if they
        are equal in this.
        """
        low, high = (torch.tensor(end * len(x) ** 0.5).log() for end in NORM_RANGE)
        grid = torch.linspace(float(low), float(high), GRID_POINTS, dtype=x.dtype, device=x.device)
        missed = self._compute_misfit(x, observed, grid)
        padded = torch.nn.functional.pad(missed.T, (1, 1), value=float("inf")).T
        valleys = ((missed <= padded[:-2]) & (missed <= padded[2:])).nonzero()
        near = missed[valleys[:, 0], valleys[:, 1]].argsort()[: 2 * self.classes]
        norms = [
            self._refine_norm(x, observed, grid[place], int(label), grid[1] - grid[0]) for place, label in valleys[near].tolist()
        ]
        minimum = min(missed for _, missed in norms)
        lengths = sorted({round(float(s), 6): s for s, missed in norms if missed <= minimum + TWIN_TOLERANCE}.values())
        candidates = [s.exp() * x for s in torch.stack(lengths)]
        if bounds is not None:
            low_, high_ = (b.double().flatten() for b in bounds)
            outside = [float(((low_ - c).clamp(min=0) + (c - high_).clamp(min=0)).square().mean()) for c in candidates]
            return candidates[max(range(len(candidates)), key=lambda i: (-max(outside[i], 1e-6), i))], len(candidates) > 1
        return candidates[-1], len(candidates) > 1

    def _compute_misfit(self, x: Tensor, observed: Tensor, grid: Tensor) -> Tensor:
        """Return the misfit |s dL/dz - part| / |part|, (G, K), of inputs s x with norms s = exp(grid), (G,), and K labels."""
        lengths = grid.exp()
        each = self.simulate_all_labels(lengths[:, None] * x)
        result: Tensor = (lengths[:, None, None] * each - observed).norm(dim=2) / observed.norm()
        return result

    def _refine_norm(self, x: Tensor, observed: Tensor, start: Tensor, label: int, step: Tensor) -> tuple[Tensor, float]:
        around, missed = torch.linspace(-1, 1, 9, dtype=x.dtype, device=x.device), torch.tensor(float("inf"))
        for _ in range(REFINEMENTS):
            grid = start + step * around
            values = self._compute_misfit(x, observed, grid)[:, label]
            start, missed, step = grid[values.argmin()], values.amin(), step / 4
        return start, float(missed)


def _find_labels(simulated: Tensor, observed: Tensor, spare: int) -> tuple[tuple[int, ...], float]:
    """Return labels for one input, one for each time that it seems to occur in the batch, and their misfit.

    simulated: (K, width), the gradients dL/dz of the input for each of K labels. observed: (width,), the observed dL/dz.
    The labels are those whose simulated gradients add up best to `observed`. The misfit is the norm of the difference, relative
    to the norm of `observed`. There are at least one and at most 1 + `spare` labels, fewer if there were more than
    MAX_LABEL_COMBINATIONS combinations. More labels are used only if the misfit is then less than a tenth of the misfit of fewer
    labels. If the misfit exceeds MAX_SCALED_MISFIT, the result is the one label whose gradient has the most similar direction.
    """
    best: tuple[tuple[int, ...], float] = ((0,), float("inf"))
    for count in range(1, spare + 2):
        if comb(len(simulated) + count - 1, count) > MAX_LABEL_COMBINATIONS:
            break
        sets = list(combinations_with_replacement(range(len(simulated)), count))
        missed = (simulated[torch.tensor(sets)].sum(dim=1) - observed).norm(dim=1) / observed.norm()
        lowest = int(missed.argmin())
        if float(missed[lowest]) < 0.1 * best[1]:
            best = (sets[lowest], float(missed[lowest]))
    if best[1] > MAX_SCALED_MISFIT:
        return (int(torch.cosine_similarity(simulated, observed, dim=1).argmax()),), best[1]
    return best


def _measure_angle(simulated: Tensor, observed: Tensor) -> float:
    """Return the smallest sine of the angle between `observed` and one of `simulated`, or 1 if all angles are obtuse.

    The sine is computed from differences of unit vectors, since cosines lose digits near 1.
    """
    half = (torch.nn.functional.normalize(simulated, dim=1) - observed / observed.norm()).norm(dim=1) / 2
    return float(torch.where(half < 0.5**0.5, 2 * half * (1 - half.square()).clamp(min=0).sqrt(), 1.0).min())


def _measure_distance(simulated: Tensor, observed: Tensor) -> float:
    """Return the distance of `observed` from the span of `simulated` (see `_find_labels`), over the norm of `observed`."""
    left, value, _ = torch.linalg.svd(simulated.T, full_matrices=False)
    basis = left[:, value > MIN_SINGULAR_VALUE * value[0]]
    return float((observed - basis @ (basis.T @ observed)).norm() / observed.norm())

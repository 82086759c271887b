"""Features that entered the last layer, per example, computed from its gradient without a search for inputs.

For softmax cross-entropy over a batch of B, with f_i the features of example i, p_i its probabilities and e_i its one-hot label,

    G = A^T F    and    g = A^T 1    with    A = (P - E) / B    and    P = softmax(F W^T + b).

G has the rank of the batch, so F = C V^T, where V (F, B) holds its right singular vectors and C (B, B) is unknown. P follows
from C, and C from P by least squares. This fixed-point iteration contracts if probabilities depend weakly on features, as in
barely trained networks. Other networks, and examples that share a label, are solved by Levenberg-Marquardt on the same
equations: for equal labels the rows of A differ only by their probabilities, which float32 still distinguishes. (For one
example: R-GAP, section 3.1.1. For a batch we know of no source.)
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

EXACT = 1e-5
"""Misfit below which equations rounded to float32 count as solved."""
SPLIT = 16
"""Largest batch in which examples that share a label are separated; the cost grows with its sixth power."""
ROUNDED, LEFT = 20 * 2.0**-24, 5.0
"""Relative error of a gradient: from float32, and per unit of misfit. Chosen on the tuning split of CIFAR-10."""
STARTS = 3
TURNS = 60
RECOUNTS = 4


class HeadFeatures(NamedTuple):
    """Features of each example of a batch.

    features: (B, F), float64. labels: (B,) int64; ascending if they were recounted, else as given.
    shared:   (B,) bool, whether a row is only the mean over the examples of its label.
    misfit:   distance between the gradient of these features and the observed one, relative to its norm.
    error:    (B,) estimated norm of the error of a row; large if only rounding separates two examples.
    """

    features: Tensor
    labels: Tensor
    shared: Tensor
    misfit: float
    error: Tensor


class _Equations(NamedTuple):
    """Equations in the basis of the gradient's row space: target T (K, D), logit map M (K, D), and logit offset (K,)."""

    target: Tensor
    logits: Tensor
    offset: Tensor

    def probabilities(self, c: Tensor) -> Tensor:
        return (c @ self.logits.T + self.offset).softmax(dim=1)


def head_features(
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    labels: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    rng: Generator,
    recount: bool = False,
) -> HeadFeatures:
    """Return the features of each example behind the gradient of a linear layer with softmax cross-entropy, mean over the batch.

    weight_gradient, weight: (K, F). bias_gradient, bias: (K,), or None. labels: (B,), known or guessed. An update of several
    steps, divided by learning rate and steps, is treated as the gradient of one batch.
    recount: correct the labels by `B (mean p_c - g_c)` with the found probabilities; needs the gradient of the bias.

    Rows are exact if the batch is smaller than K and F, and has at most SPLIT examples or distinct labels. Otherwise examples of
    one label share their mean; with a single logit all do. Raises ValueError for shapes that do not fit and values that are not
    finite.
    """
    _check(weight_gradient, bias_gradient, labels, weight, bias)
    gradient, weight = weight_gradient.double(), weight.double()
    offset = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    if len(weight) == 1:
        return _of_one_logit(gradient, bias_gradient, labels)
    with_ones = bias_gradient is not None
    if bias_gradient is not None:
        gradient = torch.cat([gradient, bias_gradient.double()[:, None]], dim=1)
        weight, offset = torch.cat([weight, offset[:, None]], dim=1), torch.zeros_like(offset)
    best = _solved(gradient, weight, offset, labels, bias_gradient, rng)
    tried = {tuple(labels.tolist())}
    while recount and bias_gradient is not None and best.misfit > EXACT and len(tried) <= RECOUNTS:
        labels = _counted(best.features @ weight.T + offset, bias_gradient.double())
        if tuple(labels.tolist()) in tried:
            break
        tried.add(tuple(labels.tolist()))
        best = min(best, _solved(gradient, weight, offset, labels, bias_gradient, rng), key=lambda found: found.misfit)
    return best._replace(features=best.features[:, :-1]) if with_ones else best


def _check(weight_gradient: Tensor, bias_gradient: Tensor | None, labels: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    vectors = [t for t in (bias_gradient, bias) if t is not None]
    if weight_gradient.shape != weight.shape or any(v.shape != weight.shape[:1] for v in vectors):
        shapes = [tuple(t.shape) for t in (weight_gradient, weight, *vectors)]
        raise ValueError(f"the gradient of a layer of shape {tuple(weight.shape)} and its bias has the same shapes, got {shapes}")
    if not len(labels) or not bool(((labels >= 0) & (labels < max(2, len(weight)))).all()):
        raise ValueError(f"labels of {len(weight)} classes are needed, one an example at least, got {labels.tolist()}")
    if not all(bool(t.isfinite().all()) for t in (weight_gradient, weight, *vectors)):
        raise ValueError("the layer's gradient or weights are not finite: nothing can be read off them")


def _solved(
    gradient: Tensor, weight: Tensor, offset: Tensor, labels: Tensor, bias_gradient: Tensor | None, rng: Generator
) -> HeadFeatures:
    """Solve as `head_features` does, with the bias as an additional column of weight and gradient, without recounting."""
    u, s, vh = torch.linalg.svd(gradient, full_matrices=False)

    def equations(rank: int) -> tuple[_Equations, Tensor]:
        basis = vh[:rank]
        return _Equations(u[:, :rank] * s[:rank], weight @ basis.T, offset), basis

    classes, place, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    system, basis = equations(min(len(classes), len(s)))
    c, misfit = _of_classes(system, classes, counts, bias_gradient)
    shared = counts[place] > 1
    if len(labels) <= min(SPLIT, len(s)) and (misfit > EXACT or bool(shared.any())):
        wide, wide_basis = equations(len(labels))
        start = c[place] @ (basis @ wide_basis.T)
        split, split_misfit = _of_each(wide, labels, start, shared, rng)
        for _ in range(STARTS - 1):
            if split_misfit > EXACT:
                again = _of_each(wide, labels, start, shared, rng)
                split, split_misfit = min((split, split_misfit), again, key=lambda found: found[1])
        if split_misfit < misfit or split_misfit < EXACT:
            error = _error(split, s, split_misfit)
            return HeadFeatures(split @ wide_basis, labels, torch.zeros_like(shared), split_misfit, error)
    return HeadFeatures((c @ basis)[place], labels, shared, misfit, _error(c, s, misfit)[place])


def _error(c: Tensor, s: Tensor, misfit: float) -> Tensor:
    """Return the norm of the errors of rows c V^T if each row of V^T has the gradient's error divided by its singular value s."""
    noise = (ROUNDED + LEFT * misfit) * s.norm() / len(s) ** 0.5
    lengths: Tensor = (c.square() @ (noise / s[: c.shape[1]].clamp(min=1e-300)).square()).sqrt()
    return lengths


def _of_classes(system: _Equations, classes: Tensor, counts: Tensor, bias_gradient: Tensor | None) -> tuple[Tensor, float]:
    """Solve for one row of C per class, alternating with P, as if all examples of a class equalled their mean."""
    size, width = int(counts.sum()), len(system.target)
    one_hot = torch.nn.functional.one_hot(classes, width).double()
    start = torch.full((width,), 1 / width, dtype=torch.float64)
    if bias_gradient is not None:
        start = (bias_gradient.double() + counts.double() @ one_hot / size).clamp(min=0)
        start = start / start.sum().clamp(min=1e-12)
    p = start.expand(len(classes), -1)
    c, least = torch.zeros(len(classes), system.target.shape[1], dtype=torch.float64), float("inf")
    for _ in range(TURNS):
        a = counts[:, None] * (p - one_hot) / size
        found = torch.linalg.lstsq(a.T, system.target, driver="gelsd").solution
        p = system.probabilities(found)
        misfit = _misfit((counts[:, None] * (p - one_hot) / size).T @ found, system.target)
        if misfit < least:
            c, gain, least = found, least - misfit, misfit
            if gain < 1e-3 * least or least < 1e-9:
                break
    return c, least


def _of_each(system: _Equations, labels: Tensor, start: Tensor, shared: Tensor, rng: Generator) -> tuple[Tensor, float]:
    """Solve for one row of C per example by Levenberg-Marquardt from `start`, where equal rows are first separated."""
    size, width = len(labels), len(system.target)
    one_hot = torch.nn.functional.one_hot(labels, width).double()

    def residual(flat: Tensor) -> Tensor:
        c = flat.reshape(size, -1)
        return (((system.probabilities(c) - one_hot) / size).T @ c - system.target).flatten()

    apart = torch.randn(start.shape, generator=rng, dtype=torch.float64)
    x = (start * (1 + 0.05 * shared[:, None] * apart)).flatten()
    error, damping = residual(x), 1e-3
    length = system.target.norm().clamp(min=1e-300)
    for _ in range(TURNS):
        jacobian = _jacobian(system, one_hot, x.reshape(size, -1))
        normal, slope = jacobian.T @ jacobian, jacobian.T @ error
        while damping < 1e9:
            damped = normal + torch.diag(damping * normal.diagonal() + 1e-300)
            step = _least_squares(jacobian, error, (damping * normal.diagonal()).sqrt()) if damping < 1e-6 else None
            step = -torch.linalg.solve(damped, slope) if step is None else step
            moved = residual(x + step)
            if moved.norm() < error.norm():
                break
            damping *= 4
        else:
            break
        gained = float(1 - moved.norm() / error.norm())
        x, error, damping = x + step, moved, max(damping / 5, 1e-14)
        if gained < 1e-4 or error.norm() < 1e-9 * length:
            break
    return x.reshape(size, -1), float(error.norm() / length)


def _jacobian(system: _Equations, one_hot: Tensor, c: Tensor) -> Tensor:
    """Return the Jacobian (K D, B D) of A^T C with respect to C, directly and through P: `p_ik (M_k - sum_l p_il M_l)`."""
    size, p = len(c), system.probabilities(c)
    slopes = p[:, :, None] * (system.logits[None] - (p @ system.logits)[:, None]) / size
    direct = torch.einsum("ik,de->kdie", (p - one_hot) / size, torch.eye(c.shape[1], dtype=c.dtype))
    return (direct + torch.einsum("ike,id->kdie", slopes, c)).reshape(system.target.numel(), -1)


def _least_squares(jacobian: Tensor, error: Tensor, damping: Tensor) -> Tensor:
    """Return the damped step without squaring the condition number of the Jacobian."""
    right = torch.cat([-error, torch.zeros_like(damping)])[:, None]
    step: Tensor = torch.linalg.lstsq(torch.cat([jacobian, damping.diag()]), right, driver="gelsd").solution[:, 0]
    return step


def _of_one_logit(gradient: Tensor, bias_gradient: Tensor | None, labels: Tensor) -> HeadFeatures:
    """Return the features for a single logit: their mean weighted by p_i - y_i, scaled by the gradient of the bias."""
    scale = gradient.norm() if bias_gradient is None else bias_gradient.double().sum()
    row = gradient[0] / scale if float(scale) else gradient[0]
    many = len(labels) > 1
    error = torch.full((len(labels),), float(row.norm()) if many else 0.0, dtype=row.dtype)
    return HeadFeatures(row.expand(len(labels), -1), labels, torch.full((len(labels),), many), 1.0 if many else 0.0, error)


def _counted(logits: Tensor, bias_gradient: Tensor) -> Tensor:
    """Return labels, ascending, from `B (mean p_c - g_c)` rounded to a total of B."""
    counts = (len(logits) * (logits.softmax(dim=1).mean(dim=0) - bias_gradient)).clamp(min=0)
    counts = counts * (len(logits) / counts.sum().clamp(min=1e-12))
    whole = counts.floor().long()
    whole[(counts - whole).topk(len(logits) - int(whole.sum())).indices] += 1
    return torch.repeat_interleave(torch.arange(len(whole)), whole)


def _misfit(found: Tensor, target: Tensor) -> float:
    return float((found - target).norm() / target.norm().clamp(min=1e-300))

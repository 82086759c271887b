"""Features of each example, the inputs of the last layer, computed from its gradient without a search for examples.

For softmax cross-entropy over a batch of B, with f_i the features of example i, p_i its probabilities and e_i its one-hot label
as rows of F, P and E, the gradients of the layer's weight and bias are

    G = A^T F    and    g = A^T 1    with    A = (P - E) / B    and    P = softmax(F W^T + b).

If G has rank B, then F = C V^T, where the columns of V (F, B) are its right singular vectors and C (B, B) is unknown. P follows
from C, and C from P by least squares. This fixed-point iteration converges if probabilities depend weakly on features, as in
barely trained networks. Where the iteration does not converge, and for examples that share a label, the same equations are solved
by Levenberg-Marquardt, if the batch is small (MAX_SEPARATED). For equal labels the rows of A differ only by their probabilities.
For one example, see R-GAP, section 3.1.1. We know of no source for a batch.

The misfit of a solution, or its relative residual, is |A^T C V^T - G| / |G|, with Frobenius norms and G the observed gradient.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

EXACT_MISFIT = 1e-5
"""Misfit below which equations rounded to float32 count as solved."""
MAX_SEPARATED = 16
"""Largest batch in which examples that share a label are separated; the cost grows with the sixth power of the batch size."""
ROUNDING_ERROR, ERROR_PER_MISFIT = 20 * 2.0**-24, 5.0
"""Relative error of a gradient: from float32, and per unit of misfit. Chosen on the tuning split of CIFAR-10."""
MAX_STARTS = 3
"""Largest number of random starts of Levenberg-Marquardt."""
MAX_ITERATIONS = 60
"""Largest number of iterations of the fixed-point iteration, and of each start of Levenberg-Marquardt."""
MAX_RECOUNTS = 4
"""Largest number of corrections of the labels."""


class HeadFeatures(NamedTuple):
    """The features (inputs of the last layer) of each example of a batch.

    features: (B, F), float64. labels: (B,) int64; ascending if they were corrected, otherwise as given.
    shared:   (B,) bool, whether a row is only a mean over several examples: those with its label or, for a single logit, all.
    misfit:   distance between the gradient of these features and the observed one, relative to the norm of the observed gradient;
              for a single logit the misfit is not computed, but set to 0 for one example and to 1 for several.
    error:    (B,) estimated norm of the error of a row; large if two examples differ only by rounding errors.
    """

    features: Tensor
    labels: Tensor
    shared: Tensor
    misfit: float
    error: Tensor


class _Equations(NamedTuple):
    """The equations in the basis of the gradient's row space, or of its D leading directions.

    target: the gradient, (K, D). logits, offset: map from coordinates of features to logits, a matrix (K, D) and an offset (K,).
    """

    target: Tensor
    logits: Tensor
    offset: Tensor

    def compute_probabilities(self, c: Tensor) -> Tensor:
        return (c @ self.logits.T + self.offset).softmax(dim=1)


def solve_head_features(
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    labels: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    rng: Generator,
    recount: bool = False,
) -> HeadFeatures:
    """Estimate the features, the inputs of a linear last layer, of each example of a batch, from the layer's gradient.

    The gradient is that of the mean cross-entropy over the batch of B examples. An update of several steps, divided by
    learning rate and number of steps, is treated as the gradient of one batch.
    weight_gradient, weight: (K, F). bias_gradient, bias: (K,), or None. labels: (B,), known or inferred.
    rng:     randomness of the starting points that separate examples with equal labels.
    recount: whether to correct the labels by `B (mean p_c - g_c)` with the probabilities found; the correction needs the bias's
             gradient g, and without g `recount` has no effect.

    The equations determine the features if B is smaller than K and F; `misfit` and `error` of the result show whether they were
    solved. Examples with equal labels are separated only if B is at most MAX_SEPARATED, K and F. Otherwise they get their common
    mean; with a single logit all examples do. Raises ValueError for shapes that do not match, labels out of range, and values
    that are not finite.
    """
    _check_shapes(weight_gradient, bias_gradient, labels, weight, bias)
    gradient, weight = weight_gradient.double(), weight.double()
    offset = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    if len(weight) == 1:
        return _solve_single_logit(gradient, bias_gradient, labels)
    with_ones = bias_gradient is not None
    if bias_gradient is not None:
        gradient = torch.cat([gradient, bias_gradient.double()[:, None]], dim=1)
        weight, offset = torch.cat([weight, offset[:, None]], dim=1), torch.zeros_like(offset)
    best = _solve(gradient, weight, offset, labels, bias_gradient, rng)
    tried = {tuple(labels.tolist())}
    while recount and bias_gradient is not None and best.misfit > EXACT_MISFIT and len(tried) <= MAX_RECOUNTS:
        labels = _count_labels(best.features @ weight.T + offset, bias_gradient.double())
        if tuple(labels.tolist()) in tried:
            break
        tried.add(tuple(labels.tolist()))
        best = min(best, _solve(gradient, weight, offset, labels, bias_gradient, rng), key=lambda solution: solution.misfit)
    return best._replace(features=best.features[:, :-1]) if with_ones else best


def _check_shapes(
    weight_gradient: Tensor, bias_gradient: Tensor | None, labels: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    vectors = [t for t in (bias_gradient, bias) if t is not None]
    if weight_gradient.shape != weight.shape or any(v.shape != weight.shape[:1] for v in vectors):
        bias_shape, bias_gradient_shape = (None if v is None else tuple(v.shape) for v in (bias, bias_gradient))
        raise ValueError(
            f"the gradient must have the weight's shape {tuple(weight.shape)}, and bias and bias gradient the shape "
            f"({len(weight)},); got gradient {tuple(weight_gradient.shape)}, bias {bias_shape} and bias gradient "
            f"{bias_gradient_shape}"
        )
    if not len(labels) or not bool(((labels >= 0) & (labels < max(2, len(weight)))).all()):
        raise ValueError(f"at least one label is needed, each from 0 to {max(2, len(weight)) - 1}, got {labels.tolist()}")
    if not all(bool(t.isfinite().all()) for t in (weight_gradient, weight, *vectors)):
        raise ValueError(
            "the last layer's gradient or weights contain NaN or infinite values, so no features can be computed; leave out this "
            "update"
        )


def _solve(
    gradient: Tensor, weight: Tensor, offset: Tensor, labels: Tensor, bias_gradient: Tensor | None, rng: Generator
) -> HeadFeatures:
    """Solve as `solve_head_features` does, for several logits and without correcting labels.

    With a bias gradient, the features returned have one more column, which is nearly 1.

    With a bias gradient, the last column of `gradient` is this bias gradient, the last column of `weight` is the bias, and
    `offset` is 0. Without a bias gradient, `gradient` and `weight` have no such column, and `offset` (K,) is the layer's bias, or
    0 if the layer has none.
    bias_gradient: used only for the start of the iteration.
    """
    u, s, vh = torch.linalg.svd(gradient, full_matrices=False)

    def build_equations(rank: int) -> tuple[_Equations, Tensor]:
        basis = vh[:rank]
        return _Equations(u[:, :rank] * s[:rank], weight @ basis.T, offset), basis

    classes, place, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    system, basis = build_equations(min(len(classes), len(s)))
    c, misfit = _solve_classes(system, classes, counts, bias_gradient)
    shared = counts[place] > 1
    if len(labels) <= min(MAX_SEPARATED, len(s)) and (misfit > EXACT_MISFIT or bool(shared.any())):
        wide, wide_basis = build_equations(len(labels))
        start = c[place] @ (basis @ wide_basis.T)
        split, split_misfit = _solve_examples(wide, labels, start, shared, rng)
        for _ in range(MAX_STARTS - 1):
            if split_misfit > EXACT_MISFIT:
                again = _solve_examples(wide, labels, start, shared, rng)
                split, split_misfit = min((split, split_misfit), again, key=lambda candidate: candidate[1])
        if split_misfit < misfit or split_misfit < EXACT_MISFIT:
            error = _estimate_error(split, s, split_misfit)
            return HeadFeatures(split @ wide_basis, labels, torch.zeros_like(shared), split_misfit, error)
    return HeadFeatures((c @ basis)[place], labels, shared, misfit, _estimate_error(c, s, misfit)[place])


def _estimate_error(c: Tensor, s: Tensor, misfit: float) -> Tensor:
    """Return the estimated norm of the error of each row of c V^T, (rows of c,).

    Row i of V^T is assumed to have the error of the gradient divided by the singular value s_i of this row. The error of the
    gradient is estimated from float32 rounding and from `misfit`, the relative distance between the gradient of the features and
    the observed one (see `HeadFeatures`).
    c: coefficients of the features in the rows of V^T. s: singular values of the last layer's gradient, descending.
    """
    noise = (ROUNDING_ERROR + ERROR_PER_MISFIT * misfit) * s.norm() / len(s) ** 0.5
    lengths: Tensor = (c.square() @ (noise / s[: c.shape[1]].clamp(min=1e-300)).square()).sqrt()
    return lengths


def _solve_classes(system: _Equations, classes: Tensor, counts: Tensor, bias_gradient: Tensor | None) -> tuple[Tensor, float]:
    """Solve for C (see the module) with one row per class, by fixed-point iteration, as if the examples of a class were equal.

    Returns C and its misfit. classes, counts: the labels that occur, and how often each does. bias_gradient: for the
    start of the iteration; None for uniform probabilities.
    """
    size, width = int(counts.sum()), len(system.target)
    one_hot = torch.nn.functional.one_hot(classes, width).double()
    start = torch.full((width,), 1 / width, dtype=torch.float64)
    if bias_gradient is not None:
        start = (bias_gradient.double() + counts.double() @ one_hot / size).clamp(min=0)
        start = start / start.sum().clamp(min=1e-12)
    p = start.expand(len(classes), -1)
    c, minimum = torch.zeros(len(classes), system.target.shape[1], dtype=torch.float64), float("inf")
    for _ in range(MAX_ITERATIONS):
        a = counts[:, None] * (p - one_hot) / size
        solution = torch.linalg.lstsq(a.T, system.target, driver="gelsd").solution
        p = system.compute_probabilities(solution)
        left = (counts[:, None] * (p - one_hot) / size).T @ solution - system.target
        misfit = float(left.norm() / system.target.norm().clamp(min=1e-300))
        if misfit < minimum:
            c, gain, minimum = solution, minimum - misfit, misfit
            if gain < 1e-3 * minimum or minimum < 1e-9:
                break
    return c, minimum


def _solve_examples(system: _Equations, labels: Tensor, start: Tensor, shared: Tensor, rng: Generator) -> tuple[Tensor, float]:
    """Solve for C (see the module), one row per example, by Levenberg-Marquardt; return C and its misfit.

    start:  initial C, in which examples with equal labels have equal rows. shared: (B,) bool, marks these rows; random noise is
            added to them, so that they can become different.
    """
    size, width = len(labels), len(system.target)
    one_hot = torch.nn.functional.one_hot(labels, width).double()

    def compute_residual(flat: Tensor) -> Tensor:
        c = flat.reshape(size, -1)
        return (((system.compute_probabilities(c) - one_hot) / size).T @ c - system.target).flatten()

    apart = torch.randn(start.shape, generator=rng, dtype=torch.float64)
    x = (start * (1 + 0.05 * shared[:, None] * apart)).flatten()
    error, damping = compute_residual(x), 1e-3
    length = system.target.norm().clamp(min=1e-300)
    for _ in range(MAX_ITERATIONS):
        jacobian = _compute_jacobian(system, one_hot, x.reshape(size, -1))
        normal, slope = jacobian.T @ jacobian, jacobian.T @ error
        while damping < 1e9:
            damped = normal + torch.diag(damping * normal.diagonal() + 1e-300)
            step = _solve_least_squares(jacobian, error, (damping * normal.diagonal()).sqrt()) if damping < 1e-6 else None
            step = -torch.linalg.solve(damped, slope) if step is None else step
            moved = compute_residual(x + step)
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


def _compute_jacobian(system: _Equations, one_hot: Tensor, c: Tensor) -> Tensor:
    """Return the Jacobian (K D, B D) of A^T C by C, including the dependence of A on C through the probabilities."""
    size, p = len(c), system.compute_probabilities(c)
    slopes = p[:, :, None] * (system.logits[None] - (p @ system.logits)[:, None]) / size
    direct = torch.einsum("ik,de->kdie", (p - one_hot) / size, torch.eye(c.shape[1], dtype=c.dtype))
    return (direct + torch.einsum("ike,id->kdie", slopes, c)).reshape(system.target.numel(), -1)


def _solve_least_squares(jacobian: Tensor, error: Tensor, damping: Tensor) -> Tensor:
    """Return the Gauss-Newton step with the square roots `damping`, without squaring the condition number."""
    right = torch.cat([-error, torch.zeros_like(damping)])[:, None]
    step: Tensor = torch.linalg.lstsq(torch.cat([jacobian, damping.diag()]), right, driver="gelsd").solution[:, 0]
    return step


def _solve_single_logit(gradient: Tensor, bias_gradient: Tensor | None, labels: Tensor) -> HeadFeatures:
    """Return the features for a single logit: their mean weighted by p_i - y_i, scaled to norm 1 without a bias gradient."""
    scale = gradient.norm() if bias_gradient is None else bias_gradient.double().sum()
    row = gradient[0] / scale if float(scale) else gradient[0]
    many = len(labels) > 1
    error = torch.full((len(labels),), float(row.norm()) if many else 0.0, dtype=row.dtype)
    return HeadFeatures(row.expand(len(labels), -1), labels, torch.full((len(labels),), many), 1.0 if many else 0.0, error)


def _count_labels(logits: Tensor, bias_gradient: Tensor) -> Tensor:
    """Return ascending labels (B,) with the counts `B (mean p_c - g_c)`, rounded to the sum B; negative counts become 0.

    If noise makes all counts negative, they become equal. logits: (B, K). bias_gradient: g, (K,).
    """
    counts = (len(logits) * (logits.softmax(dim=1).mean(dim=0) - bias_gradient)).clamp(min=0)
    if not counts.sum() > 0:
        counts = torch.ones_like(counts)
    counts = counts * (len(logits) / counts.sum())
    whole = counts.floor().long()
    whole[(counts - whole).topk(len(logits) - int(whole.sum())).indices] += 1
    return torch.repeat_interleave(torch.arange(len(whole)), whole)

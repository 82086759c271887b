"""Features of the examples of a batch from the gradient behind a wide layer of random weights (Liu et al. 2024, section 4.2).

The network ends with logits A relu(W z), where z are the features of an example, and the rows w_j of W, one per neuron, are
independent and normally distributed with variance 1. The gradient of the weights of logit k is g_j = sum_i a_ik relu(w_j z_i),
with a_ik the derivative of the loss by this logit. By Stein's lemma, the mean over neurons of g_j He_p(w_j), with the Hermite
tensor He_p of order p, tends to c_p sum_i a_ik |z_i|^(1-p) z_i^(tensor power p), with c_p = E[relu(u) He_p(u)] for u normal
(Wang et al. 2023). The relative error falls with the root of neurons per feature.

Order 1 gives the features of an example whose label is unique in the batch, and the mean of the features of examples with equal
labels. Order 2 gives the span of these features. Order 3 separates them inside the span; as c_3 is 0 for ReLU, order 4 with one
index contracted takes its place, and order 3 with one index contracted takes the place of order 2 for activations whose c_2 is 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

MIN_COEFFICIENT = 1e-3
"""Absolute Hermite coefficient c_p below which an activation has no moment of order p."""
SEPARATIONS = 8
"""Number of random pairs of contractions by which a tensor is decomposed; the best is kept."""
MIN_AGREEMENT = 0.9
"""Smallest cosine between directions from both halves of the neurons at which examples with equal labels count as separated."""

Elementwise = Callable[[Tensor], Tensor]


class RecoveredFeatures(NamedTuple):
    """What the gradient tells about the features of the N examples of a batch.

    bases: (N, F, R), orthonormal columns: the direction of an example's features, or a span in which it is, with as many columns
           as the batch has examples of its label. Further columns are zero.
    agreement: (N,) cosine between the first-order estimates from both halves of the neurons: near 1 if noise hardly matters.
    """

    bases: Tensor
    agreement: Tensor


def compute_hermite_coefficient(activation: Elementwise, order: int) -> float:
    """Return c_p = E[activation(u) He_p(u)] for a standard normal u, by quadrature; order: p from 0 to 4."""
    u = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    polynomial = (torch.ones_like(u), u, u**2 - 1, u**3 - 3 * u, u**4 - 6 * u**2 + 3)[order]
    density = (-(u**2) / 2).exp() / (2 * torch.pi) ** 0.5
    return float(torch.trapezoid(activation(u) * polynomial * density, u))


def compute_moment(g: Tensor, v: Tensor, order: int, along: Tensor | None = None) -> Tensor:
    """Return the mean over neurons of g_j He_p(v_j), a symmetric tensor with p axes of length R.

    g: (neurons,). v: (neurons, R). order: p from 1 to 4. along: unit vector (R,) with which the last axis is contracted, so that
    the result has one axis less; it is ignored for order 1, and needed for order 4 (ValueError without it).
    """
    eye, mean = torch.eye(v.shape[1]).to(v), g.mean()
    first: Tensor = g @ v / len(g)
    second: Tensor = torch.einsum("j,ja,jb->ab", g, v, v) / len(g)
    if order == 1:
        return first
    if order == 2:
        moment: Tensor = second - mean * eye
        return moment if along is None else torch.mv(moment, along)
    if order == 3:
        if along is not None:
            h = v @ along
            linear = torch.outer(first, along) + torch.outer(along, first) + (first @ along) * eye
            contracted: Tensor = torch.einsum("j,ja,jb->ab", g * h, v, v) / len(g)
            return contracted - linear
        third: Tensor = torch.einsum("j,ja,jb,jc->abc", g, v, v, v) / len(g)
        return third - _symmetrise(first, eye)
    if along is None:
        raise ValueError("compute_moment needs the argument along, a unit vector, for order=4; got none")
    h = v @ along
    cubic: Tensor = torch.einsum("j,ja,jb,jc->abc", g * h, v, v, v) / len(g)
    quadratic = _symmetrise(along, second) + _symmetrise(second @ along, eye)
    return cubic - quadratic + mean * _symmetrise(along, eye)


def _symmetrise(vector: Tensor, matrix: Tensor) -> Tensor:
    """Return the sum of vector_a matrix_bc over the three ways to choose the index of the vector."""
    outer = torch.einsum("a,bc->abc", vector, matrix)
    return outer + outer.permute(1, 0, 2) + outer.permute(1, 2, 0)


def find_span(g: Tensor, w: Tensor, count: int, *, activation: Elementwise = torch.relu) -> Tensor:
    """Return orthonormal columns (F, count) that span the features of the examples behind one logit's gradient g (neurons,).

    The first column is the direction of the first-order estimate. The others are the leading eigenvectors of the second moment in
    the orthogonal complement of that direction or, if c_2 is 0, of the third moment contracted with that direction.
    w: weights of the wide layer, (neurons, F), of variance 1. count: number of examples.
    """
    first = torch.nn.functional.normalize(compute_moment(g, w, 1), dim=0, eps=1e-300)
    if count == 1:
        return first[:, None]
    even = abs(compute_hermite_coefficient(activation, 2)) > MIN_COEFFICIENT
    moment = compute_moment(g, w, 2) if even else compute_moment(g, w, 3, first)
    beside = torch.eye(len(first)).to(w) - torch.outer(first, first)
    values, vectors = torch.linalg.eigh(beside @ moment @ beside)
    chosen = vectors[:, values.abs().argsort(descending=True)[: count - 1]]
    span: Tensor = torch.linalg.qr(torch.cat([first[:, None], chosen], dim=1))[0]
    return span


def separate_directions(g: Tensor, w: Tensor, span: Tensor, *, rng: Generator, activation: Elementwise = torch.relu) -> Tensor:
    """Return unit vectors (count, F) in a span, up to sign: the directions of the features of single examples.

    g, w: as for `find_span`. span: orthonormal columns (F, count). The third moment in the coordinates of the span, or the fourth
    along its first column, is a sum of one cube per example, which is decomposed by simultaneous diagonalisation (Jennrich).
    """
    v = w @ span
    odd = abs(compute_hermite_coefficient(activation, 3)) > MIN_COEFFICIENT
    # along the mean of the features no example has weight 0
    moment = compute_moment(g, v, 3) if odd else compute_moment(g, v, 4, torch.eye(v.shape[1]).to(v)[0])
    best, least = torch.eye(v.shape[1]).to(v), float("inf")
    for _ in range(SEPARATIONS):
        a, b = (torch.einsum("abc,c->ab", moment, torch.randn(v.shape[1], generator=rng).to(v)) for _ in "ab")
        vectors = torch.linalg.eig(a @ torch.linalg.pinv(b)).eigenvectors.real
        found = (vectors / vectors.norm(dim=0).clamp(min=1e-300)).T
        cubes = torch.einsum("na,nb,nc->nabc", found, found, found).flatten(1)
        misfit = float((cubes.T @ torch.linalg.lstsq(cubes.T, moment.reshape(-1, 1)).solution - moment.reshape(-1, 1)).norm())
        if misfit < least:
            best, least = found, misfit
    directions: Tensor = best @ span.T
    return directions


def recover_features(
    gradient: Tensor, bias_gradient: Tensor | None, labels: Tensor, *, weight: Tensor, rng: Generator
) -> RecoveredFeatures:
    """Return what is known of the features of each example of a batch, from the gradient of the mean cross-entropy.

    gradient: of the last layer's weight, (K, neurons). bias_gradient: of its bias, (K,); None without one. labels: (N,).
    weight: of the wide layer, (neurons, F). rng: of the decomposition, which is used where labels are equal.
    The derivatives a_ik follow from the labels and the mean predicted probabilities of the batch. The probabilities follow from
    the gradient of the bias; without a bias, each is taken to be 1 / K.
    """
    g, w = gradient.double(), weight.double()
    w = w / w.std().clamp(min=1e-300)
    classes, place, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    slopes = _estimate_slopes(bias_gradient, classes, counts, len(g))
    whole, *halves = (
        torch.linalg.lstsq(slopes.T, g[:, rows] @ w[rows] / len(w[rows]), driver="gelsd").solution
        for rows in (slice(None), slice(None, None, 2), slice(1, None, 2))
    )
    agreement = torch.cosine_similarity(halves[0], halves[1], dim=1)
    bases = torch.zeros(len(labels), w.shape[1], int(counts.max()), dtype=torch.float64)
    for i, count in enumerate(counts.tolist()):
        own = (place == i).nonzero()[:, 0]
        if count == 1:
            bases[own[0], :, 0] = whole[i] / whole[i].norm().clamp(min=1e-300)
            continue
        row = -g[classes[i]]  # the derivative by its own logit is negative for each example of the class
        apart = _separate_reliably(row, w, count, rng)
        if apart is None:
            bases[own, :, :count] = find_span(row, w, count)
        else:
            bases[own, :, 0] = apart
    return RecoveredFeatures(bases, agreement[place])


def _estimate_slopes(bias_gradient: Tensor | None, classes: Tensor, counts: Tensor, logits: int) -> Tensor:
    """Return the derivatives of the mean loss by each logit, summed over the examples of each class that occurs, (C, K).

    All examples are taken to have the same predicted probabilities, which follow from the bias gradient and the counts. Entries
    of the bias gradient that are 0 were not sent: the probabilities of these classes are taken to be equal, with the sum that the
    probabilities of the other classes leave of 1. classes: the labels that occur, (C,). counts: their numbers of examples, (C,).
    logits: K.
    """
    one_hot = torch.nn.functional.one_hot(classes, logits).double()
    shares = counts.double()[:, None] / counts.sum()
    p = torch.full((logits,), 1 / logits, dtype=torch.float64)
    if bias_gradient is not None:
        read, unsent = (bias_gradient.double() + (shares * one_hot).sum(dim=0)).clamp(min=0), bias_gradient == 0
        rest = (1 - read[~unsent].sum()).clamp(min=0) / unsent.sum().clamp(min=1)
        read = torch.where(unsent, rest, read)
        p = read / read.sum() if float(read.sum()) > 0 else p
    return shares * (p - one_hot)


def _separate_reliably(g: Tensor, w: Tensor, count: int, rng: Generator) -> Tensor | None:
    """Return the directions of the features of `count` examples with one label, unit vectors (count, F) up to sign.

    None if the two halves of the neurons give different ones. g: gradient of the weights of one logit, (neurons,). w: weights of
    the wide layer, (neurons, F), of variance 1.
    """
    parts = ((g[rows], w[rows]) for rows in (slice(None, None, 2), slice(1, None, 2), slice(None)))
    *halves, whole = (separate_directions(own, v, find_span(own, v, count), rng=rng) for own, v in parts)
    reliable = float((halves[0] @ halves[1].T).abs().max(dim=1).values.min()) >= MIN_AGREEMENT
    return whole if reliable else None

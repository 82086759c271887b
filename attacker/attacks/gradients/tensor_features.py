"""Features of the examples of a batch from the gradient behind a wide layer of random weights (Liu et al. 2024, section 4.2).

The network ends with logits A relu(W z), where z are the features of an example, and the rows w_j of W, one per neuron, are
independent and normally distributed with variance 1. The gradient of the weights of logit k is g_j = sum_i a_ik relu(w_j z_i),
with a_ik the derivative of the loss by this logit. By Stein's lemma, the mean over neurons of g_j He_p(w_j), with the Hermite
tensor He_p of order p, tends to c_p sum_i a_ik |z_i|^(1-p) z_i^(tensor power p), with c_p = E[relu(u) He_p(u)] for u normal
(Wang et al. 2023). The relative error falls with the root of neurons per feature.

Order 1 gives the features of an example whose label is unique in the batch, and the mean of the features of examples with equal
labels. Order 2 gives the span of these features. Order 3 would separate them inside the span; as c_3 is 0 for ReLU, order 4 with
one index contracted takes its place.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

SEPARATIONS = 8
"""Number of random pairs of contractions by which a tensor is decomposed; the best is kept."""
MIN_AGREEMENT = 0.9
"""Smallest cosine between directions from both halves of the neurons at which examples with equal labels count as separated."""


class RecoveredFeatures(NamedTuple):
    """What the gradient tells about the features of the N examples of a batch.

    bases: (N, F, R), orthonormal columns: the direction of an example's features, or a span in which it is, with as many columns
           as the batch has examples of its label. Further columns are zero.
    agreement: (N,) cosine between the first-order estimates from both halves of the neurons: near 1 if noise hardly matters.
    """

    bases: Tensor
    agreement: Tensor


def compute_first_moment(g: Tensor, v: Tensor) -> Tensor:
    """Return the mean over neurons of g_j He_1(v_j) = g_j v_j, (R,). g: (neurons,). v: (neurons, R)."""
    moment: Tensor = g @ v / len(g)
    return moment


def compute_second_moment(g: Tensor, v: Tensor) -> Tensor:
    """Return the mean over neurons of g_j He_2(v_j), a symmetric matrix (R, R). Arguments as in `compute_first_moment`."""
    moment: Tensor = torch.einsum("j,ja,jb->ab", g, v, v) / len(g)
    return moment - g.mean() * torch.eye(v.shape[1]).to(v)


def compute_fourth_moment(g: Tensor, v: Tensor, along: Tensor) -> Tensor:
    """Return the mean over neurons of g_j He_4(v_j), contracted with a unit vector `along` (R,): a symmetric tensor (R, R, R).

    Other arguments as in `compute_first_moment`.
    """
    eye, h = torch.eye(v.shape[1]).to(v), v @ along
    second: Tensor = torch.einsum("j,ja,jb->ab", g, v, v) / len(g)
    cubic: Tensor = torch.einsum("j,ja,jb,jc->abc", g * h, v, v, v) / len(g)
    quadratic = _symmetrise(along, second) + _symmetrise(second @ along, eye)
    return cubic - quadratic + g.mean() * _symmetrise(along, eye)


def _symmetrise(vector: Tensor, matrix: Tensor) -> Tensor:
    """Return the sum of vector_a matrix_bc over the three ways to choose the index of the vector."""
    outer = torch.einsum("a,bc->abc", vector, matrix)
    return outer + outer.permute(1, 0, 2) + outer.permute(1, 2, 0)


def find_span(g: Tensor, w: Tensor, count: int) -> Tensor:
    """Return orthonormal columns (F, count) that span the features of the examples behind one logit's gradient g (neurons,).

    The first column is the direction of the first-order estimate. The others are the leading eigenvectors of the second moment in
    the orthogonal complement of that direction.
    w: weights of the wide layer, (neurons, F), of variance 1. count: number of examples.
    """
    first = torch.nn.functional.normalize(compute_first_moment(g, w), dim=0, eps=1e-300)
    if count == 1:
        return first[:, None]
    beside = torch.eye(len(first)).to(w) - torch.outer(first, first)
    values, vectors = torch.linalg.eigh(beside @ compute_second_moment(g, w) @ beside)
    chosen = vectors[:, values.abs().argsort(descending=True)[: count - 1]]
    span: Tensor = torch.linalg.qr(torch.cat([first[:, None], chosen], dim=1))[0]
    return span


def separate_directions(g: Tensor, w: Tensor, span: Tensor, *, rng: Generator) -> Tensor:
    """Return unit vectors (count, F) in a span, up to sign: the directions of the features of single examples.

    g, w: as for `find_span`. span: orthonormal columns (F, count). The fourth moment in the coordinates of the span, along its
    first column, is a sum of one cube per example, which is decomposed by simultaneous diagonalisation (Jennrich).
    """
    v = w @ span
    moment = compute_fourth_moment(g, v, torch.eye(v.shape[1]).to(v)[0])  # along the mean of the features no example has weight 0
    best, minimum = torch.eye(v.shape[1]).to(v), float("inf")
    for _ in range(SEPARATIONS):
        a, b = (torch.einsum("abc,c->ab", moment, torch.randn(v.shape[1], generator=rng).to(v)) for _ in "ab")
        vectors = torch.linalg.eig(a @ torch.linalg.pinv(b)).eigenvectors.real
        units = (vectors / vectors.norm(dim=0).clamp(min=1e-300)).T
        cubes = torch.einsum("na,nb,nc->nabc", units, units, units).flatten(1)
        misfit = float((cubes.T @ torch.linalg.lstsq(cubes.T, moment.reshape(-1, 1)).solution - moment.reshape(-1, 1)).norm())
        if misfit < minimum:
            best, minimum = units, misfit
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
        members = (place == i).nonzero()[:, 0]
        if count == 1:
            bases[members[0], :, 0] = whole[i] / whole[i].norm().clamp(min=1e-300)
            continue
        row = -g[classes[i]]  # the derivative by its own logit is negative for each example of the class
        apart = _separate_reliably(row, w, count, rng)
        if apart is None:
            bases[members, :, :count] = find_span(row, w, count)
        else:
            bases[members, :, 0] = apart
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
    *halves, whole = (separate_directions(part, v, find_span(part, v, count), rng=rng) for part, v in parts)
    reliable = float((halves[0] @ halves[1].T).abs().max(dim=1).values.min()) >= MIN_AGREEMENT
    return whole if reliable else None

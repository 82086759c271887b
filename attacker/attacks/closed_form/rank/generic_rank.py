"""The generic rank of each layer's equations, by elimination modulo a prime.

Weights, activation slopes and output gradient are random integers. The gradients k = dL/dz of a layer are propagated back through
the later layers whose rank is computed as well: from a random gradient at the nearest later layer whose rank is not computed (a
linear layer, or one that is too large), or else from the network's output. Dependencies between these layers therefore count,
such as those of two convolutions without an activation between them, or of values that a later layer does not use; dependencies
through other layers do not.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.rank.elimination import compute_rank, draw, find_null_space, multiply, reduce_modulo
from attacker.attacks.closed_form.rank.equation_counts import compute_pooled_rank, count_dead_values, group_taps
from attacker.attacks.closed_form.rgap.footprint import LayerFootprint, build_pooling_matrix
from attacker.attacks.networks.activations import IDENTITY, RELU, Activation
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer

MAX_MATRIX_ENTRIES = 25_000_000
"""Largest number of entries of the matrices that are created or eliminated (200 MB)."""


def compute_generic_ranks(
    chain: Chain, footprints: list[LayerFootprint], live: list[Tensor], open_ones: list[int], *, dead: float, columns: int
) -> list[int | None]:
    """Return the generic rank of each layer's equations, or None for a layer for which it is not computed.

    It is not computed for linear layers, which need no elimination, for layers that are too large, and for layers whose input
    after pooling cannot have arbitrary values.
    live:      for each layer, mask of the output values of one channel that later layers depend on.
    open_ones: for each layer, number of unknowns that its gradient constraints leave undetermined, by count.
    columns:   a layer with more than this number of such unknowns is too large; so is a layer with too large matrices.
    dead:      assumed share of outputs that are 0 after a ReLU.
    """
    rng = torch.Generator().manual_seed(0)
    ranks: list[int | None] = []
    below: Tensor | None = None
    layers = [*zip(chain.layers, footprints, live, open_ones, strict=True)]
    for layer, shape, mask, open_count in reversed(layers):
        if (
            layer.kernel is None
            or open_count > columns
            or _estimate_largest_matrix(shape) > MAX_MATRIX_ENTRIES
            or (shape.before is not None and compute_pooled_rank(shape.before) < shape.values)
        ):
            ranks.append(None)
            below = _draw_pooled_gradient(layer, rng)
            continue
        gradient = draw(shape.filters, len(mask), rng=rng) if below is None else below.reshape(shape.filters, -1)
        slope = _draw_slopes(layer.activation, mask.expand_as(gradient), dead, rng)
        output_gradient = reduce_modulo(gradient * slope)
        known = (slope != 0) & mask
        k = output_gradient if shape.after is None else multiply(output_gradient, shape.after.double())
        weight = draw(shape.filters, shape.channels, len(shape.sees), rng=rng)
        ranks.append(_compute_rank(shape, weight, k, known, mask, columns, rng))
        below = _backpropagate(shape, weight, k)
    return ranks[::-1]


def _draw_pooled_gradient(layer: Layer, rng: torch.Generator) -> Tensor | None:
    """Draw a random gradient modulo PRIME at a layer's input before its pooling, (channels, values); None without pooling."""
    pool = build_pooling_matrix(layer.before, layer.inputs, f"before layer {layer.name}")
    return None if pool is None else multiply(draw(layer.inputs[0], len(pool), rng=rng), pool.double())


def _estimate_largest_matrix(shape: LayerFootprint) -> int:
    """Estimate the number of entries of the largest matrix that is created before the elimination."""
    taps, places = shape.sees.shape
    return max(shape.channels * taps * max(places, shape.filters), taps * places * 128, shape.filters * taps * shape.values)


def _draw_slopes(activation: Activation, live: Tensor, dead: float, rng: torch.Generator) -> Tensor:
    """Draw derivatives of an activation for the elimination, integers in [0, PRIME).

    They have the shape of the mask `live`, and are 0 where it is false. Elsewhere they are 1 without an activation, either 1 or
    one random number for a leaky ReLU, whatever its slope is, independent random numbers for a smooth activation, and 1 for a
    ReLU but 0 for the share `dead` of the live values of each channel.
    live: mask (filters, values), with equal rows.
    """
    if activation is RELU:
        order = torch.rand(live.shape, generator=rng).masked_fill(~live, 2).argsort(dim=1).argsort(dim=1)
        return (live & (order >= count_dead_values(dead, live[0]))).double()
    if activation is IDENTITY:
        return live.double()
    if activation.smooth:
        return draw(*live.shape, rng=rng) * live
    low = float(draw(1, rng=rng))
    return torch.where(torch.rand(live.shape, generator=rng) < 0.5, low, 1.0).double() * live


def _compute_rank(
    shape: LayerFootprint, weight: Tensor, k: Tensor, known: Tensor, live: Tensor, columns: int, rng: torch.Generator
) -> int | None:
    """Return the rank modulo PRIME of a layer's equations for its input after pooling; None if elimination would be too large.

    The gradient constraints are eliminated first, for each input channel separately. Then the weight constraints are applied to
    the unknowns that the gradient constraints leave undetermined. Weights and gradients are integers in [0, PRIME).
    weight:  (filters, channels, taps).
    k:       loss gradient at the output of the convolution, before pooling, (filters, places).
    known:   mask (filters, output values) of weight constraints with a known right-hand side.
    live:    mask (output values,) of the output values that later layers depend on.
    columns: largest number of undetermined unknowns, in all input channels together, that is not too large.
    """
    used = replace(shape, before=None).find_used_values(live)
    null_space = _find_null_space(shape, k, live, used)
    unknowns, open_ones = shape.channels * int(used.sum()), shape.channels * null_space.shape[1]
    if open_ones > columns:
        return None
    if not open_ones:
        return unknowns
    sample = _sample(known, open_ones + open_ones // 4 + 64, rng)
    for chosen in (sample, known):
        if int(chosen.sum()) * open_ones > MAX_MATRIX_ENTRIES:
            return None
        rank = compute_rank(_build_weight_rows(shape, weight, null_space, chosen))
        if rank == open_ones:
            break
    return unknowns - open_ones + rank


def _find_null_space(shape: LayerFootprint, k: Tensor, live: Tensor, used: Tensor) -> Tensor:
    """Return a basis (n, dimensions) of the null space modulo PRIME of the gradient constraints on one input channel of n values.

    k: loss gradient at the output of the convolution, before pooling, (filters, places). live: mask (output values,) of the
    output values of one channel that later layers depend on. used: mask (n,) of the input values that these output values depend
    on; the basis is 0 at all other input values.
    """
    places, pieces, unmet = shape.find_live_places(live), [], used.clone()
    for group in group_taps(shape, live):
        rows = torch.zeros(shape.filters, len(group.taps), shape.values + 1, dtype=k.dtype)
        where = torch.where(places, shape.sees[group.taps], -1) % (shape.values + 1)
        rows.scatter_(2, where.expand(shape.filters, -1, -1), k[:, None].expand(-1, len(group.taps), -1))
        free = find_null_space(rows.flatten(0, 1)[:, group.values])
        piece = torch.zeros(shape.values, free.shape[1], dtype=k.dtype)
        piece[group.values] = free
        pieces.append(piece)
        unmet[group.values] = False
    alone = torch.zeros(shape.values, int(unmet.sum()), dtype=k.dtype)
    alone[unmet] = torch.eye(alone.shape[1], dtype=k.dtype)
    return torch.cat([*pieces, alone], dim=1)


def _sample(known: Tensor, rows: int, rng: torch.Generator) -> Tensor:
    """Return a mask that selects `rows` of the constraints in the mask `known` at random, or all if there are fewer."""
    order = torch.rand(known.shape, generator=rng).masked_fill(~known, 2).flatten().argsort()[:rows]
    return torch.zeros_like(known).flatten().index_fill(0, order, True).reshape(known.shape) & known


def _build_weight_rows(shape: LayerFootprint, weight: Tensor, null_space: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen weight constraints W x = z - b as a matrix (constraints, channels * dimensions), for x in a basis.

    null_space: basis (n, dimensions) of what the gradient constraints leave open in each channel. chosen: mask (filters, output
          values).
    """
    padded = torch.cat([null_space, torch.zeros(1, null_space.shape[1], dtype=null_space.dtype)])
    which = chosen.any(dim=0)
    blocks = []
    for channel in range(shape.channels):
        rows = []
        for start in range(0, null_space.shape[1], 128):
            seen = padded[:, start : start + 128][shape.sees]  # (taps, places, some dimensions)
            if shape.after is None:
                seen = seen[:, which]
            constraints = multiply(weight[:, channel], seen.flatten(1)).reshape(shape.filters, seen.shape[1], -1)
            if shape.after is not None:
                constraints = multiply(shape.after[which].double(), constraints)
            rows.append(constraints[chosen[:, which]])
        blocks.append(torch.cat(rows, dim=1))
    return torch.cat(blocks, dim=1)


def _backpropagate(shape: LayerFootprint, weight: Tensor, k: Tensor) -> Tensor:
    """Return the gradient at the layer's input modulo PRIME, (channels, values), by the transposes of convolution and pooling."""
    columns = multiply(weight.flatten(1).T, k).reshape(shape.channels, *shape.sees.shape)
    taken = torch.zeros(shape.channels, shape.values + 1, dtype=k.dtype)
    taken.scatter_add_(1, (shape.sees % (shape.values + 1)).flatten().expand(shape.channels, -1), columns.flatten(1))
    taken = reduce_modulo(taken[:, :-1])
    return taken if shape.before is None else multiply(taken, shape.before.double())

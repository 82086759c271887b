"""Rank analysis: whether the gradient of one example determines a network's input, computed from the architecture alone.

It computes the index of R-GAP (Zhu and Blaschko 2021, section 4), and the number of independent equations of each layer, which
the index only estimates. The analysis assumes that the gradient comes from one example, and that weights and data are generic,
without special relations between their values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attacker.attacks.closed_form.rank.equation_counts import (
    EquationCount,
    compute_pooled_rank,
    count_dead_values,
    count_equations,
)
from attacker.attacks.closed_form.rank.generic_rank import compute_generic_ranks
from attacker.attacks.closed_form.rgap.footprint import LayerFootprint, build_footprint, build_pooling_matrix, find_used_values
from attacker.attacks.networks.activations import IDENTITY, RELU
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer
from attacker.attacks.networks.traced import are_reshapes

MAX_PROVED_UNKNOWNS = 3000
"""Largest number of unknowns, after the gradient constraints are used, for which `attacker rank` proves the rank of a layer by
elimination, which takes seconds per layer."""


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """The analysis of one layer. All fields but `name`, `proved` and `counted` are numbers of values or of equations.

    unknowns:  |x|, values of the layer's input.
    gradients: |W|, gradient constraints K x = dL/dW, one per weight.
    weights:   |z|, weight constraints W x = z - b, one per output.
    virtual:   |V|, the paper's estimate of further constraints from earlier layers.
    index:     |x| - |W| - |z| - |V|; above 0, the paper expects too few equations.
    used:      unknowns that the network's output depends on.
    known:     weight constraints of outputs that later layers use and that are assumed not to be the zeros of a ReLU, for which z
               is unknown.
    rank:      independent equations, of both kinds together; see `proved`.
    alone:     upper bound on the rank of the gradient constraints alone.
    missing:   used - rank, a property.
    proved:    whether `rank` holds for all generic data: computed by elimination, or the rank of a linear layer. If false, `rank`
               was counted and may be too high, or it depends on the data: on the zeros of a ReLU, or on the signs before a leaky
               ReLU that is pooled.
    counted:   whether `rank` was found by counting, so that it is an upper bound.
    near:      independent equations for the layer's input from this and all later layers together, for inputs close to the true
               one, where the equations are linear. Counted, so that it may be off by a few.
    """

    name: str
    unknowns: int
    gradients: int
    weights: int
    virtual: int
    index: int
    used: int
    known: int
    rank: int
    alone: int
    proved: bool
    counted: bool
    near: int

    @property
    def missing(self) -> int:
        return self.used - self.rank

    @property
    def dependent(self) -> int:
        """Number of redundant equations, which follow from the others: gradients + known - rank."""
        return self.gradients + self.known - self.rank


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The result of a rank analysis.

    layers:   the layers from first to last.
    dead:     assumed share of outputs that are 0 after a ReLU; None if it affects no rank.
    readable: whether the last layer is linear, where R-GAP can start; it cannot start at a convolution.
    """

    layers: tuple[LayerRank, ...]
    dead: float | None
    readable: bool

    @property
    def index(self) -> int:
        """R-GAP's index of the network: the largest `LayerRank.index` of its layers, unknowns minus counted equations.

        Above 0, the paper expects that the gradient does not determine the input.
        """
        return max(layer.index for layer in self.layers)

    @property
    def critical(self) -> int:
        """Index of the critical layer: the one with the largest `missing`, and among equals with the largest `index`."""
        return max(range(len(self.layers)), key=lambda i: (self.layers[i].missing, self.layers[i].index))

    @property
    def deficient_layers(self) -> tuple[int, ...]:
        """Indices of the layers with fewer independent equations than used unknowns (`missing` > 0), in ascending order."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.missing > 0)

    @property
    def unused(self) -> int:
        """Number of values of the network's input that its output does not depend on."""
        return self.layers[0].unknowns - self.layers[0].used

    @property
    def full(self) -> bool:
        """Whether R-GAP, which solves for the input of each layer in turn, has enough equations to compute the whole input.

        That is so if the last layer is linear, every layer has enough equations of its own, and every input value is used.
        """
        return self.readable and not self.deficient_layers and not self.unused

    @property
    def locally_unique(self) -> bool:
        """Whether no other input near the true one has the same gradient.

        This is by count: all layers together have at least as many independent equations as the input has values.
        """
        return self.layers[0].near >= self.layers[0].unknowns

    @property
    def undetermined(self) -> int:
        """Number of directions in which the true input can change without changing the gradient, to first order.

        This is by count, and may be off by a few.
        """
        return max(0, self.layers[0].unknowns - self.layers[0].near)


def analyse_rank(chain: Chain, *, dead: float = 0.5, prove: int = 300) -> RankReport:
    """Analyse how many values of each layer's input the gradient of one example determines.

    dead:  assumed share of outputs, in [0, 1), that are 0 after a ReLU and give no weight constraint.
    prove: the rank of a convolution is computed by elimination, where that is possible, if its gradient constraints leave at most
           this number of unknowns open. Otherwise it is counted, which never gives too low a number. 0 counts all ranks.

    Raises NotAChain if the network pools in a way that cannot be analysed, and ValueError for `dead` out of range.
    """
    if not 0 <= dead < 1:
        raise ValueError(f"dead must be the assumed share of zeros after a ReLU, at least 0 and below 1, got {dead}")
    footprints = [build_footprint(layer) for layer in chain.layers]
    live = _find_live_values(chain, footprints)
    shares = [dead if layer.activation is RELU else 0.0 for layer in chain.layers]
    counts = [
        _count_linear(layer) if layer.kernel is None else count_equations(shape, mask, share)
        for layer, shape, mask, share in zip(chain.layers, footprints, live, shares, strict=True)
    ]
    open_unknowns = [count.unknowns - count.gradients for count in counts]
    generic_ranks = (
        compute_generic_ranks(chain, footprints, live, open_unknowns, dead=dead, columns=prove) if prove else [None] * len(counts)
    )
    virtual = count_virtual_constraints(chain)
    ranks = [
        count.rank if generic is None else min(count.rank, generic) for count, generic in zip(counts, generic_ranks, strict=True)
    ]
    near = _count_locally_independent(chain, counts, ranks)
    layers = tuple(
        LayerRank(
            name=layer.name,
            unknowns=prod(layer.inputs),
            gradients=prod(layer.shape),
            weights=prod(layer.outputs),
            virtual=virtual[i],
            index=prod(layer.inputs) - prod(layer.shape) - prod(layer.outputs) - virtual[i],
            used=counts[i].unknowns,
            known=_count_known(layer, live[i], shares[i]),
            rank=ranks[i],
            alone=min(counts[i].gradients, ranks[i]),
            proved=layer.kernel is None or (generic_ranks[i] is not None and not _depends_on_data(chain, i, dead)),
            counted=layer.kernel is not None and generic_ranks[i] is None,
            near=near[i],
        )
        for i, layer in enumerate(chain.layers)
    )
    depends = any(share and layer.kernel is not None for share, layer in zip(shares, chain.layers, strict=True))
    return RankReport(layers=layers, dead=dead if depends else None, readable=chain.layers[-1].kernel is None)


def count_virtual_constraints(chain: Chain) -> list[int]:
    """Return |V| for each layer i, the estimate in R-GAP of equations for its input that follow from the layers before it.

    With |x_n| inputs, |z_n| outputs and |W_n| weights of layer n, it is the surplus of outputs over inputs in the layers n < i,
    minus the equations that those layers lack: sum over n < i of max(|z_n| - |x_n|, 0) - max(|x_n| - |z_n| - |W_n|, 0).
    The paper prints |x_n| - |z_n| in the first term, which contradicts its equations 17 to 20 and table 2, and |x_n| - |x_n| in
    the second.
    """
    totals = [0]
    for layer in chain.layers[:-1]:
        x, z, w = prod(layer.inputs), prod(layer.outputs), prod(layer.shape)
        totals.append(totals[-1] + max(z - x, 0) - max(x - z - w, 0))
    return totals


def _find_live_values(chain: Chain, footprints: Sequence[LayerFootprint]) -> list[Tensor]:
    """Return for each layer a mask of the output values of one channel that later layers depend on, in any channel.

    The outputs of a linear layer count as channels of one value.
    """
    masks: list[Tensor] = []
    for layer, shape, used in zip(chain.layers, footprints, [*find_used_values(chain)[1:], None], strict=True):
        places = 1 if layer.kernel is None else len(shape.sees[0]) if shape.after is None else len(shape.after)
        if used is None or layer.kernel is None:
            masks.append(torch.ones(places, dtype=torch.bool))
        else:
            masks.append(used.reshape(shape.filters, places).any(dim=0))
    return masks


def _depends_on_data(chain: Chain, at: int, dead: float) -> bool:
    """Return whether the rank of convolution `at` depends on the data: by zeros of a ReLU, or slopes before pooling."""
    activation = chain.layers[at].activation
    pooled = at + 1 < len(chain.layers) and not are_reshapes(chain.layers[at + 1].before)
    return not activation.smooth and bool(dead if activation is RELU else pooled)


def _count_linear(layer: Layer) -> EquationCount:
    """Count the equations of a linear layer.

    The gradient constraints k x^T = dL/dW alone determine x, the layer's input after any pooling that precedes the weights. The
    number of independent ones is the number of values of x or, with pooling, the channels times the rank of the pooling matrix.
    """
    pool = build_pooling_matrix(layer.before, layer.inputs, f"before layer {layer.name}")
    if pool is None:
        unknowns = rank = prod(layer.inputs)
    else:
        unknowns, rank = layer.inputs[0] * int(pool.any(dim=0).sum()), layer.inputs[0] * compute_pooled_rank(pool)
    weights = min(layer.shape[0], rank)
    return EquationCount(unknowns, rank, weights, weights, rank)


def _count_known(layer: Layer, live: Tensor, dead: float) -> int:
    if layer.kernel is None:
        return layer.shape[0] - int(dead * layer.shape[0])
    return layer.shape[0] * (int(live.sum()) - count_dead_values(dead, live))


def _count_locally_independent(chain: Chain, counts: Sequence[EquationCount], ranks: Sequence[int]) -> list[int]:
    """Return the number of independent equations for each layer's input from it and all later layers, to first order.

    As long as the later layers are fully determined, this number is the layer's rank. Otherwise the equations for the next
    layer's input are passed back through the layer's weights and added to its gradient constraints. This count may be off by a
    few equations.
    """
    near, behind, complete = [], 0, True
    for layer, count, rank in zip(reversed(chain.layers), reversed(counts), reversed(ranks), strict=True):
        if not complete:
            passed = min(count.weights, behind)
            both = max(_count_shared(layer, count), count.shared - (count.weights - passed))
            rank = min(rank, count.gradients + max(0, passed - both))
        near.append(rank)
        behind, complete = rank, complete and rank >= count.unknowns
    return near[::-1]


def _count_shared(layer: Layer, count: EquationCount) -> int:
    """Return how many of the relations `count.shared` between weight and gradient constraints hold even if z is not known.

    They hold where the next layer's gradient determines the product <k_a, z_b> of the output channels a and b, with k_a =
    dL/dz_a. It determines all products if the layer has no activation, those with a = b if the activation is linear on both sides
    of 0, and none otherwise.
    count: the counted equations of the layer.
    """
    if layer.activation is IDENTITY:
        return count.shared
    return 0 if layer.activation.smooth else min(count.shared, layer.shape[0])

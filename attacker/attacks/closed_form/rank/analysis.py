"""Rank analysis: whether a network's gradient determines its input, from the shapes of its layers alone.

It computes the index of R-GAP (Zhu and Blaschko 2021, section 4), and the number of independent equations of each layer, which
the index only estimates. It assumes one example behind the gradient, and generic weights and data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attacker.attacks.closed_form.rank.counting import Count, count, dead_values, pooled_rank
from attacker.attacks.closed_form.rank.generic import generic_ranks
from attacker.attacks.closed_form.rgap.footprint import LayerFootprint, footprint, pooling, used_values
from attacker.attacks.networks.activations import IDENTITY, RELU
from attacker.attacks.networks.chain import Chain, Layer, only_reshapes

PROVED = 3000
"""Largest number of open unknowns for which `attacker rank` proves ranks by elimination, in seconds per layer."""


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """One layer. Numbers of values or equations.

    unknowns:  |x|, the layer's input. gradients: |W|, gradient constraints. weights: |z|, weight constraints.
    virtual:   |V|, as the paper estimates what the layers before must obey. index: |x| - |W| - |z| - |V|, above 0 where too few.
    used:      of the unknowns, those that anything depends on.
    known:     of the weight constraints, those whose right-hand side the walk knows: not behind a ReLU's zeros.
    rank:      independent equations. alone: independent gradient constraints among them, at most. missing: used - rank.
    proved:    the rank was found by elimination, or is that of a matrix; else it is counted, and may be lower, or depends on the
               data: on which values a ReLU leaves at 0, or, where a leaky one is pooled, on which sides of 0 they lie.
    near:      independent equations on the layer's input, near the true one, of this and all later layers together.
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
    near: int

    @property
    def missing(self) -> int:
        return self.used - self.rank

    @property
    def dependent(self) -> int:
        """Equations that say nothing new."""
        return self.gradients + self.known - self.rank


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Result of the analysis.

    layers:   first to last. dead: assumed share of zeros after a ReLU; None if no rank depends on it.
    readable: whether the last layer is a matrix, whose gradient determines its input; that of a convolution does not.
    """

    layers: tuple[LayerRank, ...]
    dead: float | None
    readable: bool

    @property
    def index(self) -> int:
        """The paper's index of a network, the largest of its layers'."""
        return max(layer.index for layer in self.layers)

    @property
    def critical(self) -> int:
        """The layer that decides: the one that lacks most, or where none lacks any, the one of the largest index."""
        return max(range(len(self.layers)), key=lambda i: (self.layers[i].missing, self.layers[i].index))

    @property
    def deficient_layers(self) -> tuple[int, ...]:
        """Layers with fewer independent equations than unknowns, first to last."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.missing > 0)

    @property
    def unused(self) -> int:
        """Values of the network's input that nothing depends on."""
        return self.layers[0].unknowns - self.layers[0].used

    @property
    def full(self) -> bool:
        """Whether the walk gives the input, each layer determined by its own equations."""
        return self.readable and not self.deficient_layers and not self.unused

    @property
    def locally_unique(self) -> bool:
        """Whether all equations together determine the input among those near it."""
        return self.layers[0].near >= self.layers[0].unknowns

    @property
    def undetermined(self) -> int:
        """Directions in which the input may change, near the true one, without any change of the gradient."""
        return max(0, self.layers[0].unknowns - self.layers[0].near)


def rank_report(chain: Chain, *, dead: float = 0.5, prove: int = 300) -> RankReport:
    """Analyse how far the gradient of one example determines the input of each layer.

    dead:  assumed share of outputs, in [0, 1), that are 0 after a ReLU and give no weight constraint.
    prove: largest number of open unknowns for which the rank is proved by elimination instead of counted.

    A counted rank is never too low. Raises NotAChain if pooling cannot be analysed, and ValueError for `dead` out of range.
    """
    if not 0 <= dead < 1:
        raise ValueError(f"dead must be a share of 0 or more and below 1, got {dead}")
    footprints = [footprint(layer) for layer in chain.layers]
    live = _live(chain, footprints)
    shares = [dead if layer.activation is RELU else 0.0 for layer in chain.layers]
    counts = [
        _matrix(layer) if layer.kernel is None else count(shape, mask, share)
        for layer, shape, mask, share in zip(chain.layers, footprints, live, shares, strict=True)
    ]
    left = [one.unknowns - one.gradients for one in counts]
    found = generic_ranks(chain, footprints, live, left, dead=dead, columns=prove) if prove else [None] * len(counts)
    virtual = virtual_constraints(chain)
    ranks = [one.rank if better is None else min(one.rank, better) for one, better in zip(counts, found, strict=True)]
    near = _near(chain, counts, ranks)
    layers = tuple(
        LayerRank(
            name=layer.name,
            unknowns=prod(layer.inputs),
            gradients=prod(layer.shape),
            weights=prod(layer.outputs),
            virtual=virtual[i],
            index=prod(layer.inputs) - prod(layer.shape) - prod(layer.outputs) - virtual[i],
            used=counts[i].unknowns,
            known=_known(layer, live[i], shares[i]),
            rank=ranks[i],
            alone=min(counts[i].gradients, ranks[i]),
            proved=layer.kernel is None or (found[i] is not None and not _by_data(chain, i, dead)),
            near=near[i],
        )
        for i, layer in enumerate(chain.layers)
    )
    depends = any(share and layer.kernel is not None for share, layer in zip(shares, chain.layers, strict=True))
    return RankReport(layers=layers, dead=dead if depends else None, readable=chain.layers[-1].kernel is None)


def virtual_constraints(chain: Chain) -> list[int]:
    """|V| for each layer: the surplus of weight constraints in the layers before, less what those lack themselves.

    sum over n < i of max(|z_n| - |x_n|, 0) - max(|x_n| - |z_n| - |W_n|, 0). The paper prints |x_n| - |z_n| in the first term,
    against its own equations 17 to 20 and table 2, and |x_n| - |x_n| in the second.
    """
    totals = [0]
    for layer in chain.layers[:-1]:
        x, z, w = prod(layer.inputs), prod(layer.outputs), prod(layer.shape)
        totals.append(totals[-1] + max(z - x, 0) - max(x - z - w, 0))
    return totals


def _live(chain: Chain, footprints: Sequence[LayerFootprint]) -> list[Tensor]:
    """For each layer, which of the values that one channel gives anything depends on."""
    masks: list[Tensor] = []
    for layer, shape, used in zip(chain.layers, footprints, [*used_values(chain)[1:], None], strict=True):
        places = 1 if layer.kernel is None else len(shape.sees[0]) if shape.after is None else len(shape.after)
        if used is None or layer.kernel is None:
            masks.append(torch.ones(places, dtype=torch.bool))
        else:
            masks.append(used.reshape(shape.filters, places).any(dim=0))
    return masks


def _by_data(chain: Chain, at: int, dead: float) -> bool:
    """Whether the rank of a layer depends on signs: where a ReLU is 0, or a leaky ReLU is on within one window of pooling."""
    activation = chain.layers[at].activation
    pooled = at + 1 < len(chain.layers) and not only_reshapes(chain.layers[at + 1].before)
    return not activation.smooth and bool(dead if activation is RELU else pooled)


def _matrix(layer: Layer) -> Count:
    """Its gradient constraints k x^T = dL/dW alone determine all that it takes."""
    unknowns = prod(layer.inputs)
    pool = pooling(layer.before, layer.inputs, layer.name)
    rank = prod(layer.taken) if pool is None else layer.inputs[0] * pooled_rank(pool)
    weights = min(layer.shape[0], rank)
    return Count(unknowns, rank, weights, weights, rank)


def _known(layer: Layer, live: Tensor, dead: float) -> int:
    if layer.kernel is None:
        return layer.shape[0] - int(dead * layer.shape[0])
    return layer.shape[0] * (int(live.sum()) - dead_values(dead, live))


def _near(chain: Chain, counts: Sequence[Count], ranks: Sequence[int]) -> list[int]:
    """Equations on each layer's input from the last layer up to it, to first order.

    Where all is known behind a layer, its rank; else what is known there passes through its weights, and joins its gradient
    constraints. Then it is a count, and may be off by a few equations either way.
    """
    near, behind, complete = [], 0, True
    for layer, one, rank in zip(reversed(chain.layers), reversed(counts), reversed(ranks), strict=True):
        if not complete:
            passed = min(one.weights, behind)
            both = max(_shared_still(layer, one), one.shared - (one.weights - passed))
            rank = min(rank, one.gradients + max(0, passed - both))
        near.append(rank)
        behind, complete = rank, complete and rank >= one.unknowns
    return near[::-1]


def _shared_still(layer: Layer, one: Count) -> int:
    """Relations of weight and gradient constraints that hold where little is known of z: the next gradient gives <k_a, z_b>.

    All of them without an activation; of one that is linear on both sides of 0, those of a = b.
    """
    if layer.activation is IDENTITY:
        return one.shared
    return 0 if layer.activation.smooth else min(one.shared, layer.shape[0])

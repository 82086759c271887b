"""Number of independent equations for a layer's input, counted from the layer's shape.

Terms: a tap is one position inside the kernel, a place is one position of the kernel on the image. There are three reasons for
linear dependence between equations, which R-GAP does not count.

* The taps fall into groups that see disjoint sets of values, such as the parity classes of a stride of 2. A group has at most as
  many independent gradient constraints as values.
* A place has at most as many independent weight constraints as values under the kernel.
* With Z = W U and G = k U^T for the patches U of one x, all output channels a and b fulfil <k_a, z_b> = <w_b, g_a>. These are
  rank(k) rank(W) relations between both kinds of equations, usually C_out^2.

The count is an upper bound of the generic rank, the rank for random weights and data. The generic rank may be slightly lower if
the image is small compared with the kernel, or if padding makes many equations depend on single values; the module `generic`
computes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.footprint import LayerFootprint


@dataclass(frozen=True)
class Group:
    """A group of taps (positions inside the kernel) whose sets of input values overlap, directly or through other taps of it.

    The taps of a group need not see the same values. Taps of different groups see none in common.
    taps:   indices of the taps.
    values: indices of the values of an input channel that at least one of the taps sees.
    rows:   upper bound on the independent gradient constraints for one input channel. The number of values is a second upper
            bound, and `rows` may exceed it.
    """

    taps: Tensor
    values: Tensor
    rows: int

    @property
    def full(self) -> bool:
        return self.rows >= len(self.values)


@dataclass(frozen=True)
class EquationCount:
    """The number of unknowns and independent equations of a layer.

    unknowns:  input values x that later layers depend on through this layer.
    gradients: independent gradient constraints (K x = dL/dW), an upper bound.
    weights:   independent weight constraints (W x = z - b), an upper bound.
    shared:    linear relations between both kinds; for a convolution, only those on the values that its gradient constraints
               leave open.
    rank:      rank of all equations together, never below the generic rank.
    """

    unknowns: int
    gradients: int
    weights: int
    shared: int
    rank: int


def count_equations(layer: LayerFootprint, live: Tensor, dead: float) -> EquationCount:
    """Count the independent equations of a convolution, or an upper bound of their number.

    live: mask of the output values of one channel that later layers depend on.
    dead: share of the layer's outputs at which a ReLU is 0. Such an output gives no weight constraint. Most relations between
          weight and gradient constraints are lost as well, since each contains all outputs of a channel.
    """
    unknowns = layer.channels * int(layer.find_used_values(live).sum())
    ceiling = unknowns if layer.before is None else min(unknowns, layer.channels * compute_pooled_rank(layer.before))
    parts = group_taps(layer, live)
    open_taps = torch.cat([part.taps for part in parts if not part.full] or [torch.zeros(0, dtype=torch.long)])
    alive = layer.filters * (1 - count_dead_values(dead, live) / max(1, int(live.sum())))
    gradients = layer.channels * sum(min(part.rows, len(part.values)) for part in parts)
    everywhere = torch.cat([part.taps for part in parts] or [open_taps])
    weights = min(_count_weight_constraints(layer, live, everywhere, alive), ceiling)
    shared = _count_relations(layer, live, open_taps, dead)
    rank = min(gradients + _count_weight_constraints(layer, live, open_taps, alive) - shared, ceiling)
    return EquationCount(unknowns, min(gradients, ceiling), weights, shared, rank)


def group_taps(layer: LayerFootprint, live: Tensor) -> list[Group]:
    """Return the taps (positions inside the kernel) that see image values from live places, in groups that share no value.

    A place is a position of the kernel on the image.
    live: mask of the output values of one channel that later layers depend on.
          A place is live if it affects one of these values.
    Taps that see only padding from live places are in no group.
    """
    places = layer.find_live_places(live)
    sees = torch.where(places, layer.sees, -1)
    masks = torch.zeros(len(sees), layer.values + 1, dtype=torch.bool).scatter_(1, sees % (layer.values + 1), True)[:, :-1]
    meets = masks.float() @ masks.float().T > 0
    rows = _find_meeting_outputs(layer, live).sum(dim=0).clamp(max=layer.filters)
    groups, left = [], meets.any(dim=1)
    while left.any():
        member = torch.zeros_like(left)
        member[left.nonzero()[0]] = True
        while not torch.equal(grown := meets[member].any(dim=0), member):
            member = grown
        left &= ~member
        taps = member.nonzero()[:, 0]
        groups.append(Group(taps, masks[taps].any(dim=0).nonzero()[:, 0], int(rows[taps].sum())))
    return groups


def count_dead_values(dead: float, live: Tensor) -> int:
    """Return the number of live output values of a channel at which a ReLU is 0: the share `dead` of them, rounded down."""
    return int(dead * int(live.sum()))


def compute_pooled_rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix.double()))


def _find_meeting_outputs(layer: LayerFootprint, live: Tensor) -> Tensor:
    """Return a mask (outputs of a channel, taps) of live outputs that use a tap, a place of the kernel, inside the image."""
    inside = (layer.sees >= 0).T
    meeting = inside if layer.after is None else (layer.after @ inside.float()) > 0
    return meeting & live[:, None]


def _count_weight_constraints(layer: LayerFootprint, live: Tensor, taps: Tensor, alive: float) -> int:
    """Return an upper bound on the number of independent weight constraints on the input values that `taps` see.

    A weight constraint is an equation W x = z - b for the input x, one per output.
    live: mask of the output values of one channel that later layers depend on. taps: indices of positions inside the kernel.
    alive: mean number of output channels that a ReLU does not set to 0.
    Each live output position has at most as many weight constraints as there are values that it uses and `taps` see, over all
    input channels, and at most `alive`.
    """
    if layer.after is None:
        values = (layer.sees[taps] >= 0).sum(dim=0)
    else:
        is_seen = torch.zeros(layer.values + 1)
        is_seen[layer.sees[taps].flatten()] = 1  # index -1 stands for padding, and is the last entry
        values = ((layer.count_uses() > 0) * is_seen[:-1]).sum(dim=1).long()
    return round(float((layer.channels * values).clamp(max=alive)[live].sum()))


def _count_relations(layer: LayerFootprint, live: Tensor, taps: Tensor, dead: float) -> int:
    """Return the number of linear relations between weight and gradient constraints on the values that `taps` see.

    The constraints are the equations W x = z - b and K x = dL/dW for a layer's input x.
    live: mask of the output values of one channel that later layers depend on; only these outputs are counted.
    taps: indices of positions inside the kernel.
    dead: share of each channel's outputs at which a ReLU is 0, which removes relations.
    """
    filters = min(layer.filters, layer.channels * len(taps))
    places = int(_find_meeting_outputs(layer, live)[:, taps].any(dim=1).sum())
    every = filters * min(layer.filters, places)
    if not dead:
        return every
    return min(every, filters * (1 + max(0, layer.filters - 1 - int(dead * places))))  # where a ReLU is 0, z_b is unknown

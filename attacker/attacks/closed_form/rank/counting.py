"""Number of independent equations that a layer gives for its input, counted from its shape.

Three things make rows depend on others, none of which R-GAP counts.

* Taps of the kernel that see disjoint values, as the parity classes of a stride do, fall into groups, and no group has more
  independent gradient constraints than values.
* A place has no more independent weight constraints than values that it sees.
* With Z = W U and G = k U^T of one x, any channels a and b of the output have <k_a, z_b> = <w_b, g_a>: as a rule C_out^2
  relations between both kinds, rank(k) rank(W) of them.

What is counted bounds the generic rank from above. Where the image is small against the kernel, or padding leaves single values
to many rows, the rank may be a little lower still; `generic` finds it there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.footprint import LayerFootprint


@dataclass(frozen=True)
class Group:
    """Taps that see values in common. rows: independent gradient constraints on each channel, at most; values: that they see."""

    taps: Tensor
    values: Tensor
    rows: int

    @property
    def full(self) -> bool:
        return self.rows >= len(self.values)


@dataclass(frozen=True)
class Count:
    """unknowns: that the layer uses. gradients, weights: independent equations of each kind. shared: counted in both.

    rank: of both together; never below the generic rank.
    """

    unknowns: int
    gradients: int
    weights: int
    shared: int
    rank: int


def count(layer: LayerFootprint, live: Tensor, dead: float = 0.0) -> Count:
    """Of a layer whose values given (values,) depend on nothing where not `live`.

    dead: the share of its outputs at which a ReLU is 0, scattered: a weight constraint each is lost, and most of what is shared.
    """
    unknowns = layer.channels * int(layer.used(live).sum())
    ceiling = unknowns if layer.before is None else min(unknowns, layer.channels * pooled_rank(layer.before))
    parts = groups(layer, live)
    open_taps = torch.cat([part.taps for part in parts if not part.full] or [torch.zeros(0, dtype=torch.long)])
    alive = layer.filters * (1 - dead_values(dead, live) / max(1, int(live.sum())))
    gradients = layer.channels * sum(min(part.rows, len(part.values)) for part in parts)
    everywhere = torch.cat([part.taps for part in parts] or [open_taps])
    weights = min(_weights(layer, live, everywhere, alive), ceiling)
    shared = _shared(layer, live, open_taps, dead)
    rank = min(gradients + _weights(layer, live, open_taps, alive) - shared, ceiling)
    return Count(unknowns, min(gradients, ceiling), weights, shared, rank)


def groups(layer: LayerFootprint, live: Tensor) -> list[Group]:
    """The taps that see anything from a live place, in groups that share no value."""
    places = layer.live_places(live)
    sees = torch.where(places, layer.sees, -1)
    masks = torch.zeros(len(sees), layer.taken + 1, dtype=torch.bool).scatter_(1, sees % (layer.taken + 1), True)[:, :-1]
    meets = masks.float() @ masks.float().T > 0
    rows = _outputs_meeting(layer, live).sum(dim=0).clamp(max=layer.filters)
    found, left = [], meets.any(dim=1)
    while left.any():
        member = torch.zeros_like(left)
        member[left.nonzero()[0]] = True
        while not torch.equal(grown := meets[member].any(dim=0), member):
            member = grown
        left &= ~member
        taps = member.nonzero()[:, 0]
        found.append(Group(taps, masks[taps].any(dim=0).nonzero()[:, 0], int(rows[taps].sum())))
    return found


def dead_values(dead: float, live: Tensor) -> int:
    """How many of the live values of a channel a ReLU leaves at 0."""
    return int(dead * int(live.sum()))


def pooled_rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix.double()))


def _outputs_meeting(layer: LayerFootprint, live: Tensor) -> Tensor:
    """(values given, taps): whether a live one has the tap inside the image."""
    inside = (layer.sees >= 0).T
    meeting = inside if layer.after is None else (layer.after @ inside.float()) > 0
    return meeting & live[:, None]


def _weights(layer: LayerFootprint, live: Tensor, taps: Tensor, alive: float) -> int:
    """Weight constraints on what `taps` see: of each place no more than `alive` outputs, or the values there."""
    if layer.after is None:
        values = (layer.sees[taps] >= 0).sum(dim=0)
    else:
        there = torch.zeros(layer.taken + 1)
        there[layer.sees[taps].flatten()] = 1  # -1, the padding, is the last
        values = ((layer.touched() > 0) * there[:-1]).sum(dim=1).long()
    return round(float((layer.channels * values).clamp(max=alive)[live].sum()))


def _shared(layer: LayerFootprint, live: Tensor, taps: Tensor, dead: float) -> int:
    """Relations between weight and gradient constraints on what `taps` see."""
    filters = min(layer.filters, layer.channels * len(taps))
    places = int(_outputs_meeting(layer, live)[:, taps].any(dim=1).sum())
    every = filters * min(layer.filters, places)
    if not dead:
        return every
    return min(every, filters * (1 + max(0, layer.filters - 1 - int(dead * places))))  # z_b is missing where k_a is not

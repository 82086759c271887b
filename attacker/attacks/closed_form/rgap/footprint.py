"""Footprint of a layer: the values that each of its equations involves, for one channel; all channels share it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.system import back_through, columns_of, fold
from attacker.attacks.networks.chain import Chain, Layer, Linear, NotAChain

POOLED = 4096
"""Largest number of values of a channel for which pooling is represented as a matrix."""


@dataclass(frozen=True)
class LayerFootprint:
    """One layer, for one channel of C that it takes and one of O that it gives.

    sees:   (taps, places) which of the n taken values lies under each tap of the kernel at each place; -1 in the padding.
    before: (n, values of one channel before the pooling that comes first) 0 or 1, or None where there is no pooling.
    after:  (values of one channel after the pooling that follows, places) 0 or 1, or None.
    """

    sees: Tensor
    channels: int
    filters: int
    taken: int
    before: Tensor | None = None
    after: Tensor | None = None

    def live_places(self, live: Tensor) -> Tensor:
        """(places,) which of them reach one of the values after the layer that are `live`."""
        return live if self.after is None else self.after[live].any(dim=0)

    def used(self, live: Tensor) -> Tensor:
        """(values of one channel of the layer's input,) whether any `live` value depends on it."""
        seen = self.sees[:, self.live_places(live)]
        taken = torch.zeros(self.taken, dtype=torch.bool)
        taken[seen[seen >= 0]] = True
        return taken if self.before is None else self.before[taken].any(dim=0)

    def touched(self) -> Tensor:
        """(values given, taken values) how often each value after the layer meets each taken one; float."""
        taps, places = self.sees.shape
        meets = torch.zeros(places, self.taken + 1)
        meets.scatter_add_(1, (self.sees % (self.taken + 1)).T, torch.ones(places, taps))
        return meets[:, :-1] if self.after is None else self.after @ meets[:, :-1]


def footprint(layer: Layer) -> LayerFootprint:
    """Of a convolution, or of a matrix, whose every input is a channel of one value. Raises NotAChain as `pooling` does."""
    if layer.kernel is None:
        return LayerFootprint(torch.zeros(1, 1, dtype=torch.long), layer.taken[0], layer.shape[0], 1)
    _, height, width = layer.taken
    numbered = torch.arange(1, height * width + 1, dtype=torch.float64).reshape(1, 1, height, width)
    return LayerFootprint(
        sees=columns_of(layer, numbered)[0].round().long() - 1,
        channels=layer.taken[0],
        filters=layer.shape[0],
        taken=height * width,
        before=pooling(layer.before, layer.inputs, layer.name),
        after=pooling(layer.after, layer.given, layer.name),
    )


def used_values(chain: Chain) -> list[Tensor]:
    """For each layer, a mask (*inputs) of the values of its input that the logits depend on.

    A stride that steps over values, or stops short of the border, leaves some out. Within a network nothing is known of those,
    nor needed: the layer before has no weight constraint for them, and its gradient is 0 there.
    """
    masks: list[Tensor] = []
    live = torch.ones(chain.layers[-1].outputs)
    for layer in reversed(chain.layers):
        given = back_through(layer.after, live[None], layer.given)
        if layer.kernel is None:
            taken = torch.ones(1, *layer.taken)
        else:
            places = given.flatten(2).amax(dim=1, keepdim=True).expand(1, prod(layer.kernel), -1)
            taken = fold(layer, places).expand(1, *layer.taken)
        live = (back_through(layer.before, taken, layer.inputs)[0] > 0).float()
        masks.append(live > 0)
    return masks[::-1]


def pooling(maps: Sequence[Linear], shape: tuple[int, ...], name: str) -> Tensor | None:
    """What average pooling among `maps` does to one channel, (values after, values before) of 0 and 1; None without pooling.

    An average is taken for a sum, which changes no rank. Raises NotAChain where channels are reshaped beside pooling, or one
    channel has more than `POOLED` values.
    """
    matrix, sides = None, shape
    for one in maps:
        after = tuple(one(torch.empty(1, *sides, device="meta")).shape[1:])
        if not keeps_values(one, sides):
            matrix = _pool(one, sides, name) @ (torch.eye(prod(sides[1:])) if matrix is None else matrix)
        elif len(after) == 3 and after != sides and len(maps) > 1:
            raise NotAChain(f"{name} pools images of {sides} and makes other channels of them, {after}")
        sides = after
    return matrix


def keeps_values(one: Linear, shape: tuple[int, ...]) -> bool:
    """Whether a linear map only gives the same values another shape."""
    values = torch.arange(prod(shape), dtype=torch.float64).reshape(1, *shape)
    return torch.equal(one(values).flatten(), values.flatten())


def _pool(one: Linear, sides: tuple[int, ...], name: str) -> Tensor:
    if len(sides) != 3 or (count := prod(sides[1:])) > POOLED:
        raise NotAChain(f"{name}: pooling of {sides} is too large to be analysed, or none of images")
    return (one(torch.eye(count).reshape(count, 1, *sides[1:])).reshape(count, -1).T > 0).float()

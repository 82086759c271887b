"""The footprint of a layer: for each of its equations, the input values that occur in it.

It is computed for one channel, since it is the same for all channels.
A tap is one position inside the kernel, a place is one position of the kernel on the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.system import apply_transposed_maps, fold, unfold
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer
from attacker.attacks.networks.traced import Linear, NotAChain

MAX_POOLED_VALUES = 4096
"""Largest number of values of a channel for which pooling is represented as a matrix."""


@dataclass(frozen=True)
class LayerFootprint:
    """The footprint of one layer: which input values occur in its equations, for one input channel and one output channel.

    A tap is a position inside the kernel, a place a position of the kernel on the image.
    sees:     (taps, places) index, among the n values of a channel, of the value under each tap at each place; -1 in the padding.
    channels, filters: number of input and of output channels.
    values:   number n of values of a channel to which the kernel is applied, after any pooling before it, without padding.
    before:   matrix (n, input values of a channel) of zeros and ones for pooling before the kernel; None without pooling.
    after:    matrix (output values of a channel, places) of zeros and ones for pooling after it; None without pooling.
    """

    sees: Tensor
    channels: int
    filters: int
    values: int
    before: Tensor | None = None
    after: Tensor | None = None

    def find_live_places(self, live: Tensor) -> Tensor:
        """Return a mask (places,) of the kernel's places that affect the outputs `live`, a mask for one channel."""
        return live if self.after is None else self.after[live].any(dim=0)

    def find_used_values(self, live: Tensor) -> Tensor:
        """Return a mask of the input values of one channel on which an output value in the mask `live` depends.

        The input values are the ones before any pooling. live: mask of the output values of one channel.
        """
        seen = self.sees[:, self.find_live_places(live)]
        taken = torch.zeros(self.values, dtype=torch.bool)
        taken[seen[seen >= 0]] = True
        return taken if self.before is None else self.before[taken].any(dim=0)

    def count_uses(self) -> Tensor:
        """Return how often each output value of a channel uses each of the n values of an input channel, (output values, n)."""
        taps, places = self.sees.shape
        meets = torch.zeros(places, self.values + 1)
        meets.scatter_add_(1, (self.sees % (self.values + 1)).T, torch.ones(places, taps))
        return meets[:, :-1] if self.after is None else self.after @ meets[:, :-1]


def build_footprint(layer: Layer) -> LayerFootprint:
    """Return the footprint of a layer: for each of its equations, the input values that occur in it.

    Each input of a linear layer counts as a channel of one value, and pooling before that layer is left out.
    Raises NotAChain if the pooling before or after a convolution cannot be analysed.
    """
    if layer.kernel is None:
        return LayerFootprint(torch.zeros(1, 1, dtype=torch.long), layer.product_inputs[0], layer.shape[0], 1)
    _, height, width = layer.product_inputs
    numbered = torch.arange(1, height * width + 1, dtype=torch.float64).reshape(1, 1, height, width)
    return LayerFootprint(
        sees=unfold(layer, numbered)[0].round().long() - 1,
        channels=layer.product_inputs[0],
        filters=layer.shape[0],
        values=height * width,
        before=build_pooling_matrix(layer.before, layer.inputs, f"before layer {layer.name}"),
        after=build_pooling_matrix(layer.after, layer.product_outputs, f"after layer {layer.name}"),
    )


def find_used_values(chain: Chain) -> list[Tensor]:
    """Return for each layer a mask, of the shape `inputs` of that layer, of the input values that the logits depend on.

    A stride can skip values, or stop before the border. R-GAP cannot recover a skipped value, and does not need it: the loss does
    not depend on it, so that it has no part in the weight gradient of the layer before.
    """
    masks: list[Tensor] = []
    live = torch.ones(chain.layers[-1].outputs)
    for layer in reversed(chain.layers):
        uses = apply_transposed_maps(layer.after, live[None], layer.product_outputs)
        if layer.kernel is None:
            taken = torch.ones(1, *layer.product_inputs)
        else:
            places = uses.flatten(2).amax(dim=1, keepdim=True).expand(1, prod(layer.kernel), -1)
            taken = fold(layer, places).expand(1, *layer.product_inputs)
        live = (apply_transposed_maps(layer.before, taken, layer.inputs)[0] > 0).float()
        masks.append(live > 0)
    return masks[::-1]


def build_pooling_matrix(maps: Sequence[Linear], shape: tuple[int, ...], location: str) -> Tensor | None:
    """Return the average pooling in `maps` as a matrix (values after, values before) for one channel; None without pooling.

    Entries are 1 where a value is averaged and 0 elsewhere: sums instead of averages. For several poolings in succession, the
    result is the product of their matrices. shape: of the input. location: of the maps, such as "after layer 2", for errors.
    Raises NotAChain if an image is reshaped to another one besides pooling, if what is pooled is not an image (C, H, W), or if a
    channel has more than MAX_POOLED_VALUES values.
    """
    matrix, sides = None, shape
    for layer_map in maps:
        after = tuple(layer_map(torch.empty(1, *sides, device="meta")).shape[1:])
        if not _is_reshape(layer_map, sides):
            matrix = _compute_pooling_matrix(layer_map, sides, location) @ (
                torch.eye(prod(sides[1:])) if matrix is None else matrix
            )
        elif len(after) == 3 and after != sides and len(maps) > 1:
            raise NotAChain(
                f"{location}, images are pooled and also reshaped from {sides} to {after}, and closed forms support only one of "
                "the two"
            )
        sides = after
    return matrix


def _is_reshape(linear: Linear, shape: tuple[int, ...]) -> bool:
    """Return whether a linear map of inputs (N, *shape) only reshapes them, keeping values and their order."""
    values = torch.arange(prod(shape), dtype=torch.float64).reshape(1, *shape)
    return torch.equal(linear(values).flatten(), values.flatten())


def _compute_pooling_matrix(linear: Linear, sides: tuple[int, ...], location: str) -> Tensor:
    if len(sides) != 3 or (count := prod(sides[1:])) > MAX_POOLED_VALUES:
        raise NotAChain(
            f"the pooling {location} takes inputs of shape {sides}, and closed forms support only pooling of images (C, H, W) of "
            f"at most {MAX_POOLED_VALUES} pixels"
        )
    return (linear(torch.eye(count).reshape(count, 1, *sides[1:])).reshape(count, -1).T > 0).float()

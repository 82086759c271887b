"""A layer with weights of a network that closed-form attacks can invert, and the geometry of its convolution."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks.networks.activations import IDENTITY, Activation
from attacker.attacks.networks.traced import Linear, NotAChain

Sides = tuple[int, int]
"""A size per side of an image: (vertical, horizontal)."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer with weights. Shapes are those of one example, without batch axis.

    name:         of the module, "" if it is the model itself. weight, bias: parameter names; bias is None if there is none.
    inputs:       shape of the layer's input, the output of the layer before.
    product_inputs: shape of the input of the product, after the maps `before` were applied.
    product_outputs: shape of the output of the product. outputs: shape after the maps `after` were applied.
    shape:        of the weight.
    kernel, stride, padding, dilation: of a convolution, (vertical, horizontal); kernel is None for a matrix product.
    before, after: linear maps without weights, applied before and after the product.
    activation:   applied last.
    """

    name: str
    weight: str
    bias: str | None
    inputs: tuple[int, ...]
    product_inputs: tuple[int, ...]
    product_outputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shape: tuple[int, ...]
    kernel: Sides | None = None
    stride: Sides = (1, 1)
    padding: Sides = (0, 0)
    dilation: Sides = (1, 1)
    before: tuple[Linear, ...] = ()
    after: tuple[Linear, ...] = ()
    activation: Activation = IDENTITY

    def apply_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution or matrix product of inputs x (N, *self.product_inputs) with the weight, without the bias."""
        if self.kernel is None:
            return functional.linear(x, weight)
        return functional.conv2d(x, weight, None, self.stride, self.padding, self.dilation)


def read_convolution(name: str, module: nn.Conv2d) -> dict[str, Sides]:
    """Return kernel, stride, padding and dilation of a convolution, by the names of the fields of `Layer`.

    name: of the module, for errors.
    Raises NotAChain if it has several groups, another padding mode than zeros, or unequal padding on opposite sides.
    """
    if module.groups != 1:
        raise NotAChain(f"{name} is a convolution with {module.groups} groups, and only convolutions with 1 group are inverted")
    if module.padding_mode != "zeros":
        raise NotAChain(f"{name} has padding_mode {module.padding_mode!r}, and only 'zeros' is supported")
    if isinstance(module.padding, str):
        whole = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if module.padding == "same" and any(side % 2 for side in whole):
            raise NotAChain(
                f"{name} pads more on one side than on the other, because its kernel has an even size, and only equal padding "
                "is supported"
            )
        padding = (0, 0) if module.padding == "valid" else (whole[0] // 2, whole[1] // 2)
    else:
        padding = _to_pair(module.padding)
    return {
        "kernel": _to_pair(module.kernel_size),
        "stride": _to_pair(module.stride),
        "padding": padding,
        "dilation": _to_pair(module.dilation),
    }


def _to_pair(sides: tuple[int, ...]) -> Sides:
    return int(sides[0]), int(sides[1])

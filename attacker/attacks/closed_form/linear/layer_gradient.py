"""The gradient of a first linear layer, from which closed forms compute the layer's inputs, and the answer that they return."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attacker.attacks.confidence.eight_bit import LEVELS, is_eight_bit
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer
from defenses.base import Tensors

UNSCALED = "the layer has no bias, so the norm of its input is not known"


@dataclass(frozen=True, kw_only=True)
class LinearAnswer:
    """The examples found in a batch.

    x:         (found, F) normalised inputs of the layer; unit vectors if the layer has no bias.
    d:         (found, width) each example's part of the gradient of the mean loss at the pre-activations; zeros where it is not
               known. If x are unit vectors, d is multiplied by the norms of the inputs.
    certainty: (found,) in [0, 1], a heuristic confidence that the example is right.
    rank:      rank of the gradient, the number of distinct examples that it shows; 0 if unknown.
    how:       name of the method, see `first_layer`: "ratio", "isolated" or "sparse directions"; "" if none were found.
    note:      if no examples were found, the reason. Otherwise remarks on the result, such as how many are missing, or "".
    scaled:    whether the norm of x is known; False if x are unit vectors.
    ambiguous: whether the gradient of several examples may have the same form as the gradient of the single one that was found.
    """

    x: Tensor
    d: Tensor
    certainty: Tensor
    rank: int
    how: str
    note: str
    scaled: bool = True
    ambiguous: bool = False

    @property
    def found(self) -> int:
        return len(self.x)


def build_empty_answer(layer: Layer, note: str, *, rank: int = 0) -> LinearAnswer:
    """Return an answer without examples. note: the reason."""
    return LinearAnswer(
        x=torch.zeros(0, prod(layer.product_inputs), dtype=torch.float64),
        d=torch.zeros(0, layer.shape[0], dtype=torch.float64),
        certainty=torch.zeros(0, dtype=torch.float64), rank=rank, how="", note=note,
    )  # fmt: skip


def join_notes(*notes: str) -> str:
    """Return the notes that are not empty, separated by semicolons."""
    return "; ".join(note for note in notes if note)


class LayerGradient:
    """The gradient and weights of a linear layer that sees the examples, each with any bias as a last column, in float64.

    F' is the number of columns: F + 1 with a bias, else F.

    rows, weight: (M, F') gradient and weights of M neurons.
    biased:   whether the layer has a bias.
    bounds:   lowest and highest possible inputs, (F,) each; None if they are not known.
    is_image: whether the bounds have the shape of an image; rows of a table may have 8-bit values by chance.
    uniform:  whether each example's row of D may be determined by a sign and its zeros. Neurons that are on for the same examples
              then have parallel rows, so that parallel rows are not evidence of a single example.
    shares_direction: whether different examples may have parallel rows of D, so that a gradient of rank one may be of several
              examples: their errors at the outputs are parallel if there are at most two outputs, or if all examples have one
              label and the network is untrained. Behind ReLU they stay parallel for examples that turn on the same neurons; other
              activations change them.
    """

    def __init__(
        self,
        layer: Layer,
        weights: Tensors,
        gradient: Tensors,
        bounds: tuple[Tensor, Tensor] | None,
        *,
        uniform: bool,
        shares_direction: bool,
    ) -> None:
        self.layer, self.uniform, self.shares_direction = layer, uniform, shares_direction
        self.rows, self.weight = augment(layer, gradient), augment(layer, weights)
        self.biased = layer.bias is not None
        self.bounds = None if bounds is None else tuple(b.double().flatten() for b in bounds)
        self.is_image = bounds is not None and bounds[0].ndim == 3

    @classmethod
    def of_first_layer(
        cls, chain: Chain, weights: Tensors, gradient: Tensors, bounds: tuple[Tensor, Tensor] | None
    ) -> "LayerGradient":
        layer, later = chain.layers[0], chain.layers[1:]
        linear, narrow = layer.activation.name == "identity", min(each.shape[0] for each in chain.layers) <= 2
        return cls(
            layer,
            weights,
            gradient,
            bounds,
            uniform=any(each.shape[0] <= 2 for each in later),
            shares_direction=linear or (narrow and layer.activation.name == "relu"),
        )

    def compute_inputs(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (K, F) that belong to directions (K, F') of the gradient's rows, and a mask (K,) of possible ones.

        With a bias, an input is possible if its direction's last entry is not zero, and if it turns on no neuron whose gradient
        is zero: such neurons are off for all examples. Without a bias, inputs are unit vectors, and all count as possible.
        """
        z = directions @ self.weight.T
        if not self.biased:
            side = torch.where(z.sum(dim=1, keepdim=True) >= 0, 1.0, -1.0)
            return side * directions, torch.ones(len(z), dtype=torch.bool, device=z.device)
        last = directions[:, -1:]
        there = last.abs() > 1e-9
        off = self.rows.norm(dim=1) == 0
        fits = (z[:, off] * torch.sign(last) <= 1e-6).all(dim=1)
        return directions[:, :-1] / torch.where(there, last, 1), there[:, 0] & fits

    def find_scales(self, x: Tensor, on: Tensor) -> Tensor:
        """Return the factors (R,) by which vectors x (R, F') must be divided to be inputs of the layer, or unit vectors.

        With a bias, the factor is the last entry of x, which is 1 after the division. Without a bias, the norm of the input is
        unknown: the factor is the norm of x, so that the quotient is a unit vector, with the sign for which it turns on the
        neurons in the mask `on` (M, R).
        """
        if self.biased:
            return x[:, -1]
        z = self.weight @ x.T
        positive, negative = (((side * z > 0) == on).double().mean(dim=0) for side in (1, -1))
        length: Tensor = x.norm(dim=1) * torch.where(positive >= negative, 1.0, -1.0)
        return length

    def is_eight_bit(self, x: Tensor) -> Tensor:
        """Return a mask (K,) of the inputs x (K, F) whose values are those of an 8-bit image; all False if this is unknown."""
        if self.bounds is None or not self.is_image or not self.biased:
            return torch.zeros(len(x), dtype=torch.bool, device=x.device)
        low, high = self.bounds
        return is_eight_bit((x - low) / (high - low))

    def round_to_eight_bit(self, x: Tensor, stored: Tensor) -> Tensor:
        """Return inputs x (K, F), of which those in the mask `stored` (K,) are rounded to the levels of an 8-bit image."""
        if self.bounds is None or not bool(stored.any()):
            return x
        low, high = self.bounds
        return torch.where(stored[:, None], low + (LEVELS * (x - low) / (high - low)).round() / LEVELS * (high - low), x)

    def is_within_bounds(self, x: Tensor) -> Tensor:
        """Return a mask (K,) of the inputs x (K, F) within the bounds, up to a tolerance; all False if this is unknown."""
        if self.bounds is None or not self.biased:
            return torch.zeros(len(x), dtype=torch.bool, device=x.device)
        low, high = self.bounds
        slack = 1e-3 * (high - low)
        return ((x >= low - slack) & (x <= high + slack)).all(dim=1)


def augment(layer: Layer, tensors: Tensors) -> Tensor:
    """Return weight and bias of a layer in one matrix (M, F + 1), or (M, F) if it has no bias, in float64."""
    weight = tensors[layer.weight].double()
    return weight if layer.bias is None else torch.cat([weight, tensors[layer.bias].double()[:, None]], dim=1)

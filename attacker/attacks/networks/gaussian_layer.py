"""Search for a wide linear layer with random Gaussian weights before the last layer, as Liu et al. 2024 add it to a network."""

from collections.abc import Mapping

from torch import Tensor, nn

from fedsim.models.tampering import MIN_NEURONS_PER_FEATURE, is_gaussian


def find_gaussian_layer(model: nn.Module, weights: Mapping[str, Tensor]) -> str | None:
    """Return the name of the wide layer if its weights, in `weights`, look normally distributed, else None."""
    name = find_wide_layer(model)
    return name if name is not None and is_gaussian(weights[f"{name}.weight"]) else None


def find_wide_layer(model: nn.Module) -> str | None:
    """Return the name of the last but one linear layer if it is wide and has no bias, with ReLU between it and the last.

    The last three modules that compute anything must be this layer, `nn.ReLU` and the last linear layer, in this order; if they
    are not, the result is None. With a bias, the layer's own gradient reveals its inputs, see `cocktail_party`.
    """
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    leaves = [(name, module) for name, module in leaves if not isinstance(module, nn.Flatten | nn.Identity | nn.Dropout)]
    if len(leaves) < 3:
        return None
    (name, wide), (_, activation), (_, head) = leaves[-3:]
    if not (isinstance(wide, nn.Linear) and isinstance(activation, nn.ReLU) and isinstance(head, nn.Linear)):
        return None
    fits = "bias" not in dict(wide.named_parameters()) and head.in_features == wide.out_features
    return name if fits and wide.out_features >= MIN_NEURONS_PER_FEATURE * wide.in_features else None

"""The layers of a model as checks for tampering read them: one row of weights for each neuron or filter, and its bias."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

MIN_ROWS, MIN_COLUMNS = 16, 8
"""Smallest layer that is inspected for trap weights and dead neurons."""


@dataclass(frozen=True)
class InspectedLayer:
    """One layer with a weight of two or more dimensions.

    name: of the weight. weight: its values, with one row per neuron or filter in the first dimension.
    bias: (rows,) what is added to the outputs of the rows; None if it was not found.
    """

    name: str
    weight: Tensor
    bias: Tensor | None

    @cached_property
    def rows(self) -> Tensor:
        """The weight as a matrix (rows, values) in float64."""
        return self.weight.flatten(1).double()


def read_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model by name, with those that are computed from others, as in pruned layers, as it uses them.

    A weight that is computed (by `torch.nn.utils.parametrize`, weight or spectral normalisation, or pruning) takes the place of
    the parameters that it is computed from, under its own name, such as "0.weight". Raises ValueError if `model` is no module, or
    if a parameter has no values yet.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"a model to inspect must be a torch.nn.Module, got {type(model).__name__}; load weights that the server sent into "
            "the model first"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(f"the parameter {name} has no values yet; load the weights that the server sent before inspection")
    weights: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue
        start = f"{prefix}." if prefix else ""
        if start.startswith("parametrizations.") or ".parametrizations." in start:
            continue
        own = dict(module.named_parameters(recurse=False))
        computed = set(getattr(module, "parametrizations", ()))
        weights |= {f"{start}{name}": getattr(module, name).detach() for name in sorted(computed)}
        weights |= {f"{start}{name}": value for name, value in _resolve(module, own).items()}
    return weights


def find_embeddings(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model that are the table of an embedding, whatever else they are used for."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    return frozenset(name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in tables)


def _resolve(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the own parameters of a module by name; weights that hooks compute before each pass replace their origins."""
    found = {name: value.detach() for name, value in tensors.items()}
    for name in [name.removesuffix("_orig") for name in tensors if name.endswith("_orig")]:
        mask = getattr(module, f"{name}_mask", None)
        value = found.pop(f"{name}_orig")
        found[name] = value if mask is None else value * mask
    for name in [name.removesuffix("_v") for name in tensors if name.endswith("_v") and f"{name[:-2]}_g" in tensors]:
        direction, length = found.pop(f"{name}_v"), found.pop(f"{name}_g")
        shared = tuple(axis for axis, size in enumerate(length.shape) if size == 1) or None
        own_length = torch.linalg.vector_norm(direction, dim=shared, keepdim=True)
        found[name] = direction * length / own_length.clamp(min=torch.finfo(direction.dtype).tiny)
    return found


def list_layers(weights: Mapping[str, Tensor]) -> Iterator[InspectedLayer]:
    """Yield the layers of a model with the given parameters by name, in their order.

    A weight is any parameter of two or more dimensions with real values. Its bias is a parameter of one dimension of the same
    module, of the module that contains it, or, for linear layers, of the normalisation that comes next. A matrix with as many
    columns as its module's bias has values, but another number of rows, is stored as (inputs, outputs) and is transposed.
    """
    names = list(weights)
    for place, name in enumerate(names):
        weight = weights[name].detach()
        if weight.ndim < 2 or not weight.is_floating_point() or not weight.numel():
            continue
        bias = _find_own(weights, name, len(weight))
        if bias is None and weight.ndim == 2 and (found := _find_own(weights, name, weight.shape[1])) is not None:
            weight, bias = weight.T, found
        if bias is None and weight.ndim == 2:
            bias = _find_beside(weights, names, place, len(weight))
        yield InspectedLayer(name, weight, bias)


def _find_own(weights: Mapping[str, Tensor], name: str, size: int) -> Tensor | None:
    """Return the bias in the module of the weight `name`: one with a name like the weight's, or else any one of `size` values."""
    module, _, own = name.rpartition(".")
    start = f"{module}." if module else ""
    like = f"{start}{own.replace('weight', 'bias')}"
    fitting = [
        other
        for other, value in weights.items()
        if value.ndim == 1 and len(value) == size and other.startswith(start) and "." not in other[len(start) :]
    ]
    for other in sorted(fitting, key=lambda other: (other != like, "bias" not in other)):
        return weights[other].detach().double()
    return None


def _find_beside(weights: Mapping[str, Tensor], names: list[str], place: int, size: int) -> Tensor | None:
    """Return the bias of the weight at `place` in the list of names, from the module around its own or from the next layer."""
    around = names[place].rpartition(".")[0]
    if around and (found := _find_own(weights, around, size)) is not None:
        return found
    for other in names[place + 1 :]:
        value = weights[other]
        if value.ndim >= 2:
            return None
        if other.endswith("bias") and value.ndim == 1 and len(value) == size:
            return value.detach().double()
    return None


def is_large(weight: Tensor) -> bool:
    """Return whether a weight has at least `MIN_ROWS` rows of at least `MIN_COLUMNS` values each, enough to compare its rows."""
    return weight.ndim >= 2 and len(weight) >= MIN_ROWS and weight[0].numel() >= MIN_COLUMNS


def spread_rows(rows: Tensor, maximum: int) -> Tensor:
    """Return at most `maximum` rows, evenly spread over all."""
    return rows if len(rows) <= maximum else rows[torch.linspace(0, len(rows) - 1, maximum).long().to(rows.device)]

"""Classification of the nodes of a traced network: layers with weights, activations, linear maps, or unsupported operations."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from attacker.attacks.networks.activations import IDENTITY, RELU, SIGMOID, TANH, Activation, leaky_relu
from defenses.networks import Stochastic
from fedsim.models.foreign import take_logits

Linear = Callable[[Tensor], Tensor]
"""A linear map of batches without parameters: average pooling or a reshape."""


class NotAChain(ValueError):
    """The error for a network that closed-form attacks cannot invert; the message names the part of it and the reason."""


class Reshaped:
    """A reshape of a batch to (N, *shape); one entry of the shape may be -1."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


class Pooled:
    """An average pooling function of PyTorch with the arguments from the network's code."""

    def __init__(self, function: Linear, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.function, self.arguments, self.keywords = function, arguments, keywords

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments, **self.keywords)


def are_reshapes(maps: Iterable[Linear]) -> bool:
    """Return whether all the maps are reshapes, which keep all values in their order."""
    return all(isinstance(one, Reshaped) for one in maps)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        whole = isinstance(module, Stochastic) or find_kind(module) is not None
        return whole or super().is_leaf_module(module, qualified_name)


def trace(model: nn.Module) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """Return the torch.fx graph of a copy of `model` in evaluation mode, and a dict from name in `model` to module of the copy.

    The copy shares the weights. Raises NotAChain if the model's code cannot be traced, or if a module has hooks or a replaced
    `forward`.
    """
    if hooked := [name or "the model" for name, module in model.named_modules() if _is_hooked(module)]:
        raise NotAChain(f"{hooked[0]} has hooks or a replaced forward method, which cannot be traced")
    values = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor)]
    try:
        kept = {id(t): t for t in (*model.parameters(), *model.buffers(), *values)}
        own = nn.Sequential(copy.deepcopy(model, kept)).eval()  # a copy, since tracing changes modules that store state
        graph = _Tracer().trace(own)
    except Exception as error:  # a user's network may fail in any way
        said = (str(error).splitlines() or [""])[0]
        raise NotAChain(f"its code cannot be traced: {type(error).__name__}: {said}") from error
    return graph, {name[2:]: module for name, module in own.named_modules() if name}


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks or a replaced `forward`.

    The hook `take_logits`, which replaces an output object by the logits that it holds, does not count.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hook is not take_logits for some in hooks for hook in some.values()) or "forward" in vars(module)


def find_kind(module: nn.Module | None) -> type[nn.Conv2d] | type[nn.Linear] | None:
    """Return nn.Conv2d or nn.Linear if the module computes exactly that, also if it is a subclass; otherwise None."""
    if isinstance(module, nn.Conv2d):
        own = type(module)
        same = own.forward is nn.Conv2d.forward and own._conv_forward is nn.Conv2d._conv_forward
        return nn.Conv2d if same else None
    return nn.Linear if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward else None


def get_call_name(node: fx.Node) -> str:
    """Return the name of the module, method or function that a node calls, as it appears in the network's code."""
    if node.op == "call_module":
        return str(node.target)[2:] or "the model"
    return str(node.target) if node.op != "call_function" else getattr(node.target, "__name__", str(node.target))


def find_activation(node: fx.Node, module: nn.Module | None) -> Activation | None:
    """Return the activation that a node of a traced network applies, or None if it applies none that is known.

    module: the module that the node calls; None if it calls a function or method.
    A leaky ReLU of slope 0 counts as a ReLU. Raises NotAChain for a leaky ReLU whose slope is negative, infinite or not a number.
    """
    if module is not None:
        return _build_leaky_relu(module.negative_slope) if type(module) is nn.LeakyReLU else _MODULES.get(type(module))
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    if node.target in (functional.leaky_relu, functional.leaky_relu_):
        slope: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        return _build_leaky_relu(slope)
    return _FUNCTIONS.get(node.target)


def _build_leaky_relu(slope: Any) -> Activation:
    if not isinstance(slope, float | int) or not 0 <= slope < math.inf:
        raise NotAChain(f"the slope of a leaky ReLU must be finite and at least 0, got {slope}; closed forms support no other")
    return leaky_relu(float(slope)) if slope else RELU


def build_map(
    node: fx.Node, module: nn.Module | None, shape: tuple[int, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Linear:
    """Return the linear map that a node computes: average pooling or a reshape, which includes dropout in evaluation mode.

    module:    the module that the node calls, or None. shape: of the node's input, with batch axis.
    arguments, keywords: the arguments in the network's code besides the input.
    Raises NotAChain if the node does something else, or mixes the examples of a batch.
    """
    if isinstance(module, Stochastic):
        raise NotAChain(f"{get_call_name(node)} draws random numbers during training, which the server does not know")
    called = type(module) if module is not None else node.target
    if called in _POOLING:
        function = module if module is not None else node.target
        return Pooled(function, arguments, keywords)  # type: ignore[arg-type]
    if called in _DROPOUT or (called in _FUNCTIONAL_DROPOUT and not _is_dropping(arguments, keywords)):
        return Reshaped(shape[1:])
    if called in _FUNCTIONAL_DROPOUT:
        raise NotAChain("its code applies dropout in evaluation mode as well; pass training=self.training")
    if called in _SHAPING:
        function = module if module is not None else _SHAPING[called]
        given = tuple(function(torch.empty(shape, device="meta"), *arguments, **keywords).shape)
        if not given or given[0] != shape[0]:
            raise NotAChain(f"{get_call_name(node)} mixes the examples of a batch, since it changes the size of the batch axis")
        return Reshaped(given[1:])
    what = type(module).__name__ if module is not None else get_call_name(node)
    where = f"{get_call_name(node)} is {what}" if module is not None else f"its code calls {what}"
    raise NotAChain(f"{where}: {_explain_refusal(what)}")


def _is_dropping(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return bool(arguments[1] if len(arguments) > 1 else keywords.get("training", keywords.get("train", True)))


_MODULES: dict[type[nn.Module], Activation] = {nn.ReLU: RELU, nn.Sigmoid: SIGMOID, nn.Tanh: TANH, nn.Identity: IDENTITY}
_METHODS = {"relu": RELU, "relu_": RELU, "sigmoid": SIGMOID, "sigmoid_": SIGMOID, "tanh": TANH, "tanh_": TANH}
_FUNCTIONS: dict[Any, Activation] = {
    **dict.fromkeys((functional.relu, functional.relu_, torch.relu, torch.relu_), RELU),
    **dict.fromkeys((functional.sigmoid, torch.sigmoid, torch.sigmoid_), SIGMOID),
    **dict.fromkeys((functional.tanh, torch.tanh, torch.tanh_), TANH),
}
_POOLING: set[Any] = {nn.AvgPool2d, nn.AdaptiveAvgPool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d}
_DROPOUT: set[Any] = {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout}
_FUNCTIONAL_DROPOUT: set[Any] = {functional.dropout, functional.dropout2d, torch.dropout}
_SHAPING: dict[Any, Callable[..., Tensor]] = {
    nn.Flatten: torch.flatten,
    nn.Unflatten: Tensor.unflatten,
    torch.flatten: torch.flatten,
    torch.reshape: torch.reshape,
    **{name: getattr(Tensor, name) for name in ("flatten", "unflatten", "view", "reshape", "contiguous")},
}

_REASONS = {
    "maxpool": "its output does not show which of its inputs was the largest",
    "norm": "normalisation layers are not supported by closed forms",
    "softmax": "its outputs are probabilities, and logits are needed",
    "chunk": "it splits a tensor into several, and closed forms follow a single path",
    "conv": "the only convolution that closed forms support is torch.nn.Conv2d",
    "linear": "the only linear layer that closed forms support is torch.nn.Linear",
}


def _explain_refusal(what: str) -> str:
    plain = what.lower().replace("_", "")
    return next((why for part, why in _REASONS.items() if part in plain), "it is not a supported layer, activation or linear map")

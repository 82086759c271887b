"""What the nodes of a traced network are: layers as torch has them, activations, linear maps, or none of these, and why."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from attacker.attacks.networks.activations import IDENTITY, RELU, SIGMOID, TANH, Activation, leaky_relu
from defenses.networks import Stochastic

Linear = Callable[[Tensor], Tensor]
"""A linear map without parameters, of batches: average pooling, or another shape of the same values."""


class NotAChain(ValueError):
    """A network that no closed form walks back through; the message says which part of it, and why."""


class Reshaped:
    """The same values in another shape: (N, *shape), of which one side may be -1."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


class Pooled:
    """A function of torch's that averages, with the arguments that the network's code gives it."""

    def __init__(self, function: Linear, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.function, self.arguments, self.keywords = function, arguments, keywords

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments, **self.keywords)


def only_reshapes(maps: Iterable[Linear]) -> bool:
    """Whether maps of a chain keep all values, in their order."""
    return all(isinstance(one, Reshaped) for one in maps)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        whole = isinstance(module, Stochastic) or kind_of(module) is not None
        return whole or super().is_leaf_module(module, qualified_name)


def trace(model: nn.Module) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """The graph of `model` in evaluation mode, and its modules by name. The model stays as it is; the weights are its own.

    Raises NotAChain where its code cannot be followed.
    """
    if hooked := [name or "the model" for name, module in model.named_modules() if _hooked(module)]:
        raise NotAChain(f"{hooked[0]} has hooks or a forward of its own, and what they do cannot be followed")
    values = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor)]
    try:
        kept = {id(t): t for t in (*model.parameters(), *model.buffers(), *values)}
        own = nn.Sequential(copy.deepcopy(model, kept)).eval()  # tracing leaves its marks on modules that remember something
        graph = _Tracer().trace(own)
    except Exception as error:  # the code of others may fail in any way
        said = (str(error).splitlines() or [""])[0]
        raise NotAChain(f"its code cannot be followed: {type(error).__name__}: {said}") from error
    return graph, {name[2:]: module for name, module in own.named_modules() if name}


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def kind_of(module: nn.Module | None) -> type[nn.Conv2d] | type[nn.Linear] | None:
    """Which of the layers with weights a module is; None where its class computes something else."""
    if isinstance(module, nn.Conv2d):
        own = type(module)
        same = own.forward is nn.Conv2d.forward and own._conv_forward is nn.Conv2d._conv_forward
        return nn.Conv2d if same else None
    return nn.Linear if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward else None


def name_of(node: fx.Node) -> str:
    """What a node calls, as a reader of the network's code knows it."""
    if node.op == "call_module":
        return str(node.target)[2:] or "the model"
    return str(node.target) if node.op != "call_function" else getattr(node.target, "__name__", str(node.target))


def activation_of(node: fx.Node, module: nn.Module | None) -> Activation | None:
    """The activation that a node applies. Raises NotAChain for a leaky ReLU that has no inverse."""
    if module is not None:
        return _leaky(module.negative_slope) if type(module) is nn.LeakyReLU else _MODULES.get(type(module))
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    if node.target in (functional.leaky_relu, functional.leaky_relu_):
        slope: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        return _leaky(slope)
    return _FUNCTIONS.get(node.target)


def _leaky(slope: Any) -> Activation:
    if not isinstance(slope, float | int) or not 0 <= slope < math.inf:
        raise NotAChain(f"a leaky ReLU of slope {slope} has no inverse")
    return leaky_relu(float(slope)) if slope else RELU


def map_of(
    node: fx.Node, module: nn.Module | None, shape: tuple[int, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Linear:
    """The linear map that a node is, of one tensor (N, *shape), with all that its code gives it beside that tensor.

    shape: with the batch before it. Raises NotAChain where it is none.
    """
    if isinstance(module, Stochastic):
        raise NotAChain(f"{name_of(node)} draws at random while a client trains, and what it drew is not known")
    called = type(module) if module is not None else node.target
    if called in _POOLING:
        function = module if module is not None else node.target
        return Pooled(function, arguments, keywords)  # type: ignore[arg-type]
    if called in _DROPOUT or (called in _FUNCTIONAL_DROPOUT and not _drops(arguments, keywords)):
        return Reshaped(shape[1:])
    if called in _FUNCTIONAL_DROPOUT:
        raise NotAChain("its code drops values in evaluation mode, too: pass training=self.training")
    if called in _SHAPING:
        function = module if module is not None else _SHAPING[called]
        given = tuple(function(torch.empty(shape, device="meta"), *arguments, **keywords).shape)
        if not given or given[0] != shape[0]:
            raise NotAChain(f"{name_of(node)} mixes the examples of a batch")
        return Reshaped(given[1:])
    what = type(module).__name__ if module is not None else name_of(node)
    where = f"{name_of(node)} is {what}" if module is not None else f"its code calls {what}"
    raise NotAChain(f"{where}: {_reason(what)}")


def _drops(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
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
    "maxpool": "which of its inputs is the largest cannot be told from its output",
    "norm": "normalisation is not walked back through",
    "softmax": "its outputs are no logits, and the loss of them is another",
    "chunk": "it splits one path into several, and a closed form follows a single one",
    "conv": "of convolutions only torch.nn.Conv2d is walked back through",
    "linear": "only torch.nn.Linear is walked back through",
}


def _reason(what: str) -> str:
    plain = what.lower().replace("_", "")
    return next((why for part, why in _REASONS.items() if part in plain), "neither a layer, an activation nor a linear map")

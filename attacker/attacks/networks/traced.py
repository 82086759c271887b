"""Classification of the nodes of a traced network: layers with weights, activations, linear maps, or unsupported operations."""

import copy
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from attacker.attacks.networks.activations import IDENTITY, RELU, SIGMOID, TANH, Activation, leaky_relu
from defenses.networks import StochasticModule
from fedsim.models.foreign import convert_indices, take_logits

CONVERSIONS = ("double", "float", "half", "bfloat16")
"""Methods of a tensor that change nothing but its floating dtype."""
CASTS = ("to", "type", "type_as", "cpu", "cuda", "clone")
"""Methods of a tensor that copy its values, and may change its device, its memory format and, by their arguments, its dtype."""
MOVES = ("permute", "transpose", "swapaxes", "movedim", "moveaxis")
"""Methods of a tensor, and functions, that reorder its axes."""

Linear = Callable[[Tensor], Tensor]
"""A linear map of batches without parameters: average pooling or a reshape."""


class NotAChain(ValueError):
    """The error for a network that closed-form attacks cannot invert; the message names the layer or call and the reason."""


@dataclass(frozen=True, eq=False)
class Reshape:
    """A reshape of a batch to (N, *shape); one entry of the shape may be -1."""

    shape: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


@dataclass(frozen=True, eq=False)
class AveragePooling:
    """An average pooling function of PyTorch with the arguments from the network's code."""

    function: Linear
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments, **self.keywords)


def are_reshapes(maps: Iterable[Linear]) -> bool:
    """Return whether all the maps are reshapes, which keep all values in their order."""
    return all(isinstance(layer_map, Reshape) for layer_map in maps)


ReadSize = Callable[[fx.Node, dict[str, nn.Module]], Any]
"""Maps a node of a graph that is being traced to its value, if that value follows from sizes alone; else raises TraceError.

The second argument is the dict of modules that `trace` returns.
"""


class _Proxy(fx.Proxy):
    """A traced tensor, or a size of one. Its length is a number, and a size can be used as a number."""

    def __getattr__(self, name: str) -> "_Attribute":
        return _Attribute(self, name)

    def __len__(self) -> int:
        return int(self.tracer.create_proxy("call_function", len, (self,), {}))  # type: ignore[call-overload,no-any-return]

    def __index__(self) -> int:
        return int(self.tracer.read(self))  # type: ignore[attr-defined]

    __int__ = __index__


class _Attribute(fx.proxy.Attribute, _Proxy):
    """An attribute of a traced tensor, such as its shape."""


class _Tracer(fx.Tracer):
    """A tracer that lets Python code decide and loop by the sizes of tensors, whose values `read_size` returns."""

    def __init__(self, read_size: ReadSize) -> None:
        super().__init__()
        self.read_size, self.modules, self.reads = read_size, dict[str, nn.Module](), False

    def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
        whole = isinstance(module, StochasticModule) or find_kind(module) is not None or is_normalisation(module)
        return whole or super().is_leaf_module(module, qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def read(self, proxy: fx.Proxy) -> Any:
        self.reads = True
        try:
            return self.read_size(proxy.node, self.modules)
        finally:
            self.reads = False

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a module's attribute; `read_size` gets it as it is, and the traced code a proxy of a parameter or buffer."""
        return attr_val if self.reads else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, for `read_size`, or record the call in the graph, for the traced code."""
        return forward(*args, **kwargs) if self.reads else super().call_module(m, forward, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.read(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter(self.read(obj))


def _know_no_size(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    raise fx.proxy.TraceError(f"the network's code uses {node} as a number, which is unknown to trace; pass read_size to it")


def trace(model: nn.Module, read_size: ReadSize = _know_no_size) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """Return the torch.fx graph of a copy of `model` in evaluation mode, and a dict from name in `model` to module of the copy.

    The copy shares the weights. read_size: function that is called where the code needs a size as a number.
    Raises NotAChain if the model's code cannot be traced, or if a module has hooks or a replaced `forward`.
    """
    if hooked := [name or "the model" for name, module in model.named_modules() if _is_hooked(module)]:
        raise NotAChain(f"{hooked[0]} has hooks or a replaced forward method, which cannot be traced")
    values = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor)]
    tracer = _Tracer(read_size)
    try:
        kept = {id(t): t for t in (*model.parameters(), *model.buffers(), *values)}
        copied = nn.Sequential(copy.deepcopy(model, kept)).eval()  # a copy, since tracing changes modules that store state
        tracer.modules = {name[2:]: module for name, module in copied.named_modules() if name}
        graph = tracer.trace(copied)
    except NotAChain:  # by `read_size`
        raise
    except Exception as error:  # a user's network may fail in any way
        raise NotAChain(_explain_failure(error)) from error
    return graph, tracer.modules


def _explain_failure(error: Exception) -> str:
    """Return why code cannot be traced, with the line of the network's code that failed and how to rewrite it."""
    text = (str(error).splitlines() or [""])[0]
    known = isinstance(error, fx.proxy.TraceError) or "Proxy" in text or "symbolic" in text
    what = (
        "Python code needs the values of a tensor, and only its sizes are known" if known else f"{type(error).__name__}: {text}"
    )
    advice = "write this line with layers and functions of PyTorch, and decide only by sizes" * known
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(library)]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return "; ".join(filter(None, (f"its code cannot be traced: {what}" + f" ({where})" * bool(where), advice)))


def _is_hooked(module: nn.Module) -> bool:
    """Return whether a module has a replaced `forward` or hooks, other than `take_logits` and `convert_indices`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(
        hook not in (take_logits, convert_indices) for registered in hooks for hook in registered.values()
    ) or "forward" in vars(module)


def find_kind(module: nn.Module | None) -> type[nn.Conv2d] | type[nn.Linear] | None:
    """Return nn.Conv2d or nn.Linear if the module computes exactly that, also if it is a subclass; otherwise None."""
    if isinstance(module, nn.Conv2d):
        module_type = type(module)
        same = module_type.forward is nn.Conv2d.forward and module_type._conv_forward is nn.Conv2d._conv_forward
        return nn.Conv2d if same else None
    return nn.Linear if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward else None


def get_call_name(node: fx.Node) -> str:
    """Return the name of the module, method or function that a node calls, as it appears in the network's code."""
    if node.op == "call_module":
        return str(node.target)[2:] or "the model"
    return str(node.target) if node.op != "call_function" else getattr(node.target, "__name__", str(node.target))


def is_log_softmax(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether a node computes the log-softmax of vectors (N, K) over their K values.

    module: the module that the node calls; None if it calls a function or method.
    """
    if module is not None:
        return type(module) is nn.LogSoftmax and module.dim in (1, -1, None)
    if node.target != "log_softmax" and node.target not in (functional.log_softmax, torch.log_softmax):
        return False
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return dim in (1, -1, None)


def is_arithmetic(node: fx.Node) -> bool:
    """Return whether a node adds, subtracts, multiplies, divides or negates, value by value."""
    if node.op not in ("call_function", "call_method"):
        return False
    return get_call_name(node).strip("_") in _ARITHMETIC


def is_cast(node: fx.Node) -> bool:
    """Return whether a node keeps the values of a tensor up to rounding: one of `CONVERSIONS`, or of `CASTS` to a floating dtype.

    A dtype that another tensor gives is taken to be floating.
    """
    if node.op != "call_method" or node.target not in (*CONVERSIONS, *CASTS):
        return False
    arguments = (*node.args[1:], *node.kwargs.values())
    if any(isinstance(argument, torch.dtype) and not argument.is_floating_point for argument in arguments):
        return False
    return node.target != "type" or all(isinstance(argument, torch.dtype) for argument in arguments)


def is_move(node: fx.Node) -> bool:
    """Return whether a node reorders the axes of a tensor."""
    return node.op in ("call_function", "call_method") and get_call_name(node) in MOVES


def is_normalisation(module: nn.Module | None) -> bool:
    """Return whether the module is torchvision's `Normalize`, whose code cannot be traced."""
    return type(module).__name__ == "Normalize" and type(module).__module__.startswith("torchvision.transforms")


def find_activation(node: fx.Node, module: nn.Module | None) -> Activation | None:
    """Return the activation that a node of a traced network applies, or None if it applies none that is known.

    module: the module that the node calls; None if it calls a function or method.
    A leaky ReLU of slope 0 counts as a ReLU. Raises NotAChain for a leaky ReLU whose slope is negative, infinite or not a number.
    """
    if module is not None:
        return _build_leaky_relu(module.negative_slope) if type(module) is nn.LeakyReLU else _MODULES.get(type(module))
    if _is_relu_clamp(node):
        return RELU
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    if node.target in (functional.leaky_relu, functional.leaky_relu_):
        slope: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        return _build_leaky_relu(slope)
    return _FUNCTIONS.get(node.target)


def _is_relu_clamp(node: fx.Node) -> bool:
    """Return whether a node clamps a tensor to values of at least 0, without an upper limit."""
    if node.target not in _CLAMPS:
        return False
    low, high = (*node.args[1:], None, None)[:2]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    return isinstance(low, int | float) and low == 0 and high is None


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
    if isinstance(module, StochasticModule):
        raise NotAChain(
            f"{get_call_name(node)} draws random numbers during training, which the server does not know and closed forms would "
            "need"
        )
    called = type(module) if module is not None else node.target
    if called in _POOLING:
        function = module if module is not None else node.target
        return AveragePooling(function, arguments, keywords)  # type: ignore[arg-type]
    if called in _DROPOUT or (called in _FUNCTIONAL_DROPOUT and not _is_dropping(arguments, keywords)):
        return Reshape(shape[1:])
    if called in _FUNCTIONAL_DROPOUT:
        raise NotAChain("its code applies dropout in evaluation mode as well; pass training=self.training")
    if called == "squeeze" and not (arguments or keywords):
        raise NotAChain("its code calls squeeze without an axis, which also removes that of a single example; name the axis")
    if called in _SHAPING:
        function = module if module is not None else _SHAPING[called]
        output_shape = tuple(function(torch.empty(shape, device="meta"), *arguments, **keywords).shape)
        if not output_shape or output_shape[0] != shape[0]:
            raise NotAChain(
                f"{get_call_name(node)} changes the number of examples in a batch of shape {tuple(shape)}, and closed forms need "
                "one output for each example"
            )
        return Reshape(output_shape[1:])
    what = type(module).__name__ if module is not None else get_call_name(node)
    where = f"{get_call_name(node)} is {what}" if module is not None else f"its code calls {what}"
    raise NotAChain(f"{where}: {_explain_refusal(what)}")


def _is_dropping(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    return bool(arguments[1] if len(arguments) > 1 else keywords.get("training", keywords.get("train", True)))


_ARITHMETIC = frozenset(name for base in ("add", "sub", "mul", "truediv", "div", "neg") for name in (base, f"i{base}")) | {
    "subtract",
    "multiply",
    "divide",
    "true_divide",
    "negative",
}
_MODULES: dict[type[nn.Module], Activation] = {nn.ReLU: RELU, nn.Sigmoid: SIGMOID, nn.Tanh: TANH, nn.Identity: IDENTITY}
_METHODS = {"relu": RELU, "relu_": RELU, "sigmoid": SIGMOID, "sigmoid_": SIGMOID, "tanh": TANH, "tanh_": TANH}
_FUNCTIONS: dict[Any, Activation] = {
    **dict.fromkeys((functional.relu, functional.relu_, torch.relu, torch.relu_), RELU),
    **dict.fromkeys((functional.sigmoid, torch.sigmoid, torch.sigmoid_), SIGMOID),
    **dict.fromkeys((functional.tanh, torch.tanh, torch.tanh_), TANH),
}
_CLAMPS: set[Any] = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"}
_CLAMPS |= {getattr(torch, name) for name in _CLAMPS}
_POOLING: set[Any] = {nn.AvgPool2d, nn.AdaptiveAvgPool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d}
_DROPOUT: set[Any] = {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout}
_FUNCTIONAL_DROPOUT: set[Any] = {functional.dropout, functional.dropout2d, torch.dropout}
_SHAPING: dict[Any, Callable[..., Tensor]] = {
    nn.Flatten: torch.flatten,
    nn.Unflatten: Tensor.unflatten,
    torch.flatten: torch.flatten,
    torch.reshape: torch.reshape,
    torch.unsqueeze: torch.unsqueeze,
    **{name: getattr(Tensor, name) for name in ("flatten", "unflatten", "view", "reshape", "contiguous", "unsqueeze", "squeeze")},
}

_REASONS = {
    "maxpool": "its output does not show which of its inputs was the largest",
    "norm": "normalisation layers are not supported by closed forms",
    "softmax": "its outputs are probabilities, and logits are needed",
    "chunk": "it splits a tensor into several, and closed forms follow a single path",
    "conv": "the only convolution that closed forms support is torch.nn.Conv2d",
    "embedding": "it looks up whole numbers, such as tokens, for which there is no gradient",
    "long": "it turns inputs into whole numbers, such as tokens, for which there is no gradient",
    "linear": "the only linear layer that closed forms support is torch.nn.Linear",
}

_UNKNOWN = (
    "it is not a supported layer, activation or linear map; supported are Linear, Conv2d, average pooling, flatten and reshape, "
    "ReLU, leaky ReLU, sigmoid and tanh"
)


def _explain_refusal(name: str) -> str:
    plain = name.lower().replace("_", "")
    return next((why for part, why in _REASONS.items() if part in plain), _UNKNOWN)

"""A network as a chain of layers, the form that closed-form attacks such as R-GAP can invert layer by layer.

x[i + 1] = activation(after(weight * before(x[i]) + bias)), where * is a convolution or a matrix product, and `before` and `after`
are linear maps without weights, such as average pooling.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from attacker.attacks.networks.activations import IDENTITY, Activation
from attacker.attacks.networks.layers import Layer, read_convolution
from attacker.attacks.networks.traced import (
    Linear,
    NotAChain,
    are_reshapes,
    build_map,
    find_activation,
    find_kind,
    get_call_name,
    is_arithmetic,
    is_cast,
    is_log_softmax,
    is_move,
    is_normalisation,
    trace,
)

JOINING_OPERATIONS = ("add", "add_", "iadd", "cat", "concat")
"""Operations that join several paths. They are looked for first, so that the error for a residual network names them."""

BATCH_SIZE = 1_000_003
"""Batch size for shape inference: a prime that equals no other size in a network, so that the batch axis is recognised."""

OTHER_BATCH_SIZES = (1, 2)
"""Further batch sizes for which a network is read if its code used a size as a number; all must give the same chain."""


@dataclass(frozen=True)
class Chain:
    """A network as a sequence of layers from the input to the logits.

    A log-softmax of the logits at the end of the network is left out, since cross-entropy is the same with and without it.
    scales_inputs: whether the code computes with the inputs and constants before the first layer, such as x / 255, or reorders
                   their axes.
    """

    layers: tuple[Layer, ...]
    scales_inputs: bool = False

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.layers[0].inputs


def read_chain(model: nn.Module, shape: tuple[int, ...], *, one_dtype: bool = False, scaled_inputs: bool = False) -> Chain:
    """Return `model` in evaluation mode as a chain of layers, for inputs of `shape`; its weights may be on the meta device.

    one_dtype: whether the caller computes in a single floating dtype, so that conversions between such dtypes have no effect.
    scaled_inputs: whether the caller undoes what the code does with the inputs before the first layer (`Chain.scales_inputs`); if
    not, such code is refused.
    Raises NotAChain with the reason if the model is not a chain that closed forms support. Among the reasons are paths that join
    (residual networks), max pooling, normalisation, grouped convolutions, shared or computed weights, and code that cannot be
    traced.
    """
    chain, assumed = _read_for_batch(model, shape, BATCH_SIZE, one_dtype)
    if chain.scales_inputs and not scaled_inputs:
        raise NotAChain("its code scales the inputs before the first layer")
    for size in OTHER_BATCH_SIZES if assumed else ():
        if repr(_read_for_batch(model, shape, size, one_dtype)[0]) != repr(chain):
            raise NotAChain(
                "the network's code treats batches of different sizes differently, and closed forms need code that treats all "
                "sizes alike"
            )
    return chain


def _read_for_batch(model: nn.Module, shape: tuple[int, ...], batch: int, one_dtype: bool) -> tuple[Chain, bool]:
    """Return the chain that the model's code computes for `batch` examples, and whether the code used a size as a number."""
    reader = _ChainBuilder(model, shape, batch, one_dtype)
    graph, modules = trace(model, reader.read_size)
    reader.take_all(graph, modules)
    return reader.build_chain(), reader.assumed


def _explain_join(node: fx.Node) -> str:
    paths = len(node.all_input_nodes)
    return f"{get_call_name(node)} joins {paths} paths, as residual networks do, and a closed form follows a single one"


class _ChainBuilder:
    """The builder of a chain, which is passed the nodes of a traced network in order, also while it is being traced.

    last:    node of the path from the inputs that was taken last. shape: shape of its value, without batch axis.
    inputs:  shape of the input of the next layer. layers: found so far.
    pending: linear maps before the next layer. open: whether the last layer has no activation yet.
    shapes:  shapes of the values of nodes, with batch axis. sizes: values of nodes that read sizes.
    constants: for each node computed from tensors of the model alone, the name of such a tensor.
    taken:   number of nodes that were taken. assumed: whether the code used a size as a number.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...], batch: int, one_dtype: bool) -> None:
        self.modules, self.parameters = dict[str, nn.Module](), dict(model.named_parameters())
        self.shape = self.inputs = shape
        self.batch, self.one_dtype, self.taken, self.assumed = batch, one_dtype, 0, False
        self.last: fx.Node | None = None
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.sizes: dict[fx.Node, Any] = {}
        self.layers: list[Layer] = []
        self.pending: list[Linear] = []
        self.open = False
        self.constants: dict[fx.Node, str] = {}
        self.scales_inputs = False
        self.ends_in_log_softmax = False

    def read_size(self, node: fx.Node, modules: dict[str, nn.Module]) -> Any:
        """Return the value of a node that reads sizes, for `trace`.

        Raises TraceError if the node does something else, and NotAChain if a node before it is not supported.
        """
        if not _is_size(node):
            raise fx.proxy.TraceError(
                f"the network's code uses {node}, a value that depends on the input, as a number; decide only by sizes of tensors"
            )
        self.take_all(node.graph, modules)
        self.assumed = True
        return self.sizes[node]

    def take_all(self, graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
        """Take the nodes of the graph that were not taken yet. Raises NotAChain if one of them is not supported."""
        self.modules, nodes = modules, list(graph.nodes)[self.taken :]
        for node in nodes:
            self._find_constant(node)
            paths = [source_node for source_node in node.all_input_nodes if source_node not in self.constants]
            if get_call_name(node) in JOINING_OPERATIONS and len(paths) > 1 and not _is_size(node):
                raise NotAChain(_explain_join(node))
        for node in nodes:
            if node not in self.constants:
                self.take(node)
        self.taken += len(nodes)

    def take(self, node: fx.Node) -> None:
        if node.op == "output":
            if node.args[0] is not self.last:
                raise NotAChain("it returns something else than the output of its last layer; return only the logits")
            return
        if _is_size(node):
            try:
                self.sizes[node] = self._compute_value(node)
            except (TypeError, LookupError, ArithmeticError, RuntimeError) as error:
                raise NotAChain(
                    f"the network's code asks for a size that its inputs of shape {self.shape} do not have: {error}; correct its "
                    "forward method"
                ) from error
            return
        if node.op != "placeholder":
            self._read_node(node)
        self.last = node
        self.shapes[node] = torch.Size((self.batch, *self.shape))

    def build_chain(self) -> Chain:
        if not self.layers:
            raise NotAChain("it has no layer with weights")
        last = self.layers[-1]
        if self.pending or last.activation is not IDENTITY:
            raise NotAChain(
                f"the network applies the activation {last.activation.name} to the outputs of its last layer with weights, "
                f"{last.name}; return these outputs as logits without it"
            )
        if not are_reshapes(last.after):
            raise NotAChain(
                f"average pooling follows the network's last layer with weights, {last.name}, and closed forms need that layer's "
                "outputs as logits; pool before this layer"
            )
        if len(last.outputs) != 1:
            raise NotAChain(f"its last layer returns shape {last.outputs} per example, and logits are a vector")
        return Chain(tuple(self.layers), self.scales_inputs)

    def _find_constant(self, node: fx.Node) -> None:
        """Add the node, with the name of a tensor, to `constants` if it is a tensor of the model or computed from such alone."""
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            self.constants[node] = str(node.target)[2:]
        elif inputs and node.op != "output" and all(input_node in self.constants for input_node in inputs):
            self.constants[node] = self.constants[inputs[0]]
        elif is_cast(node) and node.args[0] in self.constants:  # to the device or dtype of another tensor
            self.constants[node] = self.constants[node.args[0]]  # type: ignore[index]

    def _read_node(self, node: fx.Node) -> None:
        names = [self.constants[source_node] for source_node in node.all_input_nodes if source_node in self.constants]
        module = self.modules[str(node.target)[2:]] if node.op == "call_module" else None
        if self.one_dtype and is_cast(node) and node.args[0] is self.last and self._has_floating_target(node):
            return
        if not self.layers and (is_arithmetic(node) or is_normalisation(module) or is_move(node)):
            self._add_scaling(node)
            return
        if self.layers and len(self.shape) == 1 and node.args[:1] == (self.last,) and is_log_softmax(node, module):
            self.ends_in_log_softmax = True
            return
        if self.ends_in_log_softmax:
            raise NotAChain(f"{get_call_name(node)} follows a log-softmax, and closed forms need it at the end of the network")
        if names:
            raise NotAChain(
                f"its code uses {names[0]} directly, and closed forms support only weights and biases that a torch.nn.Linear or "
                "torch.nn.Conv2d module itself applies, and constants before the first layer"
            )
        tensors = {a for a in node.all_input_nodes if a not in self.sizes}
        if len(tensors) > 1:
            raise NotAChain(_explain_join(node))
        if tensors != {self.last}:
            raise NotAChain(f"{get_call_name(node)} starts a second path through the network, and closed forms support only one")
        if find_kind(module) is not None:
            self._add_weighted(str(node.target)[2:], module)  # type: ignore[arg-type]
        elif (activation := find_activation(node, module)) is not None:
            self._add_activation(activation, node)
        else:
            self._add_linear(node, module)

    def _add_weighted(self, name: str, module: nn.Conv2d | nn.Linear) -> None:
        prefix, shown = f"{name}." if name else "", name or "the model"
        convolution: dict[str, Any] = read_convolution(shown, module) if isinstance(module, nn.Conv2d) else {}
        if isinstance(module, nn.Linear) and len(self.shape) != 1:
            raise NotAChain(f"{shown} takes inputs of shape {self.shape}, and linear layers are inverted only for vectors")
        if any(layer.weight == f"{prefix}weight" for layer in self.layers):
            raise NotAChain(f"{shown} is used twice, and its gradient is a sum of both uses")
        for parameter, value in (("weight", module.weight), ("bias", module.bias)):
            if value is not None and self.parameters.get(prefix + parameter) is not value:
                raise NotAChain(
                    f"the {parameter} of {shown} is shared with another layer, computed by a parametrisation such as weight "
                    "norm, or a buffer, and closed forms support none of these"
                )
        layer = Layer(
            name=name,
            weight=f"{prefix}weight",
            bias=f"{prefix}bias" if module.bias is not None else None,
            inputs=self.inputs,
            product_inputs=self.shape,
            product_outputs=(),
            outputs=(),
            shape=tuple(module.weight.shape),
            before=tuple(self.pending),
            **convolution,
        )
        x, weight = torch.empty(2, *self.shape, device="meta"), torch.empty(layer.shape, device="meta")
        product_shape = self._compute_shape(shown, lambda x: layer.apply_weight(x, weight), x)
        self.layers.append(replace(layer, product_outputs=product_shape, outputs=product_shape))
        self.pending, self.shape, self.inputs = [], product_shape, product_shape
        self.open = True

    def _add_scaling(self, node: fx.Node) -> None:
        """Record that the code computes with the inputs, value by value, before the first layer."""
        if [
            source_node
            for source_node in node.all_input_nodes
            if source_node not in self.constants and source_node not in self.sizes
        ] != [self.last]:
            raise NotAChain(_explain_join(node))
        if self.pending and not are_reshapes(self.pending):
            raise NotAChain(f"{get_call_name(node)} follows a pooling of the inputs, and closed forms support only one of both")
        if is_move(node):
            self._move_axes(node)
        self.scales_inputs = True

    def _move_axes(self, node: fx.Node) -> None:
        """Change `shape` as a node does that reorders the axes of the inputs."""
        values = fx.node.map_arg((node.args, dict(node.kwargs)), lambda a: self.sizes.get(a, a))
        x = torch.empty(self.batch, *self.shape, device="meta")
        function = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        try:
            moved_shape = tuple(function(x, *values[0][1:], **values[1]).shape)  # type: ignore[operator]
        except (TypeError, RuntimeError, IndexError) as error:
            raise NotAChain(f"{get_call_name(node)} fails on an input of shape {self.shape}: {error}") from error
        if moved_shape[0] != self.batch:
            raise NotAChain(f"{get_call_name(node)} moves the axis of the examples, and closed forms need it to be the first")
        self.shape = moved_shape[1:]

    def _has_floating_target(self, node: fx.Node) -> bool:
        """Return whether the tensors in the arguments of a cast, which may give a dtype, are parameters, which are floating."""
        return all(
            self.constants[source_node] in self.parameters
            for source_node in node.all_input_nodes
            if source_node in self.constants
        )

    def _add_activation(self, activation: Activation, node: fx.Node) -> None:
        if activation is IDENTITY:
            return
        if not self.layers or not self.open:
            raise NotAChain(
                f"{get_call_name(node)} follows no layer with weights, or one that has an activation already, so its input "
                "cannot be computed"
            )
        self.layers[-1] = replace(self.layers[-1], activation=activation)
        self.open = False

    def _add_linear(self, node: fx.Node, module: nn.Module | None) -> None:
        values = fx.node.map_arg((node.args, dict(node.kwargs)), lambda a: self.sizes.get(a, a))
        arguments = tuple(a for a in values[0] if not isinstance(a, fx.Node))
        keywords = {key: a for key, a in values[1].items() if not isinstance(a, fx.Node)}
        try:
            function = build_map(node, module, (self.batch, *self.shape), arguments, keywords)
        except (TypeError, RuntimeError, IndexError) as error:
            raise NotAChain(
                f"{get_call_name(node)} fails on an input of shape {self.shape}: {error}; correct the network or the shape of "
                "its inputs"
            ) from error
        x = torch.zeros(2, *self.shape)  # not on the meta device, on which adaptive pooling takes seconds to load
        self.shape = self._compute_shape(get_call_name(node), function, x)
        if self.layers and self.open:
            last = self.layers[-1]
            self.layers[-1] = replace(last, after=(*last.after, function), outputs=self.shape)
            self.inputs = self.shape
        else:
            self.pending.append(function)  # it belongs to the next layer, whose unknowns are its inputs

    def _compute_shape(self, name: str, function: Linear, x: Tensor) -> tuple[int, ...]:
        """Return the shape of one example after `function`, without batch axis.

        function: a linear map, or the product of a layer's inputs with its weight. x: a batch to which it is applied. name: of
        the module or call, for errors. Raises NotAChain if `function` fails or changes the size of the batch.
        """
        try:
            shape = tuple(function(x).shape)
        except (TypeError, RuntimeError, IndexError) as error:
            raise NotAChain(
                f"{name} fails on an input of shape {self.shape}: {error}; correct the network or the shape of its inputs"
            ) from error
        if not shape or shape[0] != len(x):
            raise NotAChain(
                f"{name} changes the number of examples in a batch of shape {tuple(x.shape)}, and closed forms need one output "
                "for each example"
            )
        return shape[1:]

    def _compute_value(self, node: fx.Node) -> Any:
        if node.op == "call_method" or node.target is getattr:
            x = torch.empty(self.shapes[node.args[0]], device="meta")  # type: ignore[index]
            if node.op == "call_function":
                return getattr(x, str(node.args[1]))
            return getattr(x, str(node.target))(*node.args[1:], **node.kwargs)
        if node.target is len and node.args[0] in self.shapes:
            return self.shapes[node.args[0]][0]  # type: ignore[index]
        values = fx.node.map_arg((node.args, dict(node.kwargs)), self.sizes.__getitem__)
        return node.target(*values[0], **values[1])  # type: ignore[operator]


def _is_size(node: fx.Node) -> bool:
    """Return whether a node reads shape, size, dtype or device of a tensor, or computes only with values read in this way."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "ndimension", "numel", "nelement")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    inputs = node.all_input_nodes
    return node.target is len or (
        getattr(node.target, "__module__", None) in ("_operator", "math") and bool(inputs) and all(map(_is_size, inputs))
    )

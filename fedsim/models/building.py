"""Construction of models from specifications. Code that a recording names is imported only if the user has allowed it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from defenses.networks import NetworkSpec, find_last_linear
from defenses.registry import bind_arguments, references
from fedsim.models.built_in import BUILT_IN, MODELS, ModelFactory
from fedsim.models.foreign import ModuleSpec, adapt
from fedsim.models.source_code import identify_code
from fedsim.models.vision import torchvision
from fedsim.recording.observation import DataSpec, ModelSpec

MAX_PARAMETERS = 2**31
"""Largest number of values of a model, parameters and buffers together."""

_ADMITTED: dict[str, ModelFactory] = {}
_CODE: dict[str, tuple[Callable[..., Any], str]] = {}
"""Dict from the name of a model to the function that was imported for it and the digest of its code at that time."""


def admit(reference: str, name: str | None = None) -> None:
    """Import the model function `module:function`, also from the current folder, and allow `build` to use it.

    `build` then accepts it under that reference and under `name`. The function or class takes `shape` and `num_classes` as
    keyword arguments, or only one of them, or both by position under other names, or neither; it returns a module. Its other
    arguments are those of the specification.
    Raises ValueError if it cannot be imported, or if `name` is the name of a built-in model.
    """
    if name in BUILT_IN:
        raise ValueError(
            f"the model {name!r} is built in and needs no code, so {reference} cannot be used under this name; leave it out, or "
            "choose another name"
        )
    function = references.admit(reference)
    if not callable(function):
        raise ValueError(f"{reference} is not a function or class, but of type {type(function).__name__}")
    known, code = _CODE.get(reference, (None, ""))
    if known is not function:  # editing the file after the import does not change the code that runs
        code = identify_code(function)
    for key in {reference, name or reference}:
        _ADMITTED[key] = _make_factory(function)
        _CODE[key] = (function, code)


def identify_network(spec: ModelSpec) -> str:
    """Return `module:name@digest`, which identifies the source code of a network; "" for a network of this project.

    Raises ValueError if the code is not part of this project and the user has not allowed it (`admit`).
    """
    if spec.name in _CODE:
        return _CODE[spec.name][1]
    return identify_code(_find_factory(spec.name))


def build(spec: ModelSpec, data: DataSpec, *, seed: int = 0) -> nn.Module:
    """Return the model with initial weights drawn from `seed`. PyTorch's global random state is not changed.

    For a `ModuleSpec`, the result is a copy of its network with the weights that it has, and `seed` has no effect.
    The argument `outputs` of a specification is the number of logits: one per class (the default), or 1 for two classes and the
    logistic loss.
    Raises ValueError if name, arguments or `data.shape` do not fit, or the model has more than `MAX_PARAMETERS` values.
    """
    build_layout(spec, data)
    return _draw_weights(spec, data, seed)


def build_layout(spec: ModelSpec, data: DataSpec) -> nn.Module:
    """Return the model without values, on the meta device: names, shapes and modules at little cost. Raises as `build` does.

    If the code of a model does not work on the meta device, the model is returned on the CPU, with values.
    """
    try:
        with torch.device("meta"):
            model = _call_factory(spec, data)
        _check_size(spec, model)
        outputs = _probe_outputs(spec, model, data, device="meta")
    except ValueError:
        raise
    except Exception as error:
        # NotImplementedError: an operation that the meta device lacks
        if spec.name in BUILT_IN and not isinstance(error, NotImplementedError):
            raise _make_misfit_error(spec, data, error) from error
        model = _draw_weights(spec, data, 0)
        _check_size(spec, model)
        try:
            outputs = _probe_outputs(spec, model, data, device="cpu")
        except Exception as late:
            raise _make_misfit_error(spec, data, late) from late
    _check_outputs(spec, outputs, data)
    return model


def find_head(model: nn.Module, data: DataSpec | None = None) -> tuple[str, str | None]:
    """Return the names of the weight and the bias of the last linear layer; None for a bias that is missing or no parameter.

    data: if given, only layers count whose number of outputs fits the number of classes. This matters for networks from outside
          this project, which may register their head before other linear layers, or have a convolution as their head.
    Raises ValueError if there is no such layer, or if its weight is another layer's as well, such as an embedding's: the
    gradient is then not that of the last layer alone.
    """
    name = find_last_linear(model, _list_output_counts(data) if data else None)
    prefix = f"{name}." if name else ""
    weight = model.get_submodule(name).weight
    if sum(any(own is weight for own in module._parameters.values()) for module in model.modules()) > 1:
        raise ValueError(f"the weight of the last linear layer, {prefix}weight, is shared with another layer")
    return f"{prefix}weight", f"{prefix}bias" if isinstance(model.get_submodule(name).bias, nn.Parameter) else None


def has_head(model: nn.Module, data: DataSpec) -> bool:
    """Return whether the network has a linear layer whose number of outputs fits the number of classes, see `find_head`."""
    try:
        find_head(model, data)
    except ValueError:
        return False
    return True


def list_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the persistent buffers of the model, such as batch-norm statistics."""
    saved = model.state_dict(keep_vars=True)
    return tuple(name for name, _ in model.named_buffers() if name in saved)


def _draw_weights(spec: ModelSpec, data: DataSpec, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            return _call_factory(spec, data)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"model {_shorten(spec)} cannot be built: {type(error).__name__}: {_read_first_line(error)}"
            ) from error


def _call_factory(spec: ModelSpec, data: DataSpec) -> nn.Module:
    if isinstance(spec, ModuleSpec):
        return spec.copy()
    factory = _find_factory(spec.name)
    given, outputs = dict(spec.arguments), data.num_classes
    if "outputs" in given and "outputs" not in inspect.signature(factory).parameters:
        outputs = given.pop("outputs")
        if isinstance(outputs, bool) or outputs not in _list_output_counts(data):
            raise ValueError(f"model {spec.name!r}: outputs must be one of {_list_output_counts(data)}, got {outputs!r}")
    bind_arguments(spec.name, factory, data.shape, outputs, given=given, hidden=2)
    model = factory(data.shape, outputs, **given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {spec.name!r} must return a torch.nn.Module, got {type(model).__name__}")
    return NetworkSpec.parse(spec.network).apply(model)


def _find_factory(name: str) -> ModelFactory:
    if name in _ADMITTED:
        return _ADMITTED[name]
    if references.is_admitted(name):
        admit(name)
        return _ADMITTED[name]
    if ":" in name:
        raise ValueError(
            f"model {name!r} is Python code that is not part of fedleak, and it is imported only with your permission: if you "
            f"trust it, repeat the command with --model {name}"
        )
    return MODELS[name]


def _make_factory(function: Callable[..., Any]) -> ModelFactory:
    """Wrap a user's `function` as a factory that takes `(shape, num_classes, **arguments)`.

    The network that it returns takes floats and returns logits (`foreign.adapt`).
    """
    named, plain = _find_public_parameters(function)

    def build_network(shape: tuple[int, ...], num_classes: int, **arguments: Any) -> nn.Module:
        public = {"shape": shape, "num_classes": num_classes}
        positional = (shape, num_classes) if plain else ()
        model: nn.Module = function(*positional, **{key: public[key] for key in named}, **arguments)
        return adapt(model, shape) if isinstance(model, nn.Module) else model

    return build_network


def _find_public_parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return which of shape and num_classes are names of parameters of a function, and whether it takes both by position.

    The function takes both by position if it has no parameter of these names and at least two positional parameters without a
    default.
    """
    parameters = inspect.signature(function).parameters
    named = [key for key in ("shape", "num_classes") if key in parameters]
    required = [
        key
        for key, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and key not in named
    ]
    return named, not named and len(required) >= 2


def _list_output_counts(data: DataSpec) -> tuple[int, ...]:
    return (1, 2) if data.num_classes == 2 else (data.num_classes,)


def _check_size(spec: ModelSpec, model: nn.Module) -> None:
    values = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if values > MAX_PARAMETERS:
        raise ValueError(
            f"model {_shorten(spec)} has {values:,} values in parameters and buffers, and the limit is {MAX_PARAMETERS:,}; make "
            "it smaller"
        )


def _probe_outputs(spec: ModelSpec, model: nn.Module, data: DataSpec, *, device: str) -> Any:
    """Return the number of logits per example, or text that describes the output if it is not a tensor (N, logits).

    The number is found by a forward pass, except for built-in networks other than `torchvision`: they check shapes themselves, so
    the number of rows of the last linear layer is enough. This saves the second that PyTorch's first forward pass takes.
    Raises ValueError if the network's `forward` needs more than one argument.
    """
    if spec.name in BUILT_IN and BUILT_IN[spec.name] is not torchvision:
        return dict(model.named_parameters())[find_head(model)[0]].shape[0]
    if len(needed := _list_inputs(model)) > 1:
        raise ValueError(
            f"model {_shorten(spec)} takes {len(needed)} inputs ({', '.join(needed)}), and attacks search for one input "
            "tensor; give a module whose forward takes one tensor and computes all inputs from it"
        )
    training = model.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        logits = model.eval()(torch.zeros(2, *data.shape, device=device))
    model.train(training)
    if not isinstance(logits, Tensor):
        return type(logits).__name__
    return logits.shape[1] if logits.ndim == 2 and len(logits) == 2 else f"{tuple(logits.shape)} for 2 examples"


def _list_inputs(model: nn.Module) -> list[str]:
    """Return the names of the positional arguments of the network's `forward` that have no default."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _check_outputs(spec: ModelSpec, outputs: Any, data: DataSpec) -> None:
    wanted = (spec.arguments["outputs"],) if "outputs" in spec.arguments else _list_output_counts(data)
    if outputs not in wanted:
        mend = (
            "; name a function whose network has the same weights and returns one tensor of logits, (N, K): (N, 1) in place of "
            "(N,), and the mean over all positions if it labels each pixel or word (docs/tutorials/flower-app.md)"
        )
        raise ValueError(
            f"model {_shorten(spec)} returns {outputs}, but {data.num_classes} classes need {' or '.join(map(str, wanted))} "
            f"logits per example{'' if isinstance(outputs, int) else mend}"
        )


def _make_misfit_error(spec: ModelSpec, data: DataSpec, error: Exception) -> ValueError:
    problem = _read_first_line(error)
    cast = (
        "; attacks compute in float32: where its forward casts inputs to another precision, let it take that of a weight, as in "
        "x.to(self.layer.weight.dtype)"
    )
    casts = "should be the same" in problem or "same dtype" in problem
    return ValueError(f"model {_shorten(spec)} does not fit inputs of shape {data.shape}: {problem}{cast if casts else ''}")


def _shorten(spec: ModelSpec) -> str:
    text = str(spec)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _read_first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]

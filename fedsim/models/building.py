"""Construction of models from specifications. Code that a recording names is imported only if the user has allowed it."""

import inspect
from collections.abc import Callable, Mapping
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn

from defenses.networks import NetworkSpec, find_last_linear
from defenses.registry import Registry, bind_arguments, references
from fedsim.models.foreign import ModuleSpec, adapt
from fedsim.models.imprint import STATISTICS, Imprint
from fedsim.models.lenet import lenet_cpl, lenet_dlg
from fedsim.models.mlp import mlp
from fedsim.models.resnet import resnet18, resnet20_4
from fedsim.models.rgap import cnn6, cnn6_d, fcn3
from fedsim.models.rog import lenet_rog, resnet9_rog, resnet18_rog, vgg7
from fedsim.models.source_code import identify_code
from fedsim.models.vision import torchvision
from fedsim.models.wide_head import WideHead
from fedsim.recording.observation import DataSpec, ModelSpec

ModelFactory = Callable[..., nn.Module]


def imprint(
    shape: tuple[int, ...],
    num_classes: int,
    base: str = "lenet_cpl",
    bins: int = 1024,
    statistic: str = "average",
    centre: float = 0.0,
    spread: float = 1.0,
) -> nn.Sequential:
    """Return a built-in model behind the imprint module of a malicious server (Fowl et al. 2022, "Robbing the Fed").

    base:           name of the built-in model; not imprint, torchvision or wide_head.
    bins:           number of neurons of the imprint module, from 2 to 65536.
    statistic:      what the neurons measure: average (of all normalised values) or cosine (a wave over the flattened image).
    centre, spread: location and scale of this statistic on public data of the same kind.
    Raises ValueError for other values.
    """
    network = _find_base("imprint", base)
    if isinstance(bins, bool) or not isinstance(bins, int) or not 2 <= bins <= MAX_BINS:
        raise ValueError(f"model imprint: bins must be a whole number from 2 to {MAX_BINS:,}, got {bins!r}")
    if statistic not in STATISTICS:
        raise ValueError(f"model imprint: statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}")
    if isinstance(centre, bool) or not isinstance(centre, int | float) or not isfinite(centre):
        raise ValueError(f"model imprint: centre must be a finite number, got {centre!r}")
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 < spread < float("inf"):
        raise ValueError(f"model imprint: spread must be a finite number above 0, got {spread!r}")
    module = Imprint(prod(shape), bins=bins, statistic=statistic, centre=centre, spread=spread)
    return nn.Sequential(module, network(shape, num_classes))


def wide_head(
    shape: tuple[int, ...],
    num_classes: int,
    base: str = "lenet_cpl",
    features: int = 128,
    neurons: int = 4096,
    activation: str = "",
) -> nn.Sequential:
    """Return a built-in model that ends with a wide layer of random Gaussian weights, as a server adds it (Liu et al. 2024).

    base:       name of the built-in model, which returns features instead of logits; not imprint, torchvision or wide_head.
    features:   number of features, from 1 to 65536.
    neurons:    number of neurons of the wide layer, from 1 to 1048576. The attack `feature_reconstruction` needs at least 4 per
                feature, which is not checked here.
    activation: argument of the base, if it has one; "" for its default.
    Raises ValueError for other values.
    """
    network = _find_base("wide_head", base)
    for name, count, limit in (("features", features, MAX_BINS), ("neurons", neurons, MAX_NEURONS)):
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= limit:
            raise ValueError(f"model wide_head: {name} must be a whole number from 1 to {limit:,}, got {count!r}")
    if activation and "activation" not in inspect.signature(network).parameters:
        raise ValueError(f"model wide_head: the base {base} has no argument activation; leave it out")
    own = {"activation": activation} if activation else {}
    return nn.Sequential(network(shape, features, **own), WideHead(features, num_classes, neurons=neurons))


MAX_BINS = 2**16
"""Largest number of neurons of an imprint module, and of features before a wide layer."""
MAX_NEURONS = 2**20
"""Largest number of neurons of a wide layer."""


def _find_base(name: str, base: str) -> ModelFactory:
    """Return the factory of the built-in model `base`, to which the model `name` adds layers.

    Raises ValueError if `base` is not a built-in model, or is imprint, torchvision or wide_head.
    """
    known = [other for other in BUILT_IN if other not in ("imprint", "torchvision", "wide_head")]
    if base not in known:
        raise ValueError(f"model {name}: base must be one of {', '.join(known)}, got {base!r}")
    return BUILT_IN[base]


BUILT_IN: Mapping[str, ModelFactory] = {
    "cnn6": cnn6,
    "cnn6_d": cnn6_d,
    "fcn3": fcn3,
    "imprint": imprint,
    "lenet_cpl": lenet_cpl,
    "lenet_dlg": lenet_dlg,
    "lenet_rog": lenet_rog,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18_rog": resnet18_rog,
    "resnet20_4": resnet20_4,
    "resnet9_rog": resnet9_rog,
    "torchvision": torchvision,
    "vgg7": vgg7,
    "wide_head": wide_head,
}

MODELS: Registry[ModelFactory] = Registry("fedsim.models", BUILT_IN)

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

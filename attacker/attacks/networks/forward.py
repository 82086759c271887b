"""A forward pass of a network with given weights, for inputs in any memory layout, and differentiable twice."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from fedsim.recording.observation import Observation


def run_forward_pass(model: nn.Module, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits (N, K) of `model` with weights and buffers `state` for normalised inputs x (N, *shape).

    Attacks store images channels last, batch problems with `vmap`, and need second derivatives. `Tensor.view`, hard sigmoids,
    fused attention and cuDNN's recurrent layers, which do not support this, are replaced by equivalents. Activation checkpointing
    is switched off. If `state` was converted to one floating dtype, the network's code computes in that dtype throughout: it
    converts nothing to the dtypes of the weights of `model`, and buffers that `state` lacks, such as frozen weights that are not
    saved, are converted as well.
    """
    dtype = _find_new_dtype(model, state)
    others = {} if dtype is None else _convert_buffers(model, state, dtype)
    with allow_double_backward(model), _AnyLayout(dtype):
        logits: Tensor = functional_call(model, {**others, **state}, (x,))
    return logits


def read_state(model: nn.Module, observation: Observation) -> dict[str, Tensor]:
    """Return the weights and buffers sent, or `model`'s own, by name; shared tensors once, as `functional_call` requires."""
    sent = {**observation.buffers, **observation.weights}
    return {name: sent.get(name, own) for name, own in (*model.named_buffers(), *model.named_parameters())}


@contextmanager
def record_calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Record the calls of modules within a `with` statement: a dict from a module's name to the input and output of each call.

    Modules that were not called are missing; the others are in the order of their first calls.
    """
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():
            hook = module.register_forward_hook(
                lambda _, inputs, output, n=name: seen.setdefault(n, []).append((inputs[0], output))
            )
            hooks.callback(hook.remove)
        yield seen


def list_linear(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a network by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def record_inputs(model: nn.Module, state: Mapping[str, Tensor], x: Tensor, *, layer: str) -> tuple[Tensor, Tensor]:
    """Return the inputs (N, F), flattened, of the last call of the module `layer` in a forward pass, and the logits (N, K)."""
    with record_calls({layer: model.get_submodule(layer)}) as seen:
        logits = run_forward_pass(model, state, x)
    return seen[layer][-1][0].flatten(1), logits


@contextmanager
def allow_double_backward(model: nn.Module) -> Iterator[None]:
    """Switch off fused attention, and cuDNN if the model has recurrent layers, within a `with` statement.

    These kernels of PyTorch have no second derivative.
    """
    with ExitStack() as chosen:
        chosen.enter_context(sdpa_kernel([SDPBackend.MATH]))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            chosen.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _find_new_dtype(model: nn.Module, state: Mapping[str, Tensor]) -> torch.dtype | None:
    """Return the floating dtype to which `state` was converted; None if there are several, or if it is the one of `model`."""
    state_dtypes = {t.dtype for t in state.values() if t.is_floating_point()}
    model_dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return state_dtypes.pop() if len(state_dtypes) == 1 and state_dtypes != model_dtypes else None


def _convert_buffers(model: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the floating-point buffers of `model` that are not in `state`, by name, in another dtype."""
    missing = {name: b for name, b in model.named_buffers() if name not in state and b.is_floating_point()}
    return {name: b.to(dtype) for name, b in missing.items()}


class _AnyLayout(TorchFunctionMode):
    """A mode in which `view` accepts tensors of any memory layout, and hard sigmoids can be differentiated twice.

    dtype: replaces all floating dtypes that the network's code names; None to replace none.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.dtype is not None:
            if func in _CONVERSIONS:
                return args[0].to(self.dtype)
            if func is not Tensor.view:  # it reads the bits as those of another dtype
                args, kwargs = tuple(map(self._replace_dtype, args)), {k: self._replace_dtype(v) for k, v in kwargs.items()}
        replaced = _REPLACED.get(func)
        return func(*args, **kwargs) if replaced is None else replaced(*args, **kwargs)

    def _replace_dtype(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


_CONVERSIONS = (Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16)


def _view(x: Tensor, *shape: Any, **keywords: Any) -> Tensor:
    try:
        return x.view(*shape, **keywords)
    except RuntimeError:
        if keywords or (shape and isinstance(shape[0], torch.dtype)):
            raise
        return x.reshape(*shape)  # still raises if the sizes do not match


def _hard_sigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Return the hard sigmoid, computed from elementary operations, since PyTorch's own has no second derivative."""
    output = (input + 3).clamp(0, 6) / 6
    return input.copy_(output) if inplace else output


_REPLACED: Mapping[Any, Any] = {
    Tensor.view: _view,
    Tensor.view_as: lambda x, other: _view(x, other.shape),
    functional.hardsigmoid: _hard_sigmoid,
}


def _is_attacked() -> bool:
    """Return whether the caller is called by a network in `run_forward_pass`."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, _AnyLayout) for mode in stack)


def _switch_off_checkpointing() -> None:
    """Make torch.utils.checkpoint call the functions that it is given directly, if it is called in `run_forward_pass`.

    Checkpointing saves memory and does not change values, but torch.func does not support it, and its reentrant version has no
    second derivatives. Inner functions of the module are replaced because networks import `checkpoint` by its name.
    """

    def call_plainly() -> Generator[None]:
        yield

    def skip_recomputation(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: call_plainly() if _is_attacked() else original(*args, **kwargs)

    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"):
        if hasattr(checkpoint, name):  # the second is not in all versions of PyTorch
            setattr(checkpoint, name, skip_recomputation(getattr(checkpoint, name)))
    reentrant = checkpoint.CheckpointFunction.apply

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args) if _is_attacked() else reentrant(function, preserve, *args)

    checkpoint.CheckpointFunction.apply = staticmethod(apply)


_switch_off_checkpointing()

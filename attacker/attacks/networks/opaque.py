"""A wrapper for functions that torch.func cannot transform: ordinary autograd differentiates them, and a loop replaces vmap."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
"""Maps tensors to tensors. Its outputs have an autograd graph if one of the inputs requires a gradient."""


def call_opaquely(function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `function(*tensors)`, also under `vmap` and `grad`, differentiable once by evaluating the function again."""
    outputs: tuple[Tensor, ...] = _Call.apply(function, *tensors)
    return outputs


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        with _allow_saved_tensors_hooks():
            return tuple(t.detach() for t in function(*(t.detach() for t in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        needed_inputs = tuple(ctx.needs_input_grad[1:])
        derivatives = iter(_Pullback.apply(ctx.function, needed_inputs, *ctx.saved_tensors, *slopes))
        return None, *(next(derivatives) if needed else None for needed in needed_inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Function, *tensors: Tensor) -> Any:
        rows = _split_rows(info.batch_size, in_dims[1:], tensors)
        return _stack_rows([_Call.apply(function, *row) for row in rows])


class _Pullback(torch.autograd.Function):
    """The vector-Jacobian product of a function: maps derivatives by the function's outputs to derivatives by some of its inputs.

    wanted: for each input, whether its derivative is returned.
    """

    @staticmethod
    def forward(function: Function, differentiated: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, slopes = tensors[: len(differentiated)], tensors[len(differentiated) :]
        with _allow_saved_tensors_hooks():
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_(needs) for t, needs in zip(inputs, differentiated, strict=True)]
                outputs = function(*leaves)
                pairs = [(o, s) for o, s in zip(outputs, slopes, strict=True) if o.requires_grad]
            needs = [leaf for leaf in leaves if leaf.requires_grad]
            if not pairs:
                return tuple(torch.zeros_like(leaf) for leaf in needs)
            return torch.autograd.grad([o for o, _ in pairs], needs, [s for _, s in pairs], materialize_grads=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        raise NotImplementedError(
            "second derivatives of a function that is called by call_opaquely are not supported; call the function itself"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Function, differentiated: tuple[bool, ...], *tensors: Tensor) -> Any:
        rows = _split_rows(info.batch_size, in_dims[2:], tensors)
        return _stack_rows([_Pullback.apply(function, differentiated, *row) for row in rows])


@contextmanager
def _allow_saved_tensors_hooks() -> Iterator[None]:
    """Allow hooks of saved tensors within a `with` statement.

    torch.func forbids them for its own tensors, but a wrapped function sees ordinary tensors.
    """
    reason = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if reason is None:
        yield
        return
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_disable(reason)


def _split_rows(count: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    pairs = list(zip(tensors, dims, strict=True))
    return [tuple(t if dim is None else t.select(dim, i) for t, dim in pairs) for i in range(count)]


def _stack_rows(rows: Sequence[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    columns = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    return columns, (0,) * len(columns)

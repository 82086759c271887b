"""Emulation of a second device without a GPU: its tensors compute on the CPU, but refuse operations with CPU tensors.

The rules are CUDA's: an operation takes tensors of one device, CPU tensors without dimensions excepted; a tensor on the device
may be indexed by one on the CPU, and not the other way round; a generator of the CPU draws on the CPU; `numpy()` needs `cpu()`
first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
"""Name of the emulated device; beside "cpu", it is the only one that PyTorch's dispatcher accepts everywhere."""
MOVES = {"_to_copy", "copy_"}
INDEXES = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}


class Elsewhere(Tensor):
    """A tensor on the second device; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=torch.device(NAME)
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"Elsewhere({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("cannot convert a tensor of the second device to numpy; copy it with cpu() first")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """A mode that handles `torch.tensor` and lists as indices, from which PyTorch makes tensors without dispatching.

    A vector times a matrix is computed as a matrix times a vector, as PyTorch changes the shape of the first's result in place,
    which a wrapper does not notice.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if function is torch.tensor and str(given.get("device")) == NAME:
            return function(*args, **given | {"device": "cpu"}).to(NAME)
        if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]), *args[2:])
        if function in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and [t.ndim for t in args] == [1, 2]:
            function, args = torch.mv, (args[1].mT, args[0])
        return function(*args, **given)


@contextmanager
def second_device() -> Iterator[str]:
    """Emulate the second device within the context; yields its name."""
    with _Factories(), _Mode():
        yield NAME


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, tensors = function.overloadpacket.__name__, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [t for t in tensors if isinstance(t, Elsewhere)]
    if any(t.device.type == NAME and not isinstance(t, Elsewhere) for t in tensors):
        raise RuntimeError(f"{function}: a tensor lost its values on the way to the second device: see `_Factories`")
    wanted = kwargs.get("device")
    on_device = bool(there) if wanted is None else torch.device(wanted).type == NAME
    if name not in MOVES:
        _check_devices(name, args, tensors)
    if kwargs.get("generator") is not None and on_device:
        raise RuntimeError(f"{function}: expected a generator of the second device, got one of the CPU")
    given: Callable[[Any], Any] = lambda value: value.inner if isinstance(value, Elsewhere) else value  # noqa: E731
    inner = tree_map(given, kwargs)
    if wanted is not None:
        inner["device"] = torch.device("cpu")
    result = function(*tree_map(given, args), **inner)
    if function._schema.is_mutable and isinstance(result, Tensor):
        return kwargs.get("out", args[0] if args else result)
    return tree_map(lambda value: Elsewhere(value) if on_device and isinstance(value, Tensor) else value, result)


def _check_devices(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    if name in INDEXES:
        tensors = [args[0], *(value for value in args[2:3] if isinstance(value, Tensor) and value.ndim)]
        elsewhere = any(isinstance(index, Elsewhere) for index in args[1])
        if elsewhere and not isinstance(args[0], Elsewhere):
            raise RuntimeError(f"{name}: a CPU tensor cannot be indexed by one of the second device")
    places = {isinstance(tensor, Elsewhere) for tensor in tensors if tensor.ndim}
    if len(places) > 1:
        shapes = ", ".join(f"{tuple(t.shape)} on {'the second device' if isinstance(t, Elsewhere) else 'cpu'}" for t in tensors)
        raise RuntimeError(f"{name}: expected all tensors on one device, got {shapes}")

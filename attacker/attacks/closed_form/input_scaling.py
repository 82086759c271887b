"""Scaling of the inputs in a network's code, such as x / 255 or (x - mean) / std, before the first layer of a chain."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.forward import record_calls, run_forward_pass
from attacker.attacks.networks.traced import NotAChain, are_reshapes
from fedsim.recording.observation import DataSpec

MAX_AFFINE_ERROR = 1e-4
"""Largest error, relative to the largest scale, at which the code counts as an affine function of each value."""
MIN_SCALE = 1e-3
"""Smallest scale of a value, relative to the largest one, that can be undone."""


@dataclass(frozen=True)
class InputScaling:
    """The affine map between an example x in [0, 1] and the input scale * x + shift of the first layer. Both are of one example.

    It consists of the normalisation in `DataSpec` and the scaling in the network's code.
    """

    scale: Tensor
    shift: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Return the first layer's inputs (..., *shape) for examples x (..., *shape)."""
        return x * self.scale.to(x) + self.shift.to(x)

    def undo(self, inputs: Tensor) -> Tensor:
        """Return the examples (..., *shape) for inputs (..., *shape) of the first layer, not clamped to [0, 1]."""
        return (inputs - self.shift.to(inputs)) / self.scale.to(inputs)

    def maps(self, x: Tensor, inputs: Tensor) -> bool:
        """Return whether `apply` maps an example to these inputs, up to `MAX_AFFINE_ERROR`; False if a value is NaN."""
        return float((self.apply(x) - inputs).abs().max()) <= MAX_AFFINE_ERROR * float(self.scale.abs().max())

    @property
    def is_invertible(self) -> bool:
        """Whether no scale is below `MIN_SCALE`, so that the code sets no value to a constant."""
        return float(self.scale.abs().min()) > MIN_SCALE * float(self.scale.abs().max())


def measure_scaling(model: nn.Module, state: Mapping[str, Tensor], chain: Chain, data: DataSpec) -> InputScaling:
    """Return the scaling of the inputs in the code of `model`, from the inputs of the first layer for three examples.

    state: weights and buffers by name. Raises NotAChain if the code does something else than scale and shift each value, sets
    values to constants, or fails.
    """
    first, shape = chain.layers[0], data.shape
    if not are_reshapes(first.before):
        raise NotAChain(
            "its code scales the inputs and pools them before the first layer, and closed forms support only one of both"
        )
    state = {name: t.double().detach() if t.is_floating_point() else t for name, t in state.items()}
    probe = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(next(iter(state.values())))
    try:
        with torch.no_grad(), record_calls({first.name: model.get_submodule(first.name)}) as seen:
            for x in (torch.zeros_like(probe), torch.ones_like(probe), probe):
                run_forward_pass(model, state, data.normalise(x[None]))
    except Exception as error:  # a user's network may fail in any way
        raise NotAChain(f"its code fails on an example of zeros or ones: {type(error).__name__}: {error}") from error
    low, high, middle = (given[0].reshape(shape) for given, _ in seen[first.name])
    scaling = InputScaling(high - low, low)
    if not scaling.maps(probe, middle):
        raise NotAChain("its code changes the inputs before the first layer, and not by a scale and a shift of each value")
    if not scaling.is_invertible:
        raise NotAChain("its code sets values of the inputs to constants, so that they cannot be computed from the first layer's")
    return scaling

"""Observations: all that an honest-but-curious server knows of one client in one round, and all that an attack is given.

Plain data without further attributes, so that nothing of a client's private data can be attached to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec
from defenses.networks import NetworkSpec
from defenses.spec import DefenseSpec
from fedsim.recording import codec
from fedsim.recording.training import Training

__all__ = ["Column", "DataSpec", "ModelSpec", "Observation", "Training"]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of an encoded table.

    continuous:  scaled to [0, 1]; `low` and `high` are the values at 0 and 1, in the column's own unit.
    categorical: one of several adjacent columns of the same `name`: 1 where the value is `category`, else 0.
    """

    name: str
    kind: Literal["continuous", "categorical"] = "continuous"
    low: float = 0.0
    high: float = 1.0
    category: str = ""

    def __post_init__(self) -> None:
        _check(self.kind in ("continuous", "categorical"), f"column {self.name!r}: unknown kind {self.kind!r}")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Public shape of the data: images (C, H, W) or table rows (F,), with values in [0, 1].

    mean, std: normalisation of the model's input, one value a channel (images) or one for all (rows).
    columns:   for tables, one entry a feature.
    ranges_from: source of ranges and categories of `columns`: public knowledge, held-out rows that no client holds, or the rows
    of
               all clients, whose extremes and rare values then are public; "" where unknown.
    """

    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    columns: tuple[Column, ...] = ()
    ranges_from: Literal["", "public", "held_out", "clients"] = ""

    def __post_init__(self) -> None:
        _check(len(self.shape) in (1, 3), f"data shape must be (C, H, W) or (F,), got {self.shape}")
        _check(all(size > 0 for size in self.shape), f"data shape must be positive, got {self.shape}")
        _check(self.num_classes > 1, f"num_classes must be at least 2, got {self.num_classes}")
        widths = (1, self.shape[0]) if self.is_image else (1,)
        _check(len(self.mean) == len(self.std) and len(self.mean) in widths, f"mean and std must have {widths} entries")
        _check(all(value > 0 for value in self.std), f"std must be positive, got {self.std}")
        _check(len(self.columns) in (0, self.shape[0]), f"{len(self.columns)} columns for {self.shape[0]} features")
        known = ("", "public", "held_out", "clients")
        _check(self.ranges_from in known, f"unknown data.ranges_from {self.ranges_from!r}. Known: {', '.join(known[1:])}")

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    @property
    def size(self) -> int:
        """Number of values of one example."""
        return prod(self.shape)

    def _per_channel(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        tensor = torch.tensor(values, dtype=like.dtype, device=like.device)
        return tensor[:, None, None] if self.is_image else tensor

    def normalise(self, x: Tensor) -> Tensor:
        """Map x of values in [0, 1], shape (..., *shape), to the input of the model."""
        return (x - self._per_channel(self.mean, x)) / self._per_channel(self.std, x)

    def denormalise(self, x: Tensor) -> Tensor:
        """Map the input of the model back to values in [0, 1]; the inverse of `normalise`."""
        return x * self._per_channel(self.std, x) + self._per_channel(self.mean, x)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The public architecture, by name. `fedsim.models` builds it; code outside of this project is imported only if admitted.

    network: specification of a defense that changes the model, such as "precode(bottleneck=256)"; "" for none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    network: str = ""

    def __post_init__(self) -> None:
        NetworkSpec.parse(self.network)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.arguments.items())})" if self.arguments else self.name


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All that an honest-but-curious server knows of one client in one round.

    round:        communication round, counted from 1.
    client:       pseudonym that the client sent, or Flower's node id where it sent none.
    cohort:       clients of that round, this one included.
    num_examples: number of examples behind the update, each counted once an epoch. It follows from what the client reports and
                  the prescribed training (`Training.examples_behind`); None where the client reports nothing.
    weights:      what the server sent to the client, by name.
    payload:      the client's message.
    gradient, inputs: specifications of how clients compute gradients and change their examples, beside `defenses`.
    buffers:      what the server sent beside the weights; empty where the model has none, or they are not shared.
    buffers_after: the buffers that the client sent back after its training.
    metrics:      what the client reported without protection.
    update:       local minus global weights, by name, decoded from the payload.
    sent:         mask of the coordinates that were sent, by name, where the codec tells.
    rounding:     bound on the rounding error of `update`, by name, where clients send weights instead of updates; else empty.
    """

    round: int
    client: str
    cohort: tuple[str, ...]
    num_examples: int | None
    model: ModelSpec
    data: DataSpec
    training: Training
    defenses: DefenseSpec
    gradient: GradientSpec = field(default_factory=GradientSpec)
    inputs: InputsSpec = field(default_factory=InputsSpec)
    weights: Mapping[str, Tensor]
    payload: codec.Payload
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    buffers_after: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identifier of this observation within its recording."""
        return f"{self.round:05d}-{self.client}"

    @cached_property
    def update(self) -> Mapping[str, Tensor]:
        return codec.decode(self.payload, self.weights)

    @cached_property
    def sent(self) -> Mapping[str, Tensor]:
        return codec.sent(self.payload, self.weights)

    @cached_property
    def rounding(self) -> Mapping[str, Tensor]:
        """Bound on the rounding error of each coordinate of `update`, where a client sends weights instead of the update.

        It is half the gap between neighbouring floating-point numbers at the larger of the weights sent and sent back, for each
        step.
        What a client computes from rounded weights counts as its training, not as an error.
        """
        if self.payload.codec != "weights":
            return {}
        an_epoch = max(1, -(-(self.num_examples or 1) // self.training.step_size))
        steps = self.training.steps or an_epoch * (self.training.epochs or 1)
        return {
            name: steps * _half_gap(torch.maximum(w.abs(), self.weights[name].to(w.dtype).abs()))
            for name, w in self.payload.tensors.items()
            if w.is_floating_point()
        }


def _half_gap(magnitude: Tensor) -> Tensor:
    return (torch.nextafter(magnitude, torch.full_like(magnitude, float("inf"))) - magnitude) / 2

"""Observations: what an honest-but-curious server knows about one client in one round, the input of attacks.

The classes are plain data. They have no field for the examples that a client trained on.
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
from fedsim.recording.field_types import adopt_types
from fedsim.recording.training import Training, require


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the model's input for table data.

    Continuous: the value, scaled so that `low` becomes 0 and `high` becomes 1; both are in the column's own unit.
    Categorical: one of several adjacent columns with the same `name`, which is 1 if the value is `category`, and else 0.
    """

    name: str
    kind: Literal["continuous", "categorical"] = "continuous"
    low: float = 0.0
    high: float = 1.0
    category: str = ""

    def __post_init__(self) -> None:
        adopt_types(self, "column.")
        require(self.kind in ("continuous", "categorical"), f"column {self.name!r}: unknown kind {self.kind!r}")


MIN_SIDE = 8
"""Smallest number of rows and columns of an image whose last dimension is taken for channels."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The public specification of the data: images (C, H, W) or table rows (F,), with values in [0, 1] before normalisation.

    mean, std: normalisation of the model's input, (x - mean) / std: one value for all, or one per channel or table column. For a
               column that clients standardise, state (its mean - low) / (high - low) and its deviation / (high - low), where low
               and high are the ends of its range.
    columns:   for tables, one entry per column of the model's input; may be empty.
    ranges_from: source of the ranges and categories of `columns`: "public" knowledge, "held_out" rows that no client holds, or
               the rows of all "clients", which reveals their extremes and rare values to everybody; "" if unknown.
    Raises ValueError for values that are out of range or do not fit `shape`.
    """

    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    columns: tuple[Column, ...] = ()
    ranges_from: Literal["", "public", "held_out", "clients"] = ""

    def __post_init__(self) -> None:
        adopt_types(self, "data.")
        require(
            len(self.shape) in (1, 3),
            f"data shape must be (C, H, W) or (F,), got {self.shape}; for other examples, such as volumes or sequences, name a "
            "function whose network has the same weights and reshapes its input",
        )
        require(all(size > 0 for size in self.shape), f"data shape must be positive, got {self.shape}")
        require(self.num_classes > 1, f"num_classes must be at least 2, also for a single output, got {self.num_classes}")
        parts = f"channel of the shape {self.shape}, read as (C, H, W)" if self.is_image else f"column of the shape {self.shape}"
        require(
            len(self.mean) == len(self.std) and len(self.mean) in (1, self.shape[0]),
            f"mean and std must have 1 or {self.shape[0]} entries, one for each {parts}; got {len(self.mean)} and "
            f"{len(self.std)}",
        )
        require(all(value > 0 for value in self.std), f"std must be positive, got {self.std}")
        require(len(self.columns) in (0, self.shape[0]), f"{len(self.columns)} columns for {self.shape[0]} features")
        known = ("", "public", "held_out", "clients")
        require(self.ranges_from in known, f"unknown data.ranges_from {self.ranges_from!r}. Known: {', '.join(known[1:])}")

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    @property
    def size(self) -> int:
        """Return the number of values of one example."""
        return prod(self.shape)

    def list_doubts(self) -> list[str]:
        """Return a list with a warning if the shape looks like (H, W, C) in place of (C, H, W); otherwise empty."""
        if not self.is_image or self.shape[2] not in (1, 3, 4) or min(self.shape[:2]) < MIN_SIDE:
            return []
        c, h, w = self.shape
        return [
            f"the shape {self.shape} is read as {c} channels of {h} x {w} values; if the channels come last, state "
            f"({w}, {c}, {h}) and name a network that moves them: class First(Net): def forward(self, x): return "
            "super().forward(x.permute(0, 2, 3, 1))"
        ]

    def _to_channels(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        tensor = torch.tensor(values, dtype=like.dtype, device=like.device)
        return tensor[:, None, None] if self.is_image else tensor

    def normalise(self, x: Tensor) -> Tensor:
        """Return the model's input, (x - mean) / std, for examples x (..., *shape) with values in [0, 1]."""
        return (x - self._to_channels(self.mean, x)) / self._to_channels(self.std, x)

    def denormalise(self, x: Tensor) -> Tensor:
        """Return the examples, x * std + mean, for a model's input x (..., *shape). Values outside [0, 1] are not clamped."""
        return x * self._to_channels(self.std, x) + self._to_channels(self.mean, x)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The name and arguments of the model's architecture, from which `fedsim.models` builds it. They are public.

    network: specification of a defense that changes the architecture, such as "precode(bottleneck=256)"; "" for none. Raises
             ValueError if it is invalid.
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
    """What an honest-but-curious server knows about one client in one round, or about the round's secure sum.

    The secure sum is what the server learns under secure aggregation: the mean of the updates of all clients in the sum.

    round:        1-based communication round.
    client:       pseudonym that the client sent, or Flower's node id if it sent none; "sum" for the secure sum.
    cohort:       the clients that were asked in that round, including this one; for the secure sum, the clients in it.
    num_examples: number of distinct examples behind the update, derived from the client's report and the prescribed training
                  (`Training.count_examples`); for the secure sum, the total over its clients; None if unknown.
    model, data, training: the network, the data and the local training, with the learning rate of that round.
    weights:      weights that the server sent, by name, in float32.
    payload:      the update as sent, in packed form.
    defenses:     defenses that clients apply to their updates. gradient, inputs: defenses that change how clients compute
                  gradients and prepare examples.
    buffers:      buffers that the server sent with the weights; empty if it sent none.
    buffers_after: buffers that the client sent back after its training; empty if it sent none.
    metrics:      numbers that the client reported, unencrypted.
    update:       local minus global weights by name, as decoded from the payload, so after the defenses; in float32.
    sent:         boolean mask of the sent coordinates by name; empty if the codec always sends all of them.
    rounding:     estimated rounding error of `update` by name, if clients send whole weights; else empty.
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
        """Return a text that identifies this observation within its recording: round and client, such as "00003-anna"."""
        return f"{self.round:05d}-{self.client}"

    @property
    def is_defended(self) -> bool:
        """Return whether clients defend their updates or change how they compute gradients.

        Defenses of the network and of the examples (`inputs`) are not considered.
        """
        return bool(self.defenses.steps or self.gradient.step)

    @cached_property
    def update(self) -> Mapping[str, Tensor]:
        return convert_to_float32(codec.decode(self.payload, self.weights))

    @cached_property
    def sent(self) -> Mapping[str, Tensor]:
        return codec.find_sent(self.payload, self.weights)

    @cached_property
    def rounding(self) -> Mapping[str, Tensor]:
        """Return an estimate of the largest rounding error of each coordinate of `update`, by name.

        It is empty unless clients send whole weights. The clients are then assumed to round their weights once per local step,
        each time by at most half the gap between neighbouring floating point numbers, taken at the larger magnitude of the weight
        before and after training. The estimate is the number of steps times this half gap. If `num_examples` is unknown, one step
        per epoch is assumed.
        """
        if self.payload.codec != "weights":
            return {}
        an_epoch = max(1, -(-(self.num_examples or 1) // self.training.step_size))
        steps = self.training.steps or an_epoch * (self.training.epochs or 1)
        return {
            name: steps * _compute_half_gap(torch.maximum(w.abs(), self.weights[name].to(w.dtype).abs()))
            for name, w in self.payload.tensors.items()
            if w.is_floating_point()
        }


def convert_to_float32(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors by name, those of floating point in float32, in which attacks compute.

    If nothing changes, `tensors` itself is returned, so that observations of a round share the weights that were sent.
    """
    if all(t.dtype is torch.float32 for t in tensors.values() if t.is_floating_point()):
        return tensors
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def _compute_half_gap(magnitude: Tensor) -> Tensor:
    """Return half the distance from each value to the next larger floating point number of its type."""
    return (torch.nextafter(magnitude, torch.full_like(magnitude, float("inf"))) - magnitude) / 2

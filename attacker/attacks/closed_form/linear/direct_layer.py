"""Example of an update from the gradient of a linear layer that sees it directly, whatever the rest of the network is.

For one example, the gradient of the layer's weight is gb h^T with the gradient gb of the bias, so that a division gives the
layer's input h. The example x follows from it if h is the flattened x, or x after a normalisation value by value in the network's
code.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.layer_input import InputRecorder, infer_case_labels
from attacker.attacks.closed_form.linear.single_example import ZERO_BIAS, divide_rows
from attacker.attacks.closed_form.observations import StackedObservations

MAX_AFFINE_ERROR = 1e-4
"""Largest error, relative to the largest scale, at which a layer's input counts as an affine function of the example."""
MIN_SCALE = 1e-3
"""Smallest scale of a value, relative to the largest one; the layer does not see a value with a smaller one."""
MAX_TRIED_LABELS = 100
"""Largest number of classes that are tried one by one; with more, the label is inferred from the last layer."""


@dataclass(frozen=True, kw_only=True)
class DirectLayer:
    """A linear layer with a bias whose input is scale * x + shift, value by value, for the flattened example x in [0, 1].

    name: of the layer. scale, shift: (F,).
    """

    name: str
    scale: Tensor
    shift: Tensor

    @property
    def parameters(self) -> tuple[str, str]:
        """Return the names of weight and bias."""
        return f"{self.name}.weight", f"{self.name}.bias"


@dataclass(frozen=True, kw_only=True)
class DirectAnswer:
    """The example x (1, *shape) of a case, its label y (1,), and a certainty in [0, 1]. Without an answer, x and y are empty."""

    x: Tensor
    y: Tensor
    certainty: Tensor
    notes: tuple[str, ...]


def find_direct_layer(observed: StackedObservations, i: int) -> DirectLayer | None:
    """Return the first linear layer that sees the example of case i directly (see `DirectLayer`); None if there is none.

    The layer is found by forward passes of three examples, one by one, at the weights and buffers that the server sent. None also
    if the network fails in one of them.
    """
    passed, data = InputRecorder(observed, i), observed.data
    probe = torch.rand(data.shape, generator=torch.Generator().manual_seed(0)).to(observed.device)
    try:
        low, high, middle = (passed.record_inputs(x) for x in (torch.zeros_like(probe), torch.ones_like(probe), probe))
    except Exception:  # a user's network may fail in any way, which the search reports
        return None
    for name in low:
        shift = low[name].detach()
        usable = {f"{name}.weight", f"{name}.bias"} <= observed.gradient.keys() - observed.omitted
        if not usable or len(shift) != data.size or name not in high or name not in middle:
            continue
        scale = high[name].detach() - shift
        largest, error = scale.abs().max(), (scale * probe.flatten() + shift - middle[name].detach()).abs().max()
        if scale.abs().min() > MIN_SCALE * largest and error <= MAX_AFFINE_ERROR * largest:
            return DirectLayer(name=name, scale=scale, shift=shift)
    return None


def divide(observed: StackedObservations, layer: DirectLayer, i: int, rng: Generator) -> DirectAnswer:
    """Return the only example of case i, from the gradient of a layer that sees it directly, and its label.

    The label is the one whose simulated gradient fits best or, with many classes, inferred from the last layer.
    """
    weight, bias = (observed.gradient[name][i] for name in layer.parameters)
    if not bool(bias.any()):
        none = torch.zeros(0, *observed.data.shape)
        return DirectAnswer(x=none, y=torch.zeros(0, dtype=torch.long), certainty=torch.zeros(()), notes=(ZERO_BIAS,))
    rows = torch.cat([weight, bias[:, None]], dim=1)
    h, certainty, note = divide_rows(rows / rows.abs().amax())
    x = ((h - layer.shift) / layer.scale).reshape(1, *observed.data.shape)
    return DirectAnswer(x=x, y=choose_label(observed, x, i, rng), certainty=certainty, notes=(note,) if note else ())


def choose_label(observed: StackedObservations, x: Tensor, i: int, rng: Generator) -> Tensor:
    """Return the label (1,) of the only example x (1, *shape) of case i.

    It is the one that fits best or, with many classes, inferred from the last layer.
    """
    if observed.cases[i].known_labels is not None or observed.data.num_classes > MAX_TRIED_LABELS:
        return infer_case_labels(observed, i, rng).to(x.device)
    missed = [observed.measure_misfit(i, x, torch.tensor([label])) for label in range(observed.data.num_classes)]
    return torch.tensor([missed.index(min(missed))], device=x.device)

"""Examples of an update from the gradient of a linear layer that sees them directly, whatever the rest of the network is.

For one example, the gradient of the layer's weight is gb h^T with the gradient gb of the bias, so that a division gives the
layer's input h. The inputs of several examples are separated by the zeros that a ReLU behind the layer causes (`first_layer`).
The example x follows from h if this is the flattened x, or x after a normalisation value by value in the network's code.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.input_scaling import InputScaling
from attacker.attacks.closed_form.layer_input import InputRecorder, infer_case_labels
from attacker.attacks.closed_form.linear.first_layer import recover_from_layer
from attacker.attacks.closed_form.linear.layer_gradient import LayerGradient
from attacker.attacks.closed_form.linear.single_example import SINGLE_NEURON_CERTAINTY, ZERO_BIAS, divide_rows
from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations
from attacker.attacks.networks.activations import RELU
from attacker.attacks.networks.layers import Layer
from fedsim.recording.observation import DataSpec

MAX_TRIED_LABELS = 100
"""Largest number of classes that are tried one by one; with more, the label is inferred from the last layer."""
NOTHING_DIRECT = "the gradient of the only linear layer that sees the examples does not separate them"
MAX_LABEL_TRIALS = 400
"""Largest number of examples times classes at which the labels of a batch are corrected one by one."""
MAX_TURNED = 1e-3
"""Largest distance of unit vectors at which an example's part of the gradient counts as that of a label."""
MAX_WHOLE_DISTANCE = 1e-3
"""Largest distance of a complete batch's gradient from the observed one, relative to its norm, that shows the batch right."""
MAX_KNOWN_ERROR = 1e-3
"""Largest unexplained share of a neuron's gradient at which the neuron is used to choose the labels of the examples found."""


@dataclass(frozen=True, kw_only=True)
class DirectLayer:
    """A linear layer with a bias whose input is the flattened example in [0, 1], scaled and shifted value by value."""

    name: str
    scaling: InputScaling

    @property
    def parameters(self) -> tuple[str, str]:
        """Return the names of weight and bias."""
        return f"{self.name}.weight", f"{self.name}.bias"

    def restore_examples(self, inputs: Tensor, data: DataSpec) -> Tensor:
        """Return the examples (N, *shape) for inputs (N, F) of the layer."""
        return self.scaling.undo(inputs).reshape(-1, *data.shape)

    def get_range(self) -> tuple[Tensor, Tensor]:
        """Return the inputs (F,) of the layer for examples of zeros and of ones."""
        return self.scaling.shift, self.scaling.scale + self.scaling.shift


def find_direct_layer(observed: StackedObservations, i: int) -> DirectLayer | None:
    """Return the first linear layer that sees the example of case i directly (see `DirectLayer`); None if there is none.

    The layer is found by forward passes of three examples, one by one, at the weights and buffers that the server sent. None also
    if the network fails in one of them. For a batch, a pass has two copies of the example.
    """
    network, data = InputRecorder(observed, i, copies=1 if observed.examples == 1 else 2), observed.data
    probe = torch.rand(data.shape, generator=torch.Generator().manual_seed(0)).to(observed.device)
    try:
        low, high, middle = (network.record_inputs(x) for x in (torch.zeros_like(probe), torch.ones_like(probe), probe))
    except Exception:  # a user's network may fail in any way, which the search reports
        return None
    for name in low:
        shift = low[name].detach()
        usable = {f"{name}.weight", f"{name}.bias"} <= observed.gradient.keys() - observed.omitted
        if not usable or len(shift) != data.size or name not in high or name not in middle:
            continue
        scaling = InputScaling(high[name].detach() - shift, shift)
        if scaling.is_invertible and scaling.maps(probe.flatten(), middle[name].detach()):
            return DirectLayer(name=name, scaling=scaling)
    return None


def is_followed_by_relu(observed: StackedObservations, layer: DirectLayer) -> bool:
    """Return whether the loss of an example does not depend on the layer's outputs where these are negative.

    Tested on random examples; False also if the network fails, or if no output is negative.
    """
    x = torch.rand(4, *observed.data.shape, generator=torch.Generator().manual_seed(0)).to(observed.device, observed.dtype)
    weight, bias = (observed.get_weights(0)[name] for name in layer.parameters)
    z = layer.scaling.apply(x.flatten(1)) @ weight.T + bias
    try:
        used = (observed.differentiate_outputs(layer.name, x) != 0).any(dim=0)
    except Exception:  # a user's network may fail in any way
        return False
    return used.shape == z.shape and bool(used.any()) and bool((z < 0).any()) and not bool((used & (z < 0)).any())


def recover_direct_example(observed: StackedObservations, layer: DirectLayer, i: int, rng: Generator) -> ClosedFormAnswer:
    """Return the only example of case i, from the gradient of a layer that sees it directly, and its label.

    The label is the one whose simulated gradient fits best or, with many classes, inferred from the last layer. The certainty of
    the example is in `ClosedFormAnswer.stays`.
    """
    weight, bias = (observed.gradient[name][i] for name in layer.parameters)
    if not bool(bias.any()):
        return ClosedFormAnswer.without_examples(observed.data, "linear", ZERO_BIAS)
    rows = torch.cat([weight, bias[:, None]], dim=1)
    h, certainty, note = divide_rows(rows / rows.abs().amax())
    x = layer.restore_examples(h[None], observed.data)
    y = choose_label(observed, x, i, rng)
    return ClosedFormAnswer(x, y, "linear", notes=(note,) if note else (), stays=certainty[None])


def recover_direct_batch(observed: StackedObservations, layer: DirectLayer, i: int, rng: Generator) -> ClosedFormAnswer:
    """Return the examples of a batch, case i, that the gradient of a layer followed by ReLU separates, and their labels.

    An example that is computed from a single neuron counts only if it has the values of an 8-bit image. The certainties of the
    examples are in `ClosedFormAnswer.stays`, NaN for possible mixtures.
    """
    weight, bias = layer.parameters
    wide = observed.gradient[bias][i].shape
    narrow = any(w.ndim > 2 and w.shape[1] <= 2 for w in observed.weights.values())
    size, ends = (observed.data.size,), layer.get_range()
    gradient = LayerGradient(
        Layer(
            name=layer.name, weight=weight, bias=bias, inputs=size, product_inputs=size, product_outputs=wide, outputs=wide,
            shape=(*wide, *size), activation=RELU,
        ),
        observed.get_weights(i),
        {name: observed.gradient[name][i] for name in layer.parameters},
        (torch.minimum(*ends).reshape(observed.data.shape), torch.maximum(*ends).reshape(observed.data.shape)),
        uniform=narrow,
        shares_direction=narrow,
    )  # fmt: skip
    recovered = recover_from_layer(gradient, observed.examples, rng)
    kept = (recovered.certainty > SINGLE_NEURON_CERTAINTY) | gradient.is_eight_bit(recovered.x)
    if not bool(kept.any()):
        return ClosedFormAnswer.without_examples(observed.data, "linear", recovered.note or NOTHING_DIRECT)
    inputs = recovered.x[kept]
    x = layer.restore_examples(inputs, observed.data)
    y, explained = _choose_labels(observed, layer, x, _solve_output_gradients(gradient.rows, inputs))
    y, missed = _correct_labels(observed, i, x, y)
    certain = explained | gradient.is_eight_bit(inputs) | (missed <= MAX_WHOLE_DISTANCE)
    certainty = recovered.certainty[kept].masked_fill(~certain, torch.nan)
    return ClosedFormAnswer(x, y, "linear", notes=(recovered.note,) if recovered.note else (), stays=certainty)


def _solve_output_gradients(rows: Tensor, inputs: Tensor) -> Tensor:
    """Return each example's part of the gradient at the outputs, (N, M); NaN for neurons that unknown examples turn on."""
    augmented = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    parts: Tensor = rows @ torch.linalg.pinv(augmented)
    missed = (rows - parts @ augmented).norm(dim=1) > MAX_KNOWN_ERROR * rows.norm(dim=1)
    return parts.T.masked_fill(missed, torch.nan)


def _choose_labels(observed: StackedObservations, layer: DirectLayer, x: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels (N,) whose gradients are most similar in direction to `gradients` (N, M), and a mask of those that agree.

    A gradient agrees with a label if it is parallel to the label's gradient, up to MAX_TURNED, and if the gradients of the labels
    are not all parallel, as they are at neurons whose outputs the network adds up. None agrees if the network fails.
    """
    y, explained = (torch.zeros(len(x), dtype=kind, device=x.device) for kind in (torch.long, torch.bool))
    try:
        every = observed.differentiate_outputs(layer.name, x)
    except Exception:  # a user's network may fail in any way, such as at batch normalisation of one example
        return y, explained
    for k, part in enumerate(gradients):
        known = ~part.isnan()
        of_labels, part_known = every[:, k, known], part[known]
        units = torch.nn.functional.normalize(of_labels, dim=1)
        gaps = (units - part_known / part_known.norm().clamp(min=1e-300)).norm(dim=1)
        y[k] = gaps.argmin()
        values = torch.linalg.svdvals(of_labels)
        varied = len(values) > 1 and float(values[1]) > MAX_TURNED * float(values[0])
        explained[k] = varied and float(gaps.min()) <= MAX_TURNED
    return y, explained


def _correct_labels(observed: StackedObservations, i: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return labels (N,) that are changed one by one as long as the gradient fits better, and its distance, see `measure_misfit`.

    They are unchanged if x (N, *shape) is not the complete batch, or if there are more than MAX_LABEL_TRIALS changes.
    """
    missed = observed.measure_misfit(i, x, y)
    if len(x) != observed.examples or len(x) * observed.data.num_classes > MAX_LABEL_TRIALS:
        return y, missed
    for at, label in product(range(len(x)), range(observed.data.num_classes)):
        if missed <= MAX_WHOLE_DISTANCE:
            break
        other = y.clone()
        other[at] = label
        if (distance := observed.measure_misfit(i, x, other)) < missed:
            y, missed = other, distance
    return y, missed


def choose_label(observed: StackedObservations, x: Tensor, i: int, rng: Generator) -> Tensor:
    """Return the label (1,) of the only example x (1, *shape) of case i.

    It is the one that fits best or, with many classes, inferred from the last layer.
    """
    if observed.cases[i].known_labels is not None or observed.data.num_classes > MAX_TRIED_LABELS:
        return infer_case_labels(observed, i, rng).to(x.device)
    missed = [observed.measure_misfit(i, x, torch.tensor([label])) for label in range(observed.data.num_classes)]
    return torch.tensor([missed.index(min(missed))], device=x.device)

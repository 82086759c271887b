"""The update of an input layer as rows whose span is that of the examples.

For z = W x + b, an SGD update of any number of steps is [dW, db] = D^T [X, 1] - c [W, b], where X holds the examples that were
used, and c is the share of the weights that weight decay removed. Adding c [W, b] leaves rows in the span of the vectors [x, 1],
whose length, the number of inputs plus 1, is F.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.isolation import estimate_rounding
from attacker.attacks.networks.input_layer import InputLayer
from attacker.attacks.simulation.client import find_schedule
from fedsim.recording import codec
from fedsim.recording.observation import DataSpec, Observation
from fedsim.recording.training import Training


def explain_unlinear(training: Training, layer: InputLayer) -> str:
    """Return why an update under these training settings is not a sum of the layer's gradients, or "" if it is such a sum.

    Reasons are another optimiser than SGD, and a weight or bias of the layer that clients do not train. Weight decay is no
    reason, since `read_rows` undoes it.
    """
    if training.optimiser != "sgd":
        return f"an update of {training.optimiser} is not a sum of gradients, so its rows do not lie in the span of the examples"
    if training.is_frozen(layer.weight) or training.is_frozen(layer.bias):
        return f"the first layer ({layer.weight}, {layer.bias}) is frozen"
    return ""


def compute_decayed_share(training: Training, steps: int) -> float:
    """Return the share of the initial weights that weight decay removes in `steps` local steps of SGD.

    The final weights are linear in the initial ones, so that the share follows from a single weight of 1 without a gradient.
    """
    if not training.weight_decay:
        return 0.0
    weight, velocity = 1.0, 0.0
    for step in range(steps):
        gradient = training.weight_decay * weight
        velocity = training.momentum * velocity + gradient
        weight -= training.compute_rate(step) * (gradient + training.momentum * velocity if training.nesterov else velocity)
    return 1 - weight


@dataclass(frozen=True)
class LayerRows:
    """The update of an input layer as rows (width, F) in the span of the vectors [x, 1] of examples, up to errors, in float64.

    noise: (width,) estimated standard deviation of the rounding errors of each row's values. A defense's noise is not included.
    """

    rows: Tensor
    noise: Tensor


def read_rows(observation: Observation, layer: InputLayer, device: str = "cpu") -> LayerRows:
    """Return the update of the input layer as rows, without weight decay. Raises ValueError if it has NaN or infinite values.

    The update is decoded here and not kept, since an attack may read thousands of observations.
    """
    update = codec.decode(observation.payload, observation.weights)
    rows = join_parameters(update, layer, device)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(
            f"the update of client {observation.client} in round {observation.round} contains NaN or infinite values in "
            f"{layer.weight} or {layer.bias}; leave this round out with --rounds"
        )
    noise = estimate_rounding(rows)
    if observation.payload.codec == "weights":
        bound = observation.rounding
        noise = torch.maximum(noise, join_parameters(bound, layer, device).square().mean(dim=1).div(3).sqrt())
    if decayed := compute_decayed_share(observation.training, find_schedule(observation)[1]):
        rows = rows + decayed * join_parameters(observation.weights, layer, device)
    return LayerRows(rows, noise)


def join_parameters(tensors: Mapping[str, Tensor], layer: InputLayer, device: str = "cpu") -> Tensor:
    """Return the layer's weight (width, F - 1) and bias (width,) among `tensors` as one matrix (width, F), in float64."""
    return torch.cat([tensors[layer.weight].double(), tensors[layer.bias].double()[:, None]], dim=1).to(device)


def convert_to_examples(vectors: Tensor, data: DataSpec) -> Tensor:
    """Return examples (N, *shape) on the scale [0, 1], not clamped, from vectors (N, F).

    A vector is any multiple of [x, 1], where x is the flattened normalised example.
    """
    assert vectors.shape[1] == prod(data.shape) + 1
    return data.denormalise((vectors[:, :-1] / vectors[:, -1:]).reshape(-1, *data.shape))

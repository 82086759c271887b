"""Updates of the input layer, the linear layer whose input is the example itself: their rows and row spaces.

For z = W x + b, an SGD update of any number of steps is [dW, db] = D^T [X, 1] - c [W, b], where X holds the examples that were
used, and c is the share of the weights that weight decay removed. Adding c [W, b] leaves rows in the span of the vectors [x, 1],
whose length, the number of inputs plus 1, is F.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.closed_form.linear.isolation import estimate_rounding
from attacker.attacks.multi_round.spans.row_space import RowSpace, compute_row_space
from attacker.attacks.needs import Need
from attacker.attacks.networks.chain import Chain, read_chain
from attacker.attacks.networks.input_layer import InputLayer, find_input_layer, is_input_random
from attacker.attacks.networks.traced import NotAChain
from attacker.attacks.simulation.client import find_schedule
from fedsim import models
from fedsim.recording import codec
from fedsim.recording.observation import DataSpec, Observation
from fedsim.recording.training import Training


@dataclass(frozen=True)
class LayerUpdates:
    """The updates of the input layer in the observations of a case.

    spaces:   row space of each update.
    forwards: dict from the index of each update of one local step to a function that loads the [W, b] (width, F) before the step.
              It is empty unless the layer is the network's first one, and is followed by ReLU.
    data:     specification of the layer's input, see `InputLayer.specify_input`.
    """

    spaces: Sequence[RowSpace]
    forwards: Mapping[int, Callable[[], Tensor]]
    data: DataSpec

    @cached_property
    def limits(self) -> tuple[Tensor, Tensor]:
        """The flattened normalised inputs, (F - 1,) each, of an example of all zeros and of one of all ones."""
        values = (torch.full(self.data.shape, value, dtype=torch.float64) for value in (0.0, 1.0))
        low, high = (self.data.normalise(value).flatten() for value in values)
        return low, high


def require_input_layer(observation: Observation) -> InputLayer:
    """Return the input layer of the observed model, the linear layer with bias whose input is the example itself.

    Raises ValueError if the model has no such layer, or if the rows of its update are no linear combinations of examples, since
    clients do not train the layer, use another optimiser than SGD, or draw random numbers before it, such as dropout of inputs.
    """
    layer = find_input_layer(observation.model, observation.data)
    if layer is None:
        raise ValueError(Need.INPUT_LAYER.value)
    if reason := explain_unlinear(observation.training, layer):
        raise ValueError(reason)
    name = layer.weight.rpartition(".")[0]
    if observation.training.mode == "train" and is_input_random(observation.model, observation.data, name):
        raise ValueError(
            f"clients draw random numbers before layer {name}, such as dropout of inputs, so that its updates hold other values "
            "than those of the examples; use an attack that searches, such as cpl"
        )
    return layer


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


def read_rows(observation: Observation, layer: InputLayer, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return the update of the input layer, without weight decay, and the estimated errors of its values, in float64.

    The update is a matrix (width, F) of rows in the span of the vectors [x, 1] of examples, up to errors. The errors (width,) are
    the standard deviations of the rounding errors of each row's values; a defense's noise is not included.
    The update is decoded here and not kept, since an attack may read thousands of observations. Raises ValueError if it has NaN
    or infinite values.
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
    return rows, noise


def join_parameters(tensors: Mapping[str, Tensor], layer: InputLayer, device: str = "cpu") -> Tensor:
    """Return the layer's weight (width, F - 1) and bias (width,) among `tensors` as one matrix (width, F), in float64."""
    return torch.cat([tensors[layer.weight].double(), tensors[layer.bias].double()[:, None]], dim=1).to(device)


def compute_spaces(
    case: Case, layer: InputLayer, rng: Generator, progress: Progress | None = None, device: str = "cpu"
) -> list[RowSpace]:
    """Return the row space of the layer's update in each observation of a case, computed on `device` and returned on the CPU."""
    found = []
    for number, observation in enumerate(case.observations, start=1):
        rows, noise = read_rows(observation, layer, device)
        own = seed_generator(rng, case, f"row space of round {observation.round}")
        space = compute_row_space(rows, noise, observation.num_examples or None, own)
        found.append(replace(space, y=space.y.cpu(), coordinates=space.coordinates.cpu(), noise=space.noise.cpu()))
        if progress is not None:
            progress(number, len(case.observations), f"row spaces: rank {found[-1].rank} in round {observation.round}")
    return found


def convert_to_examples(vectors: Tensor, data: DataSpec) -> Tensor:
    """Return examples (N, *shape) on the scale [0, 1], not clamped, from multiples (N, F) of [x, 1] with normalised x."""
    assert vectors.shape[1] == prod(data.shape) + 1
    return data.denormalise((vectors[:, :-1] / vectors[:, -1:]).reshape(-1, *data.shape))


def list_forwards(case: Case, layer: InputLayer) -> Mapping[int, Callable[[], Tensor]]:
    """Return a dict from the index of each observation of one local step to a function that loads the [W, b] sent for the layer.

    The result is empty if the layer is not the network's first one, or is not followed by ReLU.
    """
    if not precedes_relu(case.observations[0], layer):
        return {}

    def make(observation: Observation) -> Callable[[], Tensor]:
        return lambda: join_parameters(observation.weights, layer)

    return {t: make(observation) for t, observation in enumerate(case.observations) if find_schedule(observation)[1] == 1}


def precedes_relu(observation: Observation, layer: InputLayer) -> bool:
    """Return whether the layer is the first one of a network that is a chain of layers, and is followed by ReLU."""
    chain = find_chain(observation)
    return chain is not None and chain.layers[0].weight == layer.weight and chain.layers[0].activation.name == "relu"


def find_chain(observation: Observation) -> Chain | None:
    """Return the observed model as a chain of layers, which begins behind the scaling of inputs in the model's code.

    None if `read_chain` refuses it: for example, if paths join, or for max pooling or normalisation.
    """
    try:
        layout = models.build_layout(observation.model, observation.data)
        return read_chain(layout, observation.data.shape, one_dtype=True, scaled_inputs=True)
    except NotAChain:
        return None

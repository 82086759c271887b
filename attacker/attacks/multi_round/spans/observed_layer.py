"""The linear layer of a case whose input is the example itself: the row spaces of its updates, and the activation behind it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.multi_round.spans.layer_rows import explain_unlinear, join_parameters, read_rows
from attacker.attacks.multi_round.spans.row_space import RowSpace, compute_row_space
from attacker.attacks.needs import Need
from attacker.attacks.networks.chain import Chain, read_chain
from attacker.attacks.networks.input_layer import InputLayer, find_input_layer, is_input_random
from attacker.attacks.networks.traced import NotAChain
from attacker.attacks.simulation.client import find_schedule
from fedsim import models
from fedsim.recording.observation import DataSpec, Observation


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


def compute_spaces(
    case: Case, layer: InputLayer, rng: Generator, progress: Progress | None = None, device: str = "cpu"
) -> list[RowSpace]:
    """Return the row space of the layer's update in each observation of a case, computed on `device` and returned on the CPU."""
    found = []
    for number, observation in enumerate(case.observations, start=1):
        seen = read_rows(observation, layer, device)
        own = seed_generator(rng, case, f"row space of round {observation.round}")
        space = compute_row_space(seen.rows, seen.noise, observation.num_examples or None, own)
        found.append(replace(space, y=space.y.cpu(), coordinates=space.coordinates.cpu(), noise=space.noise.cpu()))
        if progress is not None:
            progress(number, len(case.observations), f"row spaces: rank {found[-1].rank} in round {observation.round}")
    return found


def find_limits(data: DataSpec) -> tuple[Tensor, Tensor]:
    """Return the flattened normalised inputs, (F - 1,) each, of an example of all zeros and of one of all ones."""
    low, high = (data.normalise(torch.full(data.shape, value, dtype=torch.float64)).flatten() for value in (0.0, 1.0))
    return low, high


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

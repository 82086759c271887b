"""Labels of examples that row spaces gave, from the updates of the rounds that contain them."""

import torch
from torch import Tensor

from attacker.attacks.cases import Case
from attacker.attacks.closed_form.linear.batch_labels import AssignedLabels, assign_labels
from attacker.attacks.multi_round.spans.layer_rows import convert_to_examples
from attacker.attacks.multi_round.spans.observed_layer import find_chain
from attacker.attacks.multi_round.spans.recovery import RecoveredExamples
from attacker.attacks.networks.input_layer import InputLayer
from attacker.attacks.simulation.client import convert_to_gradient, find_schedule
from fedsim import models
from fedsim.recording import codec
from fedsim.recording.observation import Observation


def label_examples(case: Case, layer: InputLayer, found: RecoveredExamples) -> AssignedLabels:
    """Return a label for each of the N examples, determined from the update of the first round that contains it, and a mask.

    The mask `mixed` (N,) marks examples that have two labels, so that they are mixtures of two examples. Only updates of one
    local step can show that. If the network is not a chain of layers that begins with `layer`, labels are those that the network
    predicts with the last weights sent, and no example is marked.
    """
    first = case.observations[0]
    chain = find_chain(first)
    labels, mixed = (torch.zeros(len(found.vectors), dtype=kind) for kind in (torch.long, torch.bool))
    if chain is None or chain.layers[0].weight != layer.weight:
        return AssignedLabels(_predict(case.observations[-1], layer, found), mixed)
    holders = [places[0] if places else 0 for places in found.holders]
    for t in sorted(set(holders)):
        observation, own = case.observations[t], [i for i, holders_of in enumerate(found.holders) if t in holders_of]
        own = own or [i for i, holder in enumerate(holders) if holder == t]
        weights = {name: w.double() for name, w in observation.weights.items()}
        update = codec.decode(observation.payload, observation.weights)
        steps = find_schedule(observation)[1]
        gradient = convert_to_gradient({k: u.double() for k, u in update.items()}, weights, observation.training, steps)
        vectors = found.vectors[own]
        assigned = assign_labels(
            chain,
            weights,
            gradient,
            vectors[:, :-1] / vectors[:, -1:],
            loss=first.training.loss,
            classes=first.data.num_classes,
            examples=observation.num_examples or len(own),
        )
        for i, label, two in zip(own, assigned.y.tolist(), assigned.mixed.tolist(), strict=True):
            if holders[i] == t:
                labels[i], mixed[i] = label, two and steps == 1
    return AssignedLabels(labels, mixed)


def _predict(observation: Observation, layer: InputLayer, found: RecoveredExamples) -> Tensor:
    model = models.build(observation.model, observation.data).eval()
    x = convert_to_examples(found.vectors, layer.specify_input(observation.data)).float()
    state = {**dict(model.named_buffers()), **observation.buffers, **observation.weights}
    with torch.no_grad():
        logits = torch.func.functional_call(model, state, (observation.data.normalise(x),))
    return models.predict_classes(logits)

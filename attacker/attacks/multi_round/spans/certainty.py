"""Certainty and labels of recovered examples: an example that may be a mixture of examples must not count as certain.

A one-dimensional intersection, or a direction that several rows have, is an example only if nothing else explains it. Four facts
decide. An answer whose values are those of an 8-bit image is an image; if some answers are 8-bit images, an answer that is not an
8-bit image is a mixture. Behind one step on a layer with ReLU, the neurons that an example turns off have rows of the other
examples only, so that the rank of these rows is smaller by one. An intersection of two spaces is evidence only if both are the
whole span of their batches' examples, and if their ranks add up to at most the dimension of the span of all examples: if the sum
of the ranks is larger, they intersect by chance. And of examples that depend linearly on each other, one is a mixture.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attacker.attacks.cases import Case
from attacker.attacks.closed_form.linear.batch_labels import AssignedLabels, assign_labels
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples
from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates, convert_to_examples, find_chain
from attacker.attacks.multi_round.spans.relu_zeros import PARALLEL_CLEARANCE, ZERO_LEVEL
from attacker.attacks.multi_round.spans.row_space import RowSpace, compute_threshold
from attacker.attacks.networks.forward import read_state, run_forward_pass
from attacker.attacks.networks.input_layer import InputLayer
from attacker.attacks.simulation.client import convert_to_gradient, find_schedule
from fedsim import models
from fedsim.recording import codec
from fedsim.recording.observation import DataSpec, Observation

CERTAIN = 0.99
"""Confidence in an example that is clear of noise and known up to rounding. On the validation part of CIFAR-10 none of 128 such
examples was wrong (benchmarks/rounds.py)."""
MIN_CLEARANCE = 10.0
"""Smallest `RecoveredExamples.clearance` of a certain example."""
MAX_CERTAIN_ERROR = 1e-4
"""Largest estimated error of the values of an example that counts as certain. Errors by rounding are far smaller, errors by noise
at a signal-to-noise ratio of 40 dB larger. At that noise two of 41 examples that met MIN_CLEARANCE were mixtures of examples."""
DEPENDENCE_RANGE = (1e-6, 1e-3)
"""Lower and upper limit of the threshold up to which a singular value of stacked unit vectors counts as zero. Between these
limits, the threshold is the noise of the vectors."""
MIN_SHARE = 1e-3
"""Smallest coefficient of a vector in a combination of norm 1 from which the vector counts as part of this combination."""
SPARE_ROWS = 8
"""Smallest number of rows beyond the rank of a space at which a dimension that all these rows lack is no coincidence."""
MIN_COSINE = 1e-4
"""Smallest cosine between an example and a neuron's weights, in magnitude, from which the neuron's state is known."""
MIN_DUAL = 1e-3
"""Smallest cosine between an example and the direction that is orthogonal to the rows of all neurons that it turns off."""
MAX_UNION_SPACES = 64
"""Number of row spaces from which the dimension of all examples is estimated."""


def judge_certainty(found: RecoveredExamples) -> Tensor:
    """Return the confidence (N,) in examples.

    The confidence is `CERTAIN` if the example stands out from noise (`clearance` of at least MIN_CLEARANCE) and its values are
    known well (`error` of at most MAX_CERTAIN_ERROR), otherwise NaN (undecided).
    """
    sure = (found.clearance >= MIN_CLEARANCE) & (found.error <= MAX_CERTAIN_ERROR)
    return torch.where(sure, CERTAIN, torch.nan).float()


def judge_clearance(found: RecoveredExamples, updates: LayerUpdates) -> RecoveredExamples:
    """Return the examples, with clearance 0 for those that may be mixtures, and infinite for those that are 8-bit images.

    If some are 8-bit images, all others have clearance 0.
    """
    if not len(found.vectors):
        return found
    spaces, forwards, data = updates.spaces, updates.forwards, updates.data
    found = doubt_dependent(found, spaces)
    stored = find_eight_bit(found, data)
    clearance = torch.where(stored, torch.inf, found.clearance)
    if bool(stored.any()):
        clearance = clearance.masked_fill(~stored, 0.0)
    dimension = found.vectors.shape[1] if data.is_image else measure_union(spaces)
    sent: dict[int, Tensor] = {}
    for i, holders in enumerate(found.holders):
        if not MIN_CLEARANCE <= float(clearance[i]) < torch.inf:
            continue
        tests: list[bool | None] = []
        for t in (t for t in holders if t in forwards):
            if t not in sent:
                sent[t] = forwards[t]()
            tests.append(shows_example(spaces[t], sent[t], found.vectors[i]))
            if tests[-1]:
                break
        if any(tests):
            continue
        own = [spaces[t] for t in holders]
        by_rows = float(clearance[i]) == PARALLEL_CLEARANCE and any(space.complete for space in own)
        if any(test is not None for test in tests) or not (by_rows or _exceeds_chance(own, dimension)):
            clearance[i] = 0.0
    return replace(found, clearance=clearance)


def find_eight_bit(found: RecoveredExamples, data: DataSpec) -> Tensor:
    """Return a mask (N,) of the 8-bit images (`is_eight_bit`) with an error of at most MAX_CERTAIN_ERROR."""
    if not data.is_image:
        return torch.zeros(len(found.vectors), dtype=torch.bool)
    return is_eight_bit(convert_to_examples(found.vectors, data)) & (found.error <= MAX_CERTAIN_ERROR)


def shows_example(space: RowSpace, forward: Tensor, vector: Tensor) -> bool | None:
    """Return whether a batch has exactly one example that turns on the same neurons as a given one; None if that cannot be told.

    The rows of neurons that an example turns off are combinations of the batch's other examples: the rank of these rows is one
    less than the rank of the space. The vector that is orthogonal to these rows is not orthogonal to the example, nor to the rows
    of the neurons that it turns on. A mixture of examples turns off neurons that some of them turn on, or the reverse. The result
    is None if too few neurons are off, or if the space is not the whole span of its batch. The result is also False if several
    examples turn on the same neurons.
    space: of an update of one step. forward: [W, b] (width, F) that was sent. vector: a multiple of [x, 1] in the space.
    """
    point = vector / vector[-1]
    cosine = (forward @ point) / (forward.norm(dim=1).clamp(min=torch.finfo(forward.dtype).tiny) * point.norm())
    level = space.noise.clamp(min=torch.finfo(forward.dtype).tiny)
    live = space.coordinates.norm(dim=1) > ZERO_LEVEL * level
    rows = space.coordinates / level[:, None]
    off, on = rows[live & (cosine < -MIN_COSINE)], rows[live & (cosine > MIN_COSINE)]
    if not space.complete or len(off) < space.rank + SPARE_ROWS:
        return None
    values, right = torch.linalg.svd(off, full_matrices=False)[1:]
    missing = values <= ZERO_LEVEL * len(off) ** 0.5
    inside = space.basis @ point
    if int(missing.sum()) != 1 or float((right[-1] @ inside).abs() / inside.norm()) <= MIN_DUAL:
        return False
    return bool(((on @ right[-1]).abs() > ZERO_LEVEL).all())


def _exceeds_chance(spaces: Sequence[RowSpace], dimension: int) -> bool:
    """Return whether there are two `complete` spaces, and the two smallest ranks of these add up to at most `dimension`."""
    ranks = sorted(space.rank for space in spaces if space.complete)
    return len(ranks) > 1 and sum(ranks[:2]) <= dimension


def measure_union(spaces: Sequence[RowSpace]) -> int:
    """Return the dimension of the span of the first MAX_UNION_SPACES row spaces together; saturated ones are left out.

    Two of these spaces whose ranks add up to more than this dimension intersect by chance, even if their batches share no
    example.
    """
    kept = [space.y for space in spaces if space.rank and not space.saturated][:MAX_UNION_SPACES]
    if not kept:
        return 0
    stack = torch.cat(kept)
    return int((torch.linalg.svdvals(stack) > compute_threshold(stack.shape[1])).sum())


def doubt_dependent(found: RecoveredExamples, spaces: Sequence[RowSpace]) -> RecoveredExamples:
    """Return the examples, with clearance 0 for each example that depends linearly on other examples of the same row space.

    The examples of a batch are independent in general, so that one of the examples in a linear dependence is a mixture. Examples
    with infinite clearance keep it.
    """
    doubtful = torch.zeros(len(found.vectors), dtype=torch.bool)
    for t, space in enumerate(spaces):
        held = [i for i, holders in enumerate(found.holders) if t in holders]
        if len(held) < 3 or space.saturated:
            continue
        length = found.vectors[held].norm(dim=1, keepdim=True)
        noise = (compute_threshold(found.vectors.shape[1]) / length.min()).clamp(*DEPENDENCE_RANGE)
        left, values, _ = torch.linalg.svd(found.vectors[held] / length, full_matrices=len(held) > found.vectors.shape[1])
        values = torch.cat([values, values.new_zeros(left.shape[1] - len(values))])
        shares = left[:, values <= noise].abs()
        if shares.shape[1]:
            doubtful[torch.tensor(held)[shares.amax(dim=1) > MIN_SHARE]] = True
    return replace(found, clearance=found.clearance.masked_fill(doubtful & found.clearance.isfinite(), 0.0))


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
    with torch.no_grad():
        logits = run_forward_pass(model, read_state(model, observation), observation.data.normalise(x))
    return models.predict_classes(logits)

"""Examples that alone turn on a neuron of a first layer with ReLU: the neuron's row of the update is a multiple of [x, 1].

A row of a mixture of examples has the same form. A row counts as one example's if another neuron has a parallel row, since two
neurons rarely mix examples in equal proportions, or if its values are those of an 8-bit image (Marchand et al. 2023, "SRATTA",
recognise examples by such knowledge about the data). Parallel rows are no evidence if the errors of all examples are multiples of
each other, as in tasks of two classes, where all neurons that are on for the same examples have parallel rows. Two examples that
a confident network takes for each other's class have such errors as well. Their mixture is a combination of examples that are
also found, so that parallel rows do not make such examples certain (`certainty.doubt_dependent`).

Units of noise are those of `row_space`: the entries of a vector have noise of standard deviation 1.
"""

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.isolation import group_parallel_rows
from attacker.attacks.confidence.eight_bit import LEVELS, is_eight_bit
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples, mark_plausible
from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates
from attacker.attacks.multi_round.spans.relu_zeros import ERROR_FACTOR, ZERO_LEVEL
from attacker.attacks.multi_round.spans.row_space import RowSpace
from attacker.attacks.networks.chain import Chain
from fedsim.recording.observation import Observation

PARALLEL_CLEARANCE = 1e6
"""`RecoveredExamples.clearance` of examples that rest on parallel rows."""
MIN_GRID_CLEARANCE = 20.0
"""Smallest distance of two 8-bit values, in standard deviations of the noise of a row's values, at which they are compared."""


def has_independent_errors(observation: Observation, chain: Chain | None) -> bool:
    """Return whether parallel rows of a first layer's update are evidence of a single example.

    Parallel rows are evidence if the loss gradients of different examples at the layer's outputs have different directions. They
    are assumed to differ unless the network has at most two classes, or a layer of at most two neurons after the first one.
    chain: the network as a chain of layers; None if the network is not a chain, and then the number of classes alone decides.
    """
    narrow = chain is not None and any(layer.shape[0] <= 2 for layer in chain.layers[1:])
    return observation.data.num_classes > 2 and not narrow


def add_lone_rows(found: RecoveredExamples, updates: LayerUpdates, *, parallel: bool) -> RecoveredExamples:
    """Return the examples found so far, and those that alone turn on neurons in one of the updates, each example once.

    Only vectors that can be examples are added (`mark_plausible`). parallel: as for `find_lone_rows`.
    """
    images = updates.data.is_image
    rows = [find_lone_rows(space, *updates.limits, parallel=parallel, images=images) for space in updates.spaces if space.rank]
    if not rows:
        return found
    vectors, clearance = (torch.cat(each) for each in zip(*rows, strict=True))
    plausible = mark_plausible(vectors, updates.limits)
    return found.add(vectors[plausible], clearance[plausible], updates.spaces)


def find_lone_rows(space: RowSpace, low: Tensor, high: Tensor, *, parallel: bool, images: bool = True) -> tuple[Tensor, Tensor]:
    """Return vectors (n, F) in units of noise of examples that alone turn on neurons, and the clearance of each, (n,).

    One example may occur several times. Clearance says how certain an example is: infinite for 8-bit images, PARALLEL_CLEARANCE
    for those found by parallel rows.
    low, high: normalised inputs (F - 1,) of an example of all zeros, and of one of all ones.
    parallel: whether parallel rows count, see `has_independent_errors`. images: whether the data are images, whose values may
    have 8 bits.
    """
    stored = find_eight_bit_rows(space, low, high) if images else space.y[:0]
    several = find_parallel_rows(space) if parallel else stored[:0]
    clearance = stored.new_full((len(several) + len(stored),), torch.inf)
    clearance[: len(several)] = PARALLEL_CLEARANCE
    return torch.cat([several, stored]), clearance


def find_parallel_rows(space: RowSpace) -> Tensor:
    """Return vectors (n, F) in units of noise, one for each direction that at least two rows of the matrix of a space share.

    The result is empty if the space is saturated: there may then be more examples than dimensions, and parallel rows are no
    evidence of a single one.
    """
    if space.saturated:
        return space.y[:0]
    groups = group_parallel_rows(space.coordinates, space.noise, space.coordinates.norm(dim=1) > ZERO_LEVEL * space.noise)
    directions = groups.directions[groups.confirmed]
    lengths = space.y.norm(dim=1)
    error = (directions / lengths).norm(dim=1)
    scaled: Tensor = directions @ space.basis / (ERROR_FACTOR * error[:, None])
    return scaled


def find_eight_bit_rows(space: RowSpace, low: Tensor, high: Tensor) -> Tensor:
    """Return vectors (n, F) in units of noise of the rows that are multiples of [x, 1] of an 8-bit image x.

    The values of x are rounded to 8 bits. low, high: as for `find_lone_rows`.
    """
    rows = space.coordinates @ space.basis
    clear = rows[:, -1].abs() * float((high - low).abs().min()) > MIN_GRID_CLEARANCE * LEVELS * space.noise
    scale = rows[clear, -1:] / space.noise[clear, None]
    x = (rows[clear, :-1] / rows[clear, -1:] - low) / (high - low)
    stored = is_eight_bit(x)
    exact = low + (LEVELS * x[stored]).round() / LEVELS * (high - low)
    return scale[stored] * torch.cat([exact, torch.ones_like(scale[stored])], dim=1)

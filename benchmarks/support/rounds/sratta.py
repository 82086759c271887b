"""An independent implementation of SRATTA (Marchand et al. 2023), which the table `cohorts` of rounds.py compares with.

It follows the paper, and the settings of the authors' program for Fashion-MNIST: a quotient of a neuron's rows is an example if
all of its values are within 1/20 of a level of multiples of 1/255; a row is explained by at most MAX_EXAMPLES recovered examples,
found by orthogonal matching pursuit; examples that turned a neuron on are linked with the examples for which the neuron was on at
the weights sent: at once if there is only one such example, otherwise once all of them are known to be of one client.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks import Case
from attacker.attacks.multi_round.spans.layer_updates import join_parameters, require_input_layer

LEVELS, MAX_GRID_DISTANCE = 255, 1 / (256 * 20)
"""Number of steps between 0 and 1 of stored values, and largest distance of an example's values to the nearest step."""
LEAST_UPDATE = 1e-5
"""Magnitude that the update of a neuron's bias, and the largest entry of the update of its weights, must exceed."""
MAX_ATOMS, MAX_EXAMPLES = 20, 5
"""Largest number of steps of the pursuit, and of examples that may explain a row."""
MAX_RESIDUAL, RELATIVE, ABSOLUTE = 1e-10, 1e-2, 1e-7
"""Limits for explained rows. MAX_RESIDUAL: largest squared residual. RELATIVE: smallest ratio of an example's coefficient to
the largest coefficient, and largest relative error of a row's values. ABSOLUTE: smallest coefficient."""


@dataclass(frozen=True)
class SrattaResult:
    """Recovered examples, and groups of their indices, each of examples of one client.

    x: (N, F), as inputs of the first layer, whose values are multiples of 1/255 from 0 to 1.
    """

    x: Tensor
    groups: list[list[int]]


def run_sratta(case: Case) -> SrattaResult:
    """Return the examples that SRATTA recovers from secure sums, and its groups of at least two examples of one client each."""
    layer = require_input_layer(case.observations[0])
    updates = [join_parameters(observation.update, layer) for observation in case.observations]
    x = recover_examples(updates)
    if not len(x):
        return SrattaResult(x, [])
    vectors = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    relations: set[tuple[frozenset[int], frozenset[int]]] = set()
    for one, update in zip(case.observations, updates, strict=True):
        before = join_parameters(one.weights, layer) @ vectors.T > 0
        for neuron, used in explain_rows(update, x):
            on = frozenset(i for i in used if bool(before[neuron, i]))
            if turned_on := frozenset(used) - on:
                relations.add((on, turned_on))
    return SrattaResult(x, join_groups(relations, len(x)))


def recover_examples(updates: Sequence[Tensor]) -> Tensor:
    """Return the different stored images (N, F) among the quotients of rows [dW, db] of updates (width, F + 1)."""
    examples: list[Tensor] = []
    for update in updates:
        live = (update[:, -1].abs() > LEAST_UPDATE) & (update[:, :-1].abs().amax(dim=1) > LEAST_UPDATE)
        x = update[live, :-1] / update[live, -1:]
        level = (x * LEVELS).round()
        stored = ((x - level / LEVELS).abs() <= MAX_GRID_DISTANCE).all(dim=1) & (level.amin(dim=1) >= 0)
        examples += list(level[stored & (level.amax(dim=1) <= LEVELS)])
    return torch.unique(torch.stack(examples), dim=0) / LEVELS if examples else updates[0][:0, :-1]


def explain_rows(update: Tensor, x: Tensor) -> list[tuple[int, list[int]]]:
    """Return pairs of a neuron and the recovered examples, two to MAX_EXAMPLES, whose linear combination its row of `update` is.

    Rows that all examples together do not explain are left out first; the pursuit would fail on them as well.
    """
    weight, bias = update[:, :-1], update[:, -1]
    left = weight - weight @ torch.linalg.pinv(x, rtol=1e-10) @ x
    live = (weight.abs().amax(dim=1) > 1e-6) & (left.square().sum(dim=1) < MAX_RESIDUAL)
    found = []
    for neuron in live.nonzero()[:, 0].tolist():
        row = weight[neuron]
        fitting = ((x != 0) <= (row != 0)).all(dim=1).nonzero()[:, 0]
        if not len(fitting):
            continue
        atoms = x[fitting]
        chosen, share = pursue(row, atoms)
        if float((row - share @ atoms[chosen]).square().sum()) >= MAX_RESIDUAL:
            continue
        kept = share.abs() > max(ABSOLUTE, RELATIVE * float(share.abs().max()))
        used = [int(fitting[i]) for i, keep in zip(chosen, kept.tolist(), strict=True) if keep]
        again = share[kept] @ x[used]
        close = torch.allclose(again, row, rtol=RELATIVE, atol=0.0)
        if 1 < len(used) <= MAX_EXAMPLES and close and torch.isclose(share.sum(), bias[neuron], rtol=RELATIVE, atol=0.0):
            found.append((neuron, used))
    return found


def pursue(row: Tensor, atoms: Tensor) -> tuple[list[int], Tensor]:
    """Return the indices of atoms (N, F) that orthogonal matching pursuit chooses for a row (F,), and their coefficients."""
    unit = atoms / atoms.norm(dim=1, keepdim=True).clamp(min=torch.finfo(atoms.dtype).tiny)
    chosen: list[int] = []
    share, left = row[:0], row
    for _ in range(min(MAX_ATOMS, len(atoms))):
        score = (unit @ left).abs()
        score[chosen] = -1.0
        chosen.append(int(score.argmax()))
        share = torch.linalg.lstsq(atoms[chosen].T, row[:, None]).solution[:, 0]
        left = row - share @ atoms[chosen]
        if float(left.square().sum()) < MAX_RESIDUAL * 1e-4:
            break
    return chosen, share


def join_groups(relations: set[tuple[frozenset[int], frozenset[int]]], count: int) -> list[list[int]]:
    """Return groups of at least two examples of one client each, as lists of indices.

    relations: pairs (on, turned_on) of sets of indices of the examples in a neuron's update: those for which the neuron was on at
    the weights sent, and those for which it was off there, so that local training has turned it on.
    If all examples of `on` are of one client, this client turned the neuron on, so that the examples of `turned_on` are its, too.
    count: number of examples.
    """
    group = list(range(count))
    waiting, changed = set(relations), True
    while changed:
        changed = False
        for on, turned_on in list(waiting):
            if len({group[i] for i in on}) == 1:
                waiting.remove((on, turned_on))
                names = {group[i] for i in on | turned_on}
                changed = changed or len(names) > 1
                group = [min(names) if name in names else name for name in group]
    members: dict[int, list[int]] = {}
    for i, name in enumerate(group):
        members.setdefault(name, []).append(i)
    return [own for own in members.values() if len(own) > 1]

"""Contradictions between the training settings that the user stated to `record()` and what a client sent back."""

from collections.abc import Mapping
from math import ceil

from torch import Tensor

from fedsim.recording.training import Training

COUNTER = "num_batches_tracked"
"""End of the name of batch norm's counter of the batches that it saw in training mode."""
STATISTICS = ("running_mean", "running_var")
MAX_DELTA_COSINE = 0.5
"""Cosine between the tensors that a client got and those that it returned, below which the returned ones are taken for changes
instead of weights, if their norm is also smaller. Weights after training have a cosine near 1, and changes one near 0."""
MAX_MOVE = 5.0
"""Largest change of a weight by Adam, relative to the sum of learning rates, that is taken for possible; 1 is usual."""
MIN_MOVE = 0.05
"""Smallest possible value of a round's largest weight change by Adam, relative to the first step's learning rate.
Adam's first step changes every weight by about this rate.
"""
MIN_EVEN = 0.5
"""Smallest ratio of the median to the largest magnitude of a tensor's nonzero entries at which they count as about equal. It was
at least 0.5 in all tensors of five networks after one to five steps of Adam, and below 0.3 in some tensor after SGD."""
MIN_ROWS = 3
"""Smallest number of rows of a tensor that `has_even_magnitudes` judges. The errors at two outputs have one magnitude, and so has
the gradient of their layer if its inputs are 0 or 1."""
MIN_SIGN_ENTRIES, MAX_SIGN_DEVIATION, MIN_SIGN_SHARE = 8, 1e-2, 0.9
"""Smallest number of nonzero entries of a row that may be a sign pattern, largest relative difference of their magnitudes, and
smallest share of them that must have it, since Adam's eps makes entries smaller where gradients are small."""
SAME_SIZE, MIN_SAME_SIZE, MIN_SAME_SHARE = 1e-3, 3, 0.1
"""Largest relative difference of the sizes of sign patterns that count as equal; smallest number of such patterns, and their
smallest share of all patterns, that only an optimiser makes. Inputs of zeros and ones make sign patterns by SGD as well, but the
errors of each neuron have a size of their own."""
SETTINGS = "compare batch_size, epochs, steps and drop_last"
KEPT = (
    'if clients keep batch norm to themselves, as in FedBN, state buffers="local"; attacks then simulate other statistics than '
    'theirs. If they call net.eval(), state mode="eval"'
)
EVEN_MAGNITUDES = (
    "the weights of each layer changed by about one magnitude, as by Adam, RMSprop or signs of gradients, and not by SGD: state "
    "the optimiser, or the defense, that clients use"
)


def find_contradictions(
    training: Training,
    reported: int | None,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    is_defended: bool = False,
) -> list[str]:
    """Return sentences on what a client returned and `training` cannot explain; empty if nothing was found.

    Six things are checked. (1) Batch norm's statistics must not change in mode "eval". (2) The returned tensors must be weights,
    not changes of weights. If (1) or (2) fails, the checks after it are left out. (3) If one of the matrices and kernels that
    `training.frozen` does not name changes, all of them must. (4) In mode "train", batch norm must have counted as many batches
    as the settings give, or none with buffers="local". (5) With adam and adamw, the largest change of a weight must be possible.
    (6) With sgd and no defense, the changes of some layer must differ in magnitude (`has_even_magnitudes`).
    reported: number of examples that the client reported, if any.
    before, after: weights and buffers by name, as the client got and returned them. Names in only one of them are left out.
    is_defended: whether a defense is stated, which may change the magnitudes.
    """
    counts = [int(after[name] - before[name]) for name in before.keys() & after.keys() if name.endswith(COUNTER)]
    tracked = [name for name in before.keys() & after.keys() if name.endswith((COUNTER, *STATISTICS))]
    changed = any(bool((after[name].double() != before[name].double()).any()) for name in tracked)
    if training.mode == "eval" and changed:
        return ['batch norm\'s running statistics changed, so that clients do not train with mode="eval": set mode="train"']
    if _are_deltas(before, after):
        return [
            "the returned tensors look like changes of the weights instead of weights: return whole weights, or let "
            "fedsim.client.update_mod send the changes"
        ]
    contradictions = _list_unchanged(training, before, after)
    passes = _count_passes(training, reported)
    kept = bool(counts) and not changed
    counted = passes is None or not counts or max(counts) == passes or (kept and training.buffers == "local")
    if training.mode == "train" and not counted:
        amount = f"epochs={training.epochs}" if training.epochs else f"steps={training.steps}"
        contradictions.append(
            f"batch norm saw {max(counts)} batches in a round, and {passes} follow from batch_size={training.batch_size}, "
            f"{amount}{f' and {reported} examples' if training.epochs else ''}: {KEPT if kept else SETTINGS}"
        )
    if training.optimiser != "sgd" and passes:
        contradictions += _judge_moves(training, ceil(passes / training.accumulation), before, after)
    if training.optimiser == "sgd" and not is_defended:
        changes = {name: after[name].double() - before[name].double() for name in _list_weights(before, after)}
        contradictions += [EVEN_MAGNITUDES] * has_even_magnitudes(changes)
    return contradictions


def has_even_magnitudes(changes: Mapping[str, Tensor]) -> bool:
    """Return whether an optimiser that does not keep the magnitudes of gradients made the changes, or part of them.

    The first steps of Adam and RMSprop, and signs of gradients, change all weights by about one magnitude (`MIN_EVEN`, in each of
    at least two tensors). Several steps leave it in the rows of neurons that were active in one step alone (`_has_equal_rows`).
    From such an update no closed form can compute an example, although it may have the rank that the update of a single example
    has, and parallel rows as that of a batch.
    changes: of the weights, by name. Tensors with fewer than two dimensions or `MIN_ROWS` rows, or without changes, are left out.
    """
    judged = [t for t in changes.values() if t.ndim > 1 and len(t) >= MIN_ROWS and bool(t.any())]
    return (len(judged) > 1 and all(map(_is_even, judged))) or any(map(_has_equal_rows, judged))


def _has_equal_rows(change: Tensor) -> bool:
    """Return whether many rows of a tensor are sign patterns of one size, see `SAME_SIZE`."""
    rows = change.flatten(1).double().abs()
    size, count = rows.amax(dim=1), (rows > 0).sum(dim=1)
    full = (rows >= (1 - MAX_SIGN_DEVIATION) * size[:, None]).sum(dim=1)
    sizes = size[(count >= MIN_SIGN_ENTRIES) & (full >= MIN_SIGN_SHARE * count)].sort().values
    least = max(MIN_SAME_SIZE, ceil(MIN_SAME_SHARE * len(sizes)))
    return len(sizes) >= least and bool((sizes[least - 1 :] <= (1 + SAME_SIZE) * sizes[: len(sizes) - least + 1]).any())


def _is_even(change: Tensor) -> bool:
    sizes = change[change != 0].abs()
    return float(sizes.median()) >= MIN_EVEN * float(sizes.max())


def _list_weights(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return the names, in both mappings, of nonempty floating-point tensors other than batch norm's statistics."""
    names = [name for name in before if name in after and before[name].is_floating_point() and after[name].numel()]
    return [name for name in names if not name.endswith(STATISTICS)]


def _are_deltas(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    names = _list_weights(before, after)
    product, old, new = (
        sum(float((first[name].double() * other[name].double()).sum()) for name in names)
        for first, other in ((before, after), (before, before), (after, after))
    )
    return 0 < new < old and product < MAX_DELTA_COSINE * (old * new) ** 0.5


def _list_unchanged(training: Training, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return a sentence if matrices or kernels that are not stated as frozen stay the same, although others change.

    Behind a matrix of zeros, such as that with which LoRA starts, no gradient arrives. If there is one, the result is empty.
    """
    names = [name for name in _list_weights(before, after) if before[name].ndim > 1 and not training.is_frozen(name)]
    if not all(bool(before[name].any()) for name in names):
        return []
    same = [name for name in names if bool((before[name] == after[name]).all())]
    if not same or len(same) == len(names):
        return []
    return [f"{', '.join(same)} did not change: if clients do not train this, name it in training.frozen"]


def _judge_moves(training: Training, steps: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return a list of one sentence if the largest change of a weight is too small or too large for Adam, else an empty list.

    Too small is below `MIN_MOVE` times the first step's learning rate. Too large is above `MAX_MOVE` times the sum of the
    learning rates of all steps.
    steps: number of local steps. before, after: weights and buffers by name, before and after training.
    """
    names = _list_weights(before, after)
    if not names or not steps:
        return []
    largest = max(float((after[name].double() - before[name].double()).abs().max()) for name in names)
    possible = sum(training.compute_rate(step) for step in range(steps))
    if MIN_MOVE * training.compute_rate(0) <= largest <= MAX_MOVE * possible:
        return []
    return [
        f"the largest change of a weight in a round is {largest:.2g}, and {training.optimiser} with a learning rate of "
        f"{training.learning_rate:g} and {steps} step{'s' * (steps != 1)} changes weights by up to about {possible:.2g}: compare "
        "learning_rate"
    ]


def _count_passes(training: Training, reported: int | None) -> int | None:
    """Return the number of batches that a client runs through the network in a round; None if it is unknown."""
    if training.epochs is None:
        return (training.steps or 0) * training.accumulation
    if reported is None:
        return None
    batches = reported / training.batch_size
    return training.epochs * (int(batches) if training.drop_last else ceil(batches))

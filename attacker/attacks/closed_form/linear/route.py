"""Route `linear`: the examples of one case from the gradient of a first linear layer, with labels, and doubts of the answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from attacker.attacks.cases import seed_generator
from attacker.attacks.closed_form.any_loss import can_measure_any_loss, measure_any_loss
from attacker.attacks.closed_form.linear.batch_labels import assign_labels, explain_batch
from attacker.attacks.closed_form.linear.direct_layer import (
    DirectLayer,
    choose_label,
    find_direct_layer,
    is_followed_by_relu,
    recover_direct_batch,
    recover_direct_example,
)
from attacker.attacks.closed_form.linear.doubts import (
    MAX_AMBIGUOUS_MISFIT,
    estimate_residual,
    find_hidden,
    find_unexplained,
    is_misstated,
    is_pattern_common,
    is_settled,
    is_settled_by_one,
)
from attacker.attacks.closed_form.linear.first_layer import recover_linear
from attacker.attacks.closed_form.linear.label_gradients import MIXED_LABELS
from attacker.attacks.closed_form.linear.layer_gradient import LinearAnswer
from attacker.attacks.closed_form.linear.sparse import STOP_AGREEMENT
from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations
from attacker.attacks.closed_form.patches import (
    DEPENDENT,
    UNEXPLAINED,
    PatchLayer,
    find_patch_layer,
    fit_free_patches,
    solve_patches,
)
from attacker.attacks.closed_form.rgap.recursion import RgapSettings
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.networks.chain import Chain

CHANGED_INPUTS = (
    "clients draw random numbers before the first layer, such as dropout of inputs, and the values are those of the examples "
    "after that"
)
MIXED_OR_MISSTATED = (
    "the update has rank 1 whatever the examples, and a single one does not explain it with the stated loss and learning rate: "
    "this is a mixture of several examples, or clients train otherwise than stated"
)
SECOND_EXAMPLE = (
    "the update of the first layer has a part that a single example cannot cause: more examples are behind it than reported, and "
    "this is a mixture of them, or clients train otherwise than stated, for example with weight decay"
)
TWIN_NOTE = "a multiple of the example has the same gradient; of the two, the one in the range of the data is returned"


def solve_linear(observed: StackedObservations, rng: Generator, rgap: RgapSettings) -> Sequence[ClosedFormAnswer]:
    """Solve for the inputs of a first linear layer, as far as the gradient separates the examples; return one answer per case.

    A case is of one example or a batch. Its answer may have fewer examples than the batch, or none.
    From the observed gradient and the recovered inputs, the gradient of the loss at the layer's outputs is computed for each
    recovered example separately. The example gets the label whose simulated gradient is closest to this computed gradient or, if
    none is close, the label whose simulated gradient has the most similar direction. An example that seems to occur several times
    in the batch is returned several times, with one label each.
    If the model is no such chain, a single example also follows from a linear layer that sees it directly
    (`recover_direct_example`) or that sees its patches (`solve_patches`), and a batch from a linear layer that sees it directly,
    before a ReLU (`recover_direct_batch`).
    Raises ValueError if the model has neither a chain of layers that begins with a linear layer, nor such a layer.
    """
    first = choose_first_layer(observed)
    if isinstance(first, PatchLayer):
        return [_solve_patches(observed, i, rng) for i in range(len(observed.cases))]
    if isinstance(first, DirectLayer):
        solve = _solve_direct_example if observed.examples == 1 else _solve_direct_batch
        return [solve(observed, i, rng) for i in range(len(observed.cases))]
    return [_solve_chain(observed, first, i, rng) for i in range(len(observed.cases))]


def choose_first_layer(observed: StackedObservations) -> Chain | DirectLayer | PatchLayer:
    """Return the chain that begins with a linear layer; if there is none, the layer that sees the examples or their patches.

    Patches are only used for a single example, and a layer that sees several examples only before a ReLU. Raises ValueError with
    the reason why there is no chain if there is neither.
    """
    chain = observed.chain
    if isinstance(chain, Chain) and chain.layers[0].kernel is None:
        return chain
    direct = find_direct_layer(observed, 0)
    if observed.examples == 1:
        layer = direct or find_patch_layer(observed, 0)
    else:
        layer = direct if direct is not None and is_followed_by_relu(observed, direct) else None
    if layer is not None:
        return layer
    if isinstance(chain, str):
        raise ValueError(f"the closed form 'linear' cannot invert this network: {chain}{observed.search_advice}")
    raise ValueError(
        f"the first layer, {chain.layers[0].name}, is a convolution, and the closed form 'linear' needs a linear layer "
        "there; a search, such as the attack cpl, does not need it"
    )


class _Labelled(NamedTuple):
    """The N examples of an answer with their labels, and the doubts that the labels raise.

    x, y: inputs of the first layer, (N, F), and labels, (N,). source: (N,) index of each example in the `LinearAnswer` with K
    examples. doubtful: mask (K,) of those that may be mixtures. twins: whether one may be multiplied by a number.
    misstated, mixed: whether clients may train otherwise than stated, and whether an example has two labels.
    """

    x: Tensor
    y: Tensor
    source: Tensor
    doubtful: Tensor
    mixed: bool
    misstated: bool = False
    twins: bool = False


def _solve_chain(observed: StackedObservations, chain: Chain, i: int, rng: Generator) -> ClosedFormAnswer:
    gradient = {name: g[i] for name, g in observed.gradient.items()}
    rng = seed_generator(rng, observed.cases[i], "linear")
    bounds = observed.get_input_range()
    linear = recover_linear(chain, observed.get_weights(i), gradient, observed.examples, rng, bounds=bounds)
    notes: tuple[str, ...] = (linear.note,) if linear.note else ()
    if not linear.found:
        return ClosedFormAnswer.without_examples(observed.data, "linear", *notes)
    try:
        labelled = _explain_batch(observed, chain, i, linear)
    except ValueError:  # only some examples were isolated
        labelled = _label_some(observed, chain, i, linear)
    hidden = find_hidden(observed, i, chain.layers[0], linear, labelled.doubtful)
    x = observed.restore_examples(labelled.x.reshape(-1, *observed.data.shape))
    layer = chain.layers[0].weight, chain.layers[0].bias
    several = linear.how == "ratio" and float(1 - linear.certainty.min()) > estimate_residual(observed, i, layer)
    eight_bit = observed.data.is_image and bool(is_eight_bit(x).all())
    if labelled.mixed:
        open_question = MIXED_LABELS
    elif eight_bit:
        open_question = ""
    elif labelled.misstated:
        open_question = MIXED_OR_MISSTATED
    else:
        open_question = SECOND_EXAMPLE if several else ""
    return ClosedFormAnswer(
        x,
        labelled.y,
        "linear",
        notes + (TWIN_NOTE,) * labelled.twins,
        stays=linear.certainty[labelled.source].masked_fill((labelled.doubtful | hidden)[labelled.source], torch.nan),
        final=len(x) == observed.examples and (eight_bit or not linear.ambiguous) and is_settled(observed, i, linear),
        open_question=open_question,
    )


def _explain_batch(observed: StackedObservations, chain: Chain, i: int, linear: LinearAnswer) -> _Labelled:
    """Return the labels that explain each example's part of the gradient. Raises ValueError if these parts are not known."""
    batch = explain_batch(
        chain, observed.get_weights(i), observed.training.loss, linear, observed.examples, bounds=observed.get_input_range()
    )
    return _Labelled(
        batch.x,
        batch.y,
        batch.source,
        doubtful=find_unexplained(observed, i, linear, batch),
        mixed=bool(batch.mixed.any()),
        misstated=linear.ambiguous and is_misstated(observed, i, chain.layers[0], batch),
        twins=bool(batch.twins.any()),
    )


def _label_some(observed: StackedObservations, chain: Chain, i: int, linear: LinearAnswer) -> _Labelled:
    """Return the labels of examples of which only the inputs are known; inputs of unknown norm are doubtful."""
    y, mixed = assign_labels(
        chain,
        observed.get_weights(i),
        {name: g[i] for name, g in observed.gradient.items()},
        linear.x,
        loss=observed.training.loss,
        classes=observed.data.num_classes,
        examples=observed.examples,
    )
    doubtful = torch.full((linear.found,), not linear.scaled, device=linear.x.device)
    return _Labelled(linear.x, y, torch.arange(linear.found), doubtful, mixed=bool(mixed.any()))


def _solve_direct_example(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    layer = find_direct_layer(observed, i)
    if layer is None:
        return ClosedFormAnswer.without_examples(observed.data, "linear")
    answer = recover_direct_example(observed, layer, i, seed_generator(rng, observed.cases[i], "linear"))
    if answer.stays is None:
        return answer
    certainty, eight_bit = float(answer.stays), observed.data.is_image and bool(is_eight_bit(answer.x).all())
    misfit, open_question = observed.measure_misfit(i, answer.x, answer.y), ""
    if observed.draws_before(layer.name):
        open_question = CHANGED_INPUTS
    elif not eight_bit and float(1 - answer.stays) > estimate_residual(observed, i, layer.parameters):
        open_question = SECOND_EXAMPLE
    elif not eight_bit and misfit > MAX_AMBIGUOUS_MISFIT:
        inputs = layer.scaling.apply(answer.x.flatten())[None]
        other_loss = can_measure_any_loss(observed) and measure_any_loss(observed, i, answer.x) <= MAX_AMBIGUOUS_MISFIT
        if not other_loss or is_pattern_common(observed, i, layer.parameters, inputs, layer.get_range()):
            open_question = MIXED_OR_MISSTATED
    return replace(answer, final=not open_question and is_settled_by_one(observed, i, certainty), open_question=open_question)


def _solve_direct_batch(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    layer = find_direct_layer(observed, i)
    if layer is None:
        return ClosedFormAnswer.without_examples(observed.data, "linear")
    answer = recover_direct_batch(observed, layer, i, seed_generator(rng, observed.cases[i], "linear"))
    complete = answer.stays is not None and len(answer.x) == observed.examples and float(answer.stays.min()) >= STOP_AGREEMENT
    return replace(
        answer,
        final=complete and observed.estimate_noise(i) == 0,
        open_question=CHANGED_INPUTS if observed.draws_before(layer.name) else "",
    )


def _solve_patches(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    layer = find_patch_layer(observed, i)
    solved = None if layer is None else solve_patches(observed, layer, i)
    if solved is None or layer is None:
        return ClosedFormAnswer.without_examples(observed.data, "linear", DEPENDENT)
    x, certainty = solved.place(solved.inputs, observed.data.shape), solved.certainty
    y = choose_label(observed, x, i, seed_generator(rng, observed.cases[i], "linear"))
    if solved.free.shape[1] and can_measure_any_loss(observed):
        x = fit_free_patches(observed, solved, i, y)
    open_question = ""
    if observed.draws_before(layer.name):
        open_question = CHANGED_INPUTS
    elif not bool(is_eight_bit(x).all()) and observed.measure_misfit(i, x, y) > MAX_AMBIGUOUS_MISFIT:
        open_question = UNEXPLAINED
    final = not open_question and is_settled_by_one(observed, i, certainty)
    return ClosedFormAnswer(x, y, "linear", stays=torch.full((1,), certainty), final=final, open_question=open_question)

"""Route `linear`: the examples of one case from the gradient of a first linear layer, with the evidence for the answer.

An answer is undecided if the gradient may also be that of several examples mixed, or of clients that train otherwise than stated.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from attacker.attacks.cases import seed_generator
from attacker.attacks.closed_form.any_loss import can_measure_any_loss, measure_any_loss
from attacker.attacks.closed_form.linear.batch_labels import LabelledExamples, explain
from attacker.attacks.closed_form.linear.direct_layer import (
    DirectLayer,
    choose_label,
    divide,
    find_direct_layer,
    is_followed_by_relu,
    separate,
)
from attacker.attacks.closed_form.linear.first_layer import recover_linear
from attacker.attacks.closed_form.linear.known_labels import assign_labels
from attacker.attacks.closed_form.linear.label_gradients import MIXED_LABELS
from attacker.attacks.closed_form.linear.layer_gradient import LinearAnswer
from attacker.attacks.closed_form.linear.sparse import STOP_AGREEMENT
from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations
from attacker.attacks.closed_form.patches import DEPENDENT, UNEXPLAINED, PatchLayer, find_patch_layer, solve_patches
from attacker.attacks.closed_form.rgap.recursion import RgapSettings
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer

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
MAX_SINGLE_RESIDUAL = 1e-5
"""Largest share of the squared norm of the first layer's gradient that a single example leaves unexplained, besides rounding of
weights, without a defense. For four photographs of one label, behind tanh and ReLU, it was 1e-4 and 1e-2."""
MAX_AMBIGUOUS_MISFIT = 1e-3
"""Largest `LabelledExamples.misfit` at which a single example counts as the cause of a gradient that several examples may cause
as well (`LinearAnswer.ambiguous`). Above it, the confidence is undecided, unless the example has the values of an 8-bit image."""
NUM_RANDOM_INPUTS = 4000
"""Number of random inputs that are compared with an example by `_shares_neurons`."""
MAX_SHARED = 0.01
"""Largest share of random inputs that turn on the same neurons as an example at which a gradient of rank one is evidence that the
example is the only one, beside the number that the client reports."""
MAX_HIDDEN_SHARED = MAX_SHARED / 10
"""The same for a row of a batch whose gradient shows fewer examples than the batch has, since rows of one table turn on the same
neurons more often than random inputs. With four columns and two classes, four of ten rows with shares from 0.006 to 0.012 were
means of several."""
MAX_TURNED = 1e-3
"""Largest `LabelledExamples.turned` of an example of a batch that counts as explained by a label. On the tuning part, it is below
1e-6 for right examples, and above 0.1 for mixtures of two."""
MAX_HALF_TURNED = 1e-2
"""The same for clients that compute in bfloat16 or float16, whose rounding turned right examples by up to 4e-3."""
MIN_MIXED_TURN = 0.1
"""Smallest `LabelledExamples.turned` of a mixture behind a defense, if other examples of the batch are below MAX_TURNED."""
MAX_SETTLED_RESIDUAL = 1e-6
"""Largest share of the squared norm of the first layer's gradient that a single example leaves unexplained if this layer alone
settles the answer."""
TWIN_NOTE = "a multiple of the example has the same gradient; of the two, the one in the range of the data is returned"


def solve_linear(observed: StackedObservations, rng: Generator, rgap: RgapSettings) -> Sequence[ClosedFormAnswer]:
    """Solve for the inputs of a first linear layer, as far as the gradient separates the examples; return one answer per case.

    A case is of one example or a batch. Its answer may have fewer examples than the batch, or none.
    From the observed gradient and the recovered inputs, the gradient of the loss at the layer's outputs is computed for each
    recovered example separately. The example gets the label whose simulated gradient is closest to this computed gradient or, if
    none is close, the label whose simulated gradient has the most similar direction. An example that seems to occur several times
    in the batch is returned several times, with one label each.
    If the model is no such chain, a single example also follows from a linear layer that sees it directly, see `divide`, or that
    sees its patches, see `solve_patches`, and a batch from a linear layer that sees it directly, before a ReLU, see `separate`.
    Raises ValueError if the model has neither a chain of layers that begins with a linear layer, nor such a layer.
    """
    first = choose_first_layer(observed)
    if isinstance(first, PatchLayer):
        return [_solve_patches(observed, i, rng) for i in range(len(observed.cases))]
    if isinstance(first, DirectLayer):
        solve = _divide_case if observed.examples == 1 else _separate_case
        return [solve(observed, i, rng) for i in range(len(observed.cases))]
    return [_solve_case(observed, first, i, rng) for i in range(len(observed.cases))]


def choose_first_layer(observed: StackedObservations) -> Chain | DirectLayer | PatchLayer:
    """Return the chain that begins with a linear layer; if there is none, the layer that sees the examples or their patches.

    Patches are only used for a single example, and a layer that sees several examples only before a ReLU. Raises ValueError with
    the reason why there is no chain if there is neither.
    """
    try:
        return _require_linear(observed)
    except ValueError:
        direct = find_direct_layer(observed, 0)
        if observed.examples == 1:
            found = direct or find_patch_layer(observed, 0)
        else:
            found = direct if direct is not None and is_followed_by_relu(observed, direct) else None
        if found is None:
            raise
        return found


def _require_linear(observed: StackedObservations) -> Chain:
    chain = observed.chain
    if isinstance(chain, str):
        reason = chain
        raise ValueError(f"the closed form 'linear' cannot invert this network: {reason}{observed.search_advice}")
    if chain.layers[0].kernel is not None:
        raise ValueError(
            f"the first layer, {chain.layers[0].name}, is a convolution, and the closed form 'linear' needs a linear layer "
            "there; a search, such as the attack cpl, does not need it"
        )
    return chain


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


def _solve_case(observed: StackedObservations, chain: Chain, i: int, rng: Generator) -> ClosedFormAnswer:
    gradient = {name: g[i] for name, g in observed.gradient.items()}
    rng = seed_generator(rng, observed.cases[i], "linear")
    bounds = observed.get_input_range()
    linear = recover_linear(chain, observed.get_weights(i), gradient, observed.examples, rng, bounds=bounds)
    notes: tuple[str, ...] = (linear.note,) if linear.note else ()
    if not linear.found:
        return _build_empty(observed, *notes)
    try:
        labelled = _explain_batch(observed, chain, i, linear)
    except ValueError:  # only some examples were isolated
        labelled = _label_some(observed, chain, i, linear)
    hidden = _find_hidden(observed, i, chain.layers[0], linear, labelled.doubtful)
    x = observed.restore_examples(labelled.x.reshape(-1, *observed.data.shape))
    layer = chain.layers[0].weight, chain.layers[0].bias
    several = linear.how == "ratio" and float(1 - linear.certainty.min()) > _estimate_residual(observed, i, layer)
    stored = observed.data.is_image and bool(is_eight_bit(x).all())
    if labelled.mixed:
        unsure = MIXED_LABELS
    elif stored:
        unsure = ""
    elif labelled.misstated:
        unsure = MIXED_OR_MISSTATED
    else:
        unsure = SECOND_EXAMPLE if several else ""
    return ClosedFormAnswer(
        x,
        labelled.y,
        "linear",
        notes + (TWIN_NOTE,) * labelled.twins,
        stays=linear.certainty[labelled.source].masked_fill((labelled.doubtful | hidden)[labelled.source], torch.nan),
        final=len(x) == observed.examples and (stored or not linear.ambiguous) and _is_settled(observed, i, linear),
        open_question=unsure,
    )


def _explain_batch(observed: StackedObservations, chain: Chain, i: int, linear: LinearAnswer) -> _Labelled:
    """Return the labels that explain each example's part of the gradient. Raises ValueError if these parts are not known."""
    batch = explain(
        chain,
        observed.get_weights(i),
        observed.training.loss,
        linear,
        observed.examples,
        bounds=observed.get_input_range(),
    )
    return _Labelled(
        batch.x,
        batch.y,
        batch.source,
        doubtful=_find_unexplained(observed, i, linear, batch),
        mixed=bool(batch.mixed.any()),
        misstated=linear.ambiguous and _is_misstated(observed, i, chain.layers[0], batch),
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


def _divide_case(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    layer = find_direct_layer(observed, i)
    if layer is None:
        return _build_empty(observed)
    found = divide(observed, layer, i, seed_generator(rng, observed.cases[i], "linear"))
    if not len(found.x):
        return ClosedFormAnswer(found.x, found.y, "linear", found.notes)
    stored = observed.data.is_image and bool(is_eight_bit(found.x).all())
    misfit, unsure = observed.measure_misfit(i, found.x, found.y), ""
    if observed.draws_before(layer.name):
        unsure = CHANGED_INPUTS
    elif not stored and float(1 - found.certainty) > _estimate_residual(observed, i, layer.parameters):
        unsure = SECOND_EXAMPLE
    elif not stored and misfit > MAX_AMBIGUOUS_MISFIT:
        inputs = (layer.scale * found.x.flatten() + layer.shift)[None]
        other = can_measure_any_loss(observed) and measure_any_loss(observed, i, found.x) <= MAX_AMBIGUOUS_MISFIT
        ends = layer.shift, layer.scale + layer.shift
        unsure = "" if other and not _shares_neurons(observed, i, layer.parameters, inputs, ends) else MIXED_OR_MISSTATED
    settled = observed.estimate_noise(i) == 0 and float(found.certainty) >= 1 - MAX_SETTLED_RESIDUAL
    final = settled and not unsure
    return ClosedFormAnswer(found.x, found.y, "linear", found.notes, stays=found.certainty, final=final, open_question=unsure)


def _separate_case(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    layer = find_direct_layer(observed, i)
    if layer is None:
        return _build_empty(observed)
    found = separate(observed, layer, i, seed_generator(rng, observed.cases[i], "linear"))
    whole = 0 < len(found.x) == observed.examples and float(found.certainty.min()) >= STOP_AGREEMENT
    return ClosedFormAnswer(
        found.x,
        found.y,
        "linear",
        found.notes,
        stays=found.certainty,
        final=whole and observed.estimate_noise(i) == 0,
        open_question=CHANGED_INPUTS if observed.draws_before(layer.name) else "",
    )


def _solve_patches(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    layer = find_patch_layer(observed, i)
    x, certainty = (None, 0.0) if layer is None else solve_patches(observed, layer, i)
    if x is None or layer is None:
        return _build_empty(observed, DEPENDENT)
    y = choose_label(observed, x, i, seed_generator(rng, observed.cases[i], "linear"))
    unsure = ""
    if observed.draws_before(layer.name):
        unsure = CHANGED_INPUTS
    elif not bool(is_eight_bit(x).all()) and observed.measure_misfit(i, x, y) > MAX_AMBIGUOUS_MISFIT:
        unsure = UNEXPLAINED
    final = observed.estimate_noise(i) == 0 and certainty >= 1 - MAX_SETTLED_RESIDUAL and not unsure
    return ClosedFormAnswer(x, y, "linear", stays=torch.full((1,), certainty), final=final, open_question=unsure)


def _build_empty(observed: StackedObservations, *notes: str) -> ClosedFormAnswer:
    return ClosedFormAnswer(torch.zeros(0, *observed.data.shape), torch.zeros(0, dtype=torch.long), "linear", notes)


def _is_misstated(observed: StackedObservations, i: int, layer: Layer, whole: LabelledExamples) -> bool:
    """Return whether the gradient of the first layer is not that of the only example found, or may be that of several.

    With one output, the loss decides only a factor of the gradient, for example the squared error of a regression. If this factor
    is not that of the stated loss, it cannot show that there is a single example; the neurons that the example turns on do.
    The errors at two logits, whose sum is zero, are parallel as well, also with label smoothing.
    """
    if float(whole.misfit.max()) <= MAX_AMBIGUOUS_MISFIT:
        return False
    narrow = can_measure_any_loss(observed) and observed.data.num_classes == 2
    if not narrow or float(whole.turned.max()) > MAX_AMBIGUOUS_MISFIT:
        return True
    low, high = observed.get_input_range()
    return _shares_neurons(observed, i, (layer.weight, layer.bias), whole.x, (low.flatten(), high.flatten()))


def _shares_neurons(
    observed: StackedObservations,
    i: int,
    names: tuple[str, str | None],
    inputs: Tensor,
    ends: tuple[Tensor, Tensor],
    *,
    limit: float = MAX_SHARED,
) -> bool:
    """Return whether more than the share `limit` of random inputs of a linear layer turns on the same neurons as the example.

    Behind ReLU, the gradients of several examples are parallel only if they turn on the same neurons. Of pairs of rows of three
    tables, of which one row was below MAX_SHARED, at most 10 % did so, and 2 % with at least 32 neurons.
    names: of the layer's weight and bias. inputs: (1, F), the example's. ends: inputs (F,) of examples of zeros and of ones.
    """
    weights = observed.get_weights(i)
    bias = 0.0 if names[1] is None else weights[names[1]]
    rng = torch.Generator().manual_seed(0)
    share = torch.rand(NUM_RANDOM_INPUTS, inputs.shape[1], generator=rng, dtype=torch.float64).to(inputs.device)
    low, high = (end.to(inputs).double() for end in ends)
    on = [(each @ weights[names[0]].double().T + bias) > 0 for each in (inputs.double(), low + share * (high - low))]
    return float((on[0] == on[1]).all(dim=1).double().mean()) > limit


def _find_unexplained(observed: StackedObservations, i: int, found: LinearAnswer, whole: LabelledExamples) -> Tensor:
    """Return a mask (found,) of the examples of a batch that may be mixtures, since no label explains their part of the gradient.

    If all labels fail for all examples, clients may have another loss, and any errors at the outputs count as well. Such errors
    explain mixtures of examples that turn on the same neurons, too, so that examples are marked that share theirs with another.
    After several steps or behind a defense, the gradient of a right example may differ in other ways. Only examples with an
    agreement below STOP_AGREEMENT are marked then, and, after one step, those that differ far more than others of the batch.
    """
    if observed.examples == 1:
        return torch.zeros_like(found.certainty, dtype=torch.bool)
    limit = MAX_TURNED if observed.training.precision == "float32" else MAX_HALF_TURNED
    off = (whole.turned > limit).to(found.certainty.device)
    if observed.cases[i].observations[0].is_defended or observed.steps != 1:
        far = (whole.turned > MIN_MIXED_TURN).to(found.certainty.device) & (observed.steps == 1) & (not bool(off.all()))
        return off & (found.certainty < STOP_AGREEMENT) | far
    if not bool(off.all()):
        return off
    return (whole.beside > limit).to(found.certainty.device) | _share_neurons_with_another(observed, i, found.x)


def _find_hidden(observed: StackedObservations, i: int, layer: Layer, found: LinearAnswer, doubtful: Tensor) -> Tensor:
    """Return a mask (found,) of the table rows that may be mixtures, since the gradient shows fewer examples than the batch has.

    The same holds if it shows as many, but a row is `doubtful`: that one may be right, and another one a mixture.

    Rows that turn on the same neurons have parallel gradients if their errors at the outputs are parallel, as with two classes,
    so that they look like one row, a mean of them. A table of few columns has many such rows, and the mean of rows of the same
    categories looks like any other row. A row is marked if more than a share MAX_HIDDEN_SHARED of random inputs turns on the same
    neurons.
    """
    count = found.found
    is_whole = found.rank >= observed.examples and not bool(doubtful.any())
    if observed.data.is_image or observed.examples == 1 or is_whole:
        return torch.zeros(count, dtype=torch.bool, device=found.certainty.device)
    low, high = observed.get_input_range()
    ends = low.flatten(), high.flatten()
    names = layer.weight, layer.bias
    shared = [_shares_neurons(observed, i, names, x[None], ends, limit=MAX_HIDDEN_SHARED) for x in found.x]
    return torch.tensor(shared, dtype=torch.bool, device=found.certainty.device)


def _share_neurons_with_another(observed: StackedObservations, i: int, inputs: Tensor) -> Tensor:
    """Return a mask (N,) of the inputs (N, F) of the first layer that turn on exactly the neurons that another one turns on."""
    assert isinstance(observed.chain, Chain)
    layer, weights = observed.chain.layers[0], observed.get_weights(i)
    on = inputs.double() @ weights[layer.weight].double().T + (0.0 if layer.bias is None else weights[layer.bias]) > 0
    return (on[:, None] == on[None]).all(dim=2).sum(dim=1) > 1


def _estimate_residual(observed: StackedObservations, i: int, names: Sequence[str | None]) -> float:
    """Return the largest unexplained share of the first layer's squared gradient norm that rounding may cause for one example.

    It is infinite behind a defense and where clients compute in less than float32, so that the share tells nothing.
    names: of the layer's weight and bias.
    """
    one = observed.cases[i].observations[0]
    if one.is_defended or one.training.precision != "float32":
        return float("inf")
    rounded = [name for name in names if name is not None and name in one.rounding]
    power = sum(float(one.update[name].double().square().sum()) for name in rounded)
    rounding = sum(float(one.rounding[name].double().square().sum()) for name in rounded)
    return MAX_SINGLE_RESIDUAL + 10 * rounding / power if power else MAX_SINGLE_RESIDUAL


def _is_settled(observed: StackedObservations, i: int, found: LinearAnswer) -> bool:
    """Return whether the first layer's gradient alone determines the examples, whatever the rest of the gradient says.

    The rest then differs only because clients train otherwise than stated, for example with another loss or learning rate. False
    if the defense adds noise, or if the norm of the inputs is unknown. `found.ambiguous` does not matter here: for an ambiguous
    answer, the caller also checks that its values are those of an 8-bit image, which a mixture's values are not.
    """
    if observed.estimate_noise(i) > 0 or not found.scaled:
        return False
    if observed.examples == 1:
        return float(found.certainty.min()) >= 1 - MAX_SETTLED_RESIDUAL
    return observed.steps == 1 and float(found.certainty.min()) >= STOP_AGREEMENT

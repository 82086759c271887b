"""Registry of routes: closed forms that compute examples from gradients.

The attack `ClosedForm` tries them in turn, by default in the order of `ROUTES`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor

from attacker.attacks.cases import seed_generator
from attacker.attacks.closed_form.direct_layer import DirectLayer, divide, find_direct_layer
from attacker.attacks.closed_form.features import invert_features, require_features
from attacker.attacks.closed_form.layer_input import STAGE_STEPS, find_suitable_layer, invert_layer_input
from attacker.attacks.closed_form.linear.batch_labels import LabelledExamples, explain
from attacker.attacks.closed_form.linear.first_layer import recover_linear
from attacker.attacks.closed_form.linear.known_labels import assign_labels
from attacker.attacks.closed_form.linear.layer_gradient import LinearAnswer
from attacker.attacks.closed_form.linear.mixed_labels import MIXED_LABELS
from attacker.attacks.closed_form.linear.sparse import STOP_AGREEMENT
from attacker.attacks.closed_form.observations import StackedObservations
from attacker.attacks.closed_form.peeling.peeled import PeelingAnswers, peel
from attacker.attacks.closed_form.rank.analysis import analyse_rank
from attacker.attacks.closed_form.rgap.inversion import (
    ClosedFormAnswer,
    build_answers,
    choose_solutions,
    require_single,
    run_rgap,
)
from attacker.attacks.closed_form.rgap.walk import WalkSettings, solve_layers
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.input_layer import is_input_random
from attacker.attacks.networks.layers import Layer

log = logging.getLogger(__name__)

Route = Callable[[StackedObservations, Generator, WalkSettings], Sequence[ClosedFormAnswer]]
"""Maps N stacked observations to N answers, which hold the examples that were found. Raises ValueError if it does not apply."""


def solve_linear(observed: StackedObservations, rng: Generator, walk: WalkSettings) -> Sequence[ClosedFormAnswer]:
    """Solve for the inputs of a first linear layer, as far as the gradient separates the examples; return one answer per case.

    A case is of one example or a batch. Its answer may have fewer examples than the batch, or none.
    From the observed gradient and the recovered inputs, the gradient of the loss at the layer's outputs is computed for each
    recovered example separately. The example gets the label whose simulated gradient is closest to this computed gradient or, if
    none is close, the label whose simulated gradient has the most similar direction. An example that seems to occur several times
    in the batch is returned several times, with one label each.
    A single example also follows if the model is no such chain, but has a linear layer that sees it directly, see `divide`.
    Raises ValueError if the model has neither a chain of layers that begins with a linear layer, nor such a layer.
    """
    first = _choose_first_layer(observed)
    if isinstance(first, DirectLayer):
        return [_divide_case(observed, i, rng) for i in range(len(observed.cases))]
    return [_solve_case(observed, first, i, rng) for i in range(len(observed.cases))]


def _choose_first_layer(observed: StackedObservations) -> Chain | DirectLayer:
    """Return the chain that begins with a linear layer; if there is none, the layer that sees a single example directly.

    Raises ValueError with the reason why there is no chain if there is neither.
    """
    try:
        return _require_linear(observed)
    except ValueError:
        direct = find_direct_layer(observed, 0) if observed.examples == 1 else None
        if direct is None:
            raise
        return direct


def _require_linear(observed: StackedObservations) -> Chain:
    chain = observed.chain
    if isinstance(chain, str):
        reason = chain
        raise ValueError(
            f"the closed form 'linear' cannot invert this network: {reason}; a search, such as the attack cpl, has no such limit"
        )
    if chain.layers[0].kernel is not None:
        raise ValueError(
            f"the first layer, {chain.layers[0].name}, is a convolution, and the closed form 'linear' needs a linear layer "
            "there; a search, such as the attack cpl, does not need it"
        )
    return chain


def solve_layer_by_layer(observed: StackedObservations, rng: Generator, walk: WalkSettings) -> Sequence[ClosedFormAnswer]:
    """Solve linear equations for the input of each layer, from the last to the first (R-GAP); return one answer per case.

    If several inputs have the same gradient, by count of equations, R-GAP finds one of these inputs, and a note says so.
    Raises ValueError if R-GAP does not apply, see `run_rgap`.
    """
    chain = require_single(observed)
    found, report = run_rgap(observed, walk=walk), analyse_rank(chain, prove=0)
    if not report.undetermined:
        return found
    size = report.layers[0].unknowns
    words = f"the gradient leaves about {report.undetermined:,} of {size:,} values undetermined: many inputs have it, this is one"
    return [replace(one, notes=(*one.notes, words), determined=1 - report.undetermined / size) for one in found]


def solve_jointly(observed: StackedObservations, rng: Generator, walk: WalkSettings) -> Sequence[ClosedFormAnswer]:
    """Solve layer by layer (R-GAP) back to a layer with too few equations, and for the network's input from there at once.

    The second step uses the equations of that layer and all before it together, with a prior. Returns one answer per case.
    If several layers have too few equations, that layer is the one nearest to the output; if none has, but the network does not
    use every input value, it is the first layer.
    Raises ValueError if R-GAP does not apply, see `run_rgap`, or if every layer has enough equations and all input values are
    used.
    """
    chain = require_single(observed)
    report = analyse_rank(chain)
    deficient = report.deficient_layers or (0,) * bool(report.unused)
    if not deficient:
        raise ValueError(
            "each layer of this network can be solved on its own, so that the closed form 'peeled', which solves several layers "
            "together, does not apply; set route=layers"
        )
    readings = choose_solutions(observed, chain, walk)
    point = solve_layers(chain, observed.weights, observed.gradient, readings.first, walk, until=deficient[-1])
    low, high = _get_input_range(observed)
    found = peel(chain, observed.weights, observed.gradient, point, low=low, high=high)
    name, determined = chain.layers[deficient[-1]].name, 1 - report.undetermined / report.layers[0].unknowns
    return [
        ClosedFormAnswer(
            x=answer.x,
            y=answer.y,
            route=answer.route,
            notes=(*answer.notes, *_note_prior(found, i, name)),
            doubts=answer.doubts,
            stays=_estimate_determined_share(found, i, determined),
            twin=answer.twin,
        )
        for i, answer in enumerate(build_answers(observed, readings, found.x, None, "peeled"))
    ]


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

ROUTES: dict[str, Route] = {
    "linear": solve_linear,
    "layers": solve_layer_by_layer,
    "peeled": solve_jointly,
    "features": invert_features,
    "layer_input": invert_layer_input,
}

_REQUIREMENTS: dict[str, Callable[[StackedObservations], object]] = {
    "linear": _choose_first_layer,
    "layers": require_single,
    "peeled": require_single,
    "features": require_features,
    "layer_input": find_suitable_layer,
}

EVALUATIONS = {"layer_input": sum(STAGE_STEPS)}
"""Largest number of evaluations of the network and its derivative that a route makes for one case, for a route that searches by
gradient descent. The evaluations of the other routes are not counted."""


def explain_refusal(route: str, observed: StackedObservations) -> str:
    """Return why a route cannot apply to the observations, as far as is known before it runs; "" if it may apply."""
    try:
        _REQUIREMENTS[route](observed)
    except Exception as error:  # a user's network may fail in any way
        return explain_error(route, error)
    return ""


def explain_error(route: str, error: Exception) -> str:
    """Return why a route gave no answer, from the error that it raised: a ValueError's message, or that the route failed.

    A failure is also logged with its traceback, the first time that it occurs.
    """
    if isinstance(error, ValueError):
        return str(error)
    words = f"the route {route} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if words not in _LOGGED:
        _LOGGED.add(words)
        log.warning("%s", words, exc_info=error)
    return words


_LOGGED = set[str]()
"""Failures of routes that have been logged, since a route is tried on every update of a recording."""


def _solve_case(observed: StackedObservations, chain: Chain, i: int, rng: Generator) -> ClosedFormAnswer:
    weights, gradient = observed.get_weights(i), {name: g[i] for name, g in observed.gradient.items()}
    rng = seed_generator(rng, observed.cases[i], "linear")
    linear = recover_linear(chain, weights, gradient, observed.examples, rng, bounds=_get_input_range(observed))
    notes: tuple[str, ...] = (linear.note,) if linear.note else ()
    if not linear.found:
        return ClosedFormAnswer(torch.zeros(0, *observed.data.shape), torch.zeros(0, dtype=torch.long), "linear", notes)
    misstated = mixed = False
    doubtful = torch.zeros(linear.found, dtype=torch.bool, device=linear.x.device)
    try:
        batch = explain(
            observed.model,
            chain,
            weights,
            observed.training.loss,
            linear,
            observed.examples,
            bounds=_get_input_range(observed),
            feed=lambda x: observed.data.normalise(observed.restore_examples(x)),
        )
        x, y, source = batch.x, batch.y, batch.source
        notes += (TWIN_NOTE,) * bool(batch.twins.any())
        misstated = linear.ambiguous and _is_misstated(observed, i, chain.layers[0], batch)
        mixed = bool(batch.mixed.any())
        doubtful = _find_unexplained(observed, i, linear, batch)
    except ValueError:  # only some examples were isolated
        x, source = linear.x, torch.arange(linear.found)
        y, unclear = assign_labels(
            chain,
            weights,
            gradient,
            x,
            loss=observed.training.loss,
            classes=observed.data.num_classes,
            examples=observed.examples,
        )
        mixed = bool(unclear.any())
        doubtful |= not linear.scaled
    x = observed.restore_examples(x.reshape(-1, *observed.data.shape))
    layer = chain.layers[0].weight, chain.layers[0].bias
    several = linear.how == "ratio" and float(1 - linear.certainty.min()) > _estimate_residual(observed, i, layer)
    stored = observed.data.is_image and bool(is_eight_bit(x).all())
    final = len(x) == observed.examples and (stored or not linear.ambiguous) and _is_settled(observed, i, linear)
    unsure = MIXED_LABELS if mixed else "" if stored else MIXED_OR_MISSTATED if misstated else SECOND_EXAMPLE if several else ""
    stays = linear.certainty[source].masked_fill(doubtful[source], torch.nan)
    return ClosedFormAnswer(x, y, "linear", notes, stays=stays, final=final, open_question=unsure)


def _divide_case(observed: StackedObservations, i: int, rng: Generator) -> ClosedFormAnswer:
    layer = find_direct_layer(observed, i)
    if layer is None:
        return ClosedFormAnswer(torch.zeros(0, *observed.data.shape), torch.zeros(0, dtype=torch.long), "linear")
    found = divide(observed, layer, i, seed_generator(rng, observed.cases[i], "linear"))
    if not len(found.x):
        return ClosedFormAnswer(found.x, found.y, "linear", found.notes)
    stored = observed.data.is_image and bool(is_eight_bit(found.x).all())
    first, misfit = observed.cases[i].observations[0], observed.measure_misfit(i, found.x, found.y)
    unsure = ""
    if first.training.mode == "train" and is_input_random(first.model, first.data, layer.name):
        unsure = CHANGED_INPUTS
    elif not stored and float(1 - found.certainty) > _estimate_residual(observed, i, layer.parameters):
        unsure = SECOND_EXAMPLE
    elif not stored and misfit > MAX_AMBIGUOUS_MISFIT:
        turned = observed.measure_misfit(i, found.x, found.y, any_scale=True)
        inputs = (layer.scale * found.x.flatten() + layer.shift)[None]
        other = observed.shows_other_losses and turned <= MAX_AMBIGUOUS_MISFIT
        ends = layer.shift, layer.scale + layer.shift
        unsure = "" if other and not _shares_neurons(observed, i, layer.parameters, inputs, ends) else MIXED_OR_MISSTATED
    settled = observed.estimate_noise(i) == 0 and float(found.certainty) >= 1 - MAX_SETTLED_RESIDUAL
    final = settled and not unsure
    return ClosedFormAnswer(
        found.x, found.y, "linear", found.notes, stays=found.certainty[None], final=final, open_question=unsure
    )


def _is_misstated(observed: StackedObservations, i: int, layer: Layer, whole: LabelledExamples) -> bool:
    """Return whether the gradient of the first layer is not that of the only example found, or may be that of several.

    With one output, the loss decides only a factor of the gradient, for example the squared error of a regression. If this factor
    is not that of the stated loss, it cannot show that there is a single example; the neurons that the example turns on do.
    """
    if float(whole.misfit.max()) <= MAX_AMBIGUOUS_MISFIT:
        return False
    if not observed.shows_other_losses or float(whole.turned.max()) > MAX_AMBIGUOUS_MISFIT:
        return True
    low, high = _get_input_range(observed)
    return _shares_neurons(observed, i, (layer.weight, layer.bias), whole.x, (low.flatten(), high.flatten()))


def _shares_neurons(
    observed: StackedObservations, i: int, names: tuple[str, str | None], inputs: Tensor, ends: tuple[Tensor, Tensor]
) -> bool:
    """Return whether more than the share MAX_SHARED of random inputs of a linear layer turns on the same neurons as the example.

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
    return float((on[0] == on[1]).all(dim=1).double().mean()) > MAX_SHARED


def _find_unexplained(observed: StackedObservations, i: int, found: LinearAnswer, whole: LabelledExamples) -> Tensor:
    """Return a mask (found,) of the examples of a batch that may be mixtures, since no label explains their part of the gradient.

    If all labels fail for all examples, clients may have another loss, and combinations of labels with any weights count as well.
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
    return off if not bool(off.all()) else (whole.beside > limit).to(found.certainty.device)


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


def _get_input_range(observed: StackedObservations) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest inputs of the chain's first layer for examples in [0, 1], each (*shape)."""
    ends = (torch.full(observed.data.shape, value, dtype=observed.dtype, device=observed.device) for value in (0.0, 1.0))
    low, high = (observed.scale_inputs(end) for end in ends)
    return torch.minimum(low, high), torch.maximum(low, high)


def _note_prior(found: PeelingAnswers, i: int, layer: str) -> tuple[str, ...]:
    if bool(found.exact[i]):
        return ()
    return (f"layer {layer} lacks equations, and a smoothness prior fills in what the gradient does not determine",)


def _estimate_determined_share(found: PeelingAnswers, i: int, determined: float) -> Tensor:
    """Return an estimate of the share of answer i that the equations determine, (1,), for `ClosedFormAnswer.stays`.

    It is 1 - `PeelingAnswers.free` or, if `free` was not measured (NaN), 0.5, but at most `determined`. It is multiplied by
    1 - `PeelingAnswers.misfit`^2, the share of the squared norm of the equations' right-hand sides that the answer explains.
    found:      the result of solving the layers together. determined: share that the gradient determines by counting equations.
    """
    share = (1 - found.free[i]).nan_to_num(nan=0.5).clamp(0, determined) * (1 - found.misfit[i].square()).clamp(0, 1)
    return share.reshape(1)

"""Registry of routes: closed forms that compute examples from gradients.

The attack `ClosedForm` tries them in turn, by default in the order of `ROUTES`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Generator, Tensor

from attacker.attacks.closed_form.features import invert_features, require_features
from attacker.attacks.closed_form.layer_input import STAGE_STEPS, find_suitable_layer, invert_layer_input
from attacker.attacks.closed_form.linear.route import choose_first_layer, solve_linear
from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations
from attacker.attacks.closed_form.peeling.peeled import PeelingAnswers, peel
from attacker.attacks.closed_form.rank.analysis import analyse_rank
from attacker.attacks.closed_form.rgap.inversion import build_answers, choose_solutions, require_single, run_rgap
from attacker.attacks.closed_form.rgap.recursion import RgapSettings, solve_layers

log = logging.getLogger(__name__)

Route = Callable[[StackedObservations, Generator, RgapSettings], Sequence[ClosedFormAnswer]]
"""Maps N stacked observations to N answers, which hold the examples that were found. Raises ValueError if it does not apply."""


def _solve_layer_by_layer(observed: StackedObservations, rng: Generator, rgap: RgapSettings) -> Sequence[ClosedFormAnswer]:
    """Solve linear equations for the input of each layer, from the last to the first (R-GAP); return one answer per case.

    If several inputs have the same gradient, by count of equations, R-GAP finds one of these inputs, and a note says so.
    Raises ValueError if R-GAP does not apply, see `run_rgap`.
    """
    chain = require_single(observed)
    answers, report = run_rgap(observed, rgap=rgap), analyse_rank(chain, prove=0)
    if not report.undetermined:
        return answers
    size = report.layers[0].unknowns
    note = f"the gradient leaves about {report.undetermined:,} of {size:,} values undetermined: many inputs have it, this is one"
    return [replace(answer, notes=(*answer.notes, note), determined=1 - report.undetermined / size) for answer in answers]


def _solve_jointly(observed: StackedObservations, rng: Generator, rgap: RgapSettings) -> Sequence[ClosedFormAnswer]:
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
    readings = choose_solutions(observed, chain, rgap)
    point = solve_layers(chain, observed.weights, observed.gradient, readings.first, rgap, until=deficient[-1])
    low, high = observed.get_input_range()
    solved = peel(chain, observed.weights, observed.gradient, point, low=low, high=high)
    name, determined = chain.layers[deficient[-1]].name, 1 - report.undetermined / report.layers[0].unknowns
    open_note = f"layer {name} lacks equations, and a smoothness prior fills in what the gradient does not determine"
    return [
        replace(
            answer,
            notes=answer.notes if bool(solved.exact[i]) else (*answer.notes, open_note),
            stays=_estimate_determined_share(solved, i, determined),
        )
        for i, answer in enumerate(build_answers(observed, readings, solved.x, None, "peeled"))
    ]


ROUTES: dict[str, Route] = {
    "linear": solve_linear,
    "layers": _solve_layer_by_layer,
    "peeled": _solve_jointly,
    "features": invert_features,
    "layer_input": invert_layer_input,
}

_REQUIREMENTS: dict[str, Callable[[StackedObservations], object]] = {
    "linear": choose_first_layer,
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
    if reason := observed.explain_other_optimiser(0):
        return reason
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


def _estimate_determined_share(solved: PeelingAnswers, i: int, determined: float) -> Tensor:
    """Return an estimate of the share of answer i that the equations determine, (1,), for `ClosedFormAnswer.stays`.

    It is 1 - `PeelingAnswers.free` or, if `free` was not measured (NaN), 0.5, but at most `determined`. It is multiplied by
    1 - `PeelingAnswers.misfit`^2, the share of the squared norm of the equations' right-hand sides that the answer explains.
    solved: the result of solving the layers together. determined: share that the gradient determines by counting equations.
    """
    share = (1 - solved.free[i]).nan_to_num(nan=0.5).clamp(0, determined) * (1 - solved.misfit[i].square()).clamp(0, 1)
    return share.reshape(1)

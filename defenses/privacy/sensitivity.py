"""Noise multiplier of a chain of defenses or a gradient rule: the scale of the noise divided by the sensitivity.

The sensitivity is the largest norm of the vector that the noise hides: a client's update, or the gradient of one example. The
sensitivity is bounded by the steps before the noise, such as clipping.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from defenses import papers
from defenses.gradients import GradientSpec
from defenses.registry.calls import Step
from defenses.spec import DEFENSES, DefenseSpec

Family = Literal["gaussian", "laplace"]
StepArguments = Mapping[str, Any]
"""A dict from the name of an argument of a step to its value."""


@dataclass(frozen=True)
class Noise:
    """Noise relative to the sensitivity of what it hides.

    multiplier: standard deviation (Gaussian) or scale (Laplace) divided by the largest norm of what is hidden; 0 hides nothing.
    family:     distribution of the noise: "gaussian" or "laplace".
    why:        reason for a multiplier of 0.
    """

    multiplier: float = 0.0
    family: Family = "gaussian"
    why: str = ""


NO_NOISE = Noise(why="no noise is added")
PARTIAL_NOISE = Noise(why="noise is added to some of the tensors only")
UNBOUNDED_NORM = Noise(why="the norm of the update is not bounded before the noise is added")
DATA_DEPENDENT_SCALE = Noise(why="the scale of the noise depends on the data")


NO_ACCOUNTING_RULE = "no accounting rule is known for"


def _report_no_rule(name: str) -> Noise:
    """Return a multiplier of 0, with the reason, for a defense of another package, whose noise is unknown."""
    return Noise(why=f"{NO_ACCOUNTING_RULE} {name}")


class _UpdateBounds(NamedTuple):
    """Properties of an update between two steps of a chain.

    length: upper bound on the update's norm. noise: of the noises that the steps so far added, the one with the largest
            multiplier.
    """

    length: float = math.inf
    noise: Noise = NO_NOISE


def find_noise(spec: DefenseSpec, *, tensors: int) -> Noise:
    """Return the noise by which a chain of defenses hides one message of a client.

    If several steps add noise, the result is the noise with the largest multiplier. What is hidden is the client's whole update.
    The sensitivity of the noise is the bound on the update's norm after the steps before it. Steps after the noise are
    post-processing and cannot weaken it.
    Steps without an entry in `NORM_BOUNDS`, and steps with error feedback, remove the bound, so that noise after them hides
    nothing until another step bounds the norm. For aliases of papers and `in_gradient_units`, the rules apply to the steps that
    these stand for. Noise whose scale depends on the data (`gaussian(snr_db=...)`), and noise on some tensors only (`masked`),
    hides nothing either. If no noise hides the message, `Noise.why` gives the reason, such as a defense of another package whose
    noise is unknown.

    There is no amplification by sampling of clients, since the server knows which clients it asked and sees every message.
    tensors: number of tensors in an update, for per-tensor bounds.
    """
    return _follow_steps(spec.steps, _UpdateBounds(), tensors).noise


def find_gradient_noise(rule: GradientSpec, *, tensors: int) -> Noise:
    """Return the noise that hides one example in the gradient of its batch.

    dp_sgd:  each example's gradient has norm at most `max_norm`, and the sum gets noise with the standard deviation
             `noise * max_norm` (Abadi et al. 2016).
    fed_cdp: one bounded and noisy sum per tensor (Wei et al. 2021), so that the multiplier is `noise / sqrt(tensors)`.
    Noise given by a signal-to-noise ratio depends on the data and hides nothing. The other rules of this project add no noise;
    the noise of rules of other packages is unknown and counts as hiding nothing.
    tensors: number of tensors in a gradient.
    """
    if rule.step is None:
        return NO_NOISE
    if rule.step.name not in ("dp_sgd", "fed_cdp"):
        return NO_NOISE if rule.registry.is_builtin(rule.step.name) else _report_no_rule(rule.step.name)
    multiplier = _complete_arguments(rule.step, rule.registry[rule.step.name])["noise"]
    if multiplier is None:
        return DATA_DEPENDENT_SCALE
    return Noise(multiplier / (math.sqrt(tensors) if rule.step.name == "fed_cdp" else 1)) if multiplier else NO_NOISE


def _follow_steps(steps: Sequence[Step], sent: _UpdateBounds, tensors: int) -> _UpdateBounds:
    for step in steps:
        sent = _follow_step(step, sent, tensors)
    return sent


def _follow_step(step: Step, sent: _UpdateBounds, tensors: int) -> _UpdateBounds:
    given = _complete_arguments(step, DEFENSES[step.name].defense)
    if step.name == "in_gradient_units":
        rate = abs(given["learning_rate"])
        inside = _follow_steps(given["defense"].steps, sent._replace(length=sent.length / rate), tensors)
        return inside._replace(length=inside.length * rate)
    if inspect.isfunction(written := getattr(papers, step.name, None)):
        return _follow_steps(DefenseSpec.parse(written(**given)).steps, sent, tensors)
    if step.name in NOISE_SCALES:
        family, scale = NOISE_SCALES[step.name](given)
        hiding = _measure_noise(sent.length, family, scale)
        return _UpdateBounds(sent.length if scale == 0 else math.inf, max(hiding, sent.noise, key=lambda noise: noise.multiplier))
    if step.name == "masked" and not sent.noise.multiplier:
        part = _follow_steps(given["defense"].steps, _UpdateBounds(length=1.0), tensors).noise
        if part != NO_NOISE:
            sent = sent._replace(noise=part if part.why.startswith(NO_ACCOUNTING_RULE) else PARTIAL_NOISE)
    if not DEFENSES.is_builtin(step.name) and not sent.noise.multiplier:
        sent = sent._replace(noise=_report_no_rule(step.name))
    bound = NORM_BOUNDS.get(step.name, _assume_unbounded)
    return sent._replace(length=math.inf if given.get("error_feedback") else bound(sent.length, given, tensors))


def _complete_arguments(step: Step, factory: Callable[..., Any]) -> StepArguments:
    """Return a dict from parameter to value: the arguments of a step, and the defaults of those that are left out."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | dict(step.arguments)


def _measure_noise(length: float, family: Family, scale: float | None) -> Noise:
    if scale is None:
        return DATA_DEPENDENT_SCALE
    if scale == 0:
        return NO_NOISE
    return Noise(scale / length, family) if length < math.inf else UNBOUNDED_NORM


def _assume_unbounded(length: float, given: StepArguments, tensors: int) -> float:
    return math.inf


def _keep_length(length: float, given: StepArguments, tensors: int) -> float:
    return length


def _rescale_length(length: float, given: StepArguments, kept: float) -> float:
    return length / kept if given["rescale"] and kept else length


NOISE_SCALES: dict[str, Callable[[StepArguments], tuple[Family, float | None]]] = {
    "gaussian": lambda given: ("gaussian", given["std"]),
    "laplace": lambda given: ("laplace", given["scale"]),
}
"""For each defense that adds noise, a function that maps the defense's arguments to the family and the scale of the noise. The
scale is None if it depends on the data."""

NORM_BOUNDS: dict[str, Callable[[float, StepArguments, int], float]] = {
    "clip": lambda length, given, tensors: min(length, given["max_norm"]),
    "clip_each": lambda length, given, tensors: min(length, given["max_norm"] * math.sqrt(tensors)),
    "top_k": _keep_length,
    "random_k": lambda length, given, tensors: _rescale_length(length, given, given["keep"]),
    "prune": _keep_length,
    "gradient_dropout": lambda length, given, tensors: _rescale_length(length, given, 1 - given["p"]),
    "sign": lambda length, given, tensors: length if given["scale"] == "mean" else math.inf,
    "withhold": _keep_length,
}
"""For each defense, a function that returns a bound on the norm of the update after it, given a bound on the norm before it, the
defense's arguments, and the number of tensors of the update. The bounds hold without error feedback, which adds a residual."""

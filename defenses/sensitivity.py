"""Sensitivity: how long what a client sends can be at most, and with it how well the noise that it adds hides anything."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from defenses import papers
from defenses._registry.calls import Step
from defenses.gradients import GradientSpec
from defenses.spec import DEFENSES, DefenseSpec

Family = Literal["gaussian", "laplace"]
Given = Mapping[str, Any]
"""Arguments of a step, by name."""


@dataclass(frozen=True)
class Noise:
    """Noise that hides something of bounded length.

    multiplier: standard deviation (Gaussian) or scale (Laplace) over the greatest length of what is hidden; 0 hides nothing.
    why:        what is missing where the multiplier is 0.
    """

    multiplier: float = 0.0
    family: Family = "gaussian"
    why: str = ""


NO_NOISE = Noise(why="no noise is added")
IN_PART = Noise(why="noise is added to some of the tensors only")
NO_BOUND = Noise(why="nothing bounds the length of what the noise is to hide")
NO_SCALE = Noise(why="the scale of the noise follows the data")


class _Sent(NamedTuple):
    """An update on its way through a chain: it is at most so long, and the best noise so far hides all that went before."""

    length: float = math.inf
    noise: Noise = NO_NOISE


def noise_of(spec: DefenseSpec, *, tensors: int) -> Noise:
    """How well one message of a client is hidden by the chain of defenses that it goes through; unit: the client.

    Noise counts by the nearest bound before it. What comes after it is post-processing and changes nothing, whatever it keeps
    between rounds; what comes before a clip does not matter. A defense that is not known here may send anything: it takes the
    bound away. An alias of a paper is the chain that it stands for. Noise whose scale follows the data (`gaussian(snr_db=...)`)
    hides nothing, and ends the bound.

    The server knows whom it asked, and sees each message by itself: no sampling of clients makes this any better.
    tensors: number of tensors in an update, for bounds on each of them.
    """
    return _through(spec.steps, _Sent(), tensors).noise


def noise_of_gradient(rule: GradientSpec, *, tensors: int) -> Noise:
    """How well one example is hidden in the gradient of a batch that it is part of; unit: the example.

    dp_sgd:  every example's gradient is at most `max_norm` long, the sum gets noise of `noise * max_norm` (Abadi et al. 2016).
    fed_cdp: as many such sums as there are tensors, each with a bound and a noise of its own (Wei et al. 2021).
    Noise by signal-to-noise ratio follows the data and hides nothing; nor does any other rule.
    """
    if rule.step is None or rule.step.name not in ("dp_sgd", "fed_cdp"):
        return NO_NOISE
    multiplier = _given(rule.step, rule.registry[rule.step.name])["noise"]
    if multiplier is None:
        return NO_SCALE
    return Noise(multiplier / (math.sqrt(tensors) if rule.step.name == "fed_cdp" else 1)) if multiplier else NO_NOISE


def _through(steps: Sequence[Step], sent: _Sent, tensors: int) -> _Sent:
    for step in steps:
        sent = _step(step, sent, tensors)
    return sent


def _step(step: Step, sent: _Sent, tensors: int) -> _Sent:
    given = _given(step, DEFENSES[step.name].defense)
    if step.name == "in_gradient_units":
        rate = abs(given["learning_rate"])
        inside = _through(given["defense"].steps, sent._replace(length=sent.length / rate), tensors)
        return inside._replace(length=inside.length * rate)
    if inspect.isfunction(written := getattr(papers, step.name, None)):
        return _through(DefenseSpec.parse(written(**given)).steps, sent, tensors)
    if step.name in SCALES:
        family, scale = SCALES[step.name](given)
        hiding = _hiding(sent.length, family, scale)
        return _Sent(sent.length if scale == 0 else math.inf, max(hiding, sent.noise, key=lambda noise: noise.multiplier))
    if step.name == "masked" and not sent.noise.multiplier and _adds_noise(given["defense"].steps, tensors):
        sent = sent._replace(noise=IN_PART)
    bound = LENGTHS.get(step.name, _unknown)
    return sent._replace(length=math.inf if given.get("error_feedback") else bound(sent.length, given, tensors))


def _adds_noise(steps: Sequence[Step], tensors: int) -> bool:
    return _through(steps, _Sent(length=1.0), tensors).noise != NO_NOISE


def _given(step: Step, factory: Callable[..., Any]) -> Given:
    """The arguments of a step, with the defaults of those that were left out."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | dict(step.arguments)


def _hiding(length: float, family: Family, scale: float | None) -> Noise:
    if scale is None:
        return NO_SCALE
    if scale == 0:
        return NO_NOISE
    return Noise(scale / length, family) if length < math.inf else NO_BOUND


def _unknown(length: float, given: Given, tensors: int) -> float:
    return math.inf


def _no_longer(length: float, given: Given, tensors: int) -> float:
    return length


def _rescaled(length: float, given: Given, kept: float) -> float:
    return length / kept if given["rescale"] and kept else length


SCALES: dict[str, Callable[[Given], tuple[Family, float | None]]] = {
    "gaussian": lambda given: ("gaussian", given["std"]),
    "laplace": lambda given: ("laplace", given["scale"]),
}
"""Defenses that add noise: its family, and its scale, None where that follows the data."""

LENGTHS: dict[str, Callable[[float, Given, int], float]] = {
    "clip": lambda length, given, tensors: min(length, given["max_norm"]),
    "clip_each": lambda length, given, tensors: min(length, given["max_norm"] * math.sqrt(tensors)),
    "top_k": _no_longer,
    "random_k": lambda length, given, tensors: _rescaled(length, given, given["keep"]),
    "prune": _no_longer,
    "gradient_dropout": lambda length, given, tensors: _rescaled(length, given, 1 - given["p"]),
    "sign": lambda length, given, tensors: length if given["scale"] == "mean" else math.inf,
    "withhold": _no_longer,
}
"""The greatest length of an update after a defense, from the one before it; without error feedback, which adds what was kept."""

"""What an attacker can tell of an answer without the truth, and the confidence that it comes to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.confidence.curves import curve, probabilities
from attacker.attacks.confidence.laplace import ITERATIONS, Posterior
from attacker.attacks.gradients.products import Gradient, squared_norm
from fedsim.recording.observation import DataSpec

UNDECIDED = float("nan")
"""Confidence where nothing calibrated can be said."""
EXACT = 1e-10
"""Share of a gradient's power that float32 does not tell from nothing."""
SAME = 1e-6
"""Distance between two answers of a closed form that are one answer given twice."""
EVALUATIONS = 40
"""Evaluations of a search for each iteration of `expected_error`, so that it costs no more than a tenth of the search."""
NAMES = ("misfit", "drift", "examples", "equations", "error", "step", "outside", "roughness", "linked", "doubt")
"""Of all numbers that confidence may be estimated from:

misfit:    share of the gradients' power that is missed beyond known noise. error: what the posterior expects of pixels squared.
step:      mean square of what one more step of Gauss-Newton would change. doubt: what a closed form holds for uncertain.
outside, roughness: mean squared distance to [0, 1], and total variation. drift: by how much of its power the gradient changes
           over the local steps that were taken as one. equations: gradient entries that were sent, for each value searched for.
           All of these are decimal logarithms.
examples:  binary logarithm of their number. linked: the certainty of the links between rounds.
"""
SIDES = (8, 64)
"""Height and width of images that the calibration speaks for: half and twice those that it saw."""
KNOWN = (
    nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.Flatten, nn.Identity,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Sigmoid, nn.Tanh, nn.Hardtanh,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)  # fmt: skip
"""Layers of the network families that the calibration covers."""


@dataclass(frozen=True)
class Judged:
    """Of one answer of N examples, what `Reconstruction` says of how sure the attack is.

    confidence: (N,), NaN where undecided. explained: (N,), the share of the gradient's power. evidence: (N,) numbers by name.
    notes: why confidence is undecided. interrupted: whether the user interrupted the judgement.
    """

    confidence: Tensor
    explained: Tensor
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class ComparedGradient:
    """One observation behind an answer, and what the answer would have made of it, without the weights of layers.

    simulate: from examples x, the gradient that would be observed. weight: how much the observation counts.
    variance: 0-d, that of the known noise in each entry. coordinates: number of entries that are compared.
    """

    observed: Gradient
    simulate: Callable[[Tensor], Gradient]
    weight: Tensor
    variance: Tensor
    coordinates: int


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """What a search has come to for one case, as confidence looks at it.

    x: all examples that were searched for. examples: how many the answer has, after those of local epochs were merged.
    evaluations: of the gradient, so far. linked: the certainty of the links between rounds. rng: for estimates.
    unfamiliar: why the calibration says nothing of such an answer, as far as the search knows; else empty.
    drift: computes the share of its power by which the gradient changes over local steps that were taken as one.
    """

    x: Tensor
    examples: int
    compared: Sequence[ComparedGradient]
    data: DataSpec
    model: nn.Module
    evaluations: int
    linked: Tensor
    rng: Generator
    unfamiliar: str
    drift: Callable[[], Tensor]


def of_search(found: SearchAnswer, route: str) -> Judged:
    """Judge what a search has come to."""
    x, examples = found.x, found.examples
    missed, noise, observed = _shares(found)
    explained = torch.full((examples,), float((1 - missed).nan_to_num(nan=0.0).clamp(0, 1)))
    if reason := _unfamiliar(found, missed):
        return undecided(examples, reason, explained)
    try:
        error, step = (t[:examples] for t in _curvature(found, torch.maximum(missed, noise)))
    except RuntimeError as failed:  # the layers of others may have no third derivative, or memory may not do
        return undecided(examples, f"the curvature of the gradient cannot be computed: {str(failed)[:200]}", explained)
    everywhere = {
        "misfit": torch.log10((missed - noise).clamp(min=0) + 0.05 * noise + EXACT),
        "drift": torch.log10(found.drift() + 1e-4),
        "examples": torch.tensor(float(len(x))).log2(),
        "equations": torch.tensor(observed / (len(x) * found.data.size)).clamp(1e-2, 1e2).log10(),
    }
    evidence = {name: value.cpu().float().expand(examples) for name, value in everywhere.items()}
    evidence |= {"error": (error + 1e-8).log10().cpu(), "step": (step + 1e-8).log10().cpu()}
    evidence |= _looks(x[:examples].cpu(), found.data)
    evidence["linked"] = found.linked[:examples]
    return judged(route, evidence, explained, found.data)


def of_closed_form(route: str, x: Tensor, missed: float, stays: Tensor, data: DataSpec, examples: int) -> Judged:
    """Judge an answer of a closed form, x (N, *shape).

    missed: how far its gradient is from the observed one, as a share of its length. stays: (N,) in [0, 1], what the closed form
    itself says of its answer. examples: how many are behind the gradient.
    An example that the answer repeats is undecided after its first place: it may be in the batch twice, or another may be lost.
    """
    count = len(x)
    explained = torch.full((count,), max(0.0, 1 - missed**2))
    evidence = {
        "misfit": torch.full((count,), missed**2 + 1e-14).log10(),
        "doubt": torch.log10((1 - stays.cpu().float()).clamp(0, 1) + 1e-6),
        "examples": torch.full((count,), float(max(examples, 1))).log2(),
        **_looks(x.cpu().float(), data),
    }
    return _repeats_undecided(judged(route, evidence, explained, data), x)


def _repeats_undecided(own: Judged, x: Tensor) -> Judged:
    again = (torch.cdist(x.double().flatten(1), x.double().flatten(1)) <= SAME).tril(-1).any(dim=1).cpu()
    if not bool(again.any()):
        return own
    count = int(again.sum())
    words = f"confidence is undecided for {count} of {len(x)} answers, which repeat another of the same update"
    return replace(own, confidence=own.confidence.masked_fill(again, UNDECIDED), notes=(*own.notes, words))


def of_prior(examples: int, data: DataSpec) -> Judged:
    """Judge an answer that no gradient was used for: by how often such answers are right, whatever was received."""
    return judged("prior alone", {}, torch.zeros(examples), data)


def judged(route: str, evidence: Mapping[str, Tensor], explained: Tensor, data: DataSpec) -> Judged:
    """Turn evidence into confidence by the calibration curve of a route."""
    own, kind = curve(route, is_image=data.is_image), "images" if data.is_image else "rows"
    reason = own.unlike(evidence) if own else f"the route {route!r} was not calibrated on {kind}"
    if own is None or reason:
        return undecided(len(explained), reason, explained, evidence)
    return Judged(probabilities(own, evidence, len(explained)), explained, evidence)


def undecided(
    examples: int, reason: str, explained: Tensor | None = None, evidence: Mapping[str, Tensor] | None = None
) -> Judged:
    """Say why there is no confidence in an answer of so many examples."""
    unknown = torch.full((examples,), UNDECIDED)
    words = (f"confidence is undecided: {reason}",)
    return Judged(unknown, torch.zeros(examples) if explained is None else explained, evidence or {}, words)


def _shares(found: SearchAnswer) -> tuple[Tensor, Tensor, int]:
    """Return the shares of the observed gradients' power that are missed and known noise, and the number of entries sent."""
    missed, noise, weights, sent = [], [], [], 0
    for one in found.compared:
        made = one.simulate(found.x)
        power = squared_norm(one.observed).clamp(min=torch.finfo(found.x.dtype).tiny)
        off = squared_norm({name: made[name] - one.observed[name] for name in one.observed})
        weights.append(one.weight)
        missed.append(one.weight * torch.where(squared_norm(one.observed) > 0, off / power, 1))
        noise.append(one.weight * one.variance * one.coordinates / power)
        sent += sum(int(g.count_nonzero()) for g in one.observed.values())
    whole = torch.stack(weights).sum()
    return torch.stack(missed).sum() / whole, torch.stack(noise).sum() / whole, sent


def _curvature(found: SearchAnswer, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return `expected_error` and `next_step` of each example, of residuals as shares of the lengths of the observed gradients.

    variance: of all residuals together, what is left unexplained or the known noise where that is more.
    """
    least = torch.finfo(found.x.dtype).tiny
    shares = [one.weight.sqrt() / squared_norm(one.observed).sqrt().clamp(min=least) for one in found.compared]

    def residuals(x: Tensor) -> Tensor:
        parts = []
        for one, share in zip(found.compared, shares, strict=True):
            made = one.simulate(x)
            parts += [share * (made[name] - one.observed[name]).flatten() for name in one.observed]
        return torch.cat(parts)

    variance = variance.clamp(min=EXACT) / sum(one.coordinates for one in found.compared)
    iterations = min(ITERATIONS, max(2, found.evaluations // EVALUATIONS))
    posterior = Posterior(residuals, found.x, variance, iterations)
    return posterior.expected_error(found.rng), posterior.next_step()


def _looks(x: Tensor, data: DataSpec) -> dict[str, Tensor]:
    """How rough each example is, and how far out of [0, 1]."""
    outside = (x - x.clamp(0, 1)).flatten(1).square().mean(dim=1)
    looks = {"outside": torch.log10(outside.nan_to_num(nan=1e3, posinf=1e3) + 1e-5)}
    if data.is_image:
        x = x.nan_to_num().clamp(0, 1)
        down, across = (x[..., 1:, :] - x[..., :-1, :]).abs(), (x[..., 1:] - x[..., :-1]).abs()
        total = sum(t.flatten(1).sum(dim=1) / max(1, t[0].numel()) for t in (down, across))
        looks["roughness"] = torch.log10(torch.as_tensor(total) + 1e-3)
    return looks


def _unfamiliar(found: SearchAnswer, missed: Tensor) -> str:
    """Return why nothing calibrated can be said of an answer; empty where it can."""
    if found.unfamiliar:
        return found.unfamiliar
    if not bool(missed.isfinite()):
        return "the gradient of the answer is no number"
    if found.data.is_image and not SIDES[0] <= min(found.data.shape[1:]) <= max(found.data.shape[1:]) <= SIDES[1]:
        return f"the calibration saw images of {SIDES[0]} to {SIDES[1]} pixels a side, and these have {found.data.shape[1:]}"
    leaves = [one for one in found.model.modules() if not list(one.children())]
    strange = [type(one).__name__ for one in leaves if not isinstance(one, (*KNOWN, nn.Sequential))]
    if strange:
        return f"no network with {', '.join(sorted(set(strange)))} was calibrated on"
    return ""

"""Evidence on an answer that an attacker can compute without the truth, and the confidence estimated from it.

"Power" is a squared Euclidean norm. An answer is a reconstruction before its confidence is known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.confidence.curves import estimate_probabilities, find_curve
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.confidence.laplace import CG_ITERATIONS, Posterior
from attacker.attacks.gradients.products import GradientTensors, squared_norm
from fedsim.recording.observation import DataSpec

UNDECIDED = float("nan")
"""Confidence of answers to which the calibration does not apply."""
CERTIFIED_MISFIT, MIN_CERTIFIED_STAYS, CERTIFIED_CONFIDENCE = 1e-4, 0.9, 0.99
"""Largest relative distance between the gradient of a whole batch and the observed one at which the batch is certified, smallest
certainty of a certified example, and the confidence in it. This applies where the calibration does not, such as to larger
batches. If the gradient contains a defense's noise, the distance is larger, so that nothing is certified."""
MAX_OUTSIDE, LIKELY = 0.009, 0.5
"""Largest mean squared distance of an image to [0, 1] at which it may be recovered (the threshold of scoring), and confidence
from which an image that is farther away is undecided."""
MAX_EXACT_MISFIT = 1e-10
"""Share of a gradient's power below which differences are rounding errors of float32."""
MAX_DUPLICATE_DISTANCE = 1e-6
"""Largest Euclidean distance between two examples of a closed form that count as equal."""
EVALUATIONS_PER_ITERATION = 40
"""Gradient evaluations of a search per iteration of conjugate gradients in `Posterior.estimate_error`, of which there are at
least 2 and at most CG_ITERATIONS. The estimate thus costs at most a tenth of a search of 80 or more evaluations."""
FEATURE_NAMES = ("misfit", "drift", "examples", "equations", "error", "step", "outside", "roughness", "linked", "doubt")
"""Names of the features from which confidence may be estimated. All but `examples` and `linked` are decimal logarithms.

misfit:    share of the gradients' power that is not explained, beyond known noise.
drift:     power of the gradient's change over the client's local steps, relative to the gradient's power, if the attack treats
           these steps as one step.
equations: number of gradient entries that were sent, per value that is searched for.
error:     expected squared error of pixels under the Laplace approximation of the posterior.
step:      mean squared change that another Gauss-Newton step would make.
outside, roughness: mean squared distance to [0, 1], and total variation.
doubt:     1 minus the certainty in [0, 1] that a closed form states for the example (`ClosedFormAnswer.stays`).
examples:  binary logarithm of the number of examples.
linked:    certainty of the links between rounds, in [0, 1].
"""
POSSIBLE_MIXTURES = (
    "which may be mixtures of several: no label explains their part of the gradient, or a layer without a bias hides whether "
    "they are single examples"
)
IMAGE_SIDES = (8, 64)
"""Smallest and largest height and width of images to which the calibration applies: half the
smallest and twice the largest of its images."""
KNOWN_LAYERS = (
    nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.Flatten, nn.Identity,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Sigmoid, nn.Tanh, nn.Hardtanh,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)  # fmt: skip
"""Layers of the network families that the calibration covers."""


@dataclass(frozen=True)
class ConfidenceEstimates:
    """The confidence in an answer of N examples, for the fields of `Reconstruction` with the same names.

    confidence: (N,), NaN if undecided. explained: share of the gradient's power that the answer explains, (N,), equal for all.
    evidence:   features by name, each (N,). notes: why confidence is undecided, or on what else it rests.
    interrupted: whether the user interrupted the computation.
    """

    confidence: Tensor
    explained: Tensor
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class SimulatedObservation:
    """One observation of a case, with the function that simulates it.

    observed:    the observed gradient, by parameter name, without the factors with which the search's objective weighs the
                 layers.
    simulate:    maps examples x to the gradient that would be observed, without these factors either.
    weight:      weight of the observation in the objective.
    variance:    variance of the known noise per gradient entry, 0-d.
    coordinates: number of gradient entries that are compared.
    """

    observed: GradientTensors
    simulate: Callable[[Tensor], GradientTensors]
    weight: Tensor
    variance: Tensor
    coordinates: int


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """The result of a search for one case, with the data from which confidence is estimated.

    x:           all examples that were searched for; if local epochs are simulated separately, one copy of each per epoch.
    examples:    number of examples without these copies; the examples themselves are the first rows of x.
    compared:    the observations of the case.
    data, model: the data specification and the network.
    evaluations: number of gradient evaluations of the search.
    rng:         for random estimates.
    linked:      for each row of x, certainty in [0, 1] that the places in several rounds at which the attack assumes this example
                 hold the same example; 1 for an example of one round.
    unfamiliar:  the reason why the calibration does not apply, if the search knows one; otherwise empty.
    given_up:    whether the search was stopped because it was hopeless.
    drift:       function that returns how much the gradient of x changes over the client's local steps if the attack treats them
                 as one step, 0-d: squared norm of the change, relative to the squared norm of the gradient. It returns 0 in all
                 other cases.
    """

    x: Tensor
    examples: int
    compared: Sequence[SimulatedObservation]
    data: DataSpec
    model: nn.Module
    evaluations: int
    linked: Tensor
    rng: Generator
    unfamiliar: str
    given_up: bool
    drift: Callable[[], Tensor]


def judge_search(found: SearchAnswer, route: str) -> ConfidenceEstimates:
    """Estimate the confidence in each example that a search found. route: the method of the search, which selects the curve.

    Confidence is undecided if the calibration does not cover the network, the images or the answer. Otherwise, a search that was
    given up gets the confidence of an answer without the gradient, since no search that was given up in the calibration would
    have succeeded. For all other searches, the curvature of the gradient is computed, which takes as long as many iterations of
    the search. If it cannot be computed, confidence is undecided as well.
    """
    x, examples = found.x, found.examples
    missed, noise, observed = _compute_shares(found)
    explained = torch.full((examples,), float((1 - missed).nan_to_num(nan=0.0).clamp(0, 1)))
    if reason := _explain_unfamiliarity(found, missed):
        return build_undecided(examples, reason, explained)
    if found.given_up:
        words = "the confidence is that of an answer without the gradient, since the search was given up"
        return replace(judge("prior alone", {}, explained, found.data), notes=(words,))
    everywhere = {
        "misfit": torch.log10((missed - noise).clamp(min=0) + 0.05 * noise + MAX_EXACT_MISFIT),
        "drift": torch.log10(found.drift() + 1e-4),
        "examples": torch.tensor(float(len(x))).log2(),
        "equations": torch.tensor(observed / (len(x) * found.data.size)).clamp(1e-2, 1e2).log10(),
    }
    evidence = {name: value.cpu().float().expand(examples) for name, value in everywhere.items()}
    evidence |= _measure_appearance(x[:examples].cpu(), found.data) | {"linked": found.linked[:examples]}
    curve = find_curve(route, is_image=found.data.is_image)
    if curve is not None and (reason := curve.explain_unfitted_facts(evidence)):
        return build_undecided(examples, reason, explained, evidence)
    try:
        error, step = (t[:examples] for t in _measure_curvature(found, torch.maximum(missed, noise)))
    except RuntimeError as failed:  # some layers have no third derivative, or memory is short
        return build_undecided(examples, f"the curvature of the gradient cannot be computed: {str(failed)[:200]}", explained)
    evidence |= {"error": (error + 1e-8).log10().cpu(), "step": (step + 1e-8).log10().cpu()}
    return judge(route, evidence, explained, found.data)


def judge_closed_form(
    route: str, x: Tensor, missed: float, stays: Tensor, data: DataSpec, examples: int, open_question: str = ""
) -> ConfidenceEstimates:
    """Estimate the confidence in an answer x (N, *shape) of a closed form.

    route:    name of the closed form, which selects the calibration curve.
    missed:   distance between the answer's gradient and the observed one, relative to the norm of the observed one.
    stays:    (N,) in [0, 1], how certain the closed form is of each example (`ClosedFormAnswer.stays`); NaN for examples that may
              be mixtures.
    examples: number of examples in the batch.
    open_question: reason why a confidence of at least LIKELY is replaced by NaN; "" for none.
    The confidence is taken from the calibration curve (`judge`), with five exceptions that are applied in this order:
    1. A whole batch of the route `linear` is certified: if the batch has several examples, x holds all of them, the confidence of
       all is NaN so far, and `missed` is at most CERTIFIED_MISFIT, then examples with `stays` of at least MIN_CERTIFIED_STAYS get
       CERTIFIED_CONFIDENCE.
    2. Examples with `stays` of NaN are undecided.
    3. An image whose values are those of an 8-bit image (`is_eight_bit`) gets CERTIFIED_CONFIDENCE, whatever the curve says.
    4. If an example occurs several times in the answer, all but the first are undecided: it may occur in the batch several times,
       or another example may be missing.
    5. Examples with a confidence of at least LIKELY become undecided if there is an `open_question`, and so do images with this
       confidence whose mean squared distance to [0, 1] exceeds MAX_OUTSIDE.
    """
    count, mixtures = len(x), stays.isnan().cpu()
    stays = stays.nan_to_num(nan=0.0)
    explained = torch.full((count,), max(0.0, 1 - missed**2))
    evidence = {
        "misfit": torch.full((count,), missed**2 + 1e-14).log10(),
        "doubt": torch.log10((1 - stays.cpu().float()).clamp(0, 1) + 1e-6),
        "examples": torch.full((count,), float(max(examples, 1))).log2(),
        **_measure_appearance(x.cpu().float(), data),
    }
    judged = judge(route, evidence, explained, data)
    if route == "linear" and count == examples > 1 and missed <= CERTIFIED_MISFIT and bool(judged.confidence.isnan().all()):
        sure = torch.where(stays.cpu() >= MIN_CERTIFIED_STAYS, CERTIFIED_CONFIDENCE, UNDECIDED).float()
        words = "the whole batch explains the gradient of all layers up to rounding, which certifies its examples"
        judged = ConfidenceEstimates(sure, explained, evidence, (words,))
    judged = _mark_undecided(judged, mixtures, POSSIBLE_MIXTURES)
    judged = _certify_eight_bit(judged, x) if data.is_image else judged
    judged = _mark_undecided(judged, _find_repeats(x), "which repeat an earlier example of this answer")
    doubted, reasons = doubt_likely(judged.confidence, open_question)
    judged = replace(judged, confidence=doubted, notes=(*judged.notes, *reasons))
    return _mark_outside_undecided(judged, x) if data.is_image else judged


def doubt_likely(confidence: Tensor, open_question: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return `confidence` (N,) with NaN instead of values of at least LIKELY, and a note with `open_question`, the reason for it.

    If `open_question` is "" or no value is that high, `confidence` is returned unchanged, without a note.
    """
    likely = confidence >= LIKELY
    if not open_question or not bool(likely.any()):
        return confidence, ()
    return confidence.masked_fill(likely, UNDECIDED), (f"confidence is undecided: {open_question}",)


def _mark_undecided(own: ConfidenceEstimates, marked: Tensor, reason: str) -> ConfidenceEstimates:
    """Return `own` with undecided confidence for the examples in the mask `marked` (N,), and a note; unchanged without any."""
    if not bool(marked.any()):
        return own
    words = f"confidence is undecided for {int(marked.sum())} of {len(marked)} examples, {reason}"
    return replace(own, confidence=own.confidence.masked_fill(marked, UNDECIDED), notes=(*own.notes, words))


def _certify_eight_bit(own: ConfidenceEstimates, x: Tensor) -> ConfidenceEstimates:
    surer = is_eight_bit(x).cpu() & ~(own.confidence >= CERTIFIED_CONFIDENCE)
    if not bool(surer.any()):
        return own
    words = f"{int(surer.sum())} of {len(x)} examples are certified by their values, which are all multiples of 1/255 (8 bits)"
    return replace(own, confidence=own.confidence.masked_fill(surer, CERTIFIED_CONFIDENCE), notes=(*own.notes, words))


def _find_repeats(x: Tensor) -> Tensor:
    """Return a mask (N,) of the examples x (N, *shape) that repeat an earlier one."""
    flat = x.double().flatten(1)
    return (torch.cdist(flat, flat) <= MAX_DUPLICATE_DISTANCE).tril(-1).any(dim=1).cpu()


def _mark_outside_undecided(own: ConfidenceEstimates, x: Tensor) -> ConfidenceEstimates:
    """Return `own` with undecided confidence for images far outside [0, 1] that are at least LIKELY, and a note for the user.

    Far is a mean squared distance to [0, 1] above MAX_OUTSIDE. Such an image is too far from every valid image to count as
    recovered. If it is right nevertheless, the clients normalise their images in another way than the recording states.
    """
    far = is_far_outside(x).cpu() & (own.confidence >= LIKELY)
    if not bool(far.any()):
        return own
    values = f"{float(x[far].min()):.3g} to {float(x[far].max()):.3g} instead of 0 to 1"
    remedy = "if clients normalise their images, set mean and std of the data (DataSpec)"
    return _mark_undecided(own, far, f"whose values are {values}: {remedy}")


def is_far_outside(x: Tensor) -> Tensor:
    """Return a mask (N,) of the examples x (N, *shape) whose mean squared distance to [0, 1] is above MAX_OUTSIDE."""
    return (x - x.clamp(0, 1)).flatten(1).square().mean(dim=1) > MAX_OUTSIDE


def judge_prior(examples: int, data: DataSpec) -> ConfidenceEstimates:
    """Return the confidence in an answer of `examples` examples that used no gradient, the same for all of them.

    It is approximately the share of recovered examples among the answers without a gradient in the calibration.
    """
    return judge("prior alone", {}, torch.zeros(examples), data)


def judge(route: str, evidence: Mapping[str, Tensor], explained: Tensor, data: DataSpec) -> ConfidenceEstimates:
    """Return the confidence that the calibration curve of a route, the method of the attack, gives for this evidence.

    It is undecided (NaN), with a note, if no curve applies. It is also NaN for each example whose probability lies within
    `Curve.unsure`. evidence: features by name, (N,) each. explained: share of the gradient's power that the answer explains,
    (N,), which is only copied to the result.
    """
    own, kind = find_curve(route, is_image=data.is_image), "images" if data.is_image else "table rows"
    reason = own.explain_mismatch(evidence) if own else f"answers of the method {route!r} were not calibrated on {kind}"
    if own is None or reason:
        return build_undecided(len(explained), reason, explained, evidence)
    said = estimate_probabilities(own, evidence, len(explained))
    if not (unsure := int(said.isnan().sum())):
        return ConfidenceEstimates(said, explained, evidence)
    least, most = own.unsure
    words = (
        f"confidence is undecided for {unsure} of {len(said)} examples: probabilities from {least} to {most} were too "
        "inaccurate in the calibration"
    )
    return ConfidenceEstimates(said, explained, evidence, (words,))


def build_undecided(
    examples: int, reason: str, explained: Tensor | None = None, evidence: Mapping[str, Tensor] | None = None
) -> ConfidenceEstimates:
    """Return undecided confidence (NaN) for an answer of `examples` examples, with the reason as a note.

    explained: (N,) share of the gradient's power that the answer explains; None for 0. evidence: features by name, (N,) each.
    """
    unknown = torch.full((examples,), UNDECIDED)
    words = (f"confidence is undecided: {reason}",)
    return ConfidenceEstimates(unknown, torch.zeros(examples) if explained is None else explained, evidence or {}, words)


def _compute_shares(found: SearchAnswer) -> tuple[Tensor, Tensor, int]:
    """Return the unexplained share and the known noise's share of the gradients' power, 0-d, and the number of entries sent.

    The shares are means over the observations of the case, weighted by `SimulatedObservation.weight`. The number counts the
    nonzero entries of all observed gradients.
    """
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


def _measure_curvature(found: SearchAnswer, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each example how uncertain its values are, and how much another Gauss-Newton step would change them, (N,) each.

    They are the mean posterior variance (`Posterior.estimate_error`), and the mean squared change by that step
    (`Posterior.estimate_next_step`).
    Residuals are differences between simulated and observed gradients, relative to the norm of the observed ones.
    variance: sum of the variances of all residuals: the unexplained share of power, or the known noise if that is more.
    """
    tiny = torch.finfo(found.x.dtype).tiny
    shares = [
        observation.weight.sqrt() / squared_norm(observation.observed).sqrt().clamp(min=tiny) for observation in found.compared
    ]

    def compute_residuals(x: Tensor) -> tuple[Tensor, ...]:
        residuals: list[Tensor] = []
        for observation, share in zip(found.compared, shares, strict=True):
            simulated = observation.simulate(x)
            residuals += [share * (simulated[name] - observation.observed[name]) for name in observation.observed]
        return tuple(residuals)

    variance = variance.clamp(min=MAX_EXACT_MISFIT) / sum(observation.coordinates for observation in found.compared)
    iterations = min(CG_ITERATIONS, max(2, found.evaluations // EVALUATIONS_PER_ITERATION))
    posterior = Posterior(compute_residuals, found.x, variance, iterations)
    return posterior.estimate_error(found.rng), posterior.estimate_next_step()


def _measure_appearance(x: Tensor, data: DataSpec) -> dict[str, Tensor]:
    """Return two features of examples x (N, *shape), decimal logarithms (N,): `outside` and, for images only, `roughness`.

    outside: mean squared distance of an example's values to [0, 1]. roughness: anisotropic total variation of the clamped image,
    that is the mean absolute difference of vertical neighbours plus that of horizontal ones.
    """
    outside = (x - x.clamp(0, 1)).flatten(1).square().mean(dim=1)
    looks = {"outside": torch.log10(outside.nan_to_num(nan=1e3, posinf=1e3) + 1e-5)}
    if data.is_image:
        x = x.nan_to_num().clamp(0, 1)
        down, across = (x[..., 1:, :] - x[..., :-1, :]).abs(), (x[..., 1:] - x[..., :-1]).abs()
        total = sum(t.flatten(1).sum(dim=1) / max(1, t[0].numel()) for t in (down, across))
        looks["roughness"] = torch.log10(torch.as_tensor(total) + 1e-3)
    return looks


def _explain_unfamiliarity(found: SearchAnswer, missed: Tensor) -> str:
    """Return why the calibration does not apply to an answer; empty if it does. missed: unexplained share of power, 0-d."""
    if found.unfamiliar:
        return found.unfamiliar
    if not bool(missed.isfinite()):
        return "the gradient of the answer is NaN or infinite"
    if found.data.is_image and not IMAGE_SIDES[0] <= min(found.data.shape[1:]) <= max(found.data.shape[1:]) <= IMAGE_SIDES[1]:
        smallest, largest = IMAGE_SIDES
        return f"the calibration is for images of {smallest} to {largest} pixels a side, and these have {found.data.shape[1:]}"
    leaves = [one for one in found.model.modules() if not list(one.children())]
    strange = [type(one).__name__ for one in leaves if not isinstance(one, (*KNOWN_LAYERS, nn.Sequential))]
    if strange:
        return f"the calibration included no network with {', '.join(sorted(set(strange)))}"
    return ""

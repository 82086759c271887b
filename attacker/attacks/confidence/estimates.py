"""The confidence in the examples of an answer, estimated from the evidence on it.

"Power" is a squared Euclidean norm. An answer is a reconstruction before its confidence is known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from attacker.attacks.confidence.curves import INFERRED_ORDER, estimate_probabilities, find_curve
from attacker.attacks.confidence.doubts import (
    CONVERGED_MISFIT,
    MAX_MERGED_DRIFT,
    MAX_SCALED_MISFIT,
    MAX_UNEXPLAINED_ROWS,
    MAX_UNLIKELY_ORDERED,
    MERGED_STEPS,
    MIN_LIKELY,
    MIN_LIKELY_ORDERED,
    MIN_SCALED_GAIN,
    ROWS_OF_A_BATCH,
    STANDARDISED,
    UNCALIBRATED_ORDER,
    UNDECIDED,
    CurvatureEvidence,
    doubt_likely,
    doubt_normalisation,
    is_short,
    is_standardised,
    list_search_doubts,
)
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.confidence.evidence import (
    INSIDE,
    MAX_EXACT_MISFIT,
    SearchAnswer,
    compute_shares,
    fit_factor,
    measure_appearance,
    measure_curvature,
    measure_likeness,
    measure_outside,
)
from attacker.attacks.confidence.laplace import CG_ITERATIONS, EARLY_CG_ITERATIONS
from attacker.reconstruction import MAX_RECOVERED_MSE
from defenses.networks import StochasticModule
from fedsim.recording.observation import DataSpec

CERTIFIED_MISFIT, MIN_CERTIFIED_STAYS, CERTIFIED_CONFIDENCE = 1e-4, 0.9, 0.99
"""Largest relative distance between the gradient of a whole batch and the observed one at which the batch is certified, smallest
certainty of a certified example, and the confidence in it. This applies where the calibration does not, such as to larger
batches. If the gradient contains a defense's noise, the distance is larger, so that nothing is certified."""
MAX_LINEAR_DISTANCE, MAX_LINEAR_OUTSIDE = 10**-2.5, 1e-6
"""Largest mean squared distance to [0, 1] of a likely image of the route `linear`, if the answer's gradient differs from the
observed one by at most MAX_LINEAR_DISTANCE, relative to the observed one. All 360 such images of the tuning part are recovered,
and the distance of each is below 1e-9. Values outside then mean that clients normalise their images otherwise than stated."""
MIN_LINEAR_CERTAINTY, MIN_LINEAR_EXPLAINED = 0.5, 0.5
"""Smallest certainty of an example of the route `linear`, and smallest explained share of the gradient's power, of which one must
be reached for the curve to apply. The curve was fitted to few wrong answers, and gives 0.47 to pure noise, which reaches
neither."""
MAX_DUPLICATE_DISTANCE = 1e-6
"""Largest Euclidean distance between two examples of a closed form that count as equal."""
POSSIBLE_MIXTURES = (
    "which may be mixtures of several: no label explains their part of the gradient, a layer without a bias hides whether they "
    "are single examples, or the gradient shows fewer examples than the batch has"
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


def judge_search(found: SearchAnswer, route: str) -> ConfidenceEstimates:
    """Estimate the confidence in each example that a search found. route: the method of the search, which selects the curve.

    Confidence is undecided if the calibration does not cover the network, the images or the answer. Otherwise, a search that was
    given up gets the confidence of an answer without the gradient, since no search that was given up in the calibration would
    have succeeded. For all other searches, the curvature of the gradient is computed, which takes as long as many iterations of
    the search. If it cannot be computed, confidence is undecided as well.

    A confidence of at least MIN_LIKELY becomes undecided in the cases that `list_search_doubts` lists, and for images that look
    complete by another common normalisation, and not by the stated one (`find_other_normalisation`). A smaller one becomes
    undecided if the answer explains the gradient but for a factor (`_doubt_scale`), or is for a row of a batch and all but
    MAX_UNEXPLAINED_ROWS of the gradient's power is explained. If the answer rests on an assumed order of the client's examples,
    all between MAX_UNLIKELY_ORDERED and MIN_LIKELY_ORDERED are undecided, unless its route has a curve for such answers
    (`INFERRED_ORDER`); and so if local steps are taken for one, over which the gradient changes by more than MAX_MERGED_DRIFT.
    """
    x, examples = found.x, found.examples
    missed, noise, observed = compute_shares(found)
    explained = torch.full((examples,), float((1 - missed).nan_to_num(nan=0.0).clamp(0, 1)))
    if reason := _explain_unfamiliarity(found, missed):
        return build_undecided(examples, reason, explained)
    if found.given_up:
        note = "the confidence is that of an answer without the gradient, since the search was given up"
        return replace(judge("prior alone", {}, explained, found.data), notes=(note,))
    everywhere = {
        "misfit": torch.log10((missed - noise).clamp(min=0) + 0.05 * noise + MAX_EXACT_MISFIT),
        "drift": torch.log10(found.drift() + 1e-4),
        "examples": torch.tensor(float(len(x))).log2(),
        "equations": torch.tensor(observed / (len(x) * found.data.size)).clamp(1e-2, 1e2).log10(),
    }
    evidence = {name: value.detach().cpu().float().expand(examples) for name, value in everywhere.items()}
    evidence |= measure_appearance(x[:examples].cpu(), found.data) | {"linked": found.linked[:examples]}
    if found.data.is_image:
        evidence["alike"] = measure_likeness(x[:examples].detach(), found.labels[:examples]).cpu()
    curve = find_curve(route, is_image=found.data.is_image)
    if curve is not None and (reason := curve.explain_unfitted_facts(evidence)):
        return build_undecided(examples, reason, explained, evidence)
    early = is_short(found, route) and float(missed - noise) <= CONVERGED_MISFIT
    iterations = EARLY_CG_ITERATIONS if early else CG_ITERATIONS
    try:
        error, step, unseen = (t[:examples].detach() for t in measure_curvature(found, torch.maximum(missed, noise), iterations))
    except TimeoutError:
        reason = "the search was interrupted, and the curvature of the gradient takes too long to compute after that"
        return build_undecided(examples, reason, explained, evidence)
    except RuntimeError as failed:  # some layers have no third derivative, or memory is short
        return build_undecided(examples, f"the curvature of the gradient cannot be computed: {str(failed)[:200]}", explained)
    evidence |= {"error": (error + 1e-8).log10().cpu(), "step": (step + 1e-8).log10().cpu()}
    judged = judge(route, evidence, explained, found.data)
    confidence, notes = judged.confidence, [*judged.notes]
    curvature = CurvatureEvidence(error.cpu(), step.cpu(), unseen.cpu())
    for doubt in list_search_doubts(found, route, float(missed - noise), curvature):
        confidence, reasons = doubt_likely(confidence, *doubt)
        notes += reasons
    confidence, reasons = doubt_normalisation(confidence, x[:examples].cpu(), found.data)
    judged = replace(judged, confidence=confidence, notes=(*notes, *reasons))
    between = (confidence > MAX_UNLIKELY_ORDERED) & (confidence < MIN_LIKELY_ORDERED)
    if found.ordered and route != INFERRED_ORDER:
        judged = _mark_undecided(judged, between, UNCALIBRATED_ORDER)
    elif float(evidence["drift"][0]) > math.log10(MAX_MERGED_DRIFT):
        judged = _mark_undecided(judged, between, MERGED_STEPS)
    if not found.data.is_image and examples > 1 and float(missed - noise) <= MAX_UNEXPLAINED_ROWS:
        judged = _mark_undecided(judged, confidence < MIN_LIKELY, ROWS_OF_A_BATCH)
    return judged if float(noise) else _doubt_scale(judged, found, float(missed))


def _doubt_scale(estimates: ConfidenceEstimates, found: SearchAnswer, missed: float) -> ConfidenceEstimates:
    """Return `estimates` with undecided confidence, and a note, for unlikely examples (below MIN_LIKELY) that a factor explains.

    This is so if the answer's gradient, times a factor, leaves at most MAX_SCALED_MISFIT of the power unexplained, and the
    gradient itself at least MIN_SCALED_GAIN times as much. Searches that compare directions find the right examples then, and the
    curves take the difference for a failure. missed: unexplained share of the power, without known noise.
    """
    factor, left = fit_factor(found)
    if not (left <= MAX_SCALED_MISFIT and missed >= MIN_SCALED_GAIN * left and factor > 0):
        return estimates
    reason = (
        f"which explain the gradient but for a factor of {factor:.3g}, as if clients had another learning rate, number of local "
        "steps or loss than stated"
    )
    return _mark_undecided(estimates, estimates.confidence < MIN_LIKELY, reason)


def judge_closed_form(
    route: str, x: Tensor, missed: float, stays: Tensor, data: DataSpec, examples: int, open_question: str = ""
) -> ConfidenceEstimates:
    """Estimate the confidence in an answer x (N, *shape) of a closed form.

    route:    name of the closed form, which selects the calibration curve.
    missed:   distance between the answer's gradient and the observed one, relative to the norm of the observed one.
    stays:    (N,) in [0, 1], how certain the closed form is of each example (`ClosedFormAnswer.stays`); NaN for examples that may
              be mixtures.
    examples: number of examples in the batch.
    open_question: reason why a confidence of at least MIN_LIKELY is replaced by NaN; "" for none.
    The confidence is taken from the calibration curve (`judge`), with eight exceptions that are applied in this order:
    1. An example of the route `linear` of which the closed form is less certain than MIN_LINEAR_CERTAINTY, in an answer that
       explains less than MIN_LINEAR_EXPLAINED of the gradient's power, gets the confidence of an answer without the gradient.
    2. A whole batch of the route `linear` is certified: if the batch has several examples, x holds all of them, the confidence of
       all is NaN so far, and `missed` is at most CERTIFIED_MISFIT, then examples with `stays` of at least MIN_CERTIFIED_STAYS get
       CERTIFIED_CONFIDENCE.
    3. Examples with `stays` of NaN are undecided.
    4. An image whose values are those of an 8-bit image (`is_eight_bit`) gets CERTIFIED_CONFIDENCE, whatever the curve says.
    5. If an example occurs several times in the answer, all but the first are undecided: it may occur in the batch several times,
       or another example may be missing.
    6. Examples with a confidence of at least MIN_LIKELY become undecided if there is an `open_question`, and so do images with
       this confidence whose mean squared distance to [0, 1] exceeds MAX_RECOVERED_MSE or, for exact answers of the route
       `linear`, MAX_LINEAR_OUTSIDE. If `missed` is at most MAX_LINEAR_DISTANCE, images further outside than MAX_RECOVERED_MSE
       have the confidence of images inside, so that they are undecided if all other evidence is good.
    7. So do images that are standardised by their own mean and deviation.
    8. So do images that look complete by another common normalisation, and not by the stated one (`find_other_normalisation`).
    """
    count, mixtures = len(x), stays.isnan().cpu()
    stays = stays.nan_to_num(nan=0.0)
    explained = torch.full((count,), max(0.0, 1 - missed**2))
    evidence = {
        "misfit": torch.full((count,), missed**2 + 1e-14).log10(),
        "doubt": torch.log10((1 - stays.cpu().float()).clamp(0, 1) + 1e-6),
        "examples": torch.full((count,), float(max(examples, 1))).log2(),
        **measure_appearance(x.cpu().float(), data),
    }
    if data.is_image and missed <= MAX_LINEAR_DISTANCE:  # so values far outside [0, 1] are the clients', not errors
        evidence["outside"] = evidence["outside"].masked_fill(is_far_outside(x).cpu(), math.log10(INSIDE))
    judged = judge(route, evidence, explained, data)
    if route == "linear" and 1 - missed**2 < MIN_LINEAR_EXPLAINED:
        unexplained = torch.minimum(judged.confidence, judge_prior(count, data).confidence)
        judged = replace(judged, confidence=torch.where(stays.cpu() < MIN_LINEAR_CERTAINTY, unexplained, judged.confidence))
    if route == "linear" and count == examples > 1 and missed <= CERTIFIED_MISFIT and bool(judged.confidence.isnan().all()):
        sure = torch.where(stays.cpu() >= MIN_CERTIFIED_STAYS, CERTIFIED_CONFIDENCE, UNDECIDED).float()
        note = "the whole batch explains the gradient of all layers up to rounding, which certifies its examples"
        judged = ConfidenceEstimates(sure, explained, evidence, (note,))
    judged = _mark_undecided(judged, mixtures, POSSIBLE_MIXTURES)
    judged = _certify_eight_bit(judged, x) if data.is_image else judged
    judged = _mark_undecided(judged, _find_repeats(x), "which repeat an earlier example of this answer")
    doubted, reasons = doubt_likely(judged.confidence, open_question)
    doubted, standardised = doubt_likely(doubted, STANDARDISED, is_standardised(x.cpu(), data))
    doubted, misread = doubt_normalisation(doubted, x.cpu(), data)
    judged = replace(judged, confidence=doubted, notes=(*judged.notes, *reasons, *standardised, *misread))
    precise = route == "linear" and missed <= MAX_LINEAR_DISTANCE
    return _mark_outside_undecided(judged, x, MAX_LINEAR_OUTSIDE if precise else MAX_RECOVERED_MSE) if data.is_image else judged


def _mark_undecided(estimates: ConfidenceEstimates, marked: Tensor, reason: str) -> ConfidenceEstimates:
    """Return `estimates` with undecided confidence, and a note, for the examples in the mask `marked` (N,), if there are any."""
    if not bool(marked.any()):
        return estimates
    note = f"confidence is undecided for {int(marked.sum())} of {len(marked)} examples, {reason}"
    return replace(estimates, confidence=estimates.confidence.masked_fill(marked, UNDECIDED), notes=(*estimates.notes, note))


def _certify_eight_bit(estimates: ConfidenceEstimates, x: Tensor) -> ConfidenceEstimates:
    surer = is_eight_bit(x).cpu() & ~(estimates.confidence >= CERTIFIED_CONFIDENCE)
    if not bool(surer.any()):
        return estimates
    note = f"{int(surer.sum())} of {len(x)} examples are certified by their values, which are all multiples of 1/255 (8 bits)"
    earlier = () if bool(surer.all()) else estimates.notes  # reasons why the confidence of others is undecided
    return replace(estimates, confidence=estimates.confidence.masked_fill(surer, CERTIFIED_CONFIDENCE), notes=(*earlier, note))


def _find_repeats(x: Tensor) -> Tensor:
    """Return a mask (N,) of the examples x (N, *shape) that repeat an earlier one."""
    flat = x.double().flatten(1)
    return (torch.cdist(flat, flat) <= MAX_DUPLICATE_DISTANCE).tril(-1).any(dim=1).cpu()


def _mark_outside_undecided(estimates: ConfidenceEstimates, x: Tensor, limit: float) -> ConfidenceEstimates:
    """Return `estimates` with undecided confidence, and a note, for likely images (MIN_LIKELY) that lie outside [0, 1].

    If such an image is right nevertheless, the clients normalise their images in another way than the recording states.
    limit: largest mean squared distance to [0, 1] that does not count as outside.
    """
    far = (measure_outside(x) > limit).cpu() & (estimates.confidence >= MIN_LIKELY)
    if not bool(far.any()):
        return estimates
    values = f"{float(x[far].min()):.3g} to {float(x[far].max()):.3g} instead of 0 to 1"
    remedy = "if clients normalise their images, set mean and std of the data (DataSpec)"
    return _mark_undecided(estimates, far, f"whose values are {values}: {remedy}")


def is_far_outside(x: Tensor) -> Tensor:
    """Return a mask (N,) of the examples x (N, *shape) whose mean squared distance to [0, 1] is above MAX_RECOVERED_MSE."""
    return measure_outside(x) > MAX_RECOVERED_MSE


def judge_prior(examples: int, data: DataSpec) -> ConfidenceEstimates:
    """Return the confidence in `examples` examples without a gradient: about their recovered share in the calibration."""
    return judge("prior alone", {}, torch.zeros(examples), data)


def judge(route: str, evidence: Mapping[str, Tensor], explained: Tensor, data: DataSpec) -> ConfidenceEstimates:
    """Return the confidence that the calibration curve of a route, the method of the attack, gives for this evidence.

    It is undecided (NaN), with a note, if no curve applies. It is also NaN for each example whose probability lies within
    `Curve.unsure`. evidence: features by name, (N,) each. explained: share of the gradient's power that the answer explains,
    (N,), which is only copied to the result.
    """
    curve, kind = find_curve(route, is_image=data.is_image), "images" if data.is_image else "table rows"
    reason = curve.explain_mismatch(evidence) if curve else f"answers of the method {route!r} were not calibrated on {kind}"
    if curve is None or reason:
        return build_undecided(len(explained), reason, explained, evidence)
    probabilities = estimate_probabilities(curve, evidence, len(explained))
    if not (unsure := int(probabilities.isnan().sum())):
        return ConfidenceEstimates(probabilities, explained, evidence)
    least, most = curve.unsure
    note = (
        f"confidence is undecided for {unsure} of {len(probabilities)} examples: probabilities from {least} to {most} were too "
        "inaccurate in the calibration"
    )
    return ConfidenceEstimates(probabilities, explained, evidence, (note,))


def build_undecided(
    examples: int, reason: str, explained: Tensor | None = None, evidence: Mapping[str, Tensor] | None = None
) -> ConfidenceEstimates:
    """Return undecided confidence (NaN) for an answer of `examples` examples, with the reason as a note.

    explained: (N,) share of the gradient's power that the answer explains; None for 0. evidence: features by name, (N,) each.
    """
    unknown = torch.full((examples,), UNDECIDED)
    notes = (f"confidence is undecided: {reason}",)
    return ConfidenceEstimates(unknown, torch.zeros(examples) if explained is None else explained, evidence or {}, notes)


def _explain_unfamiliarity(found: SearchAnswer, missed: Tensor) -> str:
    """Return why the calibration does not apply to an answer; empty if it does. missed: unexplained share of power, 0-d."""
    if found.unfamiliar:
        return found.unfamiliar
    if not bool(missed.isfinite()):
        return "the gradient of the answer is NaN or infinite"
    if found.data.is_image and not IMAGE_SIDES[0] <= min(found.data.shape[1:]) <= max(found.data.shape[1:]) <= IMAGE_SIDES[1]:
        smallest, largest = IMAGE_SIDES
        return f"the calibration is for images of {smallest} to {largest} pixels a side, and these have {found.data.shape[1:]}"
    layers = [m for m in found.model.modules() if isinstance(m, StochasticModule) or not list(m.children())]
    strange = [type(module).__name__ for module in layers if not isinstance(module, (*KNOWN_LAYERS, nn.Sequential))]
    if strange:
        return f"the calibration included no network with {', '.join(sorted(set(strange)))}"
    return ""

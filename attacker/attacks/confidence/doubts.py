"""Reasons to doubt the likely examples of an answer, whose confidence then becomes undecided.

An example is likely if its confidence is at least `MIN_LIKELY`. "Power" is a squared Euclidean norm.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.confidence.evidence import SearchAnswer, holds_signs
from attacker.attacks.confidence.laplace import PRIOR_VARIANCE
from attacker.attacks.confidence.normalisations import find_other_normalisation
from attacker.reconstruction import MAX_RECOVERED_MSE
from fedsim.recording.observation import DataSpec

UNDECIDED = float("nan")
"""Confidence of answers to which the calibration does not apply."""
MIN_LIKELY = 0.5
"""Smallest confidence of an example that is more probably recovered than not."""
MAX_UNEXPLAINED_IMAGES, MAX_UNEXPLAINED_ROWS = 0.1, 0.02
"""Largest share of a gradient's power that a search may leave unexplained, beyond known noise, for its answer to be likely."""
MAX_ROW_STEP = 0.05**2
"""Mean squared change of the values of a table row by another Gauss-Newton step above which a search's answer is not likely: a
row counts as recovered if each number is within 0.05 of its column's range."""
UNFINISHED_ROW = (
    "another step without the limits of the columns would change the values by more than counts as recovered, as if the search "
    "had not ended, or values were outside 0 to 1; if clients standardise or scale their columns, set mean and std of the data "
    "(DataSpec)"
)
MAX_SCALED_MISFIT, MIN_SCALED_GAIN = 1e-3, 10.0
"""Largest share of a gradient's power that an answer leaves unexplained if its gradient is multiplied by the best factor, and
smallest ratio of the share without this factor to it, for unlikely examples to become undecided."""
MIN_EVALUATIONS, CONVERGED_MISFIT = 150, 10**-5.5
"""Smallest number of gradient evaluations of the kept start of a search whose answer may be likely, unless the share of the
gradient's power that it leaves unexplained is at most CONVERGED_MISFIT. On the tuning part, curves that were fitted to longer
searches gave most wrong answers of 40 to 100 evaluations probabilities of 0.7 to 0.96."""
STOPPED = "the search was stopped before its end and had not converged; the calibration has only searches that ran to their end"
MAX_UNLIKELY_ORDERED, MIN_LIKELY_ORDERED = 0.1, 0.9
"""Confidences between which an answer in an assumed order of the client's examples is undecided, unless its curve was fitted to
such answers (route `INFERRED_ORDER`). Answers in a fixed order, to table rows and of several rounds were not calibrated."""
UNCALIBRATED_ORDER = (
    "which were searched for in an assumed order of the client's examples; no such answer was calibrated, and probabilities "
    f"between {MAX_UNLIKELY_ORDERED:.0%} and {MIN_LIKELY_ORDERED:.0%} may be too high or too low"
)
MAX_MERGED_DRIFT = 1e-3
"""Largest change of the gradient over local steps that are taken for one, as a share of its power, at which a confidence between
MAX_UNLIKELY_ORDERED and MIN_LIKELY_ORDERED is given."""
MERGED_STEPS = (
    "for which several local steps were taken for one although the gradient changes over them; probabilities between "
    f"{MAX_UNLIKELY_ORDERED:.0%} and {MIN_LIKELY_ORDERED:.0%} did not tell which answers are right"
)
ROWS_OF_A_BATCH = (
    "which are rows of a batch whose gradient the answer nearly explains: searches recover some of such rows and not others, and "
    "the calibration cannot tell which"
)
UNSEEN_VALUES = "the gradient of the answer does not depend on all of its values, as if the network cropped its inputs"
MAX_UNEXPLAINED_COLOUR = 0.01
"""Largest share of a gradient's power that a search may leave unexplained, beyond known noise, for an image nearly of one colour
to be likely. Searches for more examples than there are fill the batch up with such images: on the tuning part, two of 18 had a
confidence of 0.77 and 0.93, and left 3 % unexplained."""
COLOUR_IN_ORDER = (
    "the answer is nearly of one colour, and searches in an inferred order of the client's examples return such images in place "
    "of others"
)
UNDETERMINED_COLOUR = (
    "the answer is nearly of one colour, which the smoothness prior prefers, and the gradient leaves more of it open than the "
    f"error that a recovered image may have, or more than {MAX_UNEXPLAINED_COLOUR:.0%} of the gradient is unexplained"
)
MAX_STANDARD_DIFFERENCE = 0.01
"""Largest difference from 0 and 1 of the mean and standard deviation of a standardised image. At most 1 of 1,000 images of
CIFAR-10, CIFAR-100 and LFW that are normalised by the mean and deviation of their data set is so near."""
SIGNS = (
    "the update holds little more than the signs of the gradient, as those of Adam or signSGD, and images that differ by more "
    "than counts as recovered can have the same signs"
)
STANDARDISED = (
    "the normalised values have mean 0 and deviation 1, as if clients standardised each image by its own mean and deviation, "
    "which an update does not show, so that brightness and contrast are unknown"
)


class CurvatureEvidence(NamedTuple):
    """What the curvature of the gradient says of N examples, see `measure_curvature`: three tensors (N,)."""

    error: Tensor
    step: Tensor
    unseen: Tensor


class Doubt(NamedTuple):
    """A reason why examples are not likely, and a mask (N,) of these examples; None for all."""

    reason: str
    mask: Tensor | None = None


def list_search_doubts(found: SearchAnswer, route: str, unexplained: float, curvature: CurvatureEvidence) -> Iterator[Doubt]:
    """Yield the doubts about the likely examples of a search.

    1. More than MAX_UNEXPLAINED_IMAGES or MAX_UNEXPLAINED_ROWS of the gradient's power is unexplained. No answer of the
       calibration with a confidence of MIN_LIKELY was like this.
    2. The gradient does not depend on so many pixels that their prior variance alone exceeds MAX_RECOVERED_MSE, or on some value
       of a table row. Nor was any answer of the calibration like this.
    3. Another step, which no box limits, would change a table row by more than MAX_ROW_STEP.
    4. A search that does not start from a closed form ended after fewer than MIN_EVALUATIONS evaluations, or any search was
       stopped, and had not converged (CONVERGED_MISFIT). The calibration has only searches that ran to their end.
    5. An image is nearly of one colour, and its mean posterior variance exceeds MAX_RECOVERED_MSE, or more than
       MAX_UNEXPLAINED_COLOUR of the gradient's power is unexplained. The curve takes smooth images for good ones, but a nearly
       constant image explains the gradient of some networks of sigmoids whatever the original is, and fills up batches of fewer
       examples than are searched for. With an inferred order of the client's examples, every such image: on the tuning part,
       three of four clients behind CPL's LeNet had one wrong image of this kind, and three right others.
    6. An image is standardised by its own mean and deviation.
    7. The update holds little more than signs (`holds_signs`). No such update was calibrated, the curvature is that of a
       surrogate, and many images have the same signs.

    route: the method of the search. unexplained: share of the gradient's power that the answer leaves unexplained, beyond known
    noise.
    """
    x, data = found.x[: found.examples].cpu(), found.data
    if unexplained > (MAX_UNEXPLAINED_IMAGES if data.is_image else MAX_UNEXPLAINED_ROWS):
        yield Doubt(
            f"the answer leaves {min(unexplained, 1.0):.0%} of the gradient unexplained beyond known noise, as if the search had "
            "failed, or clients trained with another loss or otherwise than stated"
        )
    yield Doubt(UNSEEN_VALUES, curvature.unseen * PRIOR_VARIANCE > (MAX_RECOVERED_MSE if data.is_image else 0.0))
    if not data.is_image:
        yield Doubt(UNFINISHED_ROW, curvature.step > MAX_ROW_STEP)
    if is_short(found, route) and unexplained > CONVERGED_MISFIT:
        yield Doubt(
            f"the search ended after {found.kept_evaluations} evaluations of the gradient and had not converged; with fewer than "
            f"{MIN_EVALUATIONS}, such answers are often wrong"
        )
    if found.stopped and unexplained > CONVERGED_MISFIT:
        yield Doubt(STOPPED)
    if data.is_image:
        undetermined = (curvature.error > MAX_RECOVERED_MSE) | (unexplained > MAX_UNEXPLAINED_COLOUR)
        one_colour = _is_one_colour(x)
        yield Doubt(COLOUR_IN_ORDER, one_colour) if found.inferred else Doubt(UNDETERMINED_COLOUR, one_colour & undetermined)
        yield Doubt(STANDARDISED, is_standardised(x, data))
    if holds_signs(found):
        yield Doubt(SIGNS)


def is_short(found: SearchAnswer, route: str) -> bool:
    """Return whether a search that does not start from a closed form made fewer than MIN_EVALUATIONS evaluations."""
    return not route.startswith("optimisation from") and found.kept_evaluations < MIN_EVALUATIONS


def doubt_likely(confidence: Tensor, reason: str, doubted: Tensor | None = None) -> tuple[Tensor, tuple[str, ...]]:
    """Return `confidence` (N,) with NaN instead of values of at least MIN_LIKELY, and a note with the reason.

    doubted: mask (N,) of the values that may be replaced; None for all. If `reason` is "" or none of these values is that
    high, `confidence` is returned unchanged, without a note.
    """
    likely = confidence >= MIN_LIKELY if doubted is None else doubted & (confidence >= MIN_LIKELY)
    if not reason or not bool(likely.any()):
        return confidence, ()
    some = "" if bool(likely.all()) else f" for {int(likely.sum())} of {len(likely)} examples"
    return confidence.masked_fill(likely, UNDECIDED), (f"confidence is undecided{some}: {reason}",)


def doubt_normalisation(confidence: Tensor, x: Tensor, data: DataSpec) -> tuple[Tensor, tuple[str, ...]]:
    """Return `confidence` (N,) of images x with NaN for likely ones that another normalisation explains better, and a note."""
    likely = confidence >= MIN_LIKELY
    other = find_other_normalisation(x[likely], data)
    if other is None:
        return confidence, ()
    return doubt_likely(confidence, str(other), likely.masked_scatter(likely, other.differing))


def _is_one_colour(x: Tensor) -> Tensor:
    """Return a mask (N,) of the images x (N, C, H, W) that the image of their mean colour would count as recovering."""
    x = x.clamp(0, 1)
    return (x - x.mean(dim=(2, 3), keepdim=True)).flatten(1).square().mean(dim=1) <= MAX_RECOVERED_MSE


def is_standardised(x: Tensor, data: DataSpec) -> Tensor:
    """Return a mask (N,) of the images x (N, *shape) whose normalised values have mean 0 and standard deviation 1.

    Both may differ by MAX_STANDARD_DIFFERENCE. It is false for table rows.
    """
    values = data.normalise(x).flatten(1).double()
    off = torch.maximum(values.mean(dim=1).abs(), (values.std(dim=1, correction=0) - 1).abs())
    return (off <= MAX_STANDARD_DIFFERENCE) & data.is_image

"""Check whether the numbers of examples of each label can be read off the updates, without truth."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from scipy.stats import binom
from torch import Tensor, nn

from attacker.attacks.confidence.evidence import MIN_EQUAL_SHARE, count_equal
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import PROBE_COUNT
from attacker.attacks.labels.probes import compute_head_inputs, draw_inputs
from attacker.attacks.labels.rules import INTEGER_TOLERANCE, MAX_ROW_SUM, add_negative_logit
from attacker.attacks.simulation.client import build_network
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from fedsim import models
from fedsim.recording import Observation
from fedsim.recording.masked_vectors import SUM_CLIENT

READABLE = "labels-readable"
MAX_UPDATES, MAX_EXAMPLES = 8, 256
MAX_LISTED = 20
"""Largest number of labels whose numbers of examples are listed one by one."""
MAX_CHANCE = 1e-4
"""Labels count as readable if chance puts as many estimates near whole numbers as observed with at most this probability."""


def check_labels(observations: Sequence[Observation]) -> Iterator[CheckResult]:
    """Yield one result: a `Finding` if labels of single examples, or numbers of examples per label, can be read off updates.

    At most the first `MAX_UPDATES` updates are tested. It is a finding if more updates of one example name its label
    (`_name_label`) than chance explains. Otherwise it is a finding if more estimated numbers of examples of a label are near
    whole numbers than chance explains. The result is a `NotChecked` if no update allows an estimate, or if there are too few
    estimates to show more than chance. In all other cases without a finding it is `PassedCheck`.
    For softmax cross-entropy, the gradient of the last layer's bias is the mean over examples of p minus the one-hot label, where
    the mean prediction p is estimated on random inputs. By chance, a share of 2 * `INTEGER_TOLERANCE` of all estimates is
    within this tolerance of a whole number. The estimates of an update sum to its number of examples, so that the estimate for
    the first label follows from the others and is not tested. An update is left out if its rounded estimates do not sum to this
    number, if one is negative, or if most of those that are not near 0 are not near a whole number either (`_are_numbers`). A
    wrong sum arises, for example, if each of many labels gets a small share of an example: such estimates are near 0 but show
    nothing. Negative estimates, and shares of an example, show that clients do not train as stated, but for example with the sum
    of the losses, or on more examples than they report.
    """
    sampled = observations[:MAX_UPDATES]
    single = [_name_label(one) for one in sampled if one.num_examples == 1]
    named = [one for one in single if one is not None]
    if named and binom.sf(len(named) - 1, len(single), max(one.chance for one in named)) <= MAX_CHANCE:
        yield _build_finding(
            f"In {len(named)} of {len(single)} updates of one example, one entry of the gradient of the last layer's bias is "
            f"negative, and all entries {named[0].pattern}: that entry is of the example's label, in the first of them "
            f"{named[0].label}."
        )
        return
    tested, reason, unread = [], "", 0
    for observation in sampled:
        try:
            counts = _estimate_counts(observation)
        except ValueError as error:
            reason = str(error)
            continue
        if _are_numbers(counts, observation.num_examples):
            tested.append(counts)
        else:
            unread += 1
    if unread and not tested:
        evidence = (
            "the estimated numbers of examples per label are negative, not whole, or do not sum to the number of examples, in "
            f"any of {unread} updates"
        )
        yield PassedCheck(rule=READABLE, evidence=evidence)
        return
    if not tested:
        yield NotChecked(rule=READABLE, reason=reason or "the recording holds no update")
        return
    distances = torch.cat([(counts - counts.round()).abs()[1:] for counts in tested])
    near = int((distances <= INTEGER_TOLERANCE).sum())
    chance = float(binom.sf(near - 1, len(distances), 2 * INTEGER_TOLERANCE))
    tally = (
        f"{near} of {len(distances)} estimated numbers of examples per label are within {INTEGER_TOLERANCE:g} of a whole number"
    )
    if binom.sf(len(distances) - 1, len(distances), 2 * INTEGER_TOLERANCE) > MAX_CHANCE:
        yield NotChecked(rule=READABLE, reason=f"{tally}; so few estimates cannot show more than chance", kind="inconclusive")
        return
    if chance > MAX_CHANCE:
        yield PassedCheck(rule=READABLE, evidence=f"{tally}, as many as by chance")
        return
    yield _build_finding(
        f"{tally}, in {len(tested)} updates; by chance it would be {2 * INTEGER_TOLERANCE:.0%}. In the first update, "
        f"{format_counts(tested[0].round().int().tolist())}."
    )


def _build_finding(evidence: str) -> Finding:
    return Finding(
        rule=READABLE,
        grade="moderate",
        title="The server can count how many examples of each label a client used.",
        evidence=evidence,
        advice="Add noise to the update of the last layer (clip and gaussian), or sum the updates of many clients by secure "
        "aggregation. If labels are no secret, accept this finding.",
    )


def _are_numbers(counts: Tensor, examples: int | None) -> bool:
    """Return whether estimates (K,) may be the numbers of examples of each label of an update of so many examples."""
    whole, held = counts.round(), counts > INTEGER_TOLERANCE
    near = (counts - whole).abs() <= INTEGER_TOLERANCE
    return int(whole.sum()) == examples and int(whole.min()) >= 0 and 2 * int(near[held].sum()) >= int(held.sum())


def format_counts(counts: Sequence[int]) -> str:
    """Return the numbers of examples of all labels as text.

    If there are more than `MAX_LISTED` labels, only the first `MAX_LISTED` labels with a nonzero number are listed.
    """
    if len(counts) <= MAX_LISTED:
        return f"from label 0 on: {', '.join(map(str, counts))}"
    held = [f"{count} of label {label}" for label, count in enumerate(counts) if count]
    return ", ".join(held[:MAX_LISTED]) + (", ..." if len(held) > MAX_LISTED else "")


class _NamedLabel(NamedTuple):
    """A label that an update names, what all entries do, and the probability that noise or random signs do the same."""

    label: int
    pattern: str
    chance: float


def _name_label(observation: Observation) -> _NamedLabel | None:
    """Return the label of an update of one example; None if its gradient is not that of softmax cross-entropy, or its signs.

    The gradient p - y of the last layer's bias adds up to 0, and only the entry of the label y is negative, after one local step
    on this example or several. Unknown noise changes the sum. Updates of Adam and signSGD hold the signs of this gradient, with
    equal magnitudes (`MIN_EQUAL_SHARE`). The signs of two entries add up to 0, too. Of K random signs, exactly one is negative
    with the probability K / 2^K.
    """
    try:
        _, _, bias = _read_bias_gradient(observation)
    except ValueError:
        return None
    if len(bias) < 2 or not bias.isfinite().all() or int((bias < 0).sum()) != 1:
        return None
    if float(bias.sum().abs()) <= MAX_ROW_SUM * float(bias.norm()):
        return _NamedLabel(int(bias.argmin()), "add up to 0", MAX_ROW_SUM)
    if count_equal(bias) >= MIN_EQUAL_SHARE * len(bias):
        return _NamedLabel(int(bias.argmin()), "are of equal size", max(MAX_ROW_SUM, len(bias) / 2.0 ** len(bias)))
    return None


def _estimate_counts(observation: Observation) -> Tensor:
    """Return the estimated numbers of examples of each label, (K,), floats. Raises ValueError if they cannot be estimated."""
    examples = observation.num_examples or 0
    if not 0 < examples <= MAX_EXAMPLES:
        reported = "no number" if observation.num_examples is None else observation.num_examples
        raise ValueError(
            f"labels can only be counted if the client reports 1 to {MAX_EXAMPLES} examples, and this one reported {reported}"
        )
    model, seen, bias = _read_bias_gradient(observation)
    if seen.steps > 1:
        raise ValueError(f"labels can only be counted in updates of one local step, and this update is of {seen.steps} steps")
    state = seen.get_state(0)
    with torch.no_grad():
        probes = draw_inputs(seen.data, PROBE_COUNT, torch.Generator().manual_seed(0))
        _, logits = compute_head_inputs(model, seen.data, {**state["buffers"], **state["weights"]}, seen.data.normalise(probes))
    return examples * (models.predict_probabilities(logits).mean(dim=0) - add_negative_logit(bias))


def _read_bias_gradient(observation: Observation) -> tuple[nn.Module, ObservedGradients, Tensor]:
    """Return the network, the observed gradient, and its part for the last layer's bias, (K,), or (1,) for one logit.

    The gradient is that of all local steps together. Raises ValueError if the update does not hold it: for sums of several
    clients, and layers without a bias.
    """
    if observation.client == SUM_CLIENT:
        raise ValueError(
            "labels can only be counted in the update of a single client, and this is a sum under secure aggregation"
        )
    model = build_network(observation)
    seen = ObservedGradients([observation], model=model, device="cpu", knows_defense=False)
    _, bias = models.find_head(model, observation.data)
    if bias is None:
        raise ValueError("labels can only be counted if the last layer has a bias, and this model's has none")
    return model, seen, seen.gradients[bias][0]

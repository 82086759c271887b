"""Check whether the numbers of examples of each label can be read off the updates, without truth."""

from collections.abc import Iterator, Sequence

import torch
from scipy.stats import binom
from torch import Tensor

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import PROBE_COUNT
from attacker.attacks.labels.probes import compute_head_inputs, draw_inputs
from attacker.attacks.labels.rules import INTEGER_TOLERANCE
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
    """Yield one result: a `Finding` if more estimated numbers of examples of a label are near whole numbers than chance explains.

    At most the first `MAX_UPDATES` updates are tested. The result is a `NotChecked` if no update allows an estimate, or if there
    are too few estimates to show more than chance. In all other cases without a finding it is `PassedCheck`.
    For softmax cross-entropy, the gradient of the last layer's bias is the mean over examples of p minus the one-hot label, where
    the mean prediction p is estimated on random inputs. By chance, a share of 2 * `INTEGER_TOLERANCE` of all estimates is
    within this tolerance of a whole number. The estimates of an update sum to its number of examples, so that the estimate for
    the first label follows from the others and is not tested. An update is left out if its rounded estimates do not sum to this
    number, if one is negative, or if most of those that are not near 0 are not near a whole number either (`_are_numbers`). A
    wrong sum arises, for example, if each of many labels gets a small share of an example: such estimates are near 0 but show
    nothing. Negative estimates, and shares of an example, show that clients do not train as stated, but for example with the sum
    of the losses, or on more examples than they report.
    """
    tested, reason, unread = [], "", 0
    for observation in observations[:MAX_UPDATES]:
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
    yield Finding(
        rule=READABLE,
        grade="moderate",
        title="The server can count how many examples of each label a client used.",
        evidence=f"{tally}, in {len(tested)} updates; by chance it would be {2 * INTEGER_TOLERANCE:.0%}. In the first "
        f"update, {format_counts(tested[0].round().int().tolist())}.",
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


def _estimate_counts(observation: Observation) -> Tensor:
    """Return the estimated numbers of examples of each label, (K,), floats. Raises ValueError if they cannot be estimated."""
    examples = observation.num_examples or 0
    if observation.client == SUM_CLIENT:
        raise ValueError(
            "labels can only be counted in the update of a single client, and this is a sum under secure aggregation"
        )
    if not 0 < examples <= MAX_EXAMPLES:
        reported = "no number" if observation.num_examples is None else observation.num_examples
        raise ValueError(
            f"labels can only be counted if the client reports 1 to {MAX_EXAMPLES} examples, and this one reported {reported}"
        )
    if observation.training.loss != "cross_entropy":
        raise ValueError(f"labels can only be counted for cross-entropy, and the loss is {observation.training.loss}")
    model = build_network(observation)
    seen = ObservedGradients([observation], model=model, device="cpu", knows_defense=False)
    if seen.steps > 1:
        raise ValueError(f"labels can only be counted in updates of one local step, and this update is of {seen.steps} steps")
    _, bias = models.find_head(model, observation.data)
    if bias is None:
        raise ValueError("labels can only be counted if the last layer has a bias, and this model's has none")
    if observation.data.num_classes < 3:
        raise ValueError(
            f"labels can only be counted with more than two classes, and the data have {observation.data.num_classes}"
        )
    state, gradient = seen.get_state(0), seen.gradients[bias][0]
    with torch.no_grad():
        probes = draw_inputs(seen.data, PROBE_COUNT, torch.Generator().manual_seed(0))
        _, logits = compute_head_inputs(model, seen.data, {**state["buffers"], **state["weights"]}, seen.data.normalise(probes))
    return examples * (models.predict_probabilities(logits).mean(dim=0) - gradient)

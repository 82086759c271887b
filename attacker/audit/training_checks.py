"""Check whether clients train as the recording states, since attacks simulate the stated training."""

from collections.abc import Sequence

from attacker.audit.findings import CheckResult, Finding, NotChecked, Passed
from fedsim.recording import Observation
from fedsim.recording.contradictions import find_contradictions

TRAINING_RULE = "training-misstated"


def check_training(observations: Sequence[Observation]) -> CheckResult:
    """Return a `Finding` if the tensors in most updates contradict the stated training, see `find_contradictions`.

    Single updates may do so by chance, such as one whose example turns on no neuron of a layer. Only whole weights, as unchanged
    apps send them, are compared. Without any, the result is a `NotChecked`.
    """
    whole = [one for one in observations if one.payload.codec == "weights"]
    if not whole:
        return NotChecked(rule=TRAINING_RULE, reason="no client sends whole weights, which could be compared with its training")
    told = [(one, words) for one in whole if (words := _list_contradictions(one))]
    if 2 * len(told) <= len(whole):
        return Passed(rule=TRAINING_RULE, evidence=f"{len(told)} of {len(whole)} updates contradict the stated training")
    first, words = told[0]
    return Finding(
        rule=TRAINING_RULE,
        grade="low",
        title="Clients do not train as stated, so that attacks simulate another training and find less than they could.",
        evidence=f"In {len(told)} of {len(whole)} updates; the first, round {first.round}, client {first.client}: "
        f"{'; '.join(words)}.",
        advice="Correct the settings in record(), or what clients send, and record again: the results of attacks on this run "
        "show little.",
    )


def _list_contradictions(observation: Observation) -> list[str]:
    before = {**observation.weights, **observation.buffers}
    after = {**observation.payload.tensors, **observation.buffers_after}
    return find_contradictions(observation.training, observation.num_examples, before, after)

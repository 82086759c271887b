"""Checks of the weights that the server sent, for patterns of a malicious server."""

from collections.abc import Iterator

from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from fedsim.models.inspected_layers import is_large
from fedsim.models.tampering import inspect_weights
from fedsim.recording import Recording

TAMPERED_RULE = "weights-tampered"


def check_weights(recording: Recording) -> Iterator[CheckResult]:
    """Yield one result: whether the first or the last recorded weights show signs of tampering, see `fedsim.models.tampering`."""
    rounds = recording.list_rounds()
    if not rounds:
        yield NotChecked(rule=TAMPERED_RULE, reason="no round with weights is recorded", kind="needs information")
        return
    checked = 0
    for number in dict.fromkeys((rounds[0], rounds[-1])):
        weights = recording.read_sent(number).weights
        checked += sum(is_large(weight) for weight in weights.values())
        for sign in inspect_weights(weights):
            yield Finding(
                rule=TAMPERED_RULE,
                grade="severe",
                title=f"The server sent a layer ({sign.layer}) that looks tampered with: {sign.pattern}.",
                evidence=f"Round {number}: {sign.evidence}. Malicious servers build such layers to read single examples "
                "off the gradients, whatever the batch.",
                advice="Refuse such weights on the client (fedleak.inspect_model finds them); find out who changed the model.",
            )
            return
    if not checked:
        yield NotChecked(rule=TAMPERED_RULE, reason="no layer is large enough to be inspected")
        return
    yield PassedCheck(rule=TAMPERED_RULE, evidence=f"none of the inspected layers ({checked}) shows a known pattern of tampering")

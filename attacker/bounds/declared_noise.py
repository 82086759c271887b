"""The noise that a federation declares, from which the accountant bounds reconstruction over rounds."""

from defenses.gradients import GradientSpec
from defenses.privacy.sensitivity import Noise, find_gradient_noise, find_noise
from fedsim.recording import Recording
from fedsim.training.privacy import count_uses


def find_declared_noise(recording: Recording) -> tuple[Noise, int]:
    """Return the declared noise and the number of times that it is added in one round to what it hides.

    If the defense of the update adds noise that hides the whole update, this noise is returned, and the number is 1. If it adds
    none, the noise of the gradient rule, such as DP-SGD, is returned, which hides one example; the number is then the largest
    number of local steps of a round that use the same example, for the client that reported the fewest examples; if no client
    reported a number, a client of one example is assumed. If neither adds noise, the `multiplier` of the returned noise is 0 and
    the number is 1. The recording must hold at least one round.
    """
    tensors = len(recording.read_sent(recording.list_rounds()[0]).weights)
    of_client = find_noise(recording.manifest.defense, tensors=tensors)
    if of_client.multiplier > 0:
        return of_client, 1
    of_example = find_gradient_noise(GradientSpec.parse(recording.manifest.gradient), tensors=tensors)
    if not of_example.multiplier > 0:
        return of_client, 1
    sizes = [row.reported for row in recording.read_rows(on_damage=lambda error: None) if row.reported]
    return of_example, count_uses(recording.manifest.training, min(sizes, default=1), 1, 1)

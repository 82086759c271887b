"""Check that the true examples are those behind the recorded updates, since truth of another run may name the same clients."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from attacker.bounds import NOISES, UsedExamples, build_message, flatten_update
from attacker.scoring.rows import ScoreRow
from attacker.scoring.truth.originals import CaseObservation
from attacker.scoring.truth.run_truth import RunTruth
from fedsim import models
from fedsim.recording import Observation, Recording, Row, find_recording

MAX_COMPARED = 4
"""Largest number of updates of a run that are compared. If truth is of another run, it fits none of them."""
MAX_USES = 2_000
"""Largest number of uses of examples in an update that is compared, so that the check takes no longer than an attack."""
MAX_DIFFERENCE = 0.5
"""Smallest distance between a recorded update and the one computed from the truth, relative to the norm of the recorded one, at
which they are different. Rounding causes at most about 0.01, and the examples of another client about 1."""
MAX_NOISE_RATIO = 2.0
"""The same relative to the root mean square norm of the defense's noise in the recorded update."""
MIN_CERTAIN, MIN_CERTAIN_ANSWERS = 0.95, 3
"""Confidence of a certain answer, and the smallest number of certain answers, all of them wrong, that speak against the truth. If
confidence is calibrated, so many are wrong with a probability of 1e-4."""
OTHER_RUN = (
    "the truth is of another run, or clients train otherwise than stated (compare learning rate, steps, loss and normalisation "
    "with the app)"
)


class UpdateCheck:
    """A comparison of recorded updates with those that the true examples give, simulated as the recording states the training.

    run: the folder of the run. truth: its true examples. Only `MAX_COMPARED` updates are compared, those that `explain_mismatch`
    is asked for first.
    """

    def __init__(self, run: Path, truth: RunTruth) -> None:
        self._run, self._truth = run, truth
        self._found: dict[CaseObservation, str] = {}

    @cached_property
    def _recording(self) -> Recording:
        return Recording(find_recording(self._run))

    @cached_property
    def _rows(self) -> dict[tuple[int, int, str], Row]:
        rows = self._recording.read_rows(on_damage=lambda error: None)
        return {(row.round, row.attempt, row.client): row for row in rows}

    def explain_mismatch(self, observed: Sequence[CaseObservation]) -> str:
        """Return why an update of a case cannot be that of its true examples; "" if it can be, or is not compared.

        observed: the observations of the case, of which the first is compared.
        """
        use = observed[0]
        if use not in self._found and len(self._found) < MAX_COMPARED and len(use.clients) == 1:
            try:
                self._found[use] = self._compare(use)
            except (ValueError, OSError, ImportError):  # no recording, or a defense that is unknown or whose code is not here
                self._found[use] = ""
        return self._found.get(use, "")

    def _compare(self, case: CaseObservation) -> str:
        row = self._rows.get((case.round, case.attempt, case.clients[0]))
        if row is None:
            return ""
        seen = self._recording.read_observation(row)
        used = self._truth.read_used(case.round, case.attempt, *case.clients)
        if self._recording.manifest.network or len(used.examples) > MAX_USES or not _is_comparable(seen, len(used.steps)):
            return ""
        indices = sorted({index for step in used.steps for index in step})
        x, y = self._truth.data.train[indices]
        use = UsedExamples.select(seen, used.steps, indices)
        message = build_message(use, y)
        simulated = message.simulate(x.double())
        received = flatten_update(use.observation)
        noise = float((message.std.double().expand_as(simulated) ** 2).sum().sqrt())
        size, off = float(received.norm()), float((simulated - received).norm())
        if off <= MAX_DIFFERENCE * size or off <= MAX_NOISE_RATIO * noise:
            return ""
        return (
            f"the update of {case.clients[0]} in round {case.round} is not that of its true examples: it differs from the one "
            f"that they give by {off / size:.2g} of its norm; {OTHER_RUN}"
        )


def explain_unmatched(rows: Sequence[ScoreRow]) -> str:
    """Return a sentence if the rows of an attack hold several certain answers, and none of them is right; otherwise ""."""
    certain = [row for row in rows if (row.confidence or 0.0) >= MIN_CERTAIN]
    if len(certain) < MIN_CERTAIN_ANSWERS or any(row.success for row in certain):
        return ""
    return f"none of the {len(certain)} answers with a confidence of at least {MIN_CERTAIN:g} matches its original: {OTHER_RUN}"


def _is_comparable(observation: Observation, steps: int) -> bool:
    """Return whether the update follows from the examples but for noise and rounding, and `build_message` computes it.

    It does not if clients draw random numbers or keep statistics of batch norm while they train, if they augment examples, or if
    a defense follows one that adds noise. With frozen layers, several steps and clipped gradients are not simulated.
    """
    training = observation.training
    noisy = [place for place, step in enumerate(observation.defenses.steps) if step.name in NOISES]
    frozen = bool(training.frozen) and (steps > 1 or training.clip_norm is not None)
    if (
        training.augmentation
        or training.buffers != "none"
        or frozen
        or (noisy and noisy[0] < len(observation.defenses.steps) - 1)
    ):
        return False
    return not models.list_unsimulated(models.build(observation.model, observation.data), training, observation.data)

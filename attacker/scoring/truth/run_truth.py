"""Truth of a run: which examples of the data set its clients used in which round, from one folder of truth or several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from attacker.scoring.truth.holdings import load_holdings
from attacker.scoring.truth.originals import CaseObservation, Original, count_places, list_originals
from fedsim.recording.safe_files import DamagedFile
from fedsim.truth import RoundUsage, TruthReader


class NoTruth(ValueError):
    """Error for a round of a client whose examples are in none of the folders of truth (records of which examples were used)."""


class RunTruth:
    """The truth of a run, from one folder or several, with the data set that it refers to.

    folders, data: as for `Scorer`, whose attribute `data` is the same as here: the data set. Raises ValueError as `load_holdings`
    does.
    """

    def __init__(self, folders: Sequence[Path], data: tuple[str, dict[str, Any]] | None = None) -> None:
        self._readers = [TruthReader(folder) for folder in folders]
        self.data, self._starts = load_holdings(self._readers, data)

    def read_originals(self, observed: Sequence[CaseObservation]) -> tuple[list[Original], Tensor, Tensor]:
        """Return the N distinct examples that observations were computed from, their x (N, *shape) and their labels y (N,)."""
        examples = list_originals(
            (observation.round, self.read_used(observation.round, observation.attempt, *observation.clients))
            for observation in observed
        )
        return examples, *self.data.train[[example.index for example in examples]]

    def count_places(self, observed: Sequence[CaseObservation], examples: Sequence[Original], epochs: int) -> list[int]:
        """Return, for each of the `examples` of a case, how many of the case's reconstructions may be assigned to it.

        The number is 1 unless a round used the example more than once per epoch, see `count_places`. observed: the observations
        of the case. epochs: number of epochs per round.
        """
        used = (self.read_used(observation.round, observation.attempt, *observation.clients) for observation in observed)
        places = count_places(used, epochs)
        return [places[example.index] for example in examples]

    def read_used(self, round: int, attempt: int, *clients: str) -> RoundUsage:
        """Return the indices of the examples that clients used in a round, step by step, client after client.

        The indices refer to the training examples of the data set, `self.data.train`. attempt: 1 plus the number of times that
        the run had been resumed when the round was recorded.
        Raises NoTruth if no folder of truth has these examples for one of the clients, and DamagedFile if an index is too large.
        """
        return RoundUsage(tuple(step for client in clients for step in self._read_used(round, attempt, client).steps))

    def _read_used(self, round: int, attempt: int, client: str) -> RoundUsage:
        for reader, start in zip(self._readers, self._starts, strict=True):
            try:
                used = reader.read_used(round, attempt, client)
            except KeyError:
                continue
            largest, count = max((index for step in used.steps for index in step), default=0), len(self.data.train) - start
            if largest >= count:
                raise DamagedFile(
                    reader.folder / f"{client}.jsonl",
                    f"names example {largest} of {self.data.name}, which has {count} training examples; copy the file that the "
                    "client wrote",
                )
            return RoundUsage(tuple(tuple(start + index for index in step) for step in used.steps))
        raise NoTruth(f"no truth of client {client} in round {round}; name the folder that holds it with another --truth FOLDER")

    def read_canaries(self, client: str) -> tuple[tuple[int, int], ...]:
        """Return a client's canaries, examples planted for an audit: pairs of indices into the attribute `data`.

        The client trained on one example of each pair. The result is empty if the client has no canaries.
        """
        for reader, start in zip(self._readers, self._starts, strict=True):
            if canaries := reader.read_canaries(client):
                return tuple((start + a, start + b) for a, b in canaries)
        return ()

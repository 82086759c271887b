"""The rows of a recording that a replay attacks, and checks of the user's choice of rounds and clients."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedsim.recording import DamagedFile, Recording, Row
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.safe_files import shorten
from fedsim.recording.selection import Rounds, complete_names


@dataclass(frozen=True)
class ChosenRows:
    """The rows of a recording in the rounds and of the clients that the user chose.

    rounds, clients: as for `Replay`; None for all.
    """

    recording: Recording
    rounds: Set[int] | None
    clients: frozenset[str] | None

    @property
    def rows(self) -> list[Row]:
        """Return the chosen rows that can be read."""
        return self._read[0]

    @property
    def damage(self) -> list[DamagedFile]:
        """Return an error for each chosen row that cannot be read."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[list[Row], list[DamagedFile]]:
        damage: list[DamagedFile] = []
        return self.recording.read_rows(rounds=self.rounds, clients=self.names, on_damage=damage.append), damage

    @cached_property
    def names(self) -> frozenset[str]:
        """Return the full names of the chosen clients; empty if all clients are attacked.

        Each text in `clients` should be a client's name or the beginning of one. A text with which no name begins is returned
        unchanged. Raises ValueError if a text is no full name and the names of several clients begin with it.
        """
        if not self.clients:
            return frozenset()
        return complete_names(self.clients, {row.client for row in self._read_all()})

    def find_absent_rounds(self) -> Rounds:
        """Return the chosen rounds of which the recording has no row of the chosen clients, not even one that cannot be read."""
        return Rounds.of(self.rounds or ()) - self.recording.list_observed_rounds(self.names)

    def check(self) -> None:
        """Raise ValueError if no chosen row has an update, or if one of the chosen clients, or every chosen round, is missing.

        The message lists the clients or rounds that exist. If no chosen row has an update and one cannot be read, raises its
        DamagedFile, a ValueError.
        """
        complete = any(row.status == "complete" for row in self.rows)
        if not complete and self.damage:
            raise self.damage[0]
        self._check_existence()
        if not complete:
            raise ValueError(f"{self.recording.folder} holds no update of the chosen clients in the chosen rounds; choose others")

    def _check_existence(self) -> None:
        clients = self.names - {row.client for row in self.rows}
        if not clients and self.find_absent_rounds() != self.rounds:
            return
        rows = self._read_all()
        if unknown := sorted(clients - {row.client for row in rows}):
            names = sorted({row.client for row in rows} - {SUM_CLIENT})
            raise ValueError(f"{self.recording.folder} holds no client {unknown[0]!r}. Its clients: {_join_names(names)}")
        if self.rounds and not self.rounds & {row.round for row in rows}:
            known = str(Rounds.of(row.round for row in rows)) or "none"
            raise ValueError(f"{self.recording.folder} holds no round {Rounds.of(self.rounds)}. Its rounds: {known}")

    def check_weights(self, shapes: Mapping[str, tuple[int, ...]], required: Set[str]) -> None:
        """Raise ValueError if the weights that the server sent differ from the manifest's model in the name or shape of a tensor.

        Only the first row whose round's weights can be read is checked. The check is made before any attack, since a damaged
        manifest may describe a model of any size, which attacks would build. shapes, required: as for `explain_misfit`.
        """
        for row in self.rows:
            try:
                sent = self.recording.read_sent(row.round).weights
            except DamagedFile:  # the cases of that round fail with the reason
                continue
            if misfit := explain_misfit(sent, shapes, required):
                manifest = self.recording.manifest
                advice = "give --model the network that was recorded, or " if ":" in manifest.model.name else ""
                raise ValueError(
                    f"{self.recording.folder / 'manifest.json'} describes a model that does not fit the weights recorded in "
                    f"round {row.round}: {misfit} ({manifest.model}, data of shape {manifest.data.shape}, "
                    f"{manifest.data.num_classes} classes); {advice}restore the manifest and the model's code as of the time of "
                    "the recording"
                )
            return

    def _read_all(self) -> list[Row]:
        return self.recording.read_rows(on_damage=lambda error: None)


def explain_misfit(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], required: Set[str]) -> str:
    """Return the first way in which weights differ in name or shape from a model's parameters, or "" if they do not.

    shapes: shapes of all parameters by name. required: names that `weights` must have; a parameter that layers share has further
    names.
    """
    for name in sorted(weights.keys() | required):
        if name not in weights:
            return f"{shorten(name)} is missing, a parameter of the model"
        if name not in shapes:
            return f"{shorten(name)} is not a parameter of the model"
        if tuple(weights[name].shape) != shapes[name]:
            return f"{shorten(name)} has shape {tuple(weights[name].shape)}, but {shapes[name]} in the model"
    return ""


def _join_names(names: Sequence[str]) -> str:
    """Return the first ten names as text, separated by commas, and how many more there are."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

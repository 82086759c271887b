"""Truth of a run: which examples of the data set its clients used in which round, from one folder of truth or several.

The folders refer to one data set for all clients, as in a simulation, or to one data set per client.
"""

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor

from attacker.scoring.truth.originals import CaseObservation, Original, count_places, list_originals
from fedsim import data as datasets
from fedsim.data import Dataset
from fedsim.data import client_parts as parts
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


def load_holdings(
    readers: Sequence[TruthReader], override: tuple[str, dict[str, Any]] | None = None
) -> tuple[Dataset, list[int]]:
    """Return the data sets that folders of truth refer to, joined into one, and for each folder where its data set begins there.

    The joined data set has the training examples of all sets, one set after the other; the beginnings are indices of examples.

    readers: one per folder, at least one. override: name and arguments of a data set to load instead of what truth describes,
    such as one that lies elsewhere; it must have the content that truth refers to, so that all readers must then refer to the
    same data set.
    Raises ValueError if truth does not describe a data set, if a data set's content differs from what truth refers to, or if the
    specifications (shape, classes, columns) of the sets differ.
    """
    datasets: dict[str, Dataset] = {}
    for reader in readers:
        reader.check_described()
        expected = reader.dataset["content_hash"]
        if expected in datasets:
            continue
        try:
            places = (reader.folder / "data", reader.folder.parent / "data")
            data = _load_described(reader.dataset, override, beside=next(filter(Path.is_dir, places), None))
        except (TypeError, KeyError, AttributeError) as error:  # the file's arguments may have any type
            problem = f"describes a data set that cannot be loaded ({error}); name it with --data"
            raise DamagedFile(reader.folder / "dataset.json", problem) from None
        if data.compute_hash() != expected:
            raise ValueError(
                f"the content of data set {data.name} differs from the data that the truth in {reader.folder} refers to; name "
                "the right data set with --data"
            )
        datasets[expected] = data
    sets, starts = list(datasets.values()), dict[str, int]()
    for name, data in datasets.items():
        starts[name] = sum(len(dataset.train.labels) for dataset in sets[: len(starts)])
        if data.spec != sets[0].spec:
            raise ValueError(
                f"{data.name} and {sets[0].name} differ in shape, classes or columns; give only truth of one federation"
            )
    joined = sets[0]
    if len(sets) > 1:
        examples = parts.concatenate(*(dataset.train for dataset in sets))
        joined = replace(joined, name=f"{joined.name} and {len(sets) - 1} more", train=examples)
    return joined, [starts[reader.dataset["content_hash"]] for reader in readers]


def _load_described(described: dict[str, Any], override: tuple[str, dict[str, Any]] | None, *, beside: Path | None) -> Dataset:
    """Load the data set that truth describes, or the one that the user gives instead.

    described: content of `dataset.json`. override: name and arguments of the user's data set; if it is of the same kind as the
    one in truth, arguments that the user did not give are taken from truth. beside: folder with one client's part of a data set,
    if any. It is read for the kind `part` if the folder that truth or the user names does not exist, as after copying the
    client's files to another machine. Raises FileNotFoundError, with advice, if the data set is not there.
    """
    name, arguments = described["name"], described["arguments"]
    if override:
        same = datasets.split_name(override[0])[0] == datasets.split_name(name)[0]
        name, arguments = override[0], {**(arguments if same else {}), **override[1]}
    kind, positional = datasets.split_name(name)
    if kind == "part" and beside is not None and not Path(positional or arguments["path"]).is_dir():
        return datasets.load("part", path=str(beside))
    # a name such as csv:PATH contains the first arguments itself
    positional_names = list(signature(datasets.DATASETS[kind]).parameters)[: len(list(filter(None, positional.split(","))))]
    try:
        return datasets.load(name, **{key: value for key, value in arguments.items() if key not in positional_names})
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; the clients used it under this name: run the command in the folder where the path is valid, or give "
            f"attacker score the data set's new place, as in --data {kind}:PATH"
        ) from None

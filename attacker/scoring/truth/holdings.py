"""Data sets that folders of truth refer to: one for all clients, as in a simulation, or one per client."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from fedsim import data as datasets
from fedsim.data import Dataset
from fedsim.data import client_parts as parts
from fedsim.recording.safe_files import DamagedFile
from fedsim.truth import TruthReader, Used


@dataclass(frozen=True)
class Holdings:
    """The concatenation of all data sets that truth refers to.

    data: the examples of all data sets, one set after the other. starts: dict from the content hash of a set to the index of its
          first example.
    """

    data: Dataset
    starts: dict[str, int]

    def read_used(self, reader: TruthReader, round: int, attempt: int, client: str) -> Used:
        """Return `TruthReader.read_used` with indices into `data`: the examples that a client used in a round."""
        start = self.starts[reader.dataset["content_hash"]]
        used = reader.read_used(round, attempt, client)
        return Used(tuple(tuple(start + index for index in step) for step in used.steps)) if start else used

    def read_canaries(self, reader: TruthReader, client: str) -> tuple[tuple[int, int], ...]:
        """Return `TruthReader.read_canaries` with indices into `data`."""
        start = self.starts[reader.dataset["content_hash"]]
        return tuple((start + a, start + b) for a, b in reader.read_canaries(client))


def load_holdings(readers: Sequence[TruthReader], given: tuple[str, dict[str, Any]] | None = None) -> Holdings:
    """Load the data sets that the folders of truth refer to.

    given: name and arguments of the data set, if they differ from those in truth; there must be only one data set then.
    Raises ValueError if a data set's content differs from what truth refers to, or if the specifications of the sets differ.
    """
    found: dict[str, Dataset] = {}
    for reader in readers:
        reader.check_described()
        expected = reader.dataset["content_hash"]
        if expected in found:
            continue
        try:
            data = load_described(reader.dataset, given, beside=reader.folder.parent / "data")
        except (TypeError, KeyError, AttributeError) as error:  # the file's arguments may have any type
            words = f"describes a data set that cannot be loaded ({error}); name it with --data"
            raise DamagedFile(reader.folder / "dataset.json", words) from None
        if data.compute_hash() != expected and _lacks_ranges(reader.dataset):
            data = load_described(_add_client_ranges(reader.dataset), given)
        if data.compute_hash() != expected:
            raise ValueError(
                f"the content of data set {data.name} differs from the data that the truth in {reader.folder} refers to; name "
                "the right data set with --data"
            )
        found[expected] = data
    sets, starts = list(found.values()), dict[str, int]()
    for name, data in found.items():
        starts[name] = sum(len(one.train.labels) for one in sets[: len(starts)])
        if data.spec != sets[0].spec:
            raise ValueError(
                f"{data.name} and {sets[0].name} differ in shape, classes or columns; give only truth of one federation"
            )
    if len(sets) == 1:
        return Holdings(sets[0], starts)
    examples = parts.concatenate(*(one.train for one in sets))
    return Holdings(replace(sets[0], name=f"{sets[0].name} and {len(sets) - 1} more", train=examples), starts)


def _lacks_ranges(described: dict[str, Any]) -> bool:
    """Return whether truth describes a table without saying which ranges scale its columns, as older versions wrote it."""
    factory = datasets.DATASETS[datasets.split_name(described["name"])[0]]
    return "ranges_from" in signature(factory).parameters and "ranges_from" not in described["arguments"]


def _add_client_ranges(described: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a table scaled by the ranges over all clients' rows, the only way in older versions."""
    return {**described, "arguments": {**described["arguments"], "ranges_from": "clients"}}


def load_described(described: dict[str, Any], given: tuple[str, dict[str, Any]] | None, *, beside: Path | None = None) -> Dataset:
    """Load the data set that truth describes, or the one that the user gives instead.

    beside: folder with the client's part of a data set, next to its truth; it is used if the folder that truth names does not
    exist, as after copying the client's folder to another machine.
    """
    name, arguments = described["name"], described["arguments"]
    if given:
        same = datasets.split_name(given[0])[0] == datasets.split_name(name)[0]
        name, arguments = given[0], {**(arguments if same else {}), **given[1]}
    kind, positional = datasets.split_name(name)
    if kind == "part" and beside is not None and beside.is_dir() and not Path(positional or arguments["path"]).is_dir():
        return datasets.load("part", path=str(beside))
    # a name such as csv:PATH contains the first arguments itself
    said = list(signature(datasets.DATASETS[kind]).parameters)[: len(list(filter(None, positional.split(","))))]
    return datasets.load(name, **{key: value for key, value in arguments.items() if key not in said})

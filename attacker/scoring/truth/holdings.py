"""Loaders of the data sets that folders of truth refer to: one for all clients, as in a simulation, or one per client.

Truth is a record of which examples each client trained on, as indices into a data set.
"""

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from fedsim import data as datasets
from fedsim.data import Dataset
from fedsim.data import client_parts as parts
from fedsim.recording.safe_files import DamagedFile
from fedsim.truth import TruthReader


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
            data = _load_described(reader.dataset, override, beside=reader.folder.parent / "data")
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
    one in truth, arguments that the user did not give are taken from truth. beside: folder with one client's part of a data set.
    It is read for the kind `part` if the folder that truth or the user names does not exist, as after copying the client's files
    to another machine.
    """
    name, arguments = described["name"], described["arguments"]
    if override:
        same = datasets.split_name(override[0])[0] == datasets.split_name(name)[0]
        name, arguments = override[0], {**(arguments if same else {}), **override[1]}
    kind, positional = datasets.split_name(name)
    if kind == "part" and beside is not None and beside.is_dir() and not Path(positional or arguments["path"]).is_dir():
        return datasets.load("part", path=str(beside))
    # a name such as csv:PATH contains the first arguments itself
    positional_names = list(signature(datasets.DATASETS[kind]).parameters)[: len(list(filter(None, positional.split(","))))]
    return datasets.load(name, **{key: value for key, value in arguments.items() if key not in positional_names})

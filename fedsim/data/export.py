"""Export of an experiment's data for a deployment: each client's own part, and the public description for the server."""

from dataclasses import dataclass
from pathlib import Path

from fedsim import data as datasets
from fedsim.config.experiment import Experiment, read
from fedsim.data import client_parts as parts
from fedsim.data import partition
from fedsim.recording.files import make_private, write_bytes

PUBLIC_FOLDER, EXPERIMENT_FILE = "public", "experiment.toml"


@dataclass(frozen=True, kw_only=True)
class SplitFolders:
    """The folders that `split` wrote.

    public:  folder that describes the data, for the server and all other parties.
    clients: folders `clients/NUMBER/data` of all clients, in the order of their numbers.
    sizes:   number of examples of each client, in the same order.
    """

    public: Path
    clients: tuple[Path, ...]
    sizes: tuple[int, ...]


def make_client_path(folder: Path, number: int) -> Path:
    """Return the folder `clients/NUMBER` of a client, counted from 0. `split` writes its examples to the subfolder `data`."""
    return folder / "clients" / str(number)


def split(experiment: Experiment, folder: Path) -> SplitFolders:
    """Write `public/` and `clients/NUMBER/data/` into `folder`. Each client's folder is meant for that client only.

    The parts are the same as in a simulation of the experiment. `public/experiment.toml` is the experiment, for all parties.
    Raises ValueError if `public/` exists, or a client gets no examples.
    """
    public = folder / PUBLIC_FOLDER
    if public.exists():
        raise ValueError(f"{public} exists already; choose another folder, or delete it")
    data = datasets.load(experiment.data.name, **experiment.data.arguments)
    cuts = partition.split(
        data.train,
        experiment.clients.count,
        seed=experiment.seed,
        name=experiment.partition.name,
        **experiment.partition.arguments,
    )
    make_private(folder)
    homes = []
    for number, chosen in enumerate(cuts):
        homes.append(make_private(make_client_path(folder, number)) / "data")
        parts.write_part(homes[-1], data, data.train.select(chosen))
    sizes = tuple(map(len, cuts))
    parts.write_public(public, data, sizes)
    write_bytes(public / EXPERIMENT_FILE, experiment.to_toml().encode())
    return SplitFolders(public=public, clients=tuple(homes), sizes=sizes)


def read_split(folder: Path) -> Experiment:
    """Return the experiment in `folder`/public/experiment.toml, where `split` wrote it. Raises ValueError without this file."""
    path = folder / PUBLIC_FOLDER / EXPERIMENT_FILE
    if not path.exists():
        raise ValueError(f"{folder} holds no split data; create them with: fedsim split EXPERIMENT --out {folder}")
    return read(path)


def write_own_part(data: str, public: Path, folder: Path) -> int:
    """Write a client's own data set as a folder of examples to train on, held-out ones included; return the number of examples.

    data:   the data set, such as "npz:mine.npz" or "csv:mine.csv".
    public: folder that describes the data of all clients (shape, classes, column ranges), as `split` wrote it.
    folder: where to write; the data set "part:FOLDER" reads it.
    Classes that have names are renumbered as in the public description, matched by name.
    Raises ValueError if the examples do not fit the public description, or if there are no examples.
    """
    facts = parts.public(str(public))
    own = parts.fit_to(parts.renumber_classes(datasets.load_text(data), facts), facts)
    examples = parts.concatenate(own.train, own.test)
    parts.write_part(folder, own, examples)
    return len(examples)

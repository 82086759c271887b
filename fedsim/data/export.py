"""Distribution of an experiment's data into folders: one for each client, and one with the public facts for the server."""

from dataclasses import dataclass
from pathlib import Path

from fedsim import data as datasets
from fedsim.config.experiment import Experiment, read
from fedsim.data import client_parts as parts
from fedsim.data import partition
from fedsim.recording.files import make_private, write_bytes

PUBLIC, EXPERIMENT = "public", "experiment.toml"


@dataclass(frozen=True, kw_only=True)
class Handed:
    """Folders that were written. public: of the server. clients: by partition id. sizes: numbers of examples of the clients."""

    public: Path
    clients: tuple[Path, ...]
    sizes: tuple[int, ...]


def client_folder(folder: Path, number: int) -> Path:
    """Return the folder that `split` writes for client `number`, counted from 0."""
    return folder / "clients" / str(number)


def split(experiment: Experiment, folder: Path) -> Handed:
    """Write `public/` and `clients/NUMBER/data/` into `folder`, each to be carried to its party and to no other.

    The parts are those of a simulation of the same experiment. `public/experiment.toml` is the experiment, for all parties.

    Raises ValueError if data were handed out there before.
    """
    public = folder / PUBLIC
    if public.exists():
        raise ValueError(f"{public} is there already; choose another folder, or delete it")
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
        homes.append(make_private(client_folder(folder, number)) / "data")
        parts.write_part(homes[-1], data, data.train.subset(chosen))
    sizes = tuple(map(len, cuts))
    parts.write_public(public, data, sizes)
    write_bytes(public / EXPERIMENT, experiment.to_toml().encode())
    return Handed(public=public, clients=tuple(homes), sizes=sizes)


def read_split(folder: Path) -> Experiment:
    """The experiment whose data `split` handed out in `folder`. Raises ValueError if there is none."""
    path = folder / PUBLIC / EXPERIMENT
    if not path.exists():
        raise ValueError(f"{folder} holds no data that were handed out; make them with: fedsim split EXPERIMENT --out {folder}")
    return read(path)


def own_part(data: str, public: Path, folder: Path) -> int:
    """Write a party's own data set, all of it, as the part that it trains on; the number of examples.

    data: names it, such as "npz:mine.npz" or "csv:mine.csv". public: what the server told of the data.
    Raises ValueError if the examples do not go with that.
    """
    facts = parts.public(str(public))
    own = parts.fitted(parts.renumbered(datasets.named(data), facts), facts)
    examples = parts.together(own.train, own.test)
    parts.write_part(folder, own, examples)
    return len(examples)

"""Locations of the data and the files of one party of a federation. In a simulation all parties share one folder."""

from dataclasses import dataclass
from pathlib import Path

from fedsim import data as datasets
from fedsim.data import Dataset
from fedsim.data import client_parts as parts


@dataclass(frozen=True, kw_only=True)
class PartyLocations:
    """Data set and folders of one party: the server or a client.

    data:    a client's own data set, such as "part:/data", a folder with this client's part only. If it is None, the client loads
             the experiment's data set and splits it.
    private: a client's folder for identity, secret and state; if None, below the run's folder.
    truth:   a client's folder for the indices of the examples it used; if None, below the run's folder.
    public:  the folder of public facts about the data, such as shape and ranges. If it is None, the server loads the experiment's
             data set. A client uses a copy of it to check that its `data` have these shapes, columns and classes; "part:" data
             contain the facts already.
    """

    data: str | None = None
    private: Path | None = None
    truth: Path | None = None
    public: Path | None = None

    def load_dataset(self) -> Dataset | None:
        """Return this party's data set; None if neither `data` nor `public` is set, so that it uses the experiment's data set.

        With `public` only, as on a server, the result has the public specification, no training examples, and held-out examples
        if they are public. With `data` only, the result is the client's own data set. With both, it is the client's own data set
        with the public specification and class names; ValueError is raised if the data set does not fit them. Its classes are not
        renumbered, since scoring loads the same data set without the public description, and compares the labels.
        """
        facts = None if self.public is None else datasets.load("public", path=str(self.public))
        if self.data is None:
            return facts
        own = datasets.load_text(self.data)
        return own if facts is None else parts.fit_to(own, facts)

    def describe_dataset(self, dataset: Dataset) -> dict[str, object]:
        """Return a dict that identifies this client's data set: its name, arguments, content hash and size.

        dataset: the data set that `load_dataset` returned.

        The client writes this dict to its truth folder, so that scoring can load the same examples.
        """
        assert self.data is not None
        name, arguments = datasets.parse_text(self.data)
        return datasets.describe(dataset, name, arguments)


SIMULATION_LOCATIONS = PartyLocations()
"""Locations of a simulation: all data are available to everybody, and everything is written to the run's folder."""

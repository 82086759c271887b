"""Folders of each party of a federation. In a simulation all parties share one folder."""

from dataclasses import dataclass
from pathlib import Path

from fedsim import data as datasets
from fedsim.data import Dataset
from fedsim.data import client_parts as parts


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders of one party. None means that, as in a simulation, this party loads the experiment's data set and splits it itself.

    data:    a client's own data set, such as "part:/data".
    private: a client's folder for identity, secret and state. truth: a client's folder for the examples it used.
    public:  the folder of public facts about the data. The server needs it if it does not have the data; a client needs a copy of
             it if its data set is not a "part".
    """

    data: str | None = None
    private: Path | None = None
    truth: Path | None = None
    public: Path | None = None

    def load_dataset(self) -> Dataset | None:
        """Return this party's own data set; None if it is the experiment's."""
        facts = None if self.public is None else datasets.load("public", path=str(self.public))
        if self.data is None:
            return facts
        own = datasets.load_text(self.data)
        return own if facts is None else parts.fit_to(own, facts)

    def describe_dataset(self, own: Dataset) -> dict[str, object]:
        """Return the description of the client's `own` data set for its truth folder."""
        assert self.data is not None
        name, arguments = datasets.parse_text(self.data)
        return datasets.describe(own, name, arguments)


SIMULATION_PLACES = Places()
"""Folders of a simulation: all data are available to everybody, and everything is written to the run's folder."""

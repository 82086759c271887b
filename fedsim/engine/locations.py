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

    def dataset(self) -> Dataset | None:
        """Return this party's own data set; None if it is the experiment's."""
        facts = None if self.public is None else datasets.load("public", path=str(self.public))
        if self.data is None:
            return facts
        own = datasets.named(self.data)
        return own if facts is None else parts.fitted(own, facts)

    def described(self, own: Dataset) -> dict[str, object]:
        """Return the description of the client's `own` data set for its truth folder."""
        assert self.data is not None
        name, arguments = datasets.parsed(self.data)
        return datasets.described(own, name, arguments)


SIMULATION_PLACES = Places()
"""Folders of a simulation: all data are available to everybody, and everything is written to the run's folder."""

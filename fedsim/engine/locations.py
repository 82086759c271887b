"""Where a party of a federation keeps what is its own, where that is not one folder for all, as in a simulation."""

from dataclasses import dataclass
from pathlib import Path

from fedsim import data as datasets
from fedsim.data import Dataset
from fedsim.data import client_parts as parts


@dataclass(frozen=True, kw_only=True)
class Places:
    """One party's places. What is None is as in a simulation, where everybody can load all data and split it.

    data:    of a client: names the data set that is all its own, such as "part:/data".
    private: of a client: where it keeps identity, secret and state. truth: where it writes down what it used.
    public:  of the server: folder of the public facts on the data, which it does not have; of a client with data under another
             name than "part": the same facts, for the specification.
    """

    data: str | None = None
    private: Path | None = None
    truth: Path | None = None
    public: Path | None = None

    def dataset(self) -> Dataset | None:
        """This party's data set; None where it is the experiment's."""
        facts = None if self.public is None else datasets.load("public", path=str(self.public))
        if self.data is None:
            return facts
        own = datasets.named(self.data)
        return own if facts is None else parts.fitted(own, facts)

    def described(self, own: Dataset) -> dict[str, object]:
        """What truth says of the client's `own` data set, whose training examples are the client's."""
        assert self.data is not None
        name, arguments = datasets.parsed(self.data)
        return datasets.described(own, name, arguments)


EVERYWHERE = Places()
"""Of a simulation: all data are with everybody, and all that is written goes to the run's folder."""

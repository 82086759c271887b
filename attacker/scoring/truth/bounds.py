"""Lower bounds on the expected mean squared error of reconstructions, computed at the true examples of recorded updates."""

from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np
import torch

from attacker.bounds import FisherInformation, GaussianPrior, NotBounded, UsedExamples, bound_error, build_message, fit_prior
from attacker.bounds.cramer_rao import MAX_DENSE, MAX_ITERATIONS, NUM_PROBES
from attacker.scoring.truth.originals import CaseObservation
from fedsim.data import Dataset
from fedsim.recording import DamagedFile, Observation, Recording
from fedsim.recording.index_database import INDEX_FILE
from fedsim.truth import RoundUsage

PRIOR_EXAMPLES = 464
"""Largest number of training examples that the prior is fitted to."""
ReadUsed = Callable[..., RoundUsage]


class CaseBounds:
    """Lower bounds on the expected mean squared error of the reconstruction of each true example, for the cases of one run.

    read_used: function that returns the examples of a round, given round, attempt and clients. seconds: time budget of all calls
    of `find` together. A case has no bound if computing it is expected to take longer than the budget left, if no bound is known
    (as for secure sums and some defenses), or if its files are damaged. The attribute `reasons` is a dict from the key of each
    case without a bound to the reason.
    """

    def __init__(self, recording: Recording, data: Dataset, read_used: ReadUsed, *, seconds: float = float("inf")) -> None:
        self.reasons: dict[str, str] = {}
        self._recording, self._data, self._read_used = recording, data, read_used
        self._left = seconds
        self._found: dict[tuple[CaseObservation, ...], dict[int, float] | str] = {}
        self._prior: GaussianPrior | None = None
        self._rows = {(row.round, row.attempt, row.client): row for row in recording.read_rows(on_damage=lambda error: None)}

    def find(self, key: str, observed: Sequence[CaseObservation]) -> dict[int, float]:
        """Return a dict from the data set index of each example of a case to the lower bound on its mean squared error.

        The result is empty if there is no bound; the attribute `reasons` then holds the reason under `key`. key: key of the case.
        observed: the observations of the case.
        """
        uses = tuple(observed)
        if uses not in self._found:
            started = monotonic()
            try:
                self._found[uses] = self._bound(uses)
            except (NotBounded, DamagedFile) as error:
                self._found[uses] = str(error)
            self._left -= monotonic() - started
        bounds = self._found[uses]
        if isinstance(bounds, str):
            self.reasons[key] = bounds
            return {}
        return bounds

    def _bound(self, uses: Sequence[CaseObservation]) -> dict[int, float]:
        if self._left <= 0:
            raise NotBounded("the time for bounds is used up; attacker score --bounds TIME gives more")
        if any(len(use.clients) > 1 for use in uses):
            raise NotBounded("no lower bound on the reconstruction error is known for sums under secure aggregation")
        if self._recording.manifest.network:
            raise NotBounded(
                "no lower bound on the reconstruction error is known if the clients' network is changed by "
                f"{self._recording.manifest.network}"
            )
        observations = [self._read_observation(use) for use in uses]
        usages = [self._read_used(use.round, use.attempt, *use.clients) for use in uses]
        indices = sorted({index for usage in usages for step in usage.steps for index in step})
        x, y = self._data.train[indices]
        messages = [
            build_message(UsedExamples.select(observation, usage.steps, indices), y)
            for observation, usage in zip(observations, usages, strict=True)
        ]
        information = FisherInformation(messages, x.double())
        self._check_time(information)
        bound = bound_error(information, self._find_prior())
        return dict(zip(indices, bound.mse.tolist(), strict=True))

    def _read_observation(self, use: CaseObservation) -> Observation:
        """Read the observation of one client. Raises DamagedFile if the recording has none that is valid."""
        (client,) = use.clients
        row = self._rows.get((use.round, use.attempt, client))
        if row is None:
            problem = f"has no valid row of client {client} in round {use.round}, attempt {use.attempt}"
            raise DamagedFile(self._recording.folder / INDEX_FILE, problem)
        return self._recording.read_observation(row)

    def _check_time(self, information: FisherInformation) -> None:
        """Raise NotBounded if the expected time of the bound exceeds what is left of the budget.

        The expected time is the time of one product of the information with a vector, measured here, times the largest number of
        such products that the bound may need. information: Fisher information on the examples of a case.
        """
        started = monotonic()
        information.multiply(torch.ones(information.size, dtype=torch.float64))
        needed = information.size if information.size <= MAX_DENSE else NUM_PROBES * MAX_ITERATIONS
        if (expected := needed * (monotonic() - started)) > self._left:
            raise NotBounded(
                f"the bound would take about {expected:.0f} s, and {max(self._left, 0):.0f} s are left; "
                "attacker score --bounds TIME gives more"
            )

    def _find_prior(self) -> GaussianPrior:
        if self._prior is None:
            chosen = np.sort(np.random.default_rng(0).permutation(len(self._data.train))[:PRIOR_EXAMPLES])
            self._prior = fit_prior(self._data.train[chosen][0])
        return self._prior

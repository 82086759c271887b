"""Attack `membership`: names which images of a pool, the candidates, are among a client's training examples."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter

import torch
from torch import Generator, Tensor

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.arguments import FilePath
from attacker.attacks.base import Memory, Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.membership.confidence import estimate_membership
from attacker.attacks.membership.pool import Pool, read_pool
from attacker.attacks.membership.regression import Coefficients, Regression, combine, join_blocks
from attacker.attacks.membership.residuals import fit_residuals, keeps_values
from attacker.attacks.membership.values import compute_gradients, flatten, group_by_model, group_by_values
from attacker.attacks.needs import Need
from attacker.attacks.simulation.client import convert_to_gradient, find_schedule
from attacker.reconstruction import Reconstruction
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation


@dataclass(kw_only=True)
class Membership:
    """An attack that fits a client's updates by weighted sums of the candidates' gradients, and names training examples.

    Named are the candidates whose weights in these sums are the largest relative to their standard deviations (z-scores).

    candidates: path of the archive with the candidates, see `read_pool`. sees_gradient: False gives the null, which names
    candidates at random.
    """

    candidates: str = ""
    name: str = "membership"
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=frozenset({Need.SAME_CLIENT, Need.NUM_EXAMPLES, Need.IMAGES, Need.CANDIDATES}))
    device: str = "cpu"

    def null(self) -> "Membership":
        return replace(self, sees_gradient=False)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction for each of `cases`: the candidates named as training examples, unchanged, with their labels.

        The number of named candidates is the number of examples behind the update: per case if its rounds repeat the examples,
        else per round. Raises ValueError if no pool was given, if the pool does not suit the recorded data, if a client reported
        no number of examples, or if the pool has no more candidates than there are examples behind an update. Raises
        FileNotFoundError if the pool's archive is missing.
        """
        if not self.candidates:
            raise ValueError(
                "membership chooses among candidates: name an archive with images and labels, --set candidates=FILE.npz"
            )
        pool = read_pool(Path(self.candidates), cases[0].observations[0].data)
        _check_sizes(cases, pool)
        started = perf_counter()
        scores = self._score(cases, pool, rng, progress) if self.sees_gradient else _draw_scores(cases, pool, rng)
        seconds = (perf_counter() - started) / len(cases)
        return [self._name(case, pool, case_scores, rng, seconds) for case, case_scores in zip(cases, scores, strict=True)]

    def fit(self, cases: Sequence[Case], pool: Pool, rng: Generator, progress: Progress | None = None) -> dict[str, Coefficients]:
        """Return the coefficients of the candidates in every update of `cases`, by the observation's key.

        A large pool is regressed in blocks. In the regression of one block, the candidates of the other blocks act as noise.
        """
        fitted: dict[str, list[Coefficients]] = {}
        blocks = pool.split(Generator().manual_seed(rng.initial_seed()))
        residual = {case.key: case for case in cases if keeps_values(case)}
        plain = group_by_model([o for case in cases if case.key not in residual for o in case.observations])
        steps = len(plain) + sum(len(case.observations) for case in residual.values())

        def report(observation: Observation, done: int) -> None:
            if progress is not None:
                progress(done, steps, f"candidates compared with the updates of round {observation.round}")

        for done, group in enumerate(plain, start=1):
            for (chosen, same), rows in product(group_by_values(group, rng), blocks):
                regression = Regression(compute_gradients(group[0], pool.of(rows), chosen, self.device))
                for observation in same:
                    steps_taken = find_schedule(observation)[1]
                    gradient = convert_to_gradient(observation.update, observation.weights, observation.training, steps_taken)
                    observed = flatten(gradient, chosen).to(self.device)
                    fitted.setdefault(observation.key, []).append(regression.fit(observed).cpu())
            report(group[0], done)
        followed = (
            pair for case in residual.values() for rows in blocks for pair in fit_residuals(case, pool.of(rows), rng, self.device)
        )
        for done, (observation, coefficients) in enumerate(followed):
            fitted.setdefault(observation.key, []).append(coefficients.cpu())
            report(observation, len(plain) + done // len(blocks) + 1)
        return {key: join_blocks(blocks, each) for key, each in fitted.items()}

    def _score(self, cases: Sequence[Case], pool: Pool, rng: Generator, progress: Progress | None) -> list[list[Tensor]]:
        """Return for each case the scores (P,) of the candidates, once per group of rounds with the same examples."""
        coefficients = self.fit(cases, pool, rng, progress)
        return [[combine([coefficients[o.key] for o in group]) for group in _split_rounds(case)] for case in cases]

    def _name(self, case: Case, pool: Pool, scores: Sequence[Tensor], rng: Generator, seconds: float) -> Reconstruction:
        """Return a reconstruction that consists of the candidates with the highest scores.

        scores: (P,) for each group of rounds with the same examples. seconds: time per case, for the reconstruction.
        """
        chosen, sure = [], []
        ties = torch.randperm(len(pool), generator=seed_generator(rng, case, "ties"))
        for group, group_scores in zip(_split_rounds(case), scores, strict=True):
            best = ties[group_scores[ties].argsort(descending=True, stable=True)][: group[0].num_examples]
            chosen.append(best)
            chance = torch.full((len(best),), len(best) / len(pool))  # if all examples are candidates
            sure.append(estimate_membership(group_scores, pool.y)[best] if self.sees_gradient else chance)
        rows = torch.cat(chosen)
        return build_reconstruction(
            case,
            pool.x[rows],
            pool.y[rows],
            attack=self.name,
            rng=rng,
            route="candidates" if self.sees_gradient else "prior alone",
            confidence=torch.cat(sure).float(),
            explained=None if self.sees_gradient else torch.zeros(len(rows)),
            evaluations=len(case.observations) * len(pool) * self.sees_gradient,
            seconds=seconds,
            notes=(f"chosen among {len(pool)} candidates",),
        )


def _check_sizes(cases: Sequence[Case], pool: Pool) -> None:
    for observation in (o for case in cases for o in case.observations):
        count, where = observation.num_examples, f"round {observation.round}, client {observation.client}"
        if count is None:
            raise ValueError(f"{where}: the client reported no number of examples; leave this round out with --rounds")
        if count >= len(pool):
            raise ValueError(
                f"{where}: {count} examples are behind the update, so that all of the {len(pool)} candidates would be named as "
                f"training examples; give more than {count} candidates, most of which are no training examples"
            )


def _draw_scores(cases: Sequence[Case], pool: Pool, rng: Generator) -> list[list[Tensor]]:
    """Return random scores of the candidates, in the form of `Membership._score`."""
    drawn = [(seed_generator(rng, case, "choice"), len(_split_rounds(case))) for case in cases]
    return [[torch.rand(len(pool), generator=generator) for _ in range(count)] for generator, count in drawn]


def membership(*, candidates: FilePath = "") -> Membership:
    """Name the candidates that are most likely among the training examples, by linear regression of updates on their gradients.

    An attacker who has candidates, such as public photographs or a leaked part of the data, needs no reconstruction: an update is
    nearly a weighted sum of the gradients of its examples at the weights that were sent, and with many more weights than
    candidates, the coefficients of the sum can be estimated. Other examples, local steps and defenses act as noise. Rounds in
    which clients train on the same examples for whole epochs are combined. What a defense with error feedback keeps for
    later rounds is simulated.

    candidates: archive (.npz) with `images` (P, H, W[, C]), uint8 or numbers in [0, 1], and `labels` (P,), at most 20,000. Only
                these images can be named, and most should be no training examples, since such images tell how much an update
                resembles the gradient of any image.

    Membership inference from recorded updates: Melis et al. 2019, "Exploiting unintended feature leakage in collaborative
    learning"; Li et al. 2023, "Effective passive membership inference attacks in federated learning", use the cosine.
    """
    return Membership(candidates=candidates)


def _split_rounds(case: Case) -> list[list[Observation]]:
    """Return the observations of a case in groups that use the same examples: all rounds, or one round each.

    All rounds are one group if they have the same number of examples and the client trains on all of its examples in each of
    them: for whole epochs, or for a number of steps whose batches together have more places than the first update has distinct
    examples, so that examples were repeated. Rounds of secure sums are grouped only if all of them are sums of the same clients.
    """
    first, training = case.observations[0], case.observations[0].training
    same = {(o.num_examples, o.cohort if o.client == SUM_CLIENT else ()) for o in case.observations}
    uses_all = training.epochs is not None or (first.num_examples or 0) < (training.steps or 1) * training.step_size
    if uses_all and len(same) == 1:
        return [list(case.observations)]
    return [[observation] for observation in case.observations]

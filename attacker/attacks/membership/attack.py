"""Attack `membership`: names which images of a pool are among a client's training examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Generator, Tensor
from torch.func import vmap

from attacker.attacks.arguments import FilePath
from attacker.attacks.base import Case, Memory, Need, Progress, build_reconstruction, seed_generator
from attacker.attacks.membership.pool import Pool, read_pool
from attacker.attacks.membership.regression import Coefficients, Regression, combine, estimate_probabilities
from attacker.attacks.simulation.client import build_gradient, convert_to_gradient, find_omitted, find_schedule
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation

MAX_VALUES = 20_000
"""Largest number of values of a gradient that are compared. Of more, as many are drawn at random."""
CHUNK = 50
"""Number of candidates whose gradients are computed at once."""


@dataclass(kw_only=True)
class Membership:
    """An attack that explains a client's updates as sums of the candidates' gradients, and names those with the largest share.

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
        """Return one reconstruction for each of `cases`: the named candidates, unchanged, with their labels.

        As many are named as there are examples behind the update, or behind each update if rounds do not repeat the examples.
        Raises ValueError if no pool was given, or if it does not suit the recorded data.
        """
        if not self.candidates:
            raise ValueError(
                "membership chooses among candidates: name an archive with images and labels, --set candidates=FILE.npz"
            )
        pool = read_pool(Path(self.candidates), cases[0].observations[0].data)
        started = perf_counter()
        scores = self._score(cases, pool, rng, progress) if self.sees_gradient else _draw_scores(cases, pool, rng)
        seconds = (perf_counter() - started) / len(cases)
        return [self._name(case, pool, own, rng, seconds) for case, own in zip(cases, scores, strict=True)]

    def fit(
        self, cases: Sequence[Case], pool: Pool, rng: Generator, progress: Progress | None = None
    ) -> dict[tuple[int, str], Coefficients]:
        """Return the coefficients of the candidates in every update of `cases`, by round and client."""
        found = {}
        rounds = _group_by_model([observation for case in cases for observation in case.observations])
        for number, group in enumerate(rounds, start=1):
            for chosen, same in _group_by_values(group, rng):
                regression = Regression(_compute_gradients(group[0], pool, chosen, self.device))
                for observation in same:
                    fitted = regression.fit(_flatten(_read_gradient(observation), chosen).to(self.device))
                    found[observation.round, observation.client] = Coefficients(fitted.values.cpu(), fitted.variances.cpu())
            if progress is not None:
                progress(number, len(rounds), f"candidates compared with the updates of round {group[0].round}")
        return found

    def _score(self, cases: Sequence[Case], pool: Pool, rng: Generator, progress: Progress | None) -> list[list[Tensor]]:
        """Return for each case the scores (P,) of the candidates, once per group of rounds with the same examples."""
        found = self.fit(cases, pool, rng, progress)
        return [[combine([found[o.round, o.client] for o in group]) for group in _split_rounds(case)] for case in cases]

    def _name(self, case: Case, pool: Pool, scores: Sequence[Tensor], rng: Generator, seconds: float) -> Reconstruction:
        """Return the candidates with the highest scores. scores: (P,) for each group of rounds with the same examples."""
        chosen, sure = [], []
        for group, own in zip(_split_rounds(case), scores, strict=True):
            best = own.argsort(descending=True)[: group[0].num_examples]
            chosen.append(best)
            chance = torch.full((len(best),), len(best) / len(pool))  # if all examples are candidates
            sure.append(estimate_probabilities(own, pool.y)[best] if self.sees_gradient else chance)
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
            evaluations=len(case.observations) * self.sees_gradient,
            seconds=seconds,
            notes=(f"chosen among {len(pool)} candidates",),
        )


def _draw_scores(cases: Sequence[Case], pool: Pool, rng: Generator) -> list[list[Tensor]]:
    """Return random scores of the candidates, in the form of `Membership._score`."""
    drawn = [(seed_generator(rng, case, "choice"), len(_split_rounds(case))) for case in cases]
    return [[torch.rand(len(pool), generator=own) for _ in range(count)] for own, count in drawn]


def membership(*, candidates: FilePath = "") -> Membership:
    """Name the candidates that are most likely among the training examples, by linear regression of updates on their gradients.

    An attacker who has candidates, such as public photographs or a leaked part of the data, needs no reconstruction: an update is
    nearly a weighted sum of the gradients of its examples at the weights that were sent, and with many more weights than
    candidates, the coefficients of the sum can be estimated. Other examples, local steps and defenses act as noise. Rounds in
    which clients train on the same examples for whole epochs are combined.

    candidates: archive (.npz) with `images` (P, H, W[, C]), uint8 or numbers in [0, 1], and `labels` (P,), at most 5,000. Only
                these can be named, so most of them should be no training examples: they tell how much an update resembles the
                gradient of any image.

    Membership inference from recorded updates: Melis et al. 2019, "Exploiting unintended feature leakage in collaborative
    learning"; Li et al. 2023, "Effective passive membership inference attacks in federated learning", use the cosine.
    """
    return Membership(candidates=candidates)


def _split_rounds(case: Case) -> list[list[Observation]]:
    """Return the observations of a case in groups that use the same examples: all rounds of whole epochs, or one round each.

    Rounds of secure sums are grouped only if all of them are sums of the same clients.
    """
    first = case.observations[0]
    same = {(o.num_examples, o.cohort if o.client == SUM_CLIENT else ()) for o in case.observations}
    if first.training.epochs is not None and len(same) == 1:
        return [list(case.observations)]
    return [[observation] for observation in case.observations]


def _group_by_model(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Return the observations in groups of one round and equal weights, in the order of the rounds."""
    groups: list[list[Observation]] = []
    for observation in sorted(observations, key=lambda o: (o.round, o.client)):
        own = next((group for group in groups if _have_same_model(group[0], observation)), None)
        if own is None:
            groups.append([observation])
        else:
            own.append(observation)
    return groups


def _have_same_model(one: Observation, other: Observation) -> bool:
    if one.round != other.round:
        return False
    return all(torch.equal(one.weights[name], w) for name, w in other.weights.items()) and all(
        torch.equal(one.buffers[name], w) for name, w in other.buffers.items()
    )


def _group_by_values(
    observations: Sequence[Observation], rng: Generator
) -> Iterator[tuple[Mapping[str, Tensor], list[Observation]]]:
    """Yield pairs of the compared values and the observations for which they are the same.

    The values are a dict from the name of a parameter to indices into the flattened tensor. Values that were not sent are 0 in
    the update, and are left out, as are parameters that the defense hides or that clients do not train.
    """
    found: list[tuple[Mapping[str, Tensor], list[Observation]]] = []
    for observation in observations:
        chosen = _choose_values(observation, rng)
        for other, group in found:
            if all(torch.equal(other[name], rows) for name, rows in chosen.items()):
                group.append(observation)
                break
        else:
            found.append((chosen, [observation]))
    yield from found


def _choose_values(observation: Observation, rng: Generator) -> dict[str, Tensor]:
    """Return at most `MAX_VALUES` of the values that were sent, as indices by name; the same for all clients that send all."""
    omitted = find_omitted(observation, models.build(observation.model, observation.data))
    update = {name: u for name, u in observation.update.items() if name not in omitted}
    sent = torch.cat([u.flatten() != 0 for u in update.values()])
    usable = sent.nonzero()[:, 0] if sent.float().mean() < 0.5 else torch.arange(len(sent))
    if len(usable) > MAX_VALUES:
        drawn = torch.Generator().manual_seed(rng.initial_seed() * 1_000_003 + observation.round & 2**62 - 1)
        usable = usable[torch.randperm(len(usable), generator=drawn)[:MAX_VALUES].sort().values]
    chosen, start = {}, 0
    for name, u in update.items():
        chosen[name] = usable[(usable >= start) & (usable < start + u.numel())] - start
        start += u.numel()
    return chosen


def _read_gradient(observation: Observation) -> Mapping[str, Tensor]:
    """Return the gradient that explains an observation's update as one step on one large batch."""
    return convert_to_gradient(observation.update, observation.weights, observation.training, find_schedule(observation)[1])


def _flatten(gradient: Mapping[str, Tensor], chosen: Mapping[str, Tensor], batch_dims: int = 0) -> Tensor:
    """Return the chosen values of a gradient as one vector, or with batch_dims=1 of each of several gradients as a row."""
    return torch.cat(
        [gradient[name].flatten(batch_dims)[..., rows.to(gradient[name].device)] for name, rows in chosen.items()], -1
    )


def _compute_gradients(observation: Observation, pool: Pool, chosen: Mapping[str, Tensor], device: str) -> Tensor:
    """Return the chosen values of the gradients of all candidates at the weights sent, (P, values).

    Batch norm uses the statistics that the client was sent, since those of its batches are unknown.
    """
    model = models.build(observation.model, observation.data).eval().to(device)
    compute = vmap(build_gradient(model, observation.data, observation.training.loss), in_dims=(None, 0, 0, None))
    weights = {name: w.to(device) for name, w in observation.weights.items()}
    buffers = {name: b.to(device) for name, b in (dict(model.named_buffers()) | dict(observation.buffers)).items()}
    rows = []
    for x, y in zip(pool.x.split(CHUNK), pool.y.split(CHUNK), strict=True):  # type: ignore[no-untyped-call]
        with torch.no_grad():
            rows.append(_flatten(compute(weights, x[:, None].to(device), y[:, None].to(device), buffers), chosen, 1))
    return torch.cat(rows)

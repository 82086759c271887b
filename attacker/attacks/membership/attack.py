"""Attack `membership`: names which images of a pool, the candidates, are among a client's training examples.

A defense with error feedback keeps the part of an update that it does not send, and adds it to later updates, which therefore
contain values of earlier rounds. Updates behind it are regressed on simulated updates of the candidates (`fit_residuals`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter

import torch
from torch import Generator, Tensor
from torch.func import vmap

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.arguments import FilePath
from attacker.attacks.base import Memory, Progress
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.membership.confidence import estimate_membership
from attacker.attacks.membership.pool import Pool, read_pool
from attacker.attacks.membership.regression import Coefficients, Regression, combine, join_blocks
from attacker.attacks.membership.values import Chosen, choose_values, compute_gradients, flatten, group_by_model, group_by_values
from attacker.attacks.needs import Need
from attacker.attacks.simulation.client import build_channel, compute_total_step, convert_to_gradient, find_schedule
from attacker.reconstruction import Reconstruction
from defenses.channel import Channel
from fedsim import models
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation

UNCLIPPED_FACTOR = 1e-9
"""Factor on simulated updates, so that a defense that clips leaves them unchanged and the simulation is linear."""


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


def keeps_values(case: Case) -> bool:
    """Return whether the defense sends some coordinates of an update, which are known, and keeps the others for later rounds."""
    first = case.observations[0]
    channel = build_channel(first, models.build_layout(first.model, first.data))
    nothing = {name: torch.zeros_like(u) for name, u in first.update.items()}
    return bool(first.sent) and bool(channel.follow_round(nothing, {}, channel.learn(first.update))[1])


def fit_residuals(case: Case, pool: Pool, rng: Generator, device: str) -> Iterator[tuple[Observation, Coefficients]]:
    """Yield the observations of a case in order, each with the coefficients of the candidates in its update.

    The value that a client sends of a coordinate is the sum of the coordinate's updates in all rounds since it was last sent,
    each computed at the weights of its round. The attacker simulates this sum for each candidate alone. Since it is known which
    coordinates were sent, the simulation is linear: what a client sends is the sum of what it would send for each example alone.
    Rounds before the first of the case are assumed to have left nothing.
    """
    first = case.observations[0]
    channel = build_channel(first, models.build_layout(first.model, first.data))
    chosen = choose_values(case.observations, rng)
    state: Mapping[str, Tensor] = {}
    for observation in case.observations:
        gradients = compute_gradients(observation, pool, chosen, device)
        decay = observation.training.decay * flatten(observation.weights, chosen).to(gradients)
        step = compute_total_step(observation.training, find_schedule(observation)[1])
        updates = -step * torch.cat([gradients, decay[None]])
        expected, state = _simulate(channel, observation, chosen, updates, state)
        sent = flatten(observation.sent, chosen).to(expected.device)
        seen = flatten(observation.update, chosen).to(expected)
        yield observation, Regression(expected[:-1, sent]).fit((seen - expected[-1])[sent])


def _simulate(
    channel: Channel, observation: Observation, chosen: Chosen, updates: Tensor, state: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return what the defense makes of each of several updates in a round, (P, M), and its state for each after the round.

    updates: the chosen values of the updates before the defense, (P, M). state: the state before the round, empty at first.
    """
    layout = {name: (len(rows), *[1] * (observation.weights[name].ndim - 1)) for name, rows in chosen.items()}
    parts = torch.split(updates, [len(rows) for rows in chosen.values()], dim=1)
    each = {name: UNCLIPPED_FACTOR * part.reshape(-1, *layout[name]) for name, part in zip(chosen, parts, strict=True)}
    known = {
        key: _restrict(fact.to(updates.device), key, observation.weights, chosen)
        for key, fact in channel.learn(observation.update).items()
    }
    follow = vmap(channel.follow_round, in_dims=(0, 0 if state else None, None))
    expected, after = follow(each, dict(state), known)
    return torch.cat([t.flatten(1) for t in expected.values()], dim=1) / UNCLIPPED_FACTOR, after


def _restrict(fact: Tensor, key: str, weights: Mapping[str, Tensor], chosen: Chosen) -> Tensor:
    """Return a fact about a defense (`Channel.learn`), such as which coordinates were sent, for the chosen coordinates only.

    A fact with one entry per entry of a parameter has the parameter's shape, and a `key` that ends in the parameter's name. The
    result is then (M, 1, ..., 1), with as many axes as the parameter, since some defenses treat vectors in another way. Any other
    fact is returned unchanged.
    weights: all weights of the model. chosen: indices of the M chosen coordinates in each flattened parameter, by name.
    """
    name = next((name for name in sorted(chosen, key=len, reverse=True) if f"/{key}".endswith(f"/{name}")), None)
    if name is None or fact.shape != weights[name].shape:
        return fact
    rows = chosen[name].to(fact.device)
    return fact.reshape(-1)[rows].reshape(len(rows), *[1] * (fact.ndim - 1))

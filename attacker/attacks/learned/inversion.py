"""Attack `learning_to_invert`: a network trained on public images infers examples from an update (Wu et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Generator

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.arguments import FilePath
from attacker.attacks.base import Memory, Progress
from attacker.attacks.cases import Case
from attacker.attacks.learned.inversion_network import InversionTraining, train_inversion
from attacker.attacks.membership.pool import read_pool
from attacker.attacks.membership.values import group_by_model
from attacker.attacks.needs import Need
from attacker.attacks.nulls import build_prior_answer
from attacker.attacks.simulation.client import find_schedule
from attacker.reconstruction import Reconstruction
from fedsim.recording.observation import Observation

MAX_BATCH = 4
"""Largest number of examples: the loss in training tries all their orders."""
MAX_PUBLIC_IMAGES = 50_000
LEARNED_NEEDS = frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.IMAGES, Need.PUBLIC_IMAGES})


@dataclass(kw_only=True)
class LearningToInvert:
    """An attack that trains a network to map updates to examples, one for each set of weights that were sent.

    images: path of an archive of public images with labels, see `read_pool`. training: settings of the networks' training.
    sees_gradient: False gives the null, whose examples are the mean public image.
    """

    training: InversionTraining
    images: str = ""
    name: str = "learning_to_invert"
    sees_gradient: bool = True
    needs: frozenset[Need] = field(default=LEARNED_NEEDS)
    device: str = "cpu"

    def null(self) -> "LearningToInvert":
        return replace(self, sees_gradient=False)

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction for each of `cases`. Cases of one round with equal weights and buffers share a network.

        A network depends on the seed, the public images, the weights, the buffers and the declared settings, and not on the
        updates in the call. Raises ValueError if no images were given or they do not suit the recorded data, and for clients with
        more than MAX_BATCH examples, several local steps or another optimiser than SGD. Raises FileNotFoundError if the archive
        is missing.
        """
        if not self.images:
            raise ValueError(f"{self.name} trains on public images: name an archive with them, --set images=FILE.npz")
        pool = read_pool(Path(self.images), cases[0].observations[0].data, max_candidates=MAX_PUBLIC_IMAGES)
        if not self.sees_gradient:
            # of all images, the mean has the least mean squared error to the public ones
            return [build_prior_answer(case, attack=self.name, rng=rng, image=pool.x.mean(dim=0)) for case in cases]
        for case in cases:
            _refuse_unsuitable(case.observations[0])
        owners = {case.observations[0].key: case for case in cases}
        groups, reconstructions = group_by_model([case.observations[0] for case in cases]), []
        for done, group in enumerate(groups):
            if progress is not None:
                progress(done, len(groups), f"training on simulated clients of round {group[0].round}")
            started = perf_counter()
            trained = train_inversion(
                group[0], pool, self.training, torch.Generator().manual_seed(rng.initial_seed()), self.device
            )
            seconds = (perf_counter() - started) / len(group)
            for observation in group:
                x, y = trained.invert(observation.update)
                best = float(trained.losses.min())
                note = f"trained on {self.training.simulations} simulated clients; loss {best:.4g} on held-out ones"
                reconstructions.append(
                    build_reconstruction(
                        owners[observation.key], x, y, attack=self.name, rng=rng, route="learned inversion",
                        loss=trained.losses, iterations=self.training.epochs, seconds=seconds, notes=(note,),
                    )
                )  # fmt: skip
        return reconstructions


def _refuse_unsuitable(observation: Observation) -> None:
    sizes, steps = find_schedule(observation)
    examples = sum(sizes)
    if examples > MAX_BATCH:
        raise ValueError(
            f"the client trained on {examples} examples, and this attack works for at most {MAX_BATCH}; choose another attack"
        )
    if steps != 1 or observation.training.optimiser != "sgd":
        used = f"{steps} steps of {observation.training.optimiser}"
        raise ValueError(
            f"this attack simulates clients of one local step of sgd, and this one took {used}; choose another attack"
        )


def learning_to_invert(
    *, images: FilePath = "", simulations: int = 2048, epochs: int = 20, hidden: int = 1024, knows_defense: bool = True
) -> LearningToInvert:
    """Train a network on simulated clients with public images, and read the examples off its answer to the observed update.

    It is the generic adaptive attack of Wu et al. (2023, arXiv 2210.10880): any declared defense is simulated in training, with
    fresh randomness.

    images: NumPy archive (.npz) of public images and labels in the shape of the data, without the examples that are attacked.
    simulations: number of simulated clients, a tenth of which is held out to choose the best epoch. epochs: passes over the
    others. hidden: width of the network's two hidden layers. knows_defense: whether the declared defense is simulated.
    """
    settings = InversionTraining(simulations=simulations, epochs=epochs, hidden=hidden, knows_defense=knows_defense)
    return LearningToInvert(training=settings, images=images)

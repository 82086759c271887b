"""Cells: combinations of network, data, training, defense and attack on which confidence is calibrated and measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from support.contract import Options
from support.single_cases import LocalClient, make_client
from support.splits import Images, Part, load_images
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from attacker.attacks import ATTACKS, Attack, Case
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.measures import clean_examples
from attacker.scoring.metrics import is_recovered
from fedsim import data as datasets
from fedsim import models
from fedsim.recording import DataSpec, Training

NETWORKS_MODULE = "support.calibration.networks"
TABULAR_DATA_SETS = ("breast_cancer", "adult")
MAX_SKIPPED_EXAMPLES = 200
"""Limit of the number of examples of the validation part that are left out for a seed, as the smallest part has 257."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The settings of some cases of one kind. A case is what is attacked at once: one update, or several rounds of a client.

    attack, settings: name and arguments of the attack. null: whether its null is run instead, which ignores the gradient.
    network, arguments: name and arguments of the model; a name with a colon is code of `support.calibration.networks`.
    data:   an image data set by its name in `splits.DATA_FILES`, one of `TABULAR_DATA_SETS`, or "noise" for random pixels.
    batch, rate: batch size and learning rate of the client. steps: number of local steps, each on a batch of its own.
    epochs: if above 0, the client trains on these batches for this number of epochs, in reverse order in every second epoch.
    shuffled: whether each epoch has new batches of the same examples instead, in a random order. momentum: of the client.
    warm:   number of steps on other examples that the global weights have taken before the attacked training.
    rounds: if above 1, an even number of rounds of a case, each with one batch. There are half as many batches as
            rounds, so that each batch is used twice.
    defense: specification such as "clip(4)"; "" for none. cases: number of cases.
    two_classes: whether the loss is logistic, and labels of images are replaced by their parity. half: whether images are reduced
            to half their height and width.
    side:   height and width to which images are reduced if `half` is not set; 0 for no change. Random pixels and rows of tables
            keep their size and their labels.
    claimed: number of examples that the client reports; 0 for the true one.
    """

    attack: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    network: str = "lenet_cpl"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: str = "cifar10"
    batch: int = 1
    steps: int = 1
    epochs: int = 0
    shuffled: bool = False
    momentum: float = 0.0
    rate: float = 1.0
    warm: int = 0
    rounds: int = 1
    defense: str = ""
    null: bool = False
    two_classes: bool = False
    half: bool = False
    side: int = 0
    claimed: int = 0
    cases: int = 4

    @property
    def examples(self) -> int:
        """Number of different examples per case: `batch` times the number of different batches."""
        return self.batch * (self.rounds // 2 if self.rounds > 1 else self.steps)


@dataclass(frozen=True)
class JudgedReconstruction:
    """One reconstruction: its route (the method that gave it), and values for each example that was assigned to an original.

    cell: the attacked cell; its `data` names the data set that the examples are from, also if it replaces one that is missing.
    is_image: whether the examples are images; otherwise they are rows of a table.
    evidence:   dict from the name of a feature, from which confidence is computed, to its values.
    confidence: probability of recovery, as the attack states it; NaN if it is undecided. recovered: whether it was recovered.
    explained:  share of the observed gradient's squared norm that the reconstruction explains; 0 if the attack does not state it.
    """

    cell: Cell
    route: str
    is_image: bool
    evidence: Mapping[str, Sequence[float]]
    confidence: Sequence[float]
    explained: Sequence[float]
    recovered: Sequence[bool]


def attack_cell(cell: Cell, options: Options, *, part: Part, skip: int) -> Iterator[JudgedReconstruction]:
    """Attack the cases of a cell, made of examples of one part of the data, and yield the scored reconstruction of each case.

    skip: number of examples of the part to leave out first. If the attack raises ValueError, this is printed and nothing is
    yielded.
    """
    data = draw_examples(cell, options, part=part, skip=skip)
    made, truth = make_cases(cell, data, options)
    attack: Attack = ATTACKS[cell.attack](**cell.settings)
    if cell.null:
        attack = attack.null()
    try:
        answers = attack(made, rng=torch.Generator().manual_seed(options.seed))
    except ValueError as error:
        print(f"{cell}: {error}")
        return
    for case, x in zip(made, truth, strict=True):
        one = next(answer for answer in answers if answer.case == case.key)
        yield judge_reconstruction(cell, one, x, data)


def judge_reconstruction(cell: Cell, answer: Reconstruction, truth: Tensor, data: Images) -> JudgedReconstruction:
    """Score one reconstruction as `attacker.scoring` does: only its `len(truth)` best examples are compared.

    The best are those that the attack itself ranks first. With several rounds per case, the route is "joint over rounds", except
    for a null. truth: the original examples (N, *shape) of the case.
    """
    answer = keep_first(answer, len(truth))
    x, order = clean_examples(answer.x, data.data), assign_reconstructions(answer.x.nan_to_num().clamp(0, 1), truth)
    own = [(candidate, i) for i, candidate in enumerate(order) if candidate is not None]
    chosen = [candidate for candidate, _ in own]
    right = is_recovered(x[chosen], truth[[i for _, i in own]], data.data).tolist()
    route = "joint over rounds" if cell.rounds > 1 and not cell.null else answer.route
    evidence = {name: [values[c] for c in chosen] for name, values in answer.evidence.items()}
    explained = answer.explained if answer.explained is not None else torch.zeros(len(answer.x))
    confidence = answer.confidence[chosen].tolist()
    cell = replace(cell, data=data.name)
    return JudgedReconstruction(cell, route, data.data.is_image, evidence, confidence, explained[chosen].tolist(), right)


def draw_examples(cell: Cell, options: Options, *, part: Part, skip: int) -> Images:
    """Return the examples of all cases of a cell, after the first `skip` of one part.

    Images are resized and relabelled as the cell says; random pixels and rows of tables are not.
    """
    count = cell.cases * cell.examples
    if cell.data == "noise":
        return _draw_noise(count, options.seed + skip)
    if cell.data in TABULAR_DATA_SETS:
        return _load_rows(cell.data, options, count, part=part, skip=skip)
    images = load_images(options, cell.data, count, part=part, skip=skip)
    if cell.half or cell.side:
        x = avg_pool2d(images.x, 2) if cell.half else interpolate(images.x, size=(cell.side, cell.side), mode="area")
        images = replace(images, x=x, data=replace(images.data, shape=tuple(x.shape[1:])))
    return images.of_two_classes() if cell.two_classes else images


def _draw_noise(count: int, seed: int) -> Images:
    """Return `count` images (3, 16, 16) of random pixels, with random labels of ten classes."""
    rng, data = torch.Generator().manual_seed(seed), DataSpec(shape=(3, 16, 16), num_classes=10)
    return Images("noise", torch.rand(count, *data.shape, generator=rng), torch.randint(10, (count,), generator=rng), data)


def _load_rows(name: str, options: Options, count: int, *, part: Part, skip: int) -> Images:
    """Return `count` rows of one part of the table `name`, after the first `skip`; rows repeat if the part has too few.

    Of every four rows, two are in the tuning, one in the validation and one in the report part. Without a file of "adult" in
    --data, rows of "breast_cancer" are returned, and named so.
    """
    path = options.data / "adult" / "adult.csv.gz" if options.data else None
    if name == "adult" and (path is None or not path.exists()):
        name = "breast_cancer"
    loaded = datasets.load(f"csv:{path}" if name == "adult" else name)
    rows = np.arange(len(loaded.train))
    own = rows[np.isin(rows % 4, {"tuning": (0, 2), "validation": (1,), "report": (3,)}[part])]
    x, y = loaded.train[own[(np.arange(count) + skip) % len(own)]]
    return Images(name, x, torch.as_tensor(y), loaded.spec, part)


def make_cases(cell: Cell, data: Images, options: Options) -> tuple[list[Case], list[Tensor]]:
    """Return the cases of a cell, and the true examples (N, *shape) of each, without labels."""
    if ":" in cell.network:
        models.admit(cell.network)
    own = make_client(cell.network, data.data, seed=options.seed, arguments=cell.arguments, loss=_choose_loss(cell))
    own = replace(own, training=_make_training(cell), weights=_train_weights(cell, own, options))
    made, truth, rng = [], [], torch.Generator().manual_seed(options.seed)
    for i in range(cell.cases):
        at = slice(i * cell.examples, (i + 1) * cell.examples)
        batches = list(zip(data.x[at].split(cell.batch), data.y[at].split(cell.batch), strict=True))
        key = f"{cell.data}-{cell.attack}-{i}"
        case = (
            _make_rounds(cell, own, batches, key)
            if cell.rounds > 1
            else own.make_case(_list_passes(cell, batches, rng), key, cell.defense)
        )
        if cell.claimed:  # the client reports another number of examples
            case = Case(tuple(replace(observation, num_examples=cell.claimed) for observation in case.observations))
        made.append(case)
        truth.append(data.x[at])
    return made, truth


def _choose_loss(cell: Cell) -> str:
    return "logistic" if cell.two_classes else "cross_entropy"


def _make_training(cell: Cell) -> Training:
    several: dict[str, Any] = {"epochs": cell.epochs} if cell.epochs else {"steps": cell.steps}
    return Training(
        learning_rate=cell.rate,
        momentum=cell.momentum,
        batch_size=cell.batch,
        loss=_choose_loss(cell),
        **several,  # type: ignore[arg-type]
    )


def _list_passes(cell: Cell, batches: Sequence[tuple[Tensor, Tensor]], rng: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    if cell.shuffled:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        orders = [torch.randperm(len(x), generator=rng) for _ in range(max(1, cell.epochs))]
        return [(x[rows], y[rows]) for order in orders for rows in order.split(cell.batch)]
    return [pair for epoch in range(max(1, cell.epochs)) for pair in (batches if epoch % 2 == 0 else batches[::-1])]


def _train_weights(cell: Cell, own: LocalClient, options: Options) -> Mapping[str, Tensor]:
    """Return the client's weights after `cell.warm` steps on examples of the validation part."""
    if not cell.warm:
        return own.weights
    rng = torch.Generator().manual_seed(options.seed)
    skip = options.seed % MAX_SKIPPED_EXAMPLES
    others = draw_examples(replace(cell, cases=16, batch=1, steps=1), options, part="validation", skip=skip)
    rows = [torch.randint(len(others), (8,), generator=rng).tolist() for _ in range(cell.warm)]
    batches = [(others.x[own_rows], others.y[own_rows]) for own_rows in rows]
    training = Training(learning_rate=0.02, batch_size=8, steps=cell.warm)
    return own.add(replace(own, training=training).compute_update(batches)).weights


def _make_rounds(cell: Cell, own: LocalClient, batches: Sequence[tuple[Tensor, Tensor]], key: str) -> Case:
    """Return the case of a client that passes twice over its batches, the second time in reverse order, with one step per round.

    After each round, half of the client's update is added to the global weights.
    """
    observations, at = [], own
    for number, batch in enumerate([*batches, *batches[::-1]], start=1):
        (seen,) = at.make_case([batch], key, cell.defense).observations
        observations.append(replace(seen, round=number))
        at = replace(at, weights={name: w + 0.5 * seen.update[name] for name, w in at.weights.items()})
    return Case(tuple(observations))

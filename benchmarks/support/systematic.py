"""Rows of the table of systematic.py: what several attacks leave of a batch behind each defense, and what the defense costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor

from attacker.attacks import AttackSpec, Case
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.metrics import mse
from defenses import DefenseSpec
from fedsim import models
from fedsim.recording import Training
from fedsim.training.local import evaluate, train
from support.contract import Options, ResultRow, measure_cpu
from support.rounds.federation import RecordedNetwork, make_update, observe
from support.single_cases import make_client
from support.splits import Images, load_images

BATCHES = (2, 4, 8)
IMAGES = 8
"""Number of attacked images in each row, in batches of its size."""
RATE = 1.0
"""Learning rate of the attacked step, so that the update is the gradient and defenses act on it as in the paper."""
LOCAL_RATE = 0.01
"""Learning rate of the attacked client if it takes several steps."""
TRAINING_IMAGES, HELD_OUT = 1200, 400
TRAINING_STEPS, TRAINING_RATE = 2000, 0.03
"""Steps and learning rate of the training that shows the cost of a defense, on batches of the row's size."""
DEFENSES = (
    "none",
    *(f"clip({norm})" for norm in (2, 4, 8)),
    *(f"gradient_dropout({share})" for share in (0.3, 0.5, 0.7, 0.9)),
    *(f"gaussian({std})" for std in (0.001, 0.01, 0.1)),
    *(f"prune({share})" for share in (0.3, 0.5, 0.7, 0.9, 0.99)),
    *(f"{steps} local steps" for steps in (3, 5)),
)
"""Columns of the paper's table 4, without a defense, and with local aggregation. Clipping and noise act on the batch gradient."""
PUBLISHED = {
    "inverting_gradients": (
        (0.19, 0.23, 0.25, 0.19, 0.20, 0.20, 0.21, 0.30, 0.32, 0.35, 0.19, 0.20, 0.24, 0.28, 0.27),
        (0.21, 0.22, 0.23, 0.21, 0.21, 0.21, 0.22, 0.31, 0.31, 0.31, 0.19, 0.18, 0.23, 0.29, 0.28),
        (0.22, 0.21, 0.21, 0.22, 0.22, 0.22, 0.23, 0.30, 0.31, 0.31, 0.20, 0.21, 0.25, 0.30, 0.30),
    ),
    "strongest": (
        (0.17, 0.17, 0.19, 0.16, 0.16, 0.18, 0.18, 0.17, 0.22, 0.27, 0.16, 0.17, 0.20, 0.26, 0.27),
        (0.16, 0.16, 0.16, 0.16, 0.16, 0.19, 0.19, 0.19, 0.19, 0.22, 0.16, 0.16, 0.21, 0.27, 0.27),
        (0.16, 0.16, 0.16, 0.16, 0.17, 0.19, 0.19, 0.16, 0.16, 0.24, 0.15, 0.16, 0.20, 0.29, 0.29),
    ),
    "loss": (
        (0.390, 0.481, 0.377, 0.466, 0.363, 0.564, 0.864, 0.445, 0.769, 1.889, 0.585, 0.430, 0.621, 0.763, 1.020),
        (0.408, 0.353, 0.329, 0.552, 0.316, 0.275, 0.460, 0.527, 0.551, 1.764, 0.253, 0.389, 0.561, 0.505, 0.935),
        (0.377, 0.201, 0.357, 0.259, 0.178, 0.231, 0.461, 0.365, 0.343, 1.540, 0.256, 0.161, 0.257, 0.344, 0.725),
    ),
}
"""RMSE of Inverting Gradients and of the strongest attack (table 4), and final training loss (table 5), of the paper, for three
batch sizes, which the text at hand lost, in ascending order, and the defenses from clip(2) to prune(0.99)."""


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """One attack of the comparison.

    network, network_arguments: name and arguments of the model that it attacks. arguments: of the attack. title: name of its
    column, if it is not `name`.
    """

    name: str
    network: str
    title: str = ""
    network_arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


CONVOLUTIONS = {"network": "lenet_cpl", "network_arguments": {"activation": "tanh"}}
LINEAR = {"network": "mlp", "network_arguments": {"hidden": [512]}}
ATTACKERS = (
    Attacker(name="inverting_gradients", **CONVOLUTIONS, arguments={"steps": 1200}),
    Attacker(
        name="inverting_gradients",
        title="with_features",
        **CONVOLUTIONS,
        arguments={"steps": 1200, "feature_matching": 0.1},
    ),
    Attacker(name="cocktail_party", **LINEAR),
    Attacker(name="robbing_the_fed", network="imprint", network_arguments={"bins": 512}),
    Attacker(
        name="cpl",
        **CONVOLUTIONS,
        arguments={"optimiser": "wolfe", "decoder": "smooth", "init": "smooth", "relative": True, "tv": 1e-6, "steps": 50},
    ),
    Attacker(name="exact", **LINEAR, arguments={"fallback": "none"}),
)
"""The first four are those of the comparison in the paper, whose own is here `with_features`, without its prior network and with
features from the network's own last layer."""
PAPERS = ("inverting_gradients", "with_features", "cocktail_party", "robbing_the_fed")


def make_systematic_row(asked: Options, defense: str, batch: int) -> ResultRow:
    """Return a row with the RMSE of each attack behind `defense`, of the strongest attack, of the best null, and of the paper.

    defense: one of `DEFENSES`. batch: number of images in each attacked batch.
    """
    images = load_images(asked, "cifar10", IMAGES)
    with measure_cpu() as clock:
        errors = {
            attacker.title or attacker.name: _measure_error(
                attacker, _make_cases(attacker, images, defense, batch), images, batch, asked
            )
            for attacker in (ATTACKERS[:1] if asked.quick else ATTACKERS)
        }
    loss, accuracy = _train_with_defense(asked, defense, batch)
    strongest = min(errors, key=lambda name: errors[name])
    return {
        "defense": defense,
        "batch": batch,
        "images": len(images),
        **errors,
        "strongest": strongest,
        "rmse": errors[strongest],
        "rmse_papers": min(errors[name] for name in PAPERS if name in errors),
        "null": _measure_null(asked, batch),
        "published": _find_published("strongest", defense, batch),
        "published_inverting_gradients": _find_published("inverting_gradients", defense, batch),
        "loss": loss,
        "published_loss": _find_published("loss", defense, batch),
        "accuracy": accuracy,
        "cpu_seconds": clock.seconds,
        "part": images.part,
    }


def _make_cases(attacker: Attacker, images: Images, defense: str, batch: int) -> list[Case]:
    """Return one case per batch of images: a single update of a client of its own."""
    steps = int(defense.split()[0]) if defense.endswith("local steps") else 1
    client = make_client(attacker.network, images.data, arguments=attacker.network_arguments)
    training = Training(learning_rate=RATE if steps == 1 else LOCAL_RATE, batch_size=batch, epochs=steps)
    network = RecordedNetwork(client.model, images.data, training, client.weights)
    spec = "" if defense == "none" or steps > 1 else defense
    cases = []
    for i, (x, y) in enumerate(zip(images.x.split(batch), images.y.split(batch), strict=True)):
        update = make_update(network, network.weights, [(x, y)] * steps)
        cases.append(Case((observe(network, network.weights, update, i + 1, f"c{i}", (), batch, spec),)))
    return cases


@cache
def _measure_null(asked: Options, batch: int) -> float:
    """Return the smallest error of the attacks without the update, which no defense changes."""
    images = load_images(asked, "cifar10", IMAGES)
    return min(
        _measure_error(attacker, _make_cases(attacker, images, "none", batch), images, batch, asked, null=True)
        for attacker in (ATTACKERS[:1] if asked.quick else ATTACKERS)
    )


def _measure_error(
    attacker: Attacker, cases: list[Case], images: Images, batch: int, asked: Options, *, null: bool = False
) -> float:
    """Return the mean over images of the root mean squared error; an image without a reconstruction counts as grey.

    If the attack fails on one of the cases, it counts as failed on all.
    """
    attack = AttackSpec(name=attacker.name, arguments=attacker.arguments, null=null).build(device=asked.device)
    try:
        found = {one.case: one for one in attack(cases, rng=Generator().manual_seed(asked.seed))}
    except ValueError:  # the attack applies to none of them
        found = {}
    pairs = zip(cases, images.x.split(batch), strict=True)
    return float(torch.cat([_measure_rmse(found.get(case.key), x) for case, x in pairs]).mean())


def _measure_rmse(found: Reconstruction | None, x: Tensor) -> Tensor:
    """Return the root mean squared error of each of the images x (N, *shape), (N,)."""
    guess = torch.full_like(x, 0.5)
    if found is not None and len(found.x):
        each = keep_first(found, len(x)).x.nan_to_num()
        for i, row in enumerate(assign_reconstructions(each, x)):
            guess[i] = guess[i] if row is None else each[row].clamp(0, 1)
    return mse(guess, x).sqrt()


def _train_with_defense(asked: Options, defense: str, batch: int) -> tuple[float, float]:
    """Return the mean training loss of the last tenth of the steps, and the accuracy on images held out, of a training.

    In each step, a client sends the gradient of a batch, or its local steps, through the defense.
    """
    steps = int(defense.split()[0]) if defense.endswith("local steps") else 1
    images = load_images(asked, "cifar10", TRAINING_IMAGES + HELD_OUT, skip=IMAGES)
    own, held_out = images.take_first(TRAINING_IMAGES), images.of(range(TRAINING_IMAGES, len(images)))
    client = make_client(CONVOLUTIONS["network"], images.data, arguments=CONVOLUTIONS["network_arguments"])
    training = Training(learning_rate=RATE if steps == 1 else TRAINING_RATE, batch_size=batch, epochs=steps)
    model, weights = models.build(client.model, images.data), dict(client.weights)
    built = (DefenseSpec.parse(defense, learning_rate=RATE) if steps == 1 and defense != "none" else DefenseSpec()).build()
    rng, state, losses = Generator().manual_seed(asked.seed), built.init(weights), []
    for _ in range(TRAINING_STEPS // (20 if asked.quick else 1)):
        rows = torch.randint(len(own), (batch,), generator=rng)
        trained = train(model, weights, [(own.x[rows], own.y[rows])] * steps, training, images.data)
        sent, state = built.apply(trained.update, state, rng)
        scale = TRAINING_RATE if steps == 1 else 1.0
        weights = {name: w + scale * sent[name] for name, w in weights.items()}
        losses.append(trained.loss)
    final = evaluate(model, weights, held_out.x, held_out.y, images.data, replace(training, epochs=1))
    return float(torch.tensor(losses[-max(1, len(losses) // 10) :]).mean()), final["accuracy"]


def _find_published(what: str, defense: str, batch: int) -> float | None:
    """Return the paper's number for a defense and the batch size of the same rank; None if it has none."""
    columns = DEFENSES[1:-2]
    return PUBLISHED[what][BATCHES.index(batch)][columns.index(defense)] if defense in columns else None

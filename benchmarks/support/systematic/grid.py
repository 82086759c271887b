"""Rows of the table of systematic.py: what several attacks leave of a batch behind each defense, and what the defense costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from support.attacked import PUBLISHED_SEARCH, run_attack
from support.contract import Options, ResultRow, measure_cpu
from support.rog.outcomes import load_perceptual
from support.single_cases import make_client
from support.splits import Images, load_images
from support.systematic.features import LOCAL_RATE, RATE, count_local_steps, get_defense, make_cases
from support.systematic.paper import DEFENSES, find_published
from torch import Generator, Tensor

from attacker.attacks import AttackSpec, Case
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.metrics import mse
from defenses import DefenseSpec
from fedsim import models
from fedsim.recording import Training
from fedsim.training.local import evaluate, train

BATCHES = (2, 4, 8)
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "none": ("none",),
    "clip": DEFENSES[:3],
    "dropout": DEFENSES[3:7],
    "noise": DEFENSES[7:10],
    "prune": DEFENSES[10:],
    "local": ("3 local steps", "5 local steps"),
}
SMALL = frozenset(
    {"none", "clip(4)", "gradient_dropout(0.9)", "gaussian(0.01)", "gaussian(0.1)", "prune(0.9)", "prune(0.99)", "3 local steps"}
)
"""Defenses that are measured without --full."""
TRAINING_RATE, TRAINING_IMAGES, HELD_OUT = 0.03, 1200, 400
CONVOLUTIONS = {"network": "lenet_cpl", "network_arguments": {"activation": "tanh"}}
WIDE = {
    "network": "wide_head",
    "network_arguments": {"base": "lenet_cpl", "activation": "tanh", "features": 128, "neurons": 4096},
}
LINEAR = {"network": "mlp", "network_arguments": {"hidden": [512]}}


@dataclass(frozen=True, kw_only=True)
class GridScale:
    """The size of the work.

    images: number of images attacked in each row, in batches of the row's size. adam, network, wolfe: iterations of searches in
    pixels by Adam, of searches for a network's weights, and of L-BFGS. training: steps of the training that shows the cost of a
    defense.
    """

    images: int
    adam: int
    network: int
    wolfe: int
    training: int


def choose_scale(options: Options) -> GridScale:
    """Return the size of the work for --quick, for --full, and for neither."""
    if options.quick:
        return GridScale(images=2, adam=5, network=3, wolfe=1, training=20)
    if "full" in options.flags:
        return GridScale(images=48, adam=1000, network=400, wolfe=30, training=2000)
    return GridScale(images=16, adam=1000, network=100, wolfe=30, training=2000)


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """One attack of the comparison.

    name: of the attack. title: of its column. network, network_arguments: name and arguments of the model that it attacks.
    arguments: of the attack. papers: whether it is one of the four that the paper compares.
    """

    name: str
    title: str
    network: str
    network_arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    papers: bool = False


def list_attackers(scale: GridScale) -> tuple[Attacker, ...]:
    """Return the attacks: first the four of the paper, then others."""
    wolfe = {"optimiser": "wolfe", "decoder": "smooth", "init": "smooth", "relative": True, "tv": 1e-6, "steps": scale.wolfe}
    search = {"steps": scale.adam, "tv": 3e-3, **PUBLISHED_SEARCH}
    names = ("feature_reconstruction", "inverting_gradients", "cocktail_party", "robbing_the_fed")
    ours, inverting, party, robbing = names
    return (
        Attacker(name=ours, title=ours, **WIDE, arguments={"steps": scale.network}, papers=True),
        Attacker(name=inverting, title=inverting, **CONVOLUTIONS, arguments=search, papers=True),
        Attacker(name=party, title=party, **LINEAR, papers=True),
        Attacker(name=robbing, title=robbing, network="imprint", network_arguments={"bins": 512}, papers=True),
        Attacker(name=ours, title="untrained_prior", **CONVOLUTIONS, arguments={"steps": scale.network, "matched": "head"}),
        Attacker(name="cpl", title="cpl", **CONVOLUTIONS, arguments=wolfe),
        Attacker(name="exact", title="exact", **LINEAR, arguments={"fallback": "none"}),
    )


def make_grid_row(options: Options, defense: str, batch: int) -> ResultRow:
    """Return a row with the RMSE of each attack behind `defense`, of the strongest attack, of the best null, and of the paper.

    defense: an entry of `FAMILIES`. batch: number of images in each attacked batch, one of `BATCHES`.
    """
    scale, rank = choose_scale(options), BATCHES.index(batch)
    images = load_images(options, "cifar10", scale.images)
    attackers = list_attackers(scale)
    with measure_cpu() as clock:
        answers = {attacker.title: _attack(options, attacker, images, defense, batch) for attacker in attackers}
    errors = {title: float(mse(x, images.x).sqrt().mean()) for title, x in answers.items()}
    loss, accuracy = _train_with_defense(options, defense, batch)
    strongest = min(errors, key=lambda title: errors[title])
    perceptual = load_perceptual(options, images.data.shape[1])
    return {
        "defense": defense,
        "batch": batch,
        "images": len(images),
        **errors,
        "strongest": strongest,
        "rmse": errors[strongest],
        "rmse_papers": min(errors[attacker.title] for attacker in attackers if attacker.papers),
        "null": _measure_null(options, batch),
        "published": find_published("strongest", defense, rank),
        "published_own": find_published("feature_reconstruction", defense, rank),
        "published_inverting": find_published("inverting_gradients", defense, rank),
        "lpips": None if perceptual is None else float(perceptual(answers["feature_reconstruction"], images.x).mean()),
        "lpips_inverting": None if perceptual is None else float(perceptual(answers["inverting_gradients"], images.x).mean()),
        "loss": loss,
        "published_loss": find_published("loss", defense, rank),
        "accuracy": accuracy,
        "cpu_seconds": clock.seconds,
        "part": images.part,
    }


@cache
def _measure_null(options: Options, batch: int) -> float:
    """Return the smallest RMSE of the attacks' nulls, which no defense changes."""
    scale = choose_scale(options)
    images = load_images(options, "cifar10", scale.images)
    answers = (_attack(options, attacker, images, "none", batch, null=True) for attacker in list_attackers(scale))
    return min(float(mse(x, images.x).sqrt().mean()) for x in answers)


def _attack(options: Options, attacker: Attacker, images: Images, defense: str, batch: int, *, null: bool = False) -> Tensor:
    """Return the images that an attack finds, each in the place of the image that it is assigned to; grey where it finds none.

    If the attack does not apply to one of the cases, all are grey.
    """
    cases = make_cases(attacker.network, attacker.network_arguments, images, defense, batch, seed=options.seed)
    attack = AttackSpec(name=attacker.name, arguments=attacker.arguments, null=null).build()
    try:
        answers = {answer.case: answer for answer in run_attack(attack, cases, options)[0]}
    except ValueError:  # the attack refuses a case, for example since the defense hides what it reads
        answers = {}
    return torch.cat([_assign(answers, case, x) for case, x in zip(cases, images.x.split(batch), strict=True)])


def _assign(answers: Mapping[str, Reconstruction], case: Case, x: Tensor) -> Tensor:
    """Return what was found for a case, in the order of its images x (N, *shape); grey where nothing was."""
    guess, own = torch.full_like(x, 0.5), answers.get(case.key)
    if own is not None and len(own.x):
        each = keep_first(own, len(x)).x.nan_to_num().clamp(0, 1)
        for i, row in enumerate(assign_reconstructions(each, x)):
            guess[i] = guess[i] if row is None else each[row]
    return guess


def _train_with_defense(options: Options, defense: str, batch: int) -> tuple[float, float]:
    """Return the mean training loss of the last tenth of the steps, and the accuracy on images held out, of a training.

    In each step, a client sends the gradient of a batch, or its local steps, through the defense.
    """
    steps = count_local_steps(defense)
    images = load_images(options, "cifar10", TRAINING_IMAGES + HELD_OUT, part="tuning")
    own, held_out = images.take_first(TRAINING_IMAGES), images.of(range(TRAINING_IMAGES, len(images)))
    client = make_client("lenet_cpl", images.data, arguments={"activation": "tanh"})
    training = Training(learning_rate=RATE if steps == 1 else LOCAL_RATE, batch_size=batch, epochs=steps)
    model, weights = models.build(client.model, images.data), dict(client.weights)
    spec = get_defense(defense)
    built = (DefenseSpec.parse(spec, learning_rate=RATE) if spec else DefenseSpec()).build()
    rng, state, losses = Generator().manual_seed(options.seed), built.init(weights), []
    for _ in range(choose_scale(options).training):
        rows = torch.randint(len(own), (batch,), generator=rng)
        trained = train(model, weights, [(own.x[rows], own.y[rows])] * steps, training, images.data)
        sent, state = built.apply(trained.update, state, rng)
        scale = TRAINING_RATE if steps == 1 else 1.0
        weights = {name: w + scale * sent[name] for name, w in weights.items()}
        losses.append(trained.loss)
    final = evaluate(model, weights, held_out.x, held_out.y, images.data, replace(training, epochs=1))
    return float(torch.tensor(losses[-max(1, len(losses) // 10) :]).mean()), final["accuracy"]

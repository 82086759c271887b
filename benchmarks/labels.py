"""Accuracy of the label rules, which infer the labels of a batch from its gradient before any search.

Overlap is the share of a batch's labels that a rule recovers, counting repetitions: the sum over classes c of min(true n_c,
inferred n_c), divided by the batch size. Half of the batches have many duplicates: their labels are drawn from at most half as
many classes as there are examples (but at least one), and at most half of all classes. The other batches have as few duplicates
as possible.
Models are untrained, or trained by 300 steps of Adam on other examples. The updates are single gradients of 1 to 64 examples, and
FedAvg updates of 2, 4 and 8 local steps on 4 examples each. Single gradients of 4, 8 and 16 examples are also read behind
defenses. Data are CIFAR-10 of --data, else MNIST or the embedded digits.

There is a column for each rule of `attacker.attacks.labels.rules`; `inferred` is the default of attacks. The rule `bias` requires
a last layer with a bias, and `rows` at most as many examples as classes; a cell is empty if a rule does not apply. `--quick` uses
fewer batches, sizes and models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch
from support.contract import Options, measure_cpu, parse_options, print_results
from support.single_cases import LocalClient
from support.splits import DATA_FILES, Images, load_images
from torch import Tensor, nn

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.labels.rules import LABEL_RULES, LabelRule
from attacker.attacks.simulation.client import build_network
from fedsim import models
from fedsim.recording import ModelSpec, Observation, Training

BATCH_SIZES, LOCAL_STEPS, EXAMPLES_PER_STEP = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8), 4
DEFENSES, DEFENDED_SIZES = ("top_k(0.05)", "rog_qsgd(3)", "rog_uniform(3)", "sign()", "clip(0.1)", "gaussian(0.001)"), (4, 8, 16)
LEARNING_RATE = 0.01
"""The clients' learning rate."""


@dataclass(frozen=True)
class Victim:
    """A model with its weights, and the examples of its clients, which were not used to train it.

    data: the examples. accuracy: of the model, on the first 500 of them. trained: whether it was trained for 300 steps.
    """

    name: str
    spec: ModelSpec
    data: Images
    weights: dict[str, Tensor]
    trained: bool
    accuracy: float


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    rows = []
    for victim in _make_victims(options):
        for size in (1, 4, 16) if options.quick else BATCH_SIZES:
            rows.append(_measure(victim, [size], options))
        for steps in (2,) if options.quick else LOCAL_STEPS[1:]:
            rows.append(_measure(victim, [EXAMPLES_PER_STEP] * steps, options))
        for defense in DEFENSES[:1] if options.quick else DEFENSES:
            rows += [_measure(victim, [size], options, defense) for size in DEFENDED_SIZES]
    print_results("labels", rows, _summarise(rows), options)


def _summarise(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return mean overlaps over models for updates of one step, by key of the summary; None if no row has one.

    defended: of the default rule on all models, batches and defenses. The others are without a defense.

    batch1, batch16, batch64: of the default rule `inferred` on untrained models, for batches of 1, 16 and 64 examples.
    trained16: of `inferred` on trained models, for batches of 16. trained16_RULE: the same for another rule, such as `bias`.
    """

    def average_overlap(trained: bool, size: int, rule: str = "inferred") -> float | None:
        plain = [row for row in rows if row["steps"] == 1 and not row["defense"]]
        chosen = [row[rule] for row in plain if row["trained"] == trained and row["batch"] == size and row[rule] is not None]
        return mean(chosen) if chosen else None

    keys = {"batch1": (False, 1), "batch16": (False, 16), "batch64": (False, 64), "trained16": (True, 16)}
    others = {f"trained16_{rule}": average_overlap(True, 16, rule) for rule in LABEL_RULES if rule != "inferred"}
    defended = mean(row["inferred"] for row in rows if row["defense"])
    return {key: average_overlap(*which) for key, which in keys.items()} | others | {"defended": defended}


def _make_victims(options: Options) -> list[Victim]:
    given = options.data is not None and (options.data / DATA_FILES["cifar10"]).exists()
    name, count = ("cifar10", 3000) if given else ("mnist", 700)
    train = load_images(options, name, count, part="tuning")
    test = load_images(options, name, count, skip=count if train.part == "embedded" else 0)
    names = ("mlp",) if options.quick else ("mlp", "lenet_dlg", "lenet_rog")
    return [victim for name in names for victim in _train_victim(name, train, test, options)]


def _train_victim(name: str, train: Images, test: Images, options: Options) -> list[Victim]:
    """Return one model twice: untrained, and after 300 steps of Adam on batches of 64 examples of `train`."""
    spec = ModelSpec(name=name)
    data = test.data
    model = models.build(spec, data, seed=options.seed)
    found, rng = [], np.random.default_rng(options.seed)
    for steps in (0, 300):
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(steps):
            rows = torch.from_numpy(rng.integers(len(train), size=64))
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(data.normalise(train.x[rows])), train.y[rows]).backward()
            optimiser.step()
        seen = test.take_first(500)
        with torch.no_grad():
            accuracy = float((model(data.normalise(seen.x)).argmax(dim=1) == seen.y).float().mean())
        weights = {key: p.detach().clone() for key, p in model.named_parameters()}
        found.append(Victim(name, spec, test, weights, steps > 0, accuracy))
    return found


def _measure(victim: Victim, sizes: Sequence[int], options: Options, defense: str = "") -> dict[str, Any]:
    batches = 4 if options.quick or sum(sizes) > 16 else 12
    rng = np.random.default_rng(options.seed + sum(sizes))
    drawn = [_draw_labels(victim, sum(sizes), duplicates=index % 2 == 1, rng=rng) for index in range(batches)]
    scores: dict[str, list[float]] = {rule: [] for rule in LABEL_RULES}
    seconds = dict.fromkeys(LABEL_RULES, 0.0)
    for index, labels in enumerate(drawn):
        observation = _observe_client(victim, labels, sizes, index, rng, defense)
        for name, rule in LABEL_RULES.items():
            with measure_cpu() as clock:
                recovered = _read(rule, observation, options.seed + index)
            if recovered is not None:
                scores[name].append(_measure_overlap(recovered, torch.from_numpy(labels)))
            seconds[name] += clock.seconds
    return {
        "data": victim.data.name,
        "model": victim.name,
        "trained": victim.trained,
        "accuracy": victim.accuracy,
        "defense": defense,
        "batch": sum(sizes),
        "steps": len(sizes),
        "batches": batches,
        **{name: mean(values) if values else None for name, values in scores.items()},
        "cpu_seconds": seconds["inferred"] / batches,
    }


def _draw_labels(victim: Victim, count: int, *, duplicates: bool, rng: np.random.Generator) -> np.ndarray:
    """Draw labels (count,) with as few duplicates as possible.

    duplicates: whether to draw them instead from at most count / 2 classes (at least one), and at most half of all classes.
    """
    classes = victim.data.data.num_classes
    if duplicates:
        few = rng.choice(classes, size=max(1, min(classes, count) // 2), replace=False)
        return rng.choice(few, size=count)
    return np.concatenate([rng.permutation(classes) for _ in range(-(-count // classes))])[:count]


def _observe_client(
    victim: Victim, labels: np.ndarray, sizes: Sequence[int], index: int, rng: np.random.Generator, defense: str = ""
) -> Observation:
    """Return what the server sees of a client that trains on examples of the victim's `data` with these labels.

    sizes: batch size of each local step. index: number of the client, which gives its name.
    """
    data = victim.data
    places = torch.tensor([rng.choice(np.flatnonzero(data.y.numpy() == label)) for label in rng.permutation(labels)])
    ends = np.cumsum(sizes)
    each = [places[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    parts = [(data.x[rows], data.y[rows]) for rows in each]
    training = Training(learning_rate=LEARNING_RATE, batch_size=sizes[0], steps=len(sizes))
    client = LocalClient(victim.spec, data.data, training, victim.weights)
    (observation,) = client.make_case(parts, f"c{index}", defense, noise_seed=index).observations
    return observation


def _read(rule: LabelRule, observation: Observation, seed: int) -> Tensor | None:
    """Return the labels (N,) that a rule infers, or None if the rule does not apply."""
    model = build_network(observation)
    seen = ObservedGradients([observation], model=model, device="cpu")
    try:
        return read_labels(rule, seen, 0, model, torch.Generator().manual_seed(seed))
    except ValueError:
        return None


def _measure_overlap(recovered: Tensor, true: Tensor) -> float:
    counts = [torch.bincount(labels, minlength=int(max(true.max(), recovered.max())) + 1) for labels in (recovered, true)]
    return float(torch.minimum(*counts).sum()) / len(true)


if __name__ == "__main__":
    main()

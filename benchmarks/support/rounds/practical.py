"""Table on what a recording of Flower's PyTorch quickstart, with the settings of its template, gives away over up to 100 rounds.

Ten clients hold 128 images each and train the template's network with batches of 32, momentum 0.9 and a learning rate of 0.1
for one local epoch a round. The attacker has candidates, and names those that are among the examples of a client (`membership`).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from support.contract import Options, ResultRow, measure_cpu, show_rows
from support.foreign.quickstart import APP_FOLDER, DATA_SPEC
from support.pictures import open_picture
from support.rounds.federation import average
from support.single_cases import LocalClient, make_client
from support.splits import PARTS, Images, count_part, load_images
from torch import Generator, Tensor

from attacker.attacks import Case
from attacker.attacks.membership.attack import membership
from attacker.attacks.membership.confidence import estimate_membership
from attacker.attacks.membership.pool import Pool
from attacker.attacks.membership.regression import Coefficients, combine
from defenses import DefenseSpec
from defenses.privacy.accounting import compute_bound
from defenses.privacy.sensitivity import find_noise
from fedsim import models
from fedsim.recording import Observation, Training

BATCH = 32
LEARNING_RATE = 0.1
LARGER_CLIENTS = ((512, 4), (1024, 2), (4000, 2))
"""Pairs of a larger number of examples per client, and the number of clients. Clients of the template have 4,000 examples."""
OTHERS = 692
"""Number of candidates that are no client's."""
TARGETS = 180
"""Number of candidates that all clients but the first hold together; all examples of the first client are candidates."""
POOL = 100
"""Number of candidates in a test of re-identification, one of which is the client's."""
SPARSE_CLIENTS = 3
"""Number of clients that are attacked behind top_k and dgc, where each sends other coordinates, so that attacks take longer."""
ROUNDS = (1, 3, 10, 30, 100)
"""Numbers of recorded rounds after which the attack is measured."""
READ_ROUNDS = (*range(1, 11), *range(20, 101, 10))
"""The rounds that the attacker uses, to save time. If clients keep values for later rounds, the attacker uses all rounds."""
CERTAIN = 0.9
"""Confidence from which on an answer counts as certain."""
NOISES = (0.001, 0.01, 1.0)
"""Standard deviations of Gaussian noise per value of an update that was clipped to norm 1."""
SEEDS = 3
"""Number of seeds without a defense."""
DEFENSES = (
    "top_k(0.01)",
    "top_k(0.01, error_feedback=True)",
    "dgc(0.01)",
    "sign('mean')",
    "qsgd(4)",
    *(f"clip(1) | gaussian({noise})" for noise in NOISES),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of one federation.

    defense: as in an experiment, or "none". examples: number of examples of each client. rounds: number of recorded rounds.
    """

    seed: int = 0
    defense: str = "none"
    clients: int = 10
    examples: int = 128
    rounds: int = 100


@dataclass(frozen=True)
class RecordedFederation:
    """A recorded federation. client: any client before the first round. cases, own: one case per client, and its images.

    others: images of no client. accuracy: that of the final model on `others`.
    """

    client: LocalClient
    cases: Sequence[Case]
    own: Sequence[Images]
    others: Images
    accuracy: float


def make_practical_rows(options: Options) -> list[ResultRow]:
    """Return a row for each defense and number of rounds; without a defense, for each of `SEEDS` seeds from --seed on.

    The rows of `LARGER_CLIENTS`, without a defense, follow. The columns are those that rounds.py describes.
    With --quick, there are two rounds of three clients with few examples, without a defense.
    """
    chosen = [Setting(clients=3, examples=32, rounds=2)] if options.quick else list_settings(options.seed)
    return list(show_rows(row for setting in chosen for row in attack_federation(options, setting)))


def list_settings(seed: int) -> list[Setting]:
    """Return the settings of the table: three seeds without a defense, each defense, and clients with more examples.

    Clients with more examples take more local steps.
    """
    return [
        *(Setting(seed=seed + i) for i in range(SEEDS)),
        *(Setting(seed=seed, defense=defense) for defense in DEFENSES),
        *(Setting(seed=seed, examples=examples, clients=clients, rounds=10) for examples, clients in LARGER_CLIENTS),
    ]


def record(options: Options, setting: Setting) -> RecordedFederation:
    """Simulate the federation; return what the server records, the images of its clients, and images of no client."""
    seed, (own, others) = setting.seed, _draw_images(options, setting)
    initial = client = _make_client(seed)
    spec = _parse(setting.defense)
    built, rng = spec.build(), Generator().manual_seed(seed + 1)
    states = [built.init(dict(client.weights)) for _ in own]
    observations: list[list[Observation]] = [[] for _ in own]
    for number in range(1, setting.rounds + 1):
        for i, held in enumerate(own):
            batches = [(held.x[rows], held.y[rows]) for rows in torch.randperm(len(held), generator=rng).split(BATCH)]
            sent, states[i] = built.apply(client.compute_update(batches), states[i], rng)
            observations[i].append(client.observe_sent(sent, number, f"c{i}", (), len(held), spec))
        client = client.add(average([of_client[-1].update for of_client in observations]))
    cases = [Case(tuple(of_client)) for of_client in observations]
    return RecordedFederation(initial, cases, own, others, client.measure_accuracy(others))


def _draw_images(options: Options, setting: Setting) -> tuple[list[Images], Images]:
    """Return the images of each client, and images of no client, all of the report part if it has enough of them.

    If it has too few, clients also hold images of the other parts. Their first images, among which the targets are, and those of
    no client are of the report part then, too.
    """
    examples, clients, count = setting.examples, setting.clients, count_images(options, setting)
    rng = Generator().manual_seed(setting.seed)
    if options.data is None or count <= count_part(options, "cifar10", "report"):
        images = _adapt(load_images(options, "cifar10", count))
        order = torch.randperm(len(images), generator=rng).tolist()
        return [images.of(order[i * examples : (i + 1) * examples]) for i in range(clients)], images.of(
            order[clients * examples :]
        )
    reported = _adapt(load_images(options, "cifar10", count_part(options, "cifar10", "report")))
    order = torch.randperm(len(reported), generator=rng).tolist()
    shares = [order[OTHERS + i :: clients] for i in range(clients)]
    filling = _join(
        [
            load_images(options, name, count_part(options, name, part), part=part)
            for name in ("cifar10", "cifar10_test")
            for part in PARTS
            if (name, part) != ("cifar10", "report")
        ]
    )
    rest = torch.randperm(len(filling), generator=rng).tolist()
    needed = [examples - len(share) for share in shares]
    own = [
        _join([reported.of(share), filling.of([rest.pop() for _ in range(n)])]) for share, n in zip(shares, needed, strict=True)
    ]
    return own, reported.of(order[:OTHERS])


def _adapt(images: Images) -> Images:
    """Return the images with the classes and the normalisation of the template."""
    return replace(images, y=images.y % DATA_SPEC.num_classes, data=DATA_SPEC)


def _join(parts: Sequence[Images]) -> Images:
    """Return all images of `parts`, under the name and the part of the first."""
    return _adapt(replace(parts[0], x=torch.cat([part.x for part in parts]), y=torch.cat([part.y for part in parts])))


def count_images(options: Options, setting: Setting) -> int:
    """Return how many images, the first of the part, a federation takes for its clients and as candidates of no client."""
    return setting.clients * setting.examples + (100 if options.quick else OTHERS)


def _make_client(seed: int) -> LocalClient:
    if str(APP_FOLDER) not in sys.path:
        sys.path.insert(0, str(APP_FOLDER))
    models.admit("task:Net")
    training = Training(learning_rate=LEARNING_RATE, momentum=0.9, batch_size=BATCH, epochs=1)
    return replace(make_client("task:Net", DATA_SPEC, seed=seed), training=training)


def attack_federation(options: Options, setting: Setting) -> Iterator[ResultRow]:
    """Record a federation, and yield a row for each number of rounds, with the shares of examples that are named."""
    federation, defense = record(options, setting), setting.defense
    chosen = federation.cases[: SPARSE_CLIENTS if defense.startswith(("top_k", "dgc")) else None]
    has_feedback = defense.startswith("dgc") or "error_feedback" in defense
    read = range(1, setting.rounds + 1) if has_feedback else [one for one in READ_ROUNDS if one <= setting.rounds]
    cases = [replace(case, observations=tuple(o for o in case.observations if o.round in read)) for case in chosen]
    parts = [
        federation.own[0],
        *(images.take_first(TARGETS // (setting.clients - 1)) for images in federation.own[1:]),
        federation.others,
    ]
    owner = torch.cat([torch.full((len(part),), i if i < len(parts) - 1 else -1) for i, part in enumerate(parts)])
    pool = Pool(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    rng = Generator().manual_seed(setting.seed)
    with measure_cpu() as clock:
        fitted = replace(membership(), device=options.device).fit(cases, pool, rng)
    for count in (one for one in ROUNDS if one <= setting.rounds):
        scores = combine_rounds(cases, fitted, 1, count)
        sure = torch.stack([estimate_membership(own, pool.y) for own in scores])
        certain = sure >= CERTAIN
        wrong = certain & (owner != torch.arange(len(scores))[:, None])
        firsts = _list_firsts(scores, owner, setting.seed)
        last_alone = _list_firsts(combine_rounds(cases, fitted, count, count), owner, setting.seed)
        of_another = _list_firsts(exchange_scores(scores), owner, setting.seed)
        yield {
            "defense": defense,
            "examples": setting.examples,
            "seed": setting.seed,
            "rounds": count,
            "read": sum(one <= count for one in read),
            "named": _measure_named(scores[0], owner),
            "named_null": len(federation.own[0]) / len(pool),
            "first_of_100": mean(firsts),
            "null": 1 / POOL,
            "last_round_alone": mean(last_alone),
            "by_another_client": mean(of_another),
            "bound": compute_rate_bound(defense, federation, count, prior=1 / POOL),
            "targets": len(firsts),
            "certain": int(certain.sum()),
            "certain_and_wrong": int(wrong.sum()),
            "accuracy": federation.accuracy,
            "cpu_seconds": clock.seconds,
            "part": federation.others.part,
        }


def combine_rounds(cases: Sequence[Case], fitted: Mapping[str, Coefficients], first: int, last: int) -> list[Tensor]:
    """Return the scores (P,) of the candidates for each case, from its rounds `first` to `last`."""
    return [combine([fitted[o.key] for o in case.observations if first <= o.round <= last]).float() for case in cases]


def draw_practical(rows: Sequence[ResultRow], path: Path) -> None:
    """Draw `first_of_100` against the number of recorded rounds, one line per defense, and write the picture to `path`.

    Rows of several seeds are averaged, and rows of clients with more examples are left out. A grey dashed line shows the null.
    """
    shown = [row for row in rows if row["examples"] == Setting.examples]
    with open_picture(path, 8.4, 3.8) as axes:
        for defense in dict.fromkeys(row["defense"] for row in shown):
            counts = sorted({row["rounds"] for row in shown if row["defense"] == defense})
            own = {
                count: [r["first_of_100"] for r in shown if (r["defense"], r["rounds"]) == (defense, count)] for count in counts
            }
            axes.plot(counts, [mean(own[count]) for count in counts], marker="o", markersize=3, label=defense)
        axes.axhline(1 / POOL, color="#8a8f98", linestyle="--", label="null")
        axes.set_xscale("log")
        axes.set_xticks(ROUNDS, [str(count) for count in ROUNDS], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("recorded rounds")
        axes.set_ylabel("named first of 100 candidates")
        axes.set_ylim(-0.03, 1.03)


def _parse(defense: str) -> DefenseSpec:
    return DefenseSpec() if defense == "none" else DefenseSpec.parse(defense, learning_rate=LEARNING_RATE)


def _measure_named(scores: Tensor, owner: Tensor) -> float:
    """Return the share of the first client's n examples that are among the n candidates with the largest scores (P,)."""
    examples = int((owner == 0).sum())
    return float((owner[scores.topk(examples).indices] == 0).float().mean())


def _list_firsts(scores: Sequence[Tensor], owner: Tensor, seed: int) -> list[bool]:
    """Return for each candidate that is an example of a client other than client 0 whether it has the largest of `POOL` scores.

    A candidate is compared with POOL - 1 others, which are drawn from the candidates that are examples of no client. All these
    scores are taken from `scores[c]`, where c is the client that has the candidate as an example.
    scores: for each client, the scores of all candidates for this client, (P,). owner: (P,) index of each candidate's client, -1
    for none.
    """
    rng, others, found = Generator().manual_seed(seed), (owner == -1).nonzero()[:, 0], []
    for client, own in enumerate(scores[1:], start=1):
        for row in (owner == client).nonzero()[:, 0]:
            rivals = others[torch.randperm(len(others), generator=rng)[: POOL - 1]]
            found.append(bool(own[row] > own[rivals].max()))
    return found


def exchange_scores(scores: Sequence[Tensor]) -> list[Tensor]:
    """Return for each client but the first, in whose place its own scores stay, the scores from another client's updates.

    scores: one for each client, at least two. Of three or more clients, those but the first take the scores of the next.
    """
    return [*scores[:1], *scores[2:], scores[1]] if len(scores) > 2 else [scores[0], scores[0]]


def compute_rate_bound(defense: str, federation: RecordedFederation, rounds: int, *, prior: float) -> float | None:
    """Return the upper bound on the expected share of rightly named candidates under Gaussian noise; None for another defense.

    prior: that share for an attacker without updates.
    """
    if "gaussian" not in defense:
        return None
    noise = find_noise(_parse(defense), tensors=len(federation.client.weights))
    return compute_bound(noise, prior=prior, times=rounds)

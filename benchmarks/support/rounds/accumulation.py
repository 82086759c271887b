"""Tables on what compressed, quantised and noisy updates of the same image reveal in one round and over many.

Every client holds one image, uses it in every round, and trains one step. The mean of what the clients sent in a round is added
to the global weights. Compressed and quantised updates are attacked by `accumulate`, which searches for one image that fits the
updates of all rounds.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import mean

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow, measure_cpu, prepare_worker
from support.rounds.federation import record_same_examples
from support.single_cases import LocalClient, make_client
from support.splits import Images, load_images
from torch import Tensor

from attacker.attacks import Case, accumulate
from attacker.attacks.gradients.vectorised import build_per_problem, join_problems
from attacker.attacks.simulation.client import build_channel, build_network, compute_total_step
from attacker.scoring.metrics import psnr
from defenses import DefenseSpec
from defenses.privacy.accounting import compute_bound
from defenses.privacy.sensitivity import find_noise
from fedsim.recording import Training

LEARNING_RATE = 0.01
CLIENTS = 2
"""Number of clients of each row of `make_accumulated_rows`."""
STEPS = 8
"""Iterations of the search, of up to 20 evaluations each; equal in all rows."""
FEEDBACK_ROWS = (
    ("none", (1,)),
    ("top_k(0.01)", (1, 100)),
    ("top_k(0.01, error_feedback=True)", (1, 10, 100)),
    ("dgc(0.01)", (1, 100)),
)
STOCHASTIC_ROWS = (("sign('mean')", (1, 10, 100)), ("qsgd(4)", (1, 10, 100)))
POOL = 100
"""Number of candidates among which the attacker of `private` looks for the client's image."""
FEDERATIONS = 1
"""Number of federations of the table `private`, in each of which every image of the pool is held by one client."""
NOISE_MULTIPLIERS = (10.0, 3.0, 1.0)


def make_lenet_client(images: Images, seed: int, batch: int = 1, learning_rate: float = LEARNING_RATE) -> LocalClient:
    """Return a client with the LeNet of CPL (Wei et al. 2020), random weights, and a local training of one step.

    images: only their data specification is used. batch: batch size of the step.
    """
    training = Training(learning_rate=learning_rate, batch_size=batch, steps=1)
    return replace(make_client("lenet_cpl", images.data, seed=seed), training=training)


def make_accumulated_rows(options: Options, defenses: Sequence[tuple[str, Sequence[int]]]) -> list[ResultRow]:
    """Return a row for each defense and number of rounds: PSNR of the attack `accumulate` and of its null, means over clients.

    defenses: pairs of a defense and the numbers of rounds to attack, from the first on; with --quick, every second number, at
    most 3.
    There are `CLIENTS` clients, each with an image of its own. They are attacked in `options.workers` processes, those with the
    most rounds first. Progress is printed to stderr.
    """
    choices = [
        (defense, min(count, 3) if options.quick else count)
        for defense, counts in defenses
        for count in (counts[::2] if options.quick else counts)
    ]
    tasks = [(defense, count, client) for defense, count in choices for client in range(CLIENTS)]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), initializer=prepare_worker) as pool:
        order = sorted(tasks, key=lambda task: -task[1])
        futures = {task: pool.submit(attack_client, options, *task) for task in order}
        for future in as_completed(futures.values()):
            print(future.result(), file=sys.stderr, flush=True)  # clients with 100 rounds take minutes
    part = load_images(options, "cifar10", CLIENTS).part
    return [
        {"defense": defense, "rounds": count}
        | _join_clients([futures[defense, count, client].result() for client in range(CLIENTS)])
        | {"clients": CLIENTS, "part": part}
        for defense, count in choices
    ]


@dataclass(frozen=True)
class AttackedClient:
    """What `accumulate` made of a client's rounds. psnr, null_psnr: in dB. is_label_right: whether its label was inferred."""

    defense: str
    rounds: int
    client: int
    psnr: float
    null_psnr: float
    is_label_right: bool
    cpu_seconds: float


def attack_client(options: Options, defense: str, rounds: int, client: int) -> AttackedClient:
    """Record `CLIENTS` clients for some rounds, and attack the rounds of one of them; "none" is no defense."""
    images = load_images(options, "cifar10", CLIENTS)
    setup = make_lenet_client(images, options.seed)
    case = record_same_examples(setup, images, rounds, defense="" if defense == "none" else defense)[client]
    attack = accumulate(steps=3 if options.quick else STEPS)
    (answer,), seconds = run_attack(attack, [case], options)
    (null,), _ = run_attack(attack.null(), [case], options)
    return AttackedClient(
        defense=defense,
        rounds=rounds,
        client=client,
        psnr=_measure_psnr(answer.x, images.x[client]),
        null_psnr=_measure_psnr(null.x, images.x[client]),
        is_label_right=int(answer.y[0]) == int(images.y[client]),
        cpu_seconds=seconds,
    )


def _join_clients(clients: Sequence[AttackedClient]) -> ResultRow:
    return {
        "psnr": mean(client.psnr for client in clients),
        "each": " ".join(f"{client.psnr:.1f}" for client in clients),
        "null_psnr": mean(client.null_psnr for client in clients),
        "labels": mean(client.is_label_right for client in clients),
        "cpu_seconds": sum(client.cpu_seconds for client in clients),
    }


def _measure_psnr(found: Tensor, x: Tensor) -> float:
    return float(psnr(found.nan_to_num().clamp(0, 1), x[None])[0])


def make_private_rows(options: Options) -> list[ResultRow]:
    """Return a row for each noise multiplier and number of rounds: how often the attacker picks a client's image out of `POOL`.

    The attacker knows that each client's image is one of `POOL` images, all equally likely. For each client it picks the image
    that makes the client's messages of these rounds, which are clipped and have Gaussian noise, most likely. In each of
    `FEDERATIONS` federations every image of the pool is held by one client, so that the candidates' gradients are computed once a
    round for all clients. The noise multiplier is the standard deviation of the noise divided by the clipping norm. Each row also
    holds the upper bound on the expected rate that follows from the noise multiplier.
    """
    federations, counts = (1, (1, 3)) if options.quick else (FEDERATIONS, (1, 10, 30))
    pool = load_images(options, "cifar10", POOL)
    client, rows, trials = make_lenet_client(pool, options.seed), [], federations * len(pool)
    for multiplier in NOISE_MULTIPLIERS:
        right, defense = dict.fromkeys(counts, 0), f"clip(0.01) | gaussian({0.01 * multiplier})"
        with measure_cpu() as clock:
            for number in range(federations):
                seed = 10**6 * (options.seed * federations + number)
                cases = record_same_examples(client, pool, max(counts), defense=defense, seed=seed)
                for count, named in _name_images(cases, pool, counts).items():
                    right[count] += int((named == torch.arange(len(pool))).sum())
        noise = find_noise(DefenseSpec.parse(defense), tensors=len(client.weights))
        rows += [
            {
                "noise_multiplier": multiplier,
                "rounds": count,
                "named_rightly": right[count] / trials,
                "standard_error": (right[count] / trials * (1 - right[count] / trials) / trials) ** 0.5,
                "bound": compute_bound(noise, prior=1 / POOL, times=count),
                "null": 1 / POOL,
                "trials": trials,
                "cpu_seconds": clock.seconds,
                "part": pool.part,
            }
            for count in counts
        ]
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _name_images(cases: Sequence[Case], pool: Images, counts: Sequence[int]) -> dict[int, Tensor]:
    """Return a dict from each number of rounds n in `counts` to the index (clients,) of the image that fits each client best.

    An image fits if the messages of the client's first n rounds are near what a client with this image would have sent without
    noise. cases: one per client, with all its rounds; round numbers and global weights are the same for all clients.
    """
    first = cases[0].observations[0]
    model = build_network(first)
    gradients, channel = build_per_problem(model, first.data, "cross_entropy"), build_channel(first, model)
    assert gradients is not None
    scale = -compute_total_step(first.training, 1)
    misfit, named = torch.zeros(len(cases), len(pool), dtype=torch.float64), {}
    for number, seen in enumerate(zip(*(case.observations for case in cases), strict=True), start=1):
        with torch.no_grad():
            found = join_problems(gradients(dict(seen[0].weights), pool.x[:, None], pool.y[:, None]))
        assert found is not None
        expected = torch.func.vmap(lambda update: channel.expect(update, {}))({name: scale * t for name, t in found.items()})
        for name, candidates in expected.items():
            sent = torch.stack([observation.update[name] for observation in seen])
            misfit += torch.cdist(sent.flatten(1).double(), candidates.flatten(1).double()).square()
        if number in counts:
            named[number] = misfit.argmin(dim=1)
    return named

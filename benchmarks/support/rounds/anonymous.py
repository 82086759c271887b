"""The table `anonymous` of rounds.py: updates of many clients without names, grouped by the examples that they share."""

from collections.abc import Sequence

from support.contract import Options, ResultRow, measure_cpu
from support.rounds.federation import make_network, record_epochs
from support.rounds.spans import LEARNING_RATE
from support.splits import load_images
from torch import Generator

from attacker.attacks.multi_round.spans.anonymous import group_observations
from fedsim.recording import Observation, Training

CLIENTS, EXAMPLES, BATCH, EPOCHS = 6, 64, 8, 2


def make_anonymous_rows(asked: Options) -> list[ResultRow]:
    """Return a row for each defense: how well the updates of all clients, whose names are withheld, are grouped by client.

    grouped: share of pairs of updates of one client that are in one group. wrong: share of pairs in one group that are of
    different clients. largest: updates in the largest group, of `EPOCHS * EXAMPLES / BATCH` of each client.
    """
    clients = 2 if asked.quick else CLIENTS
    images = load_images(asked, "cifar10", clients * EXAMPLES)
    network, rows = (
        make_network(images.data, Training(learning_rate=LEARNING_RATE, batch_size=BATCH, steps=1), seed=asked.seed),
        [],
    )
    for defense in ("", "gaussian(snr_db=40)", "gaussian(snr_db=20)"):
        observations: list[Observation] = []
        owners: dict[int, int] = {}
        for number in range(clients):
            own = images.of(range(number * EXAMPLES, (number + 1) * EXAMPLES))
            case, _ = record_epochs(network, own, BATCH, EPOCHS, "", seed=asked.seed + number, defense=defense)
            observations += case.observations
            owners |= {id(one): number for one in case.observations}
        observations.sort(key=lambda one: one.round)
        with measure_cpu() as clock:
            groups = group_observations(observations, Generator().manual_seed(asked.seed), asked.device)
        rows.append(
            {
                "defense": defense or "none",
                "clients": clients,
                "updates": len(observations),
                **_count_pairs([[owners[id(one)] for one in group] for group in groups]),
                "groups": len(groups),
                "largest": len(groups[0]),
                "cpu_seconds": clock.seconds,
                "part": images.part,
            }
        )
    return rows


def _count_pairs(groups: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the columns `grouped` and `wrong` of `make_anonymous_rows`. groups: the clients of the updates in each group."""

    def count(size: int) -> int:
        return size * (size - 1) // 2

    sent = [sum(group.count(client) for group in groups) for client in {client for group in groups for client in group}]
    right = sum(count(group.count(client)) for group in groups for client in set(group))
    joined = sum(count(len(group)) for group in groups)
    return {"grouped": right / sum(map(count, sent)), "wrong": 1 - right / joined if joined else 0.0}

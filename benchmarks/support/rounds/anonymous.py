"""The table `anonymous` of rounds.py: updates of many clients without names, grouped by the examples that they share."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow
from support.matches import count_exact, count_false
from support.rounds.federation import make_mlp_client, record_epochs
from support.rounds.spans import LEARNING_RATE, run_spans
from support.splits import load_images
from torch import Generator

from attacker.attacks import Case, spans
from attacker.attacks.cases import UNNAMED_CLIENT
from attacker.attacks.multi_round.spans.client_groups import group_updates
from attacker.attacks.multi_round.spans.layer_updates import compute_spaces, require_input_layer
from attacker.attacks.multi_round.spans.row_space import count_all_shared
from fedsim.recording import Observation, Training

CLIENTS, EXAMPLES, BATCH, EPOCHS = 6, 32, 8, 3


def make_anonymous_rows(options: Options) -> list[ResultRow]:
    """Return a row for each defense: how well the updates of all clients, whose names are withheld, are grouped by client.

    grouped: share of pairs of updates of one client that are in one group. wrong: share of pairs in one group that are of
    different clients. largest: number of updates in the largest group; each client sends `EPOCHS * EXAMPLES / BATCH`.
    exact: share of all images that the attack `spans` recovers above 60 dB from these updates; with_names: this share if each
    client's updates are attacked alone; null: this share for the attack's null, which returns grey images.
    """
    clients = 2 if options.quick else CLIENTS
    images = load_images(options, "cifar10", clients * EXAMPLES)
    client, rows = (
        make_mlp_client(images.data, Training(learning_rate=LEARNING_RATE, batch_size=BATCH, steps=1), seed=options.seed),
        [],
    )
    for defense in ("", "gaussian(snr_db=40)", "gaussian(snr_db=20)"):
        named: list[tuple[int, Observation]] = []
        with_names = 0
        for number in range(clients):
            own = images.of(range(number * EXAMPLES, (number + 1) * EXAMPLES))
            case, _ = record_epochs(client, own, (BATCH,) * EPOCHS, "", seed=options.seed + number, defense=defense)
            named += [(number, observation) for observation in case.observations]
            with_names += count_exact(run_spans(case, options, relu=True), own.x)
        shuffled = [named[i] for i in torch.randperm(len(named), generator=Generator().manual_seed(options.seed)).tolist()]
        shuffled.sort(key=lambda pair: pair[1].round)
        whole = Case(tuple(replace(one, client=UNNAMED_CLIENT, cohort=()) for _, one in shuffled))
        groups = _group(whole, options)
        (answer,), seconds = run_attack(spans(anonymous=True), [whole], options)
        (grey,), _ = run_attack(spans(anonymous=True).null(), [whole], options)
        false, certain = count_false(answer, images.x)
        rows.append(
            {
                "defense": defense or "none",
                "clients": clients,
                "updates": len(shuffled),
                **_count_pairs([[shuffled[i][0] for i in group] for group in groups]),
                "groups": len(groups),
                "largest": len(groups[0]),
                "exact": count_exact(answer, images.x) / len(images),
                "with_names": with_names / len(images),
                "null": count_exact(grey, images.x) / len(images),
                "certain": certain,
                "certain_and_wrong": false,
                "cpu_seconds": seconds,
                "part": images.part,
            }
        )
    return rows


def _group(case: Case, options: Options) -> list[list[int]]:
    """Return the groups of the updates of a case that share examples, as the attack forms them."""
    rng = Generator().manual_seed(options.seed)
    spaces = compute_spaces(case, require_input_layer(case.observations[0]), rng, device=options.device)
    return group_updates(spaces, count_all_shared(spaces, rng), [observation.round for observation in case.observations])


def _count_pairs(groups: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the columns `grouped` and `wrong` of `make_anonymous_rows`. groups: the clients of the updates in each group."""

    def count(size: int) -> int:
        return size * (size - 1) // 2

    sent = [sum(group.count(client) for group in groups) for client in {client for group in groups for client in group}]
    right = sum(count(group.count(client)) for group in groups for client in set(group))
    joined = sum(count(len(group)) for group in groups)
    return {"grouped": right / sum(map(count, sent)), "wrong": 1 - right / joined if joined else 0.0}

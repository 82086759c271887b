"""Table of re-identification among all images of the CIFAR-10 files, in a recording of Flower's PyTorch quickstart.

The federations are those of the table `practical`. The attacker has 20 of a client's 128 images among thousands of images that no
client has, and `membership` scores them all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean

import torch
from support.contract import Options, ResultRow, measure_cpu, show_rows
from support.rounds.practical import (
    TARGETS,
    RecordedFederation,
    Setting,
    combine_rounds,
    compute_rate_bound,
    count_images,
    record,
)
from support.splits import PARTS, Images, count_part, load_images
from torch import Generator, Tensor

from attacker.attacks.membership.attack import membership
from attacker.attacks.membership.pool import Pool

READ_ROUNDS = (1, 5, 10, 50, 100)
"""The rounds that the attacker uses, to save time."""
ROUNDS = (1, 10, 100)
"""Numbers of recorded rounds after which the attack is measured."""
DEFENSES = ("none", "sign('mean')", "qsgd(4)", "clip(1) | gaussian(0.01)")
NEAR_SHARE = 0.01
"""Largest rank of an image, relative to the number of rivals, with which it counts in the column `in_best_percent`."""


def make_pool_rows(options: Options) -> Iterator[ResultRow]:
    """Yield a row for each defense and number of rounds, which is also printed on stderr at once.

    The columns are those that rounds.py describes; `null` is that of rank_first, and the null of in_best_percent is 1 %.
    rank_first_of_another, in_best_percent_of_another: a control, these two shares by scores from another client's updates.
    """
    settings = [Setting(seed=options.seed, defense=defense) for defense in DEFENSES]
    chosen = [Setting(clients=3, examples=32, rounds=2)] if options.quick else settings
    return show_rows(row for setting in chosen for row in _attack(options, setting))


def load_rivals(options: Options, setting: Setting) -> list[Images]:
    """Return all images of the CIFAR-10 files in --data, of all parts, without those that `record` draws for the federation.

    Left out are the clients' images, and `RecordedFederation.others`, which the caller adds to the rivals. Rivals choose
    no setting here and are not reported on, so that images of the tuning part may be among them.
    """
    rivals = []
    for name in ("cifar10", "cifar10_test"):
        for part in PARTS:
            skip = count_images(options, setting) if (name, part) == ("cifar10", "report") else 0
            rivals.append(load_images(options, name, count_part(options, name, part) - skip, part=part, skip=skip))
    return rivals


def _attack(options: Options, setting: Setting) -> Iterator[ResultRow]:
    federation: RecordedFederation = record(options, setting)
    rivals = [federation.others, *([] if options.quick else load_rivals(options, setting))]
    targets = [images.take_first(TARGETS // (setting.clients - 1)) for images in federation.own[1:]]
    owner = torch.cat(
        [torch.full((len(own),), i) for i, own in enumerate(targets, start=1)] + [torch.full((len(own),), -1) for own in rivals]
    )
    classes = federation.client.data.num_classes
    pool = Pool(torch.cat([one.x for one in (*targets, *rivals)]), torch.cat([one.y % classes for one in (*targets, *rivals)]))
    read = [number for number in READ_ROUNDS if number <= setting.rounds]
    cases = [replace(one, observations=tuple(o for o in one.observations if o.round in read)) for one in federation.cases[1:]]
    with measure_cpu() as clock:
        fitted = replace(membership(), device=options.device).fit(cases, pool, Generator().manual_seed(setting.seed))
    for count in (number for number in ROUNDS if number <= setting.rounds):
        scores = combine_rounds(cases, fitted, 1, count)
        ranks = list_ranks(scores, owner)
        control = list_ranks([*scores[1:], scores[0]], owner)
        others = int((owner == -1).sum())
        yield {
            "defense": setting.defense,
            "seed": setting.seed,
            "rounds": count,
            "read": sum(number <= count for number in read),
            "targets": len(ranks),
            "rivals": others,
            "rank_first": mean(rank == 1 for rank in ranks),
            "null": 1 / (1 + others),
            "in_best_percent": mean(rank <= NEAR_SHARE * others for rank in ranks),
            "median_rank": sorted(ranks)[len(ranks) // 2],
            "rank_first_of_another": mean(rank == 1 for rank in control),
            "in_best_percent_of_another": mean(rank <= NEAR_SHARE * others for rank in control),
            "bound": compute_rate_bound(setting.defense, federation, count, prior=1 / (1 + others)),
            "cpu_seconds": clock.seconds,
            "part": federation.others.part,
        }


def list_ranks(scores: Sequence[Tensor], owner: Tensor) -> list[int]:
    """Return for each candidate of a client its rank among itself and the rivals, by the scores for its client.

    Rank 1 has the highest score; a rival with an equal score ranks before the candidate. Ranks are in the order of `scores`.
    scores: (P,) for each attacked client: clients are counted from 0, and client 0 is not attacked, so scores[0] is of client 1.
    owner:  (P,) number of the client that has each candidate, from 1, or -1 for rivals.
    """
    ranks = []
    for client, own in enumerate(scores, start=1):
        rivals = own[owner == -1]
        ranks += [1 + int((rivals >= score).sum()) for score in own[owner == client]]
    return ranks

"""The table `clients` of agic.py: AGIC on all rounds of a client together, on CPL's LeNet.

Before the search over all rounds, closed forms are tried on each round, except in the row "search alone" and in those of the null
(AGIC without the updates).
"""

from collections.abc import Sequence
from statistics import mean

from support.attacked import run_attack
from support.contract import Options, ResultRow
from support.rounds.accumulation import make_lenet_client
from support.rounds.federation import record_epochs
from support.splits import Images, load_images

from attacker.attacks import Attack, AttackSpec, Case
from attacker.attacks.presets import get_arguments
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.metrics import psnr

CLIENTS, EXAMPLES = 2, 12
"""Number of clients, and number of images of each client, which uses all of its images in each of two shuffled epochs."""
CERTAIN = 0.9
"""Confidence from which an image counts as certain."""
MIN_PSNR = 20.0
"""PSNR below which a certain image counts as wrong."""


def measure_clients(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Attack two clients with 12 images each over two epochs; return the rows, and the speed-up by closed forms.

    A batch has 1 image in both epochs (24 rounds), or 1 in the first and 4 in the second (15 rounds). The attacks are AGIC with
    closed forms before its search, AGIC's null (its best guess without the updates), and for 24 rounds also AGIC's search alone.
    The speed-up is the CPU time of the search alone divided by that with closed forms first, for 24 rounds.
    """
    images = load_images(options, "cifar10", CLIENTS * EXAMPLES)
    rows, seconds = [], {}
    for name, sizes in {"1 and 1": (1, 1), "1 and 4": (1, 4)}.items():
        for by in ("closed forms first", "search alone", "null"):
            if by == "search alone" and name != "1 and 1":
                continue
            row = _attack_clients(options, images, sizes, by)
            rows.append({"batch": name, "by": by, **row})
            seconds[name, by] = row["cpu_seconds"]
    return rows, {"speed_up": seconds["1 and 1", "search alone"] / seconds["1 and 1", "closed forms first"]}


def _attack_clients(options: Options, images: Images, sizes: Sequence[int], by: str) -> ResultRow:
    each, found, seconds, wrong = list[float](), list[Reconstruction](), 0.0, 0
    for number in range(CLIENTS):
        own = images.of(range(EXAMPLES * number, EXAMPLES * (number + 1)))
        case, _ = record_epochs(make_lenet_client(own, options.seed), own, sizes, f"client-{number}", seed=number)
        attack = _build_attack(options, case, closed_forms=by == "closed forms first")
        (one,), spent = run_attack(attack.null() if by == "null" else attack, [case], options)
        guesses = keep_first(one, len(own))
        x = guesses.x.nan_to_num().clamp(0, 1)
        chosen = assign_reconstructions(x, own.x)
        values = [0.0 if k is None else float(psnr(x[[k]], own.x[[j]])[0]) for j, k in enumerate(chosen)]
        pairs = zip(chosen, values, strict=True)
        wrong += sum(k is not None and float(guesses.confidence[k]) >= CERTAIN and value < MIN_PSNR for k, value in pairs)
        each, found, seconds = each + values, [*found, one], seconds + spent
    return {
        "rounds": " ".join(str(len({slot.round for slot in one.slots})) for one in found),
        "route": found[0].route,
        "iterations": " ".join(str(one.iterations) for one in found),
        "examples": " ".join(str(len(one.x)) for one in found),
        "psnr": mean(each),
        "each": " ".join(f"{value:.0f}" for value in each),
        "certain": sum(int((one.confidence >= CERTAIN).sum()) for one in found),
        "certain_and_wrong": wrong,
        "cpu_seconds": seconds,
        "part": images.part,
    }


def _build_attack(options: Options, case: Case, *, closed_forms: bool) -> Attack:
    first = case.observations[0]
    arguments = get_arguments("agic", "tuned", first.model, first.data)
    arguments = arguments | {"closed_forms": closed_forms} | ({"steps": 2} if options.quick else {})
    return AttackSpec(name="agic", arguments=arguments).build()

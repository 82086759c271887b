"""The table of the attack `cohort_spans`, which sees only the sums over the clients of each round (its cohort), and their names.

The table counts the clients whose examples the attack separates from the examples of others, the examples that the attack
recovers, and the recovered examples for which it also names the right client. An answer is one reconstructed example. The attack
also puts answers into groups: two or more answers that it takes for examples of one client.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow, measure_cpu, show_rows
from support.matches import EXACT_DB, SUCCESS_DB, count_exact, count_false, measure_matches, run_if_applicable
from support.rounds.federation import make_mlp_client, record_sums
from support.rounds.sratta import run_sratta
from support.single_cases import LocalBatch
from support.splits import Images, load_images
from torch import Generator, Tensor

from attacker.attacks import Case, cohort_spans
from attacker.attacks.multi_round.spans.cohort_attack import count_most_examples, list_groups, list_owners
from attacker.attacks.multi_round.spans.cohorts import isolate_clients
from attacker.attacks.multi_round.spans.layer_updates import compute_spaces, require_input_layer
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import rank_candidates
from fedsim.recording import Observation, Training

MAX_OUTSIDE = 1e-3
"""Largest distance of a client's normalised examples from a span that counts as this client's own."""
OUR_ROUNDING = 3.0 / ((2**31 - 1) // (4 * 8)) / 8
"""Step of `secure_aggregation = true` for cohorts of 4 clients of 8 examples: [-3, 3] is scaled to the largest range whose sum,
weighted by the numbers of examples, fits into 32 bits."""
SRATTA_COLUMNS = ("sratta_exact", "sratta_wrong", "sratta_grouped", "sratta_grouped_rightly", "sratta_seconds")
NO_ANSWER: ResultRow = {
    **dict.fromkeys(("exact", "exact_with_owner", "wrong_owner", "recovered", "recovered_with_owner"), 0.0),
    "recovered_wrong_owner": 0.0,
    "grouped": 0.0,
    "grouped_rightly": None,
    **dict.fromkeys(("candidates", "certain", "certain_and_wrong"), 0),
}
"""Columns of a row on the answer of the attack, if it has none."""
FLOWER_ROUNDING = 2 * 8.0 / 2**22 * 1000 / 8
"""Step of Flower's SecAgg+ workflow with its defaults: [-8, 8] is divided into 2^22 steps after multiplication by the number of
examples, 8, over max_weight, 1000."""


@dataclass(frozen=True, kw_only=True)
class CohortSetting:
    """The federation of one row of the table.

    clients, cohort: number of clients, and of those that take part in a round. examples: number of examples of each client.
    steps, batch: local steps of a round, and the size of their batches.
    fixed: whether the clients form fixed groups that take turns; otherwise each cohort is drawn at random.
    trainings: number of times that the same clients train from other random weights, for `rounds` rounds each.
    rounding: step to which clients round the values of their updates before they are summed; 0 for none.
    hidden: width of the first layer. defense: applied to the mean of the updates in a round, as in an experiment; "" for none.
    data: name of the data set.
    sratta: whether SRATTA attacks the same sums, for comparison. what: name of the federation in the table.
    """

    clients: int = 20
    cohort: int = 4
    rounds: int = 30
    examples: int = 8
    steps: int = 2
    batch: int = 4
    trainings: int = 1
    hidden: int = 256
    fixed: bool = False
    defense: str = ""
    rounding: float = 0.0
    data: str = "cifar10"
    learning_rate: float = 0.02
    sratta: bool = False
    what: str = ""


SRATTA = CohortSetting(
    clients=5,
    cohort=5,
    rounds=20,
    examples=100,
    steps=5,
    batch=8,
    hidden=1000,
    data="mnist",
    learning_rate=0.5,
    sratta=True,
    what="SRATTA's configuration, MNIST",
)
"""Settings of the paper's experiments, which use Fashion-MNIST. The paper attacks 20 trainings of the same clients together."""


def list_cohort_settings(*, quick: bool) -> list[CohortSetting]:
    """Return the federations of the table, one for each row; `quick` returns two small ones.

    The first has random cohorts, two local steps and 30 rounds. The others differ from it by four local steps on smaller batches,
    10 or 20 rounds, fixed cohorts, a narrow first layer, noise, or rounding with four local steps; the last two have the setup of
    the attack SRATTA's paper.
    """
    if quick:
        return [
            CohortSetting(clients=8, cohort=2, rounds=12, what="random cohorts"),
            CohortSetting(fixed=True, rounds=10, what="fixed cohorts"),
        ]
    return [
        CohortSetting(what="random cohorts"),
        CohortSetting(steps=4, batch=2, what="random cohorts"),
        CohortSetting(rounds=10, what="random cohorts"),
        CohortSetting(rounds=20, what="random cohorts"),
        CohortSetting(fixed=True, what="fixed cohorts"),
        CohortSetting(hidden=24, what="narrow layer"),
        CohortSetting(defense="gaussian(snr_db=40)", what="noise of 40 dB"),
        CohortSetting(steps=4, batch=2, rounding=OUR_ROUNDING, what="random cohorts, rounded as by default"),
        CohortSetting(steps=4, batch=2, rounding=FLOWER_ROUNDING, what="random cohorts, rounded as by Flower's SecAgg+"),
        SRATTA,
        replace(SRATTA, trainings=20, what=f"{SRATTA.what}, 20 trainings"),
    ]


def make_cohort_rows(options: Options) -> Iterator[ResultRow]:
    """Yield the rows of the table, each of which is also printed on stderr at once."""
    return show_rows(make_cohort_row(options, setting) for setting in list_cohort_settings(quick=options.quick))


def make_cohort_row(options: Options, setting: CohortSetting) -> ResultRow:
    """Simulate and attack one federation, and return its row.

    Column isolated: share of clients for which the attack finds the linear span of their own examples. exact: share of all
    examples to which a reconstruction has a PSNR above `EXACT_DB`; exact_with_owner, wrong_owner: share of all examples for which
    such a reconstruction also names the right client, or only a wrong one. recovered, recovered_*: these three shares with the
    threshold of scoring, `SUCCESS_DB`, which estimates by independent component analysis may pass, and with the N best answers
    only, where N is the number of all examples. grouped: number of answers that are put into a group with others, divided by N.
    grouped_rightly: share of the pairs of answers within groups that are examples of one client; None without such a pair.
    candidates: number of answers. certain: number of answers with a confidence above 0.9; certain_and_wrong: number of these that
    are not exact. null: `exact` of the null. sratta_*: results of SRATTA on the same sums, None where SRATTA was not run;
    sratta_wrong: number of its answers that are not exact.
    """
    images, holdings = load_holdings(options, setting)
    case = record(options, setting, holdings)
    isolated = _count_isolated(case, holdings, options)
    with measure_cpu() as clock:
        answer = run_if_applicable(cohort_spans(), case, options)
    (null,), _ = run_attack(cohort_spans().null(), [case], options)
    return {
        "federation": setting.what,
        "clients": setting.clients,
        "cohort": setting.cohort,
        "rounds": setting.rounds,
        "examples": setting.examples,
        "steps": setting.steps,
        "batch": setting.batch,
        "width": setting.hidden,
        "isolated": isolated / setting.clients,
        **(NO_ANSWER if answer is None else _measure_answer(answer, holdings)),
        "null": count_exact(null, torch.cat([own.x for own in holdings.values()])) / len(images),
        "cpu_seconds": clock.seconds,
        **(_attack_by_sratta(case, holdings) if setting.sratta else dict.fromkeys(SRATTA_COLUMNS)),
        "part": images.part,
    }


def _measure_answer(answer: Reconstruction, holdings: Mapping[str, Images]) -> ResultRow:
    """Return the columns `NO_ANSWER` of a row, for the answer of the attack. holdings: images of each client."""
    x, names = torch.cat([own.x for own in holdings.values()]), [name for name, own in holdings.items() for _ in range(len(own))]
    owners, groups = list_owners(answer), list_groups(answer)
    best = measure_matches(answer.x, x)
    exact, near = best > EXACT_DB, best > SUCCESS_DB
    near[rank_candidates(answer.confidence, answer.explained)[len(x) :]] = False
    right = torch.tensor([[bool(owner) and owner == name for name in names] for owner in owners])
    wrong = torch.tensor([[bool(owner) and owner != name for name in names] for owner in owners])
    same_client, pairs = _count_grouped_pairs(groups, exact, names)
    certain_and_wrong, certain = count_false(answer, x, EXACT_DB)

    def measure_share(matches: Tensor) -> float:
        """Return the share of the examples that some answer matches, given a mask (answers, examples)."""
        return float(matches.any(dim=0).double().mean())

    def measure_misnamed(matches: Tensor) -> float:
        """Return the share of the examples whose matches name only other clients."""
        return float(((matches & wrong).any(dim=0) & ~(matches & right).any(dim=0)).double().mean())

    return {
        "exact": measure_share(exact),
        "exact_with_owner": measure_share(exact & right),
        "wrong_owner": measure_misnamed(exact),
        "recovered": measure_share(near),
        "recovered_with_owner": measure_share(near & right),
        "recovered_wrong_owner": measure_misnamed(near),
        "grouped": sum(number > 0 for number in groups) / len(x),
        "grouped_rightly": same_client / pairs if pairs else None,
        "candidates": len(answer.x),
        "certain": certain,
        "certain_and_wrong": certain_and_wrong,
    }


def _attack_by_sratta(case: Case, holdings: Mapping[str, Images]) -> ResultRow:
    """Return the columns SRATTA_COLUMNS of a row, of SRATTA on the sums of `case`."""
    with measure_cpu() as clock:
        found = run_sratta(case)
    x, names = torch.cat([own.x for own in holdings.values()]), [name for name, own in holdings.items() for _ in range(len(own))]
    hit = measure_matches(found.x.float().reshape(-1, *x.shape[1:]), x) > EXACT_DB
    numbers = [0] * len(found.x)
    for number, group in enumerate(found.groups, start=1):
        for i in group:
            numbers[i] = number
    right, pairs = _count_grouped_pairs(numbers, hit, names)
    values = (
        int(hit.any(dim=0).sum()) / len(x),
        int((~hit.any(dim=1)).sum()),
        sum(number > 0 for number in numbers) / len(x),
        right / pairs if pairs else None,
        clock.seconds,
    )
    return dict(zip(SRATTA_COLUMNS, values, strict=True))


def load_holdings(options: Options, setting: CohortSetting) -> tuple[Images, dict[str, Images]]:
    """Return the images of all clients, and a dict from the name of each client to its own."""
    images = load_images(options, setting.data, setting.clients * setting.examples)
    return images, {f"c{number:02d}": own for number, own in enumerate(images.split(setting.examples))}


def record(options: Options, setting: CohortSetting, holdings: Mapping[str, Images]) -> Case:
    """Simulate all rounds and return a case with the secure sum of each: the mean of the updates of its cohort.

    holdings: dict from the name of a client to its images.
    """
    rng, names, rounds = Generator().manual_seed(options.seed + 1), sorted(holdings), []
    groups = [names[i : i + setting.cohort] for i in range(0, len(names), setting.cohort)]
    for number in range(setting.rounds * setting.trainings):
        if setting.fixed:
            cohort = groups[number % len(groups)]
        else:
            cohort = [names[i] for i in torch.randperm(len(names), generator=rng)[: setting.cohort].tolist()]
        rounds.append({name: _draw_batches(holdings[name], setting, rng) for name in sorted(cohort)})
    training = Training(learning_rate=setting.learning_rate, batch_size=setting.batch, steps=setting.steps)
    seen: list[Observation] = []
    for number in range(setting.trainings):
        client = make_mlp_client(holdings[names[0]].data, training, hidden=setting.hidden, seed=options.seed + number)
        own = rounds[number * setting.rounds : (number + 1) * setting.rounds]
        seen += record_sums(client, own, defense=setting.defense, rounding=setting.rounding).observations
    return Case(tuple(replace(one, round=number) for number, one in enumerate(seen, start=1)))


def _count_grouped_pairs(groups: Sequence[int], hit: Tensor, names: Sequence[str]) -> tuple[int, int]:
    """Return the number of pairs of answers in one group that are examples of one client, and the number of all pairs in groups.

    groups: number of each answer's group, 0 for none. hit: mask (answers, examples), true where an answer is exact for an
    example. names: client of each example.
    """
    owners = [names[int(row.int().argmax())] if bool(row.any()) else None for row in hit]
    pairs = [(i, j) for j in range(len(groups)) for i in range(j) if groups[i] == groups[j] > 0]
    return sum(owners[i] is not None and owners[i] == owners[j] for i, j in pairs), len(pairs)


def _draw_batches(own: Images, setting: CohortSetting, rng: Generator) -> list[LocalBatch]:
    rows = torch.randperm(len(own), generator=rng)[: setting.steps * setting.batch]
    return [(own.x[part], own.y[part]) for part in rows.split(setting.batch)]


def _count_isolated(case: Case, holdings: Mapping[str, Images], options: Options) -> int:
    """Return the number of clients for which the attack found the linear span of their own examples in the secure sums.

    A span is right if it has as many dimensions as the client has examples, and if for each example, as the vector of its
    normalised pixels and a 1, scaled to length 1, the part outside of the span is shorter than `MAX_OUTSIDE`.
    holdings: dict from the name of a client to its images.
    """
    try:
        spans = measure_isolation(case, Generator().manual_seed(options.seed))
    except ValueError:
        return 0
    right = 0
    for name, y in spans.items():
        x = case.observations[0].data.normalise(holdings[name].x).flatten(1).double()
        vectors = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
        unit = vectors / vectors.norm(dim=1, keepdim=True)
        basis = torch.linalg.qr(y.T).Q
        outside = (unit - unit @ basis @ basis.T).norm(dim=1)
        right += len(y) == len(x) and float(outside.max()) < MAX_OUTSIDE
    return right


def measure_isolation(case: Case, rng: Generator) -> dict[str, Tensor]:
    """Return a dict from the name of each client whose examples' span can be isolated to vectors (dimensions, F) that span it.

    The span is of the vectors [x, 1], of length F, of the client's examples x. The entries of the returned vectors have noise of
    standard deviation 1. Clients whose span cannot be isolated are left out, see `isolate_clients`.
    """
    layer = require_input_layer(case.observations[0])
    bounded = Case(
        tuple(replace(observation, num_examples=count_most_examples(observation)) for observation in case.observations)
    )
    spaces, cohorts = compute_spaces(bounded, layer, rng), [observation.cohort for observation in case.observations]
    isolated = isolate_clients(spaces, cohorts, case.rounds)
    return {name: answer.y for name, answer in isolated.items()}

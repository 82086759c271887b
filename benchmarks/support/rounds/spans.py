"""Tables of the attack `spans`, which compares updates of the first linear layer over two or three epochs.

In the table `spans` they are those of one client. In the table `anonymous` they are those of many clients without names, which
are grouped by the examples that they share.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow, measure_cpu, show_rows
from support.cpl.cases import load_table
from support.matches import SUCCESS_DB, count_exact, count_false, count_wrong, run_if_applicable
from support.rounds.federation import kill_neurons, make_mlp_client, pretrain, record_epochs
from support.single_cases import LocalClient
from support.splits import Images, load_images
from torch import Generator

from attacker.attacks import Case, spans
from attacker.attacks.cases import UNNAMED_CLIENT
from attacker.attacks.multi_round.spans.client_groups import group_updates
from attacker.attacks.multi_round.spans.layer_updates import compute_spaces, require_input_layer
from attacker.attacks.multi_round.spans.row_space import count_all_shared
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import keep_first
from fedsim.recording import Observation, Training

LEARNING_RATE = 0.02
TRAINING_STEPS = 1500
CLIENTS, EXAMPLES, BATCH, EPOCHS = 6, 32, 8, 3
"""Numbers of clients, of examples of each, of examples of a batch, and of epochs, in the table `anonymous`."""


@dataclass(frozen=True, kw_only=True)
class SpanSetting:
    """The federation of one row of the table.

    batch: size of the clients' batches. examples: number of examples of each client. clients: number of clients; each is attacked
    separately. epochs: passes of a client over its examples, with one batch per round. state: state of the client: "untrained",
    "trained", or untrained with "half dead" or "90 % dead" neurons. defense: specification as in an experiment, such as
    "gaussian(0.1)"; "" for none. data: name of the data set.
    """

    batch: int
    examples: int
    clients: int
    epochs: int = 2
    state: str = "untrained"
    defense: str = ""
    data: str = "cifar10"


def list_settings(*, quick: bool) -> list[SpanSetting]:
    """Return the federations of the table, one for each row; with `quick`, three small ones instead.

    They differ in the sizes of batches and clients, the epochs, the state of the client, noise in the updates, and the data set.
    """
    if quick:
        return [
            SpanSetting(batch=4, examples=16, clients=8),
            SpanSetting(batch=8, examples=64, clients=2, state="trained"),
            SpanSetting(batch=8, examples=64, clients=1, epochs=3),
        ]
    whole = {4: 24, 8: 6, 16: 2, 32: 1}
    rows = [
        SpanSetting(batch=batch, examples=batch**2, clients=clients, state=state)
        for state in ("untrained", "trained")
        for batch, clients in whole.items()
    ]
    rows += [SpanSetting(batch=16, examples=256, clients=2, epochs=3, state=state) for state in ("untrained", "trained")]
    rows += [SpanSetting(batch=8, examples=64, clients=4, state=state) for state in ("half dead", "90 % dead")]
    rows += [SpanSetting(batch=8, examples=64, clients=2, defense=f"gaussian(snr_db={db})") for db in (60, 40, 20)]
    rows += [SpanSetting(batch=8, examples=256, clients=1), SpanSetting(batch=16, examples=1024, clients=1)]
    for data, clients in (("breast_cancer", {4: 8, 8: 2}), ("adult", {4: 8, 8: 6, 16: 1})):
        rows += [SpanSetting(batch=batch, examples=batch**2, clients=count, data=data) for batch, count in clients.items()]
    return rows


def make_span_rows(options: Options) -> Iterator[ResultRow]:
    """Yield the rows of the table, each of which is also printed on stderr at once."""
    return show_rows(make_span_row(options, setting) for setting in list_settings(quick=options.quick))


def make_span_row(options: Options, setting: SpanSetting) -> ResultRow:
    """Return one row of the table: how much `spans` finds in the federation of `setting`. rounds.py describes its columns.

    `recovered` is the share of all images to which one of a client's N best answers with relu=True has a PSNR above `SUCCESS_DB`,
    where N is the client's number of images.
    Raises ValueError for the table "adult" without its file in --data.
    """
    count = setting.clients * setting.examples
    if setting.data in ("adult", "breast_cancer"):
        table = load_table(options, setting.data, count)
        if table is None:
            raise ValueError(f"--data must name a folder with adult/adult.csv.gz, got {options.data}")
        images = table
    else:
        images = load_images(options, setting.data, count)
    client = _make_client(images, setting, options.seed)
    totals: Counter[str] = Counter()
    for number, own in enumerate(images.split(setting.examples)):
        totals.update(_attack_client(client, own, setting, options, number))
    total = len(images)
    b, n = setting.batch, setting.examples
    return {
        "data": images.name,
        "batch": b,
        "examples": n,
        "clients": setting.clients,
        "epochs": setting.epochs,
        "network": setting.state,
        "defense": setting.defense or "none",
        "accuracy": client.measure_accuracy(images),
        "pairs": totals["pairs"],
        "overlap_exact": totals["right_pairs"] / totals["pairs"],
        "expected_two_epochs": (1 - (b - 1) / (n - 1)) ** (b - 1),
        **{column: totals[column] / total for column in ("intersections", "with_relu", "recovered", "null")},
        **{column: totals[column] for column in ("certain", "answers", "certain_and_wrong", "below_60_db", "cpu_seconds")},
        "part": images.part,
    }


def _attack_client(client: LocalClient, images: Images, setting: SpanSetting, options: Options, number: int) -> dict[str, float]:
    """Simulate and attack the client with this number, which holds `images`; return what is added up for the row."""
    case, used = record_epochs(
        client, images, (setting.batch,) * setting.epochs, f"c{number}", seed=options.seed + number, defense=setting.defense
    )
    pairs, right_pairs = _count_right_pairs(case, used, options)
    alone = run_spans(case, options, relu=False)
    with measure_cpu() as clock:
        whole = run_spans(case, options, relu=True)
    certain_and_wrong, certain = count_false(whole, images.x)
    (null,), _ = run_attack(spans().null(), [case], options)
    return {
        "pairs": pairs,
        "right_pairs": right_pairs,
        "intersections": count_exact(alone, images.x),
        "with_relu": count_exact(whole, images.x),
        "recovered": count_exact(None if whole is None else keep_first(whole, len(images)), images.x, SUCCESS_DB),
        "null": count_exact(null, images.x),
        "certain": certain,
        "answers": 0 if whole is None else len(whole.x),
        "certain_and_wrong": certain_and_wrong,
        "below_60_db": count_wrong(whole, images.x),
        "cpu_seconds": clock.seconds,
    }


def run_spans(case: Case, options: Options, *, relu: bool) -> Reconstruction | None:
    """Return the reconstruction by `spans`, or None if the attack recovers no example or cannot attack the case.

    relu: whether the attack also looks for the remaining examples of a batch, by the neurons whose ReLU is zero for them and by
    independent component analysis.
    """
    return run_if_applicable(spans(relu=relu, components=relu), case, options)


def _make_client(images: Images, setting: SpanSetting, seed: int) -> LocalClient:
    training = Training(learning_rate=LEARNING_RATE, batch_size=setting.batch, steps=1)
    client = make_mlp_client(images.data, training, seed=seed)
    if setting.state == "trained":
        return pretrain(client, images, steps=TRAINING_STEPS, seed=seed)
    shares = {"half dead": 0.5, "90 % dead": 0.9}
    return kill_neurons(client, shares[setting.state]) if setting.state in shares else client


def _count_right_pairs(case: Case, used: list[list[int]], options: Options) -> tuple[int, int]:
    """Return the number of pairs of rounds, and of those for which the attack finds the true number of examples that both use.

    used: for each round, the indices of its examples.
    """
    rng = Generator().manual_seed(options.seed)
    found = count_all_shared(compute_spaces(case, require_input_layer(case.observations[0]), rng), rng)
    truth = torch.tensor([[len(set(one) & set(other)) for other in used] for one in used])
    i, j = torch.combinations(torch.arange(len(used))).T
    return len(i), int((found[i, j] == truth[i, j]).sum())


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
        for number, own in enumerate(images.split(EXAMPLES)):
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
    return group_updates(spaces, count_all_shared(spaces, rng), case.rounds)


def _count_pairs(groups: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the columns `grouped` and `wrong` of `make_anonymous_rows`. groups: the clients of the updates in each group."""

    def count(size: int) -> int:
        return size * (size - 1) // 2

    sent = [sum(group.count(client) for group in groups) for client in {client for group in groups for client in group}]
    right = sum(count(group.count(client)) for group in groups for client in set(group))
    joined = sum(count(len(group)) for group in groups)
    return {"grouped": right / sum(map(count, sent)), "wrong": 1 - right / joined if joined else 0.0}

"""Table of the attack `spans`, which compares one client's updates of the first linear layer over two or three epochs."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.contract import Options, ResultRow, measure_cpu
from support.cpl.cases import load_table
from support.rounds.federation import RecordedNetwork, kill_neurons, make_network, record_epochs, train_network
from support.splits import Images, load_images
from torch import Generator, Tensor

from attacker.attacks import Case, spans
from attacker.attacks.multi_round.spans.attack import compute_spaces, require_input_layer
from attacker.attacks.multi_round.spans.recovery import count_all_shared
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import keep_first
from attacker.scoring.metrics import psnr
from fedsim.recording import Training

EXACT_DB = 60.0
"""PSNR above which an image counts as exact."""
SUCCESS_DB = 20.46
"""PSNR of the mean squared error at which scoring counts an image as recovered."""
LEARNING_RATE = 0.02
TRAINING_STEPS = 1500


@dataclass(frozen=True, kw_only=True)
class SpanSetting:
    """The federation of one row of the table.

    batch: size of the clients' batches. examples: number of examples of each client. clients: number of clients; each is attacked
    separately. epochs: passes of a client over its examples, with one batch per round. state: state of the network: "untrained",
    "trained", or untrained with "half dead" or "90 % dead" neurons. defense: specification as in an experiment, such as
    "gaussian(0.1)"; "" for none. data: name of the data set. hidden: number of neurons of the first layer.
    """

    batch: int
    examples: int
    clients: int
    epochs: int = 2
    state: str = "untrained"
    defense: str = ""
    data: str = "cifar10"
    hidden: int = 256


def list_settings(*, quick: bool) -> list[SpanSetting]:
    """Return the federations of the table, one for each row; with `quick`, three small ones instead.

    They differ in the sizes of batches and clients, the epochs, the state of the network, noise in the updates, and the data set.
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
    for setting in list_settings(quick=options.quick):
        row = make_span_row(options, setting)
        print(row, file=sys.stderr, flush=True)
        yield row


def make_span_row(options: Options, setting: SpanSetting, part: Any = "report") -> ResultRow:
    """Return one row of the table: how much `spans` finds in the federation of `setting`.

    `overlap_exact` is a share of all pairs of two rounds of the same client, counted over all clients: those for which the attack
    finds the true number of images in common.
    `intersections`, `with_relu` and `null` are the shares of all images to which some reconstruction has a PSNR above `EXACT_DB`:
    by the attack with relu=False, with relu=True (see `run_spans`), and by its null (the same attack without messages).
    `recovered` is the share of all images to which one of a client's N best answers with relu=True has a PSNR above `SUCCESS_DB`,
    where N is the client's number of images.
    part: part of the data set from which images are drawn: "tuning", "validation" or "report". Rows of tables are always of the
    report part. Raises ValueError for the table "adult" without its file in --data.
    """
    count = setting.clients * setting.examples
    if setting.data in ("adult", "breast_cancer"):
        table = load_table(options, setting.data, count)
        if table is None:
            raise ValueError(f"--data must name a folder with adult/adult.csv.gz, got {options.data}")
        images = table
    else:
        images = load_images(options, setting.data, count, part=part)
    network = _make_network(images, setting, options.seed)
    pairs = right = exact = with_relu = recovered = wrong = certain = false = null = answers = 0
    spent = [0.0, 0.0]
    for number in range(setting.clients):
        own = images.of(range(number * setting.examples, (number + 1) * setting.examples))
        case, used = record_epochs(
            network, own, setting.batch, setting.epochs, f"c{number}", seed=options.seed + number, defense=setting.defense
        )
        with measure_cpu() as clock:
            checked = _count_right_pairs(case, used, options)
        spent[0] += clock.seconds
        pairs, right = pairs + checked[0], right + checked[1]
        alone = run_spans(case, options, relu=False)
        with measure_cpu() as clock:
            whole = run_spans(case, options, relu=True)
        spent[1] += clock.seconds
        exact += count_exact(alone, own.x)
        with_relu += count_exact(whole, own.x)
        recovered += count_exact(None if whole is None else keep_first(whole, len(own)), own.x, SUCCESS_DB)
        answers += 0 if whole is None else len(whole.x)
        false_here, certain_here = count_false(whole, own.x)
        false, certain = false + false_here, certain + certain_here
        wrong += count_wrong(whole, own.x)
        grey = spans().null()([case], rng=Generator().manual_seed(options.seed))[0]
        null += count_exact(grey, own.x)
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
        "accuracy": network.measure_accuracy(images),
        "pairs": pairs,
        "overlap_exact": right / pairs,
        "expected_two_epochs": (1 - (b - 1) / (n - 1)) ** (b - 1),
        "intersections": exact / total,
        "with_relu": with_relu / total,
        "recovered": recovered / total,
        "null": null / total,
        "certain": certain,
        "answers": answers,
        "certain_and_wrong": false,
        "below_60_db": wrong,
        "cpu_seconds": spent[1],
        "part": images.part,
    }


def run_spans(case: Case, options: Options, *, relu: bool) -> Reconstruction | None:
    """Return the reconstruction by `spans`, or None if the attack recovers no example or cannot attack the case.

    relu: whether the attack also looks for the remaining examples of a batch, by the neurons whose ReLU is zero for them and by
    independent component analysis.
    """
    try:
        return replace(spans(relu=relu, components=relu), device=options.device)(
            [case], rng=Generator().manual_seed(options.seed)
        )[0]
    except ValueError:
        return None


def measure_best(found: Tensor, x: Tensor) -> Tensor:
    """Return the PSNR in dB between M > 0 reconstructions, first clamped to [0, 1], and N originals, as a matrix (M, N)."""
    return torch.stack([psnr(one.expand_as(x), x) for one in found.clamp(0, 1)])


def count_exact(found: Reconstruction | None, x: Tensor, least: float = EXACT_DB) -> int:
    """Return the number of originals x to which some reconstruction has a PSNR above `least` dB; 0 if `found` is None."""
    if found is None or not len(found.x):
        return 0
    return int((measure_best(found.x, x).amax(dim=0) > least).sum())


def count_wrong(found: Reconstruction | None, x: Tensor) -> int:
    """Return the number of reconstructions whose PSNR to every original in x is at most `EXACT_DB`; 0 if `found` is None."""
    return 0 if found is None else int((measure_best(found.x, x).amax(dim=1) <= EXACT_DB).sum())


def count_false(found: Reconstruction | None, x: Tensor, success: float = SUCCESS_DB) -> tuple[int, int]:
    """Count the reconstructions with a confidence above 0.9: return how many of these are wrong, and how many there are in all.

    A reconstruction is wrong if its PSNR is at most `success` dB to every original in x (N, *shape).
    """
    if found is None:
        return 0, 0
    sure = found.confidence > 0.9
    best = measure_best(found.x, x).amax(dim=1)
    return int((sure & (best <= success)).sum()), int(sure.sum())


def _make_network(images: Images, setting: SpanSetting, seed: int) -> RecordedNetwork:
    training = Training(learning_rate=LEARNING_RATE, batch_size=setting.batch, steps=1)
    network = make_network(images.data, training, hidden=setting.hidden, seed=seed)
    if setting.state == "trained":
        return train_network(network, images, steps=TRAINING_STEPS, seed=seed)
    shares = {"half dead": 0.5, "90 % dead": 0.9}
    return kill_neurons(network, shares[setting.state]) if setting.state in shares else network


def _count_right_pairs(case: Case, used: list[list[int]], options: Options) -> tuple[int, int]:
    """Return the number of pairs of rounds, and of those for which the attack finds the true number of examples that both use.

    used: for each round, the indices of its examples.
    """
    rng = Generator().manual_seed(options.seed)
    found = count_all_shared(compute_spaces(case, require_input_layer(case.observations[0]), rng), rng)
    truth = torch.tensor([[len(set(one) & set(other)) for other in used] for one in used])
    i, j = torch.combinations(torch.arange(len(used))).T
    return len(i), int((found[i, j] == truth[i, j]).sum())

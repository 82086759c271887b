"""AGIC on the full ResNet20-4: the effect of layer weights, a second epoch, linking and the one-batch approximation.

Linking finds out which examples of different rounds are the same image.

    layers    equal weights compared with layer weights on single images, 1,000 iterations with step decay (--short: 500,
              --long: 3,000)
    shapes    the weight functions of AGIC's table I, on batches of 4
    epochs    one round compared with two rounds that use the same image in different epochs, attacked together (table VI)
    matching  linking two shuffled epochs, by features with optimal assignment and greedily, and by reconstructed images with
              optimal assignment and, as published, greedily (table V)
    fedavg    local training treated as one step on one batch, compared with its simulation, for 1, 2, 4 and 8 local steps on 8
              images (figure 8)
    clients   clients with 12 images and two epochs each on CPL's LeNet, in batches of 1 (24 rounds), or of 4 in the second epoch
              (15 rounds): one search over all rounds, with closed forms tried before it, and for batches of 1 also
              without closed forms
    beyond    three options that AGIC lacks (support/agic/beyond.py), on CPL's LeNet

Images are CIFAR-10 and CIFAR-100 from --data, or embedded photographs. Narrow networks and short runs hide or reverse the effect
of layer weights, so `--quick` only checks that everything runs. If no table is named, all tables except shapes, clients and
beyond run.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from support.agic import beyond, linking, whole_clients
from support.agic.clients import ResNetFederation
from support.attacked import PUBLISHED_SEARCH, match_images, run_attack
from support.contract import Options, ResultRow, measure_cpu, parse_options, print_results
from support.single_cases import LocalClient, make_client
from support.splits import Images, load_images

from attacker.attacks import Case, exact
from attacker.attacks.linking import Links
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.layer_weights import weigh_by_depth
from attacker.attacks.papers.agic import agic
from attacker.scoring.metrics import psnr

TABLES = ("layers", "epochs", "matching", "fedavg", "shapes", "clients", "beyond")


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=TABLES, flags=("short", "long"))
    rows: list[ResultRow] = []
    summary: dict[str, Any] = {}
    by_name = {"layers": measure_layers, "shapes": measure_shapes, "epochs": measure_epochs, "fedavg": measure_fedavg}
    by_name |= {"matching": linking.measure_linking, "beyond": beyond.measure_beyond, "clients": whole_clients.measure_clients}
    for table in [options.table] if options.table else TABLES[:4]:
        more, found = by_name[table](options)
        rows, summary = rows + [{"table": table, **row} for row in more], summary | found
    print_results("agic", rows, summary, options)


def measure_layers(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Compare equal weights of all layers with AGIC's weights that grow with depth, by the PSNR of searches on single images."""
    count, steps = (
        (1, 3) if options.quick else (8, 3000 if "long" in options.flags else 500 if "short" in options.flags else 1000)
    )
    images, of = load_images(options, "cifar10", count), _make_client(options, "cifar10", count)
    cases = [of.make_case([(images.x[i : i + 1], images.y[i : i + 1])], f"image-{i}") for i in range(count)]
    rows = [_attack_cases(options, make_search(steps, beta), cases, images, weights=f"beta {beta:g}") for beta in (1.0, 50.0)]
    equal, weighed = rows
    paper = [
        {"source": "AGIC, table IV, 10,000 iterations", "weights": w, "psnr": p} for w, p in (("equal", 20.67), ("AGIC", 31.34))
    ]
    return [*rows, _measure_router(options, cases), *paper], {"layer_gain_db": weighed["psnr"] - equal["psnr"]}


def measure_shapes(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Compare the layer-weight functions of AGIC's table I on batches of 4 images.

    Weights are constant, or run from 1 to 2 or from 1 to 0.5 by depth. Then all of them, also the constant ones, are enlarged for
    layers whose gradient has many zeros (`weigh_by_depth`).
    """
    count, steps = (1, 2) if options.quick else (2, 300)
    images, of = load_images(options, "cifar10", 4 * count), _make_client(options, "cifar10", 4)
    cases = [of.make_case([(images.x[4 * i : 4 * i + 4], images.y[4 * i : 4 * i + 4])], f"batch-{i}") for i in range(count)]
    ranges = [("constant", 1.0, 14.836), *((s, b, p) for s, b, p in PAPER_SHAPES)]
    rows = [
        _attack_cases(
            options,
            make_search(steps, 1.0).copy_with(layers=weigh_by_depth(beta, shape)),
            cases,
            images,
            weights=f"{shape} to {beta:g}",
        )
        | {"paper": paper}
        for shape, beta, paper in ranges
    ]
    return [*rows, _measure_router(options, cases)], {}


PAPER_SHAPES = (
    ("log", 0.5, 14.182),
    ("exp", 0.5, 14.727),
    ("linear", 0.5, 14.354),
    ("exp", 2.0, 15.255),
    ("log", 2.0, 15.505),
    ("linear", 2.0, 15.601),
)


def measure_epochs(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Compare attacks on the first and on the second round of a client with one image to an attack on both rounds.

    Between the two rounds, the global model is trained on other images. The attack is told that both rounds hold the same image.
    """
    large = options.device != "cpu"
    count, steps, between = (1, 3, 1) if options.quick else (8, 3000, 30) if large else (3, 300, 30)
    images = load_images(options, "cifar100", count)
    federation = ResNetFederation(options, images.data)
    first = [federation.observe_client(images, [i], round=1) for i in range(count)]
    federation.train(options, between, images)
    second = [federation.observe_client(images, [i], round=2) for i in range(count)]
    both = Links((torch.tensor([0]), torch.tensor([0])), torch.ones(1), epochs=(1, 2))
    sets: dict[str, list[Case]] = {
        "1": [Case((o,)) for o in first],
        "2": [Case((o,)) for o in second],
        "1 and 2": [Case(pair, links=both) for pair in zip(first, second, strict=True)],
    }
    rows = [
        _attack_cases(options, make_search(steps, 50.0), cases, images, epochs=name, links="told" if "and" in name else "")
        for name, cases in sets.items()
    ]
    paper = zip(sets, (20.379, 19.085, 21.464), strict=True)
    rows += [
        {"source": "AGIC, table VI, equal weights, 10,000 iterations", "epochs": name, "psnr": value} for name, value in paper
    ]
    return rows, {"epoch_gain_db": rows[2]["psnr"] - rows[0]["psnr"]}


def measure_fedavg(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Attack updates of eight images in 1, 2, 4 or 8 local steps with learning rate 1e-4 (--quick: two images).

    The attack treats the local steps as one step on one batch or, in a second row, simulates them one by one.
    """
    count, steps = (2, 2) if options.quick else (8, 3000) if options.device != "cpu" else (8, 30)
    images = load_images(options, "cifar10", count)
    rows = []
    for local in (1, count) if options.quick else (1, 2, 4, 8):
        of = _make_client(options, "cifar10", count, steps=local)
        size = count // local
        batches = [(images.x[i : i + size], images.y[i : i + size]) for i in range(0, count, size)]
        case = of.make_case(batches, f"steps-{local}")
        for way in ("one_batch", "simulated"):
            attack = make_search(steps, 50.0).copy_with(local_steps=way)
            rows.append(_attack_cases(options, attack, [case], images, local_steps=local, way=way))
    one, simulated = rows[-2:]
    ratio = simulated["cpu_seconds"] / one["cpu_seconds"]
    return rows, {"simulation_ratio": ratio, "one_batch_loss_db": simulated["psnr"] - one["psnr"]}


def make_search(steps: int, beta: float) -> GradientMatching:
    """Return AGIC's search for all examples of a case (rounds that are attacked together), without the linking of rounds.

    steps: maximum number of iterations.
    beta: weight of the last convolution relative to the first, see `weigh_by_depth`; 1 means equal layer weights, as in Inverting
    Gradients. Other values also enlarge the weights of layers whose gradient has many zeros. The total variation and the signed
    steps are those of the paper.
    """
    return agic(steps=steps, beta=beta, relu_modifier=beta != 1, signed=True, tv=1e-4, **PUBLISHED_SEARCH).matching


def _make_client(options: Options, name: str, batch: int, steps: int = 1) -> LocalClient:
    """Return a client with an untrained ResNet20-4 for the data set `name`, which trains with learning rate 1e-4.

    batch: number of examples per round, in `steps` local steps of equal size.
    """
    of = make_client("resnet20_4", load_images(options, name, 1).data, seed=options.seed)
    return replace(of, training=replace(of.training, learning_rate=1e-4, batch_size=batch // steps, steps=steps))


def _measure_router(options: Options, cases: Sequence[Case]) -> ResultRow:
    """Return one row on the closed forms that the attack `exact` tries before a search, run here without the search.

    For the first case, the row holds the name of the closed form that gave the answer and the mean confidence of this answer, or
    why no closed form applies. The CPU time is the sum over all cases.
    """
    with measure_cpu() as clock:
        try:
            answers, _ = run_attack(exact(fallback="none"), cases, options)
            outcome = f"{answers[0].route}, confidence {float(answers[0].confidence.mean()):.2g}"
        except ValueError as error:
            outcome = f"no closed form ({str(error).split(';')[0]}): the search as above"
    return {"source": "measured", "weights": "router", "each": outcome, "cpu_seconds": clock.seconds}


def _attack_cases(options: Options, attack: GradientMatching, cases: Sequence[Case], truth: Images, **columns: Any) -> ResultRow:
    """Attack the cases, which have equally many images of `truth`; return a row with `columns`, the mean PSNR and each PSNR."""
    answers, seconds = run_attack(attack, cases, options)
    size = len(truth) // len(cases)
    values = psnr(match_images(answers, truth.x.split(size)), truth.x).tolist()
    labels = [answer.y.tolist() == sorted(y.tolist()) for answer, y in zip(answers, truth.y.split(size), strict=True)]
    return {
        "source": "measured",
        "data": truth.name,
        **columns,
        "iterations": attack.search.steps,
        "psnr": mean(values),
        "each": " ".join(f"{value:.1f}" for value in values),
        "labels": mean(labels),
        "cpu_seconds": seconds,
    }


if __name__ == "__main__":
    main()

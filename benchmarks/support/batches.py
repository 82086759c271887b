"""Rows of the tables `exact` and `cocktail` of batches.py, on images recovered from the gradient of a first linear layer.

The first has what closed forms recover from one client's update, or from several of the same examples. In the second, the attack
`cocktail_party` separates the images of a batch by independent component analysis.
"""

from dataclasses import asdict, dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacker.attacks import AttackSpec, Case
from attacker.reconstruction import Reconstruction
from fedsim.recording import Observation, Training
from support.attacked import run_attack
from support.contract import Options, ResultRow, measure_cpu
from support.matches import EXACT_DB, count_exact, count_false, measure_matches, run_if_applicable
from support.rounds.federation import make_mlp_client, pretrain
from support.single_cases import LocalBatch, LocalClient
from support.splits import Images, load_images

TRAINING_IMAGES, TRAINING_STEPS = 512, 300
SAME_EXAMPLES_DEFENSES = ("", "clip(max_norm=0.01)", "gaussian(snr_db=60)", "gaussian(snr_db=20)")
"""Defenses of the rows of several rounds of the same examples at the rate 0.01."""


@dataclass(frozen=True, kw_only=True)
class LargeBatch:
    """The settings of one row of the table.

    batch: number of examples of a step. width: of the hidden layer. network: "untrained" or "trained". steps: local steps of the
    client, each on a batch of its own. defense: specification such as "clip(4)"; "" for none. rate: learning rate.
    rounds: number of rounds. The client uses the same examples in all of them, and its update is added to the weights after each.
    draw: index of the row among rows with otherwise equal settings. The row leaves out the first draw * batch * steps images of
    the data, so that these rows share no image, and adds draw to the seed.
    """

    batch: int
    width: int
    network: str = "untrained"
    steps: int = 1
    defense: str = ""
    rate: float = 0.01
    rounds: int = 1
    draw: int = 0


def list_batch_settings(*, quick: bool) -> list[LargeBatch]:
    """Return the settings of all rows: several batch sizes, widths, trained networks and defenses; with `quick`, three."""
    if quick:
        four = LargeBatch(batch=32, width=512, network="trained", rate=0.05, rounds=4)
        return [LargeBatch(batch=32, width=256), LargeBatch(batch=32, width=256, defense="gaussian(snr_db=20)"), four]
    grid = [(16, 512), (32, 512), (64, 512), (64, 1024), (128, 1024), (128, 2048)]
    rows = [LargeBatch(batch=batch, width=width) for batch, width in grid]
    rows += [LargeBatch(batch=batch, width=512, network="trained") for batch in (8, 16, 32)]
    rows += [LargeBatch(batch=64, width=512, defense=f"gaussian(snr_db={db})") for db in (60, 40, 20)]
    rows += [LargeBatch(batch=64, width=512, defense="clip(max_norm=0.01)")]
    again = [LargeBatch(batch=32, width=512, network="trained", rate=0.05, rounds=4, draw=draw) for draw in range(5)]
    again += [LargeBatch(batch=32, width=512, network="trained", rate=0.05, rounds=rounds) for rounds in (1, 2)]
    again += [LargeBatch(batch=32, width=512, network="trained", rounds=4, defense=one) for one in SAME_EXAMPLES_DEFENSES]
    return [
        *rows,
        LargeBatch(batch=32, width=512, steps=2),
        *again,
        LargeBatch(batch=64, width=1024, network="trained", rate=0.05, rounds=4),
    ]


def make_batch_row(options: Options, setting: LargeBatch) -> ResultRow:
    """Return one row, whose columns batches.py describes."""
    count, seed = setting.batch * setting.steps, options.seed + setting.draw
    images = load_images(options, "cifar10", count, skip=setting.draw * count)
    client = _make_client(options, images, setting, seed)
    x = images.x.split(setting.batch)
    case = _make_case(client, list(zip(x, images.y.split(setting.batch), strict=True)), setting, count)
    with measure_cpu() as clock:
        found = _attack(case, options, null=False)
    null = _attack(case, options, null=True)
    false_certificates, certified = count_false(found, images.x, EXACT_DB)
    return {
        **asdict(setting),
        "defense": setting.defense or "none",
        "accuracy": client.measure_accuracy(images),
        "exact": count_exact(found, images.x) / count,
        "certified": certified,
        "false_certificates": false_certificates,
        "null": count_exact(null, images.x) / count,
        "cpu_seconds": clock.seconds,
        "part": images.part,
    }


def _make_client(options: Options, images: Images, setting: "LargeBatch | SeparatedBatch", seed: int) -> LocalClient:
    """Return a client with the network of a row, untrained or trained on images of the tuning part."""
    training = Training(learning_rate=setting.rate, batch_size=setting.batch, steps=setting.steps)
    client = make_mlp_client(images.data, training, hidden=setting.width, seed=seed)
    if setting.network == "untrained":
        return client
    others = load_images(options, "cifar10", TRAINING_IMAGES, part="tuning")
    return pretrain(client, others, steps=TRAINING_STEPS, seed=seed)


def _make_case(client: LocalClient, batches: list[LocalBatch], setting: LargeBatch, count: int) -> Case:
    seen = list[Observation]()
    for number in range(1, setting.rounds + 1):
        update = client.compute_update(batches)
        seen.append(client.observe(update, number, "c0", ("c0",), count, setting.defense))
        client = client.add(seen[-1].update)
    return Case(tuple(seen))


def _attack(case: Case, options: Options, *, null: bool) -> Reconstruction | None:
    """Return the answer of an attack, or of its null; None if the attack does not apply.

    One round is attacked by `exact` with its closed form for a first linear layer, several rounds are attacked by `spans`.
    """
    name = "exact" if len(case.observations) == 1 else "spans"
    arguments = {"fallback": "none", "route": "linear"} if name == "exact" else {}
    attack = AttackSpec(name=name, arguments=arguments, null=null).build()
    return run_if_applicable(attack, case, options)


@dataclass(frozen=True, kw_only=True)
class SeparatedBatch:
    """The settings of one row of the table: a batch, the network that trains on it, and the attack.

    batch: number of images of the client's only step. width: of the hidden layer. network: "untrained" or "trained".
    criterion: objective of the separation: "likelihood", or "published" for the loss of the attack's paper.
    refine:    whether the attack, starting from the separated images, solves for exact ones.
    iterations: number of them with criterion "published"; "likelihood" ignores it.
    """

    batch: int
    width: int = 256
    network: str = "trained"
    steps: int = 1
    rate: float = 0.01
    criterion: str = "likelihood"
    refine: bool = True
    iterations: int = 25_000


def list_separated(*, quick: bool) -> list[SeparatedBatch]:
    """Return the settings of all rows, which differ in batch size, width, training, refinement and loss; `quick`: of two rows."""
    if quick:
        return [SeparatedBatch(batch=32), SeparatedBatch(batch=32, criterion="published", refine=False, iterations=200)]
    rows = [SeparatedBatch(batch=batch, refine=refine) for batch in (32, 64, 128) for refine in (False, True)]
    rows += [SeparatedBatch(batch=batch, network="untrained") for batch in (32, 64, 128)]
    rows += [SeparatedBatch(batch=batch, width=512) for batch in (32, 64)]
    return [*rows, SeparatedBatch(batch=32, criterion="published", refine=False)]


def make_separated_row(options: Options, setting: SeparatedBatch) -> ResultRow:
    """Attack one batch, and return a row on the PSNR of its images, whose columns batches.py describes."""
    images = load_images(options, "cifar10", setting.batch)
    case = _make_client(options, images, setting, options.seed).make_case([(images.x, images.y)], "c0")
    arguments = {"criterion": setting.criterion, "refine": setting.refine, "steps": setting.iterations}
    attack = AttackSpec(name="cocktail_party", arguments=arguments).build()
    (answer,), seconds = run_attack(attack, [case], options)
    (grey,), _ = run_attack(attack.null(), [case], options)
    best = {name: measure_assigned(one.x.clamp(0, 1), images.x) for name, one in (("attack", answer), ("null", grey))}
    return {
        **asdict(setting),
        "psnr": float(best["attack"].mean()),
        "median_psnr": float(best["attack"].median()),
        "above_null": float((best["attack"] > best["null"]).double().mean()),
        "above_20": float((best["attack"] > 20).double().mean()),
        "exact": float((best["attack"] > EXACT_DB).double().mean()),
        "null": float(best["null"].mean()),
        "cpu_seconds": seconds,
        "part": images.part,
    }


def measure_assigned(found: Tensor, x: Tensor) -> Tensor:
    """Return the PSNR (N,) of each original to the answer assigned to it, at most 100 dB; 0 for an original without an answer.

    No answer is assigned to two originals. Of all assignments, the one with the largest sum of these PSNR values is taken.
    found: answers (M, *shape). x: originals (N, *shape).
    """
    pairs = measure_matches(found, x)
    answers, originals = (torch.as_tensor(one) for one in linear_sum_assignment(-pairs.clamp(max=100).numpy()))
    best = torch.zeros(len(x)).index_put((originals,), pairs[answers, originals].float())
    return best.clamp(max=100)

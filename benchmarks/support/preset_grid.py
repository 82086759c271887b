"""Grid search over the settings of gradient-matching attacks, by family of networks, from which presets are chosen by hand.

For each family in `NETWORKS_OF_FAMILIES` (networks with ReLU, dense layers only, batch norm, or residual paths), all settings
attack the same updates of an untrained network: one step on a single example and, unless the attack refuses batches, one step on
a batch of four.
"""

from collections import defaultdict
from typing import Any

from torch import Tensor, cat

from attacker.attacks import ATTACKS
from attacker.scoring.metrics import is_recovered, mse
from fedsim import models
from support.attacked import PUBLISHED_SEARCH, match_examples, run_attack
from support.calibration import networks
from support.contract import Options, TableAndSummary
from support.cpl.cases import Originals, make_batch_cases
from support.single_cases import make_client
from support.splits import Images

NETWORKS_OF_FAMILIES = {
    "relu": f"{networks.__name__}:convnet",
    "dense": "mlp",
    "batch_norm": f"{networks.__name__}:resnet8",
    "residual": f"{networks.__name__}:residual",
}
"""One network per family; the family `sigmoid` has grids of its own in tuning.py."""
STEPS = 600
"""Iterations of a first-order search in the grid. Presets may use more, as quality does not fall with more iterations."""
SIGNED: dict[str, Any] = {"signed": True, "tv": 1e-4, **PUBLISHED_SEARCH}
FALLING: tuple[dict[str, Any], ...] = tuple(
    {"signed": False, "tv": tv, "colour": True, "continuation": 10.0} for tv in (1e-3, 3e-3, 1e-2)
)
SETTINGS_OF_ATTACKS: dict[str, tuple[dict[str, Any], ...]] = {
    "inverting_gradients": (
        SIGNED,
        *({"signed": False, "tv": tv, **PUBLISHED_SEARCH} for tv in (1e-4, 1e-3, 3e-3, 1e-2)),
        *FALLING,
    ),
    "cpl": (
        *({"optimiser": "adam", "distance": "cosine", "tv": tv, "steps": STEPS} for tv in (1e-4, 1e-3, 1e-2)),
        {"optimiser": "wolfe", "tv": 1e-5, "steps": 100},
        {"optimiser": "wolfe", "decoder": "smooth", "init": "smooth", "relative": True, "tv": 1e-6, "steps": 50},
        {"optimiser": "wolfe", "relative": True, "tv": 1e-6, "steps": 100},
    ),
    "agic": (
        SIGNED,
        *({"signed": False, "tv": tv, **PUBLISHED_SEARCH} for tv in (1e-3, 1e-2)),
        *FALLING,
    ),
    "dlg": ({"steps": 300, "restarts": 1}, {"steps": 300, "restarts": 3}),
    "idlg": ({"steps": 300, "restarts": 1}, {"steps": 300, "restarts": 3}),
}
BATCH_SIZES = (1, 4)
SINGLE_EXAMPLE_ATTACKS = ("idlg",)
"""Attacks that refuse batches, and are measured on single examples only."""


def measure_presets(options: Options, sets: list[Images]) -> TableAndSummary:
    """Measure every setting of every attack on every family of networks.

    Returns one row for each attack, setting and family, and an empty summary. A row is over the images of all data sets together,
    with a column of each score for each batch size. With --quick only the first setting of each attack is measured.
    sets: images of each data set.
    """
    rows = []
    for family, network in NETWORKS_OF_FAMILIES.items():
        originals = [_make_originals(network, data, size, options) for data in sets for size in BATCH_SIZES]
        for attack, settings in SETTINGS_OF_ATTACKS.items():
            own = originals[:: len(BATCH_SIZES)] if attack in SINGLE_EXAMPLE_ATTACKS else originals
            for setting in settings[:1] if options.quick else settings:
                row = {"family": family, "attack": attack, **setting}
                rows.append(row | _measure_setting(attack, setting, own, options))
                print(rows[-1], flush=True)
    return rows, {}


def _make_originals(network: str, data: Images, size: int, options: Options) -> Originals:
    if ":" in network:
        models.admit(network)
    client = make_client(network, data.data, seed=options.seed, batch=size)
    return make_batch_cases(data, client, size)


def _measure_setting(attack: str, setting: dict[str, Any], originals: list[Originals], options: Options) -> dict[str, Any]:
    """Return a row with the share of recovered examples and the median MSE over all examples, both for each batch size.

    The row also has the number of examples and the CPU-seconds, both summed over all batch sizes.
    attack: its name. setting: its arguments; `steps` is STEPS if it is not among them, and always 2 with --quick.
    """
    built = ATTACKS[attack](**{"steps": STEPS, **setting, **({"steps": 2} if options.quick else {})})
    found: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    seconds = 0.0
    for one in originals:
        answers, spent = run_attack(built, one.cases, options)
        seconds += spent
        found[len(one.x[0])] += [(match_examples(answer, x)[0], x) for answer, x in zip(answers, one.x, strict=True)]
    rows: dict[str, Any] = {}
    for size, pairs in found.items():
        guesses, truth = cat([guess for guess, _ in pairs]), cat([x for _, x in pairs])
        rows |= {f"recovered {size}": float(is_recovered(guesses, truth).float().mean())}
        rows |= {f"median_mse {size}": float(mse(guesses, truth).median())}
    return {**rows, "examples": sum(len(x) for pairs in found.values() for _, x in pairs), "cpu_seconds": seconds}

"""Grid searches that choose settings of attacks, on images of the tuning part only: `tuning.py TABLE`.

    inverting_gradients  gradients or only their signs, and the weight of total variation, on five networks
    presets              settings of matching attacks for networks with ReLU, residual paths, batch norm, or dense layers only
    batches              CPL's search with a smooth decoder on batches of the LeNet: plain, with total variation added, and with a
                         start from features
    features             the assumed smoothness of images, on batches of the LeNet
    give_up              losses early in searches that succeed and that fail
    confidence           the calibration curves of confidence, fitted to answers of attacks on many networks
    confidence_of_orders the curve of clients with several local batches whose order is inferred, checked on the validation part

In the first four tables, every row is one setting of a grid. The chosen presets are in attacker/attacks/presets.toml, and the
reasons in benchmarks/results/tuning-*.md. `--quick` runs a corner of each grid, and neither lists the images in tuned.json nor
writes curves.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.attacked import PUBLISHED_SEARCH, match_examples, match_images, run_attack
from support.calibration import networks
from support.calibration.curves import fit_confidence
from support.calibration.give_up import measure_early_losses
from support.calibration.orders import fit_order_confidence
from support.contract import Options, TableAndSummary, run_selected_table
from support.cpl.cases import Originals, make_batch_cases
from support.single_cases import make_client
from support.splits import Images, hash_example, load_images, record_tuned
from torch import Tensor, cat

from attacker.attacks import ATTACKS, GradientMatching, cpl, exact, inverting_gradients
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.matching import smooth_images
from attacker.scoring.metrics import is_recovered, mse
from fedsim import models

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
    "agic": (SIGNED, *({"signed": False, "tv": tv, **PUBLISHED_SEARCH} for tv in (1e-3, 1e-2)), *FALLING),
    "dlg": ({"steps": 300, "restarts": 1}, {"steps": 300, "restarts": 3}),
    "idlg": ({"steps": 300, "restarts": 1}, {"steps": 300, "restarts": 3}),
}
BATCH_SIZES = (1, 4)
SINGLE_EXAMPLE_ATTACKS = ("idlg",)
"""Attacks that refuse batches, and are measured on single examples only."""
NETWORK_EFFORT: dict[str, tuple[int, int]] = {
    "lenet_cpl": (4, 1200),
    "mlp": (4, 600),
    "cnn6": (2, 600),
    "lenet_rog": (2, 600),
    "resnet20_4": (2, 600),
}
"""Dict from a network to the number of images of each data set, and the number of steps, that take a few CPU-minutes."""
SIGN_SETTINGS: tuple[dict[str, Any], ...] = (
    {"signed": True, "tv": 1e-4, **PUBLISHED_SEARCH},
    *({"signed": False, "tv": tv, **PUBLISHED_SEARCH} for tv in (1e-4, 1e-3, 1e-2)),
    *({"signed": False, "tv": tv, "colour": True, "continuation": 1.0} for tv in (1e-3, 3e-3)),
    *({"signed": False, "tv": tv, "colour": True, "continuation": 10.0} for tv in (1e-3, 3e-3)),
)
SMOOTH_SEARCH: dict[str, Any] = {"decoder": "smooth", "init": "smooth", "relative": True}
SEARCH_SETTINGS: tuple[dict[str, Any], ...] = (SMOOTH_SEARCH, {**SMOOTH_SEARCH, "tv": 1e-6}, {**SMOOTH_SEARCH, "features": True})
NUM_SKIPPED_IMAGES = 200
"""Images of the tuning part that the table `batches` leaves out."""


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


def measure_signs(options: Options) -> TableAndSummary:
    """Measure Inverting Gradients on updates of one example, for each network, data set and setting of `SIGN_SETTINGS`.

    A setting says whether the search steps along the sign of the gradient, and the kind and weight of total variation. Returns
    one row for each, and an empty summary.
    """
    rows = []
    for name, (count, steps) in NETWORK_EFFORT.items():
        for data in draw_images(options, ("cifar10", "lfw"), 1 if options.quick else count):
            seen = make_client(name, data.data, seed=options.seed)
            originals = make_batch_cases(data, seen, 1)
            for setting in SIGN_SETTINGS[:1] if options.quick else SIGN_SETTINGS:
                used = 20 if options.quick else steps
                attack = inverting_gradients(steps=used, **setting)
                rows.append(
                    {"network": name, "data": data.name, **setting, "steps": used, **summarise_attack(attack, originals, options)}
                )
    return rows, {}


def measure_families(options: Options) -> TableAndSummary:
    """Measure settings of five attacks on four kinds of network, with four images of each data set.

    The kinds are those of the table `presets`: networks with ReLU, residual paths, batch norm, or dense layers only. Returns one
    row for each setting and kind, and an empty summary.
    """
    return measure_presets(options, draw_images(options, ("cifar10", "lfw"), 4))


def measure_searches(options: Options) -> TableAndSummary:
    """Measure CPL's search with a smooth decoder on batches of 8: plain, with total variation, and with a start from features.

    The features are the inputs of the last layer, computed for each example from the gradient of that layer. Returns one row for
    each of the three settings, and an empty summary.
    """
    rows = []
    for data in draw_images(options, ("cifar10",), 2 if options.quick else 16, skip=0 if options.quick else NUM_SKIPPED_IMAGES):
        originals = make_batch_cases(data, make_client("lenet_cpl", data.data, seed=options.seed), min(8, len(data)))
        for setting in SEARCH_SETTINGS[:1] if options.quick else SEARCH_SETTINGS:
            search = cpl(optimiser="wolfe", steps=2 if options.quick else 50, **setting)
            rows.append(
                {"data": data.name, **setting, "steps": search.search.steps, **summarise_attack(search, originals, options)}
            )
    return rows, {}


def measure_beliefs(options: Options) -> TableAndSummary:
    """Measure an attack that computes images from the features, for several values of two parameters of its prior on images.

    The features are the inputs of the last layer, computed for each example from the gradient of that layer. The parameters are
    the decay of an image's spectrum, and the variance of the differences between colour channels. Returns one row for each data
    set and pair of values, and an empty summary.
    """
    rows = []
    own = smooth_images.SPECTRAL_DECAY, smooth_images.COLOUR_VARIANCE
    for data in draw_images(options, ("lfw", "cifar10"), 2 if options.quick else 4):
        originals = make_batch_cases(data, make_client("lenet_cpl", data.data, seed=options.seed), len(data))
        for fall in (1.5,) if options.quick else (1.0, 1.5, 2.0):
            for colour in (0.1,) if options.quick else (0.3, 0.1, 0.03):
                smooth_images.SPECTRAL_DECAY, smooth_images.COLOUR_VARIANCE = fall, colour
                row = summarise_attack(exact(route="features", fallback="none"), originals, options)
                rows.append({"data": data.name, "fall": fall, "colour": colour, **row})
    smooth_images.SPECTRAL_DECAY, smooth_images.COLOUR_VARIANCE = own
    return rows, {}


def draw_images(options: Options, names: Sequence[str], count: int, *, skip: int = 0) -> list[Images]:
    """Return, for each data set in `names`, `count` images of its tuning part, after the first `skip` of the part.

    A data set without a file in the folder --data is replaced by an embedded data set. Images that are not embedded are added to
    `tuned.json`, except with --quick.
    """
    chosen = [load_images(options, name, count, part="tuning", skip=skip) for name in names]
    if not options.quick:
        for data in chosen:
            if data.part == "tuning":
                record_tuned("presets of attacks (tuning.py)", [hash_example(value) for value in data.to_bytes().numpy()])
    return chosen


def summarise_attack(attack: GradientMatching | ClosedForm, originals: Originals, options: Options) -> dict[str, Any]:
    """Run an attack on the cases of `originals`, and return columns of a table as a dict.

    The columns are the numbers of images and of batches, the share of images recovered, the median over all images of the mean
    squared error, and the CPU-seconds per image. An image is recovered if its mean squared error is at most `MAX_RECOVERED_MSE`.
    """
    answers, seconds = run_attack(attack, originals.cases, options)
    guesses, x = match_images(answers, originals.x), torch.cat(originals.x)
    return {
        "images": len(x),
        "batches": len(originals.x),
        "recovered": float(is_recovered(guesses, x).float().mean()),
        "median_mse": float(mse(guesses, x).median()),
        "cpu_seconds": seconds / len(x),
    }


TABLES: dict[str, Callable[[Options], TableAndSummary]] = {
    "inverting_gradients": measure_signs,
    "presets": measure_families,
    "batches": measure_searches,
    "features": measure_beliefs,
    "give_up": measure_early_losses,
    "confidence": fit_confidence,
    "confidence_of_orders": fit_order_confidence,
}


if __name__ == "__main__":
    run_selected_table("tuning", __doc__ or "", TABLES)

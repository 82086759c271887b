"""The cells on which confidence is calibrated and measured: lists of `Cell`, each an attack with network, data and defense."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from support.calibration.cases import NETWORKS_MODULE, Cell

RESNET_NAME, CONVNET_NAME, STRIDED_NAME = (f"{NETWORKS_MODULE}:{name}" for name in ("resnet8", "convnet", "strided"))
WOLFE_SETTINGS = {"optimiser": "wolfe", "tv": 3e-5}
SIGNED_SETTINGS = {"steps": 600}
LONG_UNSIGNED_SETTINGS = {"steps": 1000, "signed": False, "tv": 1e-3}
UNSIGNED_SETTINGS = {"steps": 400, "signed": False, "tv": 1e-3}


def format_noise(std: float) -> str:
    """Return the text of a defense that adds Gaussian noise of standard deviation `std` to each entry of an update.

    This equals noise on the gradient if the learning rate is 1.
    """
    return f"in_gradient_units(gaussian({std}), 1.0)"


def format_prune(keep: float) -> str:
    """Return the text of a defense that sends only the share `keep` of each tensor's entries, those of largest magnitude."""
    return f"top_k({keep})"


def exact(*, knows_defense: bool = True, **cell: Any) -> Cell:
    """Return a cell of the attack `exact` with its closed forms alone."""
    settings = {"fallback": "none"} if knows_defense else {"fallback": "none", "knows_defense": False}
    return Cell(attack="exact", settings=settings, **cell)


def _make_factory(attack: str) -> Callable[..., Cell]:
    return lambda settings, **cell: Cell(attack=attack, settings=settings, **cell)


cpl, dlg, inverting = _make_factory("cpl"), _make_factory("dlg"), _make_factory("inverting_gradients")
agic, exact_with_search = _make_factory("agic"), _make_factory("exact")

SINGLE_IMAGE_CELLS = [
    cpl({"steps": 40}, data="lfw", cases=4),
    cpl({"steps": 12}, data="cifar10", cases=6),
    inverting(LONG_UNSIGNED_SETTINGS, data="lfw", cases=3),
    inverting(UNSIGNED_SETTINGS, data="cifar10", cases=4),
    cpl({"steps": 30}, data="cifar100", half=True, cases=8),
    cpl({"steps": 40}, data="mnist", network="lenet_dlg", half=True, cases=6),
    dlg({"steps": 60}, data="cifar10", network="lenet_dlg", half=True, cases=8),
    dlg({"steps": 30}, data="lfw", half=True, cases=6),
    inverting(SIGNED_SETTINGS, half=True, cases=6),
    inverting({"steps": 2400}, network="lenet_dlg", data="lfw", half=True, cases=6),
    inverting(LONG_UNSIGNED_SETTINGS, data="cifar100", half=True, cases=6),
]
BATCH_CELLS = [
    cpl({**WOLFE_SETTINGS, "steps": 50}, data="lfw", batch=16, half=True, cases=2),
    cpl({**WOLFE_SETTINGS, "steps": 30}, data="lfw", batch=2, cases=3),
    cpl({**WOLFE_SETTINGS, "steps": 60}, data="cifar100", batch=4, half=True, cases=4),
    cpl({**WOLFE_SETTINGS, "steps": 60}, data="lfw", batch=8, half=True, cases=3),
    cpl({"steps": 40}, data="cifar10", batch=4, half=True, cases=3),
    inverting(SIGNED_SETTINGS, batch=4, half=True, cases=3),
    inverting(LONG_UNSIGNED_SETTINGS, data="lfw", batch=4, half=True, cases=3),
]
DEFENDED_CELLS = [
    *(cpl({"steps": 25}, data="lfw", half=True, defense=format_noise(std), cases=6) for std in (1e-4, 1e-3, 3e-3, 1e-2)),
    cpl({"steps": 25, "knows_defense": False}, data="lfw", half=True, defense=format_noise(1e-3), cases=5),
    cpl({"steps": 25, "knows_defense": False}, data="cifar10", half=True, defense=format_noise(1e-2), cases=5),
    cpl({"steps": 25}, data="cifar10", defense=format_noise(1e-3), cases=3),
    *(
        cpl({"steps": 25, "knows_defense": knows}, data="cifar100", half=True, defense=format_prune(keep), cases=4)
        for keep, knows in product((0.5, 0.2, 0.05), (True, False))
    ),
    inverting(UNSIGNED_SETTINGS, data="lfw", half=True, defense=format_noise(1e-3), cases=5),
    inverting(UNSIGNED_SETTINGS, data="cifar10", half=True, defense=format_prune(0.1), cases=5),
]
LOCAL_STEP_CELLS = [
    *(
        cpl({"steps": 25}, data="lfw", half=True, epochs=epochs, rate=rate, cases=5)
        for epochs, rate in ((2, 1e-3), (4, 1e-2), (2, 0.1))
    ),
    cpl({"steps": 25}, data="cifar10", steps=2, rate=1e-2, half=True, cases=4),
    cpl({**WOLFE_SETTINGS, "steps": 30}, data="cifar100", steps=4, rate=1e-3, half=True, cases=3),
    inverting(SIGNED_SETTINGS, epochs=2, batch=2, rate=0.1, half=True, cases=4),
    inverting(UNSIGNED_SETTINGS, data="lfw", steps=2, rate=0.01, half=True, cases=4),
    inverting(UNSIGNED_SETTINGS, data="lfw", epochs=2, rate=0.1, half=True, cases=6),
    cpl({"steps": 20, "local_steps": "simulated", "optimiser": "wolfe"}, epochs=2, rate=0.1, half=True, cases=4),
]
RELU_CELLS = [
    inverting(LONG_UNSIGNED_SETTINGS, network="cnn6", data="lfw", half=True, cases=6),
    inverting(LONG_UNSIGNED_SETTINGS, arguments={"activation": "relu"}, data="lfw", half=True, cases=8),
    inverting(LONG_UNSIGNED_SETTINGS, network=RESNET_NAME, data="lfw", half=True, cases=6),
    inverting(LONG_UNSIGNED_SETTINGS, network=CONVNET_NAME, data="cifar100", half=True, cases=6),
    inverting({"steps": 600}, network=STRIDED_NAME, data="cifar10", half=True, cases=6),
    cpl({"steps": 40}, network=STRIDED_NAME, data="lfw", half=True, cases=6),
    inverting(UNSIGNED_SETTINGS, network="lenet_rog", data="lfw", half=True, cases=5),
    cpl({"steps": 30}, network=CONVNET_NAME, data="cifar10", half=True, cases=5),
    inverting(UNSIGNED_SETTINGS, network=CONVNET_NAME, data="mnist", half=True, batch=2, cases=4),
    cpl({"steps": 40}, arguments={"activation": "tanh"}, data="mnist", half=True, cases=6),
    cpl({"steps": 30}, data="cifar10", warm=40, half=True, cases=6),
    inverting(UNSIGNED_SETTINGS, network=CONVNET_NAME, data="lfw", warm=40, half=True, cases=6),
    inverting(UNSIGNED_SETTINGS, network=RESNET_NAME, data="lfw", batch=4, half=True, cases=2),
    cpl({**WOLFE_SETTINGS, "steps": 20}, network=RESNET_NAME, data="cifar10", half=True, cases=3),
    inverting({"steps": 600}, network=RESNET_NAME, data="cifar10", half=True, cases=3),
]
EXACT_CELLS = [
    *(exact(network=name, data=data, half=True, cases=10) for name, data in (("lenet_dlg", "cifar10"), ("lenet_cpl", "lfw"))),
    exact(network="lenet_cpl", data="mnist", defense=format_noise(1e-4), cases=4),
    exact(network="lenet_dlg", data="lfw", defense=format_noise(1e-6), cases=4),
    exact(network="lenet_cpl", data="cifar10", epochs=2, rate=0.01, cases=4),
    exact(network="cnn6_d", data="lfw", two_classes=True, half=True, cases=6),
    exact(network="cnn6", data="cifar10", half=True, cases=10),
    exact(network="cnn6", data="lfw", two_classes=True, half=True, cases=8),
    Cell(attack="rgap", network="cnn6_d", data="cifar10", two_classes=True, cases=8),
    Cell(attack="rgap", network="cnn6", data="cifar100", cases=8),
    Cell(attack="rgap", network="cnn6", data="lfw", defense=format_noise(1e-6), cases=5),
    Cell(attack="rgap", network="cnn6", data="cifar10", defense=format_noise(1e-5), cases=5),
    Cell(attack="rgap", network="cnn6", data="cifar10", defense=format_noise(1e-3), cases=5),
    Cell(attack="rgap", network="cnn6", data="cifar10", epochs=2, rate=0.01, cases=5),
    Cell(attack="rgap", network="fcn3", data="mnist", cases=5),
    *(
        exact(network="mlp", data=data, batch=batch, cases=cases)
        for data, batch, cases in (("mnist", 1, 6), ("cifar10", 4, 4), ("lfw", 8, 3), ("cifar100", 16, 2), ("mnist", 32, 1))
    ),
    *(
        exact(network="mlp", data="lfw", batch=4, defense=defense, cases=3)
        for defense in (format_noise(1e-6), format_noise(1e-4), format_prune(0.1), "clip(1.0)")
    ),
    exact(network="mlp", data="cifar10", batch=4, steps=2, rate=0.05, cases=2),
    exact(network="mlp", arguments={"hidden": (32,)}, data="cifar10", batch=8, cases=3),
    exact(network="mlp", arguments={"hidden": (64, 64)}, data="mnist", batch=8, cases=3),
    *(
        exact(network="lenet_dlg", arguments={"channels": width}, data=data, half=True)
        for width, data in ((8, "lfw"), (6, "cifar10"), (5, "lfw"), (4, "cifar100"), (3, "lfw"), (2, "mnist"))
    ),
    *(
        Cell(attack="rgap", network="lenet_dlg", arguments={"channels": width}, data=data, half=True)
        for width, data in ((8, "cifar10"), (5, "lfw"), (3, "cifar100"))
    ),
    *(
        exact(network="lenet_dlg", arguments={"channels": width}, defense=format_noise(std), half=True)
        for width, std in ((8, 1e-5), (6, 1e-4), (6, 1e-6), (4, 1e-3))
    ),
    *(exact(network="lenet_dlg", arguments={"channels": width}, data="noise") for width in (12, 7, 5, 3)),
]
FEATURE_CELLS = [
    *(
        exact(network=name, data=data, batch=batch, half=True, cases=cases)
        for name, data, batch, cases in (
            ("lenet_cpl", "lfw", 4, 4),
            ("lenet_dlg", "cifar10", 8, 2),
            ("lenet_cpl", "cifar100", 2, 4),
            (STRIDED_NAME, "lfw", 4, 3),
        )
    ),
    *(
        exact(data="cifar10", batch=4, defense=defense, half=True, cases=2)
        for defense in (format_noise(1e-5), format_noise(1e-4), format_noise(1e-3))
    ),
    exact(data="lfw", batch=2, steps=2, rate=0.01, half=True, cases=3),
    exact(data="mnist", batch=4, arguments={"channels": 6}, half=True, cases=3),
    exact(data="noise", batch=4, arguments={"channels": 8}, cases=2),
]
WARM_START_CELLS = [
    exact_with_search({"steps": 10}, data="lfw", batch=4, half=True, cases=2),
    exact_with_search({"steps": 10}, data="cifar10", batch=8, arguments={"channels": 8}, half=True, cases=1),
    exact_with_search({"steps": 10}, data="cifar100", batch=2, defense=format_noise(1e-3), half=True, cases=2),
    *(
        exact_with_search({"steps": 25}, network="lenet_cpl", data="lfw", defense=format_noise(std), half=True, cases=6)
        for std in (1e-5, 1e-4, 1e-3, 1e-2)
    ),
    exact_with_search({"steps": 25}, network="lenet_dlg", data="cifar10", defense=format_prune(0.2), half=True, cases=6),
    exact_with_search({"steps": 25}, network="cnn6", data="cifar10", defense=format_noise(1e-4), half=True, cases=6),
    exact_with_search({"steps": 40}, network="cnn6_d", data="lfw", half=True, cases=6),
    exact_with_search({"steps": 25}, network="lenet_cpl", data="cifar100", epochs=2, rate=0.01, half=True, cases=6),
    exact_with_search({"steps": 25}, network="lenet_cpl", data="cifar10", epochs=2, rate=0.1, half=True, cases=6),
    cpl({"steps": 25, "closed_form_start": True}, network="lenet_dlg", data="mnist", defense=format_noise(1e-3), cases=4),
    inverting({**UNSIGNED_SETTINGS, "closed_form_start": True}, network="cnn6_d", data="cifar10", half=True, cases=6),
    exact_with_search({"steps": 25}, network="mlp", data="lfw", batch=4, defense=format_noise(1e-3), cases=2),
    exact_with_search({"steps": 25}, network="mlp", arguments={"hidden": (32,)}, data="cifar10", batch=8, cases=2),
]
JOINT_SETTINGS = {"optimiser": "lbfgs", "distance": "euclidean", "beta": 1.0, "tv": 0.0}
JOINT_CELLS = [
    agic({**JOINT_SETTINGS, "steps": 25}, data="lfw", batch=2, rounds=6, rate=0.1, half=True, cases=4),
    agic({**JOINT_SETTINGS, "steps": 20}, data="cifar10", batch=2, rounds=4, rate=0.1, half=True, cases=5),
    agic({"steps": 400}, data="cifar100", batch=2, rounds=4, rate=0.1, half=True, cases=5),
    agic({"steps": 300}, data="lfw", batch=1, rounds=4, rate=0.1, half=True, cases=5),
    agic({"steps": 400}, network=RESNET_NAME, data="cifar10", batch=1, rounds=4, rate=0.1, half=True, cases=4),
    agic({"steps": 300}, network=CONVNET_NAME, data="lfw", batch=2, rounds=4, rate=0.1, half=True, cases=4),
    agic(
        {**JOINT_SETTINGS, "steps": 25}, data="mnist", batch=2, rounds=6, rate=0.1, half=True, defense=format_noise(1e-3), cases=4
    ),
]
TABULAR_CELLS = [
    *(
        Cell(attack=attack, settings=settings, network="mlp", data=data, cases=12)
        for (attack, settings), data in product(
            (
                ("cpl", {"steps": 15}),
                ("cpl", {"steps": 40}),
                ("dlg", {"steps": 40}),
                ("inverting_gradients", {"steps": 600, "tv": 0.0}),
            ),
            ("breast_cancer", "adult"),
        )
    ),
    cpl({"steps": 40}, network="mlp", data="breast_cancer", batch=4, cases=5),
    cpl({"steps": 40}, network="mlp", data="adult", batch=2, cases=6),
    *(
        cpl({"steps": 40}, network="mlp", data=data, defense=format_noise(std), cases=8)
        for data, std in product(("breast_cancer", "adult"), (1e-4, 1e-3, 1e-2))
    ),
    inverting({"steps": 600, "tv": 0.0}, network="mlp", data="adult", epochs=2, rate=0.1, cases=8),
    cpl({"steps": 40}, network="mlp", data="breast_cancer", steps=2, rate=0.1, cases=6),
    *(
        exact(network="mlp", data=data, batch=batch, defense=defense, cases=4)
        for data, batch, defense in product(("breast_cancer", "adult"), (1, 2, 4), ("", format_noise(1e-4), format_noise(1e-2)))
    ),
]
NULL_CELLS = [
    replace(cell, null=True, cases=2 * cell.cases)
    for cell in (
        *SINGLE_IMAGE_CELLS[::2],
        BATCH_CELLS[1],
        RELU_CELLS[4],
        RELU_CELLS[9],
        TABULAR_CELLS[0],
        TABULAR_CELLS[1],
        TABULAR_CELLS[7],
        EXACT_CELLS[0],
    )
]
DIFFICULT_CELLS = [
    # more or fewer examples than the client reports
    cpl({"steps": 40}, data="mnist", half=True, claimed=2, cases=4),
    cpl({"steps": 40}, data="cifar10", half=True, batch=4, claimed=2, cases=2),
    inverting(UNSIGNED_SETTINGS, data="cifar100", half=True, batch=2, claimed=1, cases=4),
    exact(network="lenet_dlg", data="lfw", half=True, batch=2, claimed=1, cases=6),
    exact(network="mlp", data="lfw", batch=4, claimed=2, cases=3),
    exact(network="mlp", data="mnist", batch=2, claimed=6, cases=3),
    exact(network="mlp", data="adult", batch=2, claimed=1, cases=6),
    # other sizes and data
    cpl({"steps": 40}, data="imagenet", side=24, cases=4),
    inverting(UNSIGNED_SETTINGS, network=CONVNET_NAME, data="imagenet", side=32, cases=4),
    cpl({**WOLFE_SETTINGS, "steps": 40}, data="lfw", side=24, batch=2, cases=2),
    exact(network="lenet_dlg", data="imagenet", side=20, cases=4),
    exact(network="mlp", data="imagenet", side=32, batch=8, cases=2),
    exact_with_search({"steps": 25}, data="imagenet", side=16, batch=2, cases=3),
    cpl({**WOLFE_SETTINGS, "steps": 40}, data="mnist", half=True, batch=8, cases=2),
    # two epochs, and defenses that the attack does not know
    cpl({"steps": 25}, data="mnist", half=True, epochs=2, rate=0.1, batch=2, cases=3),
    exact_with_search({"steps": 25}, data="cifar100", half=True, epochs=2, rate=0.05, cases=4),
    exact(network="mlp", data="cifar10", epochs=2, rate=0.1, batch=2, cases=3),
    exact(knows_defense=False, network="mlp", data="lfw", batch=2, defense=format_prune(0.3), cases=4),
    exact(knows_defense=False, network="lenet_dlg", data="lfw", half=True, defense=format_prune(0.5), cases=6),
    cpl(
        {"steps": 25, "knows_defense": False},
        data="lfw",
        half=True,
        batch=2,
        defense=f"clip(1.0) | {format_noise(3e-3)}",
        cases=3,
    ),
    # networks with few channels, for the route that peels off layers
    *(
        exact(network="lenet_dlg", arguments={"channels": width}, data=data, half=True, cases=6)
        for width, data in ((4, "lfw"), (3, "cifar10"), (5, "mnist"), (4, "noise"))
    ),
    exact(network="cnn6_d", data="cifar100", two_classes=True, half=True, cases=6),
    exact(network="lenet_dlg", arguments={"channels": 4}, data="cifar10", half=True, epochs=2, rate=0.01, cases=4),
    # tabular rows with noise on the gradient, and batches with more rows than the layer has units
    *(
        exact(network="mlp", data=data, batch=batch, defense=format_noise(std), cases=5)
        for data, batch, std in product(("breast_cancer", "adult"), (1, 2), (1e-5, 1e-3, 3e-3))
    ),
    *(exact(network="mlp", arguments={"hidden": (16,)}, data=data, batch=4, cases=4) for data in ("breast_cancer", "adult")),
    *(exact(network="mlp", data=data, batch=2, epochs=2, rate=0.05, cases=4) for data in ("breast_cancer", "adult")),
]
"""Difficult cells: wrong counts, other image sizes, epochs, unknown defenses, narrow networks."""
SHORT_SEARCH_CELLS = [
    *(
        inverting({"steps": steps, "give_up": 0.0}, network=network, data=data, half=True, cases=4)
        for steps in (5, 20, 50, 100, 200)
        for network, data in (
            ("lenet_cpl", "cifar10"),
            (CONVNET_NAME, "cifar100"),
            ("lenet_dlg", "mnist"),
            (STRIDED_NAME, "cifar10"),
        )
    ),
    *(
        cpl({"steps": steps}, network=network, data=data, half=True, cases=4)
        for steps in (2, 6)
        for network, data in (("lenet_cpl", "cifar10"), (STRIDED_NAME, "cifar100"))
    ),
]
"""Cells of searches that end long before they converge, as those do that a user or a budget stops."""
SMOOTH_SETTINGS = {
    "decoder": "smooth", "init": "smooth", "local_steps": "auto", "optimiser": "wolfe", "relative": True, "restarts": 3,
    "steps": 50, "tv": 1e-6,
}  # fmt: skip


def smooth(settings: Mapping[str, Any] = MappingProxyType({}), **cell: Any) -> Cell:
    """Return a cell of `cpl` as tuned for sigmoid and ReLU networks, with the decoder `smooth`. settings: other arguments."""
    return cpl({**SMOOTH_SETTINGS, **settings}, half=cell.get("data") != "noise", **cell)


SMOOTH_DECODER_CELLS = [
    *(smooth(data=data, cases=8) for data in ("lfw", "cifar10")),
    *(smooth(data=data, network="lenet_dlg", cases=8) for data in ("mnist", "cifar100")),
    *(smooth(arguments={"activation": name}, data="cifar10", cases=8) for name in ("relu", "tanh", "leaky_relu")),
    smooth(network=CONVNET_NAME, data="cifar10", cases=8),
    smooth(network=STRIDED_NAME, data="lfw", cases=8),
    smooth(network=f"{NETWORKS_MODULE}:smooth", data="cifar10", cases=8),
    *(smooth(data=data, batch=4, cases=4) for data in ("lfw", "cifar10")),
    smooth(network="lenet_dlg", data="cifar100", batch=8, cases=2),
    *(smooth(data="lfw", defense=format_noise(std), cases=6) for std in (1e-3, 3e-3, 1e-2)),
    smooth({"knows_defense": False}, data="lfw", defense=format_noise(1e-3), cases=6),
    *(smooth(data="cifar100", defense=format_prune(keep), cases=4) for keep in (0.2, 0.05)),
    smooth(data="lfw", epochs=2, rate=0.1, cases=6),
    smooth(data="cifar10", steps=2, rate=1e-2, cases=4),
    *(smooth(network="lenet_dlg", arguments={"channels": n}, data=data, cases=6) for n, data in ((5, "lfw"), (2, "mnist"))),
    smooth(data="noise", cases=4),
    smooth(network="lenet_dlg", arguments={"channels": 5}, data="noise", cases=4),
    smooth({"steps": 10, "restarts": 1}, data="lfw", cases=8),
    smooth({"steps": 20, "restarts": 1}, network=STRIDED_NAME, data="cifar100", cases=8),
    smooth(data="cifar10", batch=4, claimed=2, cases=2),
    smooth(network="lenet_dlg", data="lfw", batch=2, claimed=1, cases=6),
    *(smooth({"label_rule": "joint"}, network=name, data="lfw", cases=6) for name in ("lenet_cpl", "lenet_dlg")),
]
"""Cells of searches with the decoder `smooth`. No curve was fitted to their answers, which have that of searches in pixels."""
UNFITTED_NETWORK_CELLS = [
    cpl({"steps": 40}, network="lenet_dlg", arguments={"activation": "leaky_relu"}, data="lfw", half=True, cases=8),
    cpl({"steps": 40}, network=f"{NETWORKS_MODULE}:smooth", data="cifar10", half=True, cases=8),
    inverting(UNSIGNED_SETTINGS, network=f"{NETWORKS_MODULE}:smooth", data="lfw", half=True, cases=8),
    inverting(SIGNED_SETTINGS, network=f"{NETWORKS_MODULE}:smooth", data="cifar100", batch=2, half=True, cases=5),
    inverting(UNSIGNED_SETTINGS, network="lenet_dlg", arguments={"pooling": "mean"}, data="lfw", half=True, cases=6),
    exact_with_search({"steps": 25}, network="lenet_dlg", arguments={"channels": 8}, data="cifar10", half=True, cases=8),
]
"""Cells on which no curve was fitted. Their networks, except the one with 8 channels, are in no cell of `CELLS` either."""
CELLS = {
    "single": SINGLE_IMAGE_CELLS,
    "batches": BATCH_CELLS,
    "defended": DEFENDED_CELLS,
    "local": LOCAL_STEP_CELLS,
    "relu": RELU_CELLS,
    "exact": EXACT_CELLS,
    "features": FEATURE_CELLS,
    "started": WARM_START_CELLS,
    "joint": JOINT_CELLS,
    "rows": TABULAR_CELLS,
    "nulls": NULL_CELLS,
    "outside": DIFFICULT_CELLS,
    "short": SHORT_SEARCH_CELLS,
}

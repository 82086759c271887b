"""The published numbers of CPL's tables 1 to 9 (Wei et al. 2020).

Each table is a dict from the values, as text, of the columns that identify a row (such as data set and attack) to its numbers.
"""

from typing import Any

PaperTable = dict[tuple[str, ...], dict[str, Any]]

ITERATION_LIMITS = (10, 20, 30, 50, 100, 300)
_TABLE_1 = {
    ("lfw", "patterned"): (0, 0.34, 0.98, 1, 1, 1),
    ("lfw", "random"): (0, 0, 0, 0.562, 0.823, 0.857),
    ("cifar10", "patterned"): (0, 0.47, 0.93, 0.973, 0.973, 0.973),
    ("cifar10", "random"): (0, 0, 0, 0, 0.356, 0.754),
    ("cifar100", "patterned"): (0, 0, 0.12, 0.85, 0.981, 0.981),
    ("cifar100", "random"): (0, 0, 0, 0, 0.23, 0.85),
}
TABLE_1: PaperTable = {
    key: {f"at {limit}": asr for limit, asr in zip(ITERATION_LIMITS, row, strict=True)} for key, row in _TABLE_1.items()
}


def _make_rows(names: tuple[str, ...], table: dict[tuple[str, ...], tuple[float | None, ...]]) -> PaperTable:
    return {key: dict(zip(names, row, strict=True)) for key, row in table.items()}


TABLE_2 = _make_rows(
    ("iterations", "asr_c", "asr_l", "ssim", "mse"),
    {
        ("cifar10", "cpl"): (28.3, 0.973, 1, 0.9985, 2.2e-4),
        ("cifar10", "dlg"): (114.5, 0.754, 0.965, 0.9982, 2.5e-4),
        ("cifar10", "inverting_gradients"): (6725, 0.958, 1, 0.9984, 2.2e-4),
        ("cifar100", "cpl"): (61.8, 0.981, 1, 0.959, 5.4e-4),
        ("cifar100", "dlg"): (125, 0.85, 0.94, 0.953, 6.5e-4),
        ("cifar100", "inverting_gradients"): (6813, 0.978, 1, 0.958, 5.4e-4),
        ("lfw", "cpl"): (25, 1, 1, 0.998, 2.2e-4),
        ("lfw", "dlg"): (69.2, 0.857, 0.951, 0.997, 2.9e-4),
        ("lfw", "inverting_gradients"): (4527, 0.974, 1, 0.9978, 2.3e-4),
        ("mnist", "cpl"): (11.5, 1, 1, 0.99, 1.5e-5),
        ("mnist", "dlg"): (18.4, 0.686, 0.951, 0.985, 1.7e-5),
        ("mnist", "inverting_gradients"): (3265, 0.784, 1, 0.989, 1.6e-5),
    },
)

TABLE_3 = _make_rows(
    ("asr_c", "asr_l", "mse"),
    {
        ("adult", "cpl"): (1, 1, 1.82e-4),
        ("adult", "dlg"): (0.99, 1, 3.23e-4),
        ("adult", "inverting_gradients"): (1, 1, 4.97e-3),
        ("breast_cancer", "cpl"): (1, 1, 4.61e-4),
        ("breast_cancer", "dlg"): (0.35, 0.56, 6.15e-4),
        ("breast_cancer", "inverting_gradients"): (0.78, 0.94, 6.29e-4),
    },
)

START_NAMES = ("random", "patterned", "patterned4", "dark", "light", "red", "green", "blue", "insider")
_TABLE_4 = {
    "cifar10": ((91.14, 28.3, 24.8, 34, 52.3, 35.9, 77.5, 79.1, 23.2), (0.871, 0.973, 0.976, 0.99, 1, 0.99, 0.96, 0.96, 1)),
    "cifar100": ((125, 61.8, 57.2, 57.5, 65.3, 59.4, 61.3, 62.4, 35.3), (1, 0.981, 0.995, 1, 1, 1, 0.88, 1, 1)),
    "lfw": ((71.1, 25, 18.6, 34, 50.8, 20.3, 28, 42.1, 13.3), (0.86, 1, 0.997, 1, 1, 1, 1, 1, 1)),
}
TABLE_4: PaperTable = {
    (data, start): {"iterations": taken, "asr_c": asr}
    for data, (every, rates) in _TABLE_4.items()
    for start, taken, asr in zip(START_NAMES, every, rates, strict=True)
}

TABLE_5 = _make_rows(
    ("iterations", "least", "most", "variance"),
    {
        ("mnist", "patterned"): (11.5, 7, 19, 3.844),
        ("mnist", "random"): (18.4, 13, 65, 12.27),
        ("lfw", "patterned"): (25, 18, 125, 14.32),
        ("lfw", "random"): (69.2, 53, 186, 25.87),
        ("cifar10", "patterned"): (28.3, 17, 86, 18.11),
        ("cifar10", "random"): (114.5, 67, 272, 39.31),
        ("cifar100", "patterned"): (61.8, 24, 133, 25.3),
        ("cifar100", "random"): (125, 70, 240, 41.2),
    },
)

TABLE_6 = _make_rows(
    ("asr_c", "iterations", "ssim", "mse"),
    {
        ("lfw", "batch", "1"): (1, 25, 0.998, 2.2e-4),
        ("lfw", "batch", "2"): (0.96, 25.7, 0.635, 6.7e-3),
        ("lfw", "batch", "4"): (0.89, 25.6, 0.525, 8.0e-3),
        ("lfw", "batch", "8"): (0.76, 26.1, 0.456, 9.0e-3),
        ("lfw", "batch", "16"): (0.13, 25.7, 0.401, 1.0e-2),
        ("lfw", "local iterations", "1"): (1, 25, 0.998, 2.2e-4),
        ("lfw", "local iterations", "3"): (1, 42.5, 0.981, 6.8e-4),
        ("lfw", "local iterations", "5"): (0.97, 94.2, 0.898, 1.8e-3),
        ("lfw", "local iterations", "7"): (0.85, 95.6, 0.659, 3.8e-3),
        ("lfw", "local iterations", "9"): (0.39, 97.9, 0.471, 5.5e-3),
    },
)

PRUNED_PERCENT = (0, 1, 10, 20, 30, 40, 50, 70, 80, 90)
_TABLE_7 = {
    "lfw": (
        (25, 25, 24.9, 24.9, 25, 24.8, 25, 24.6, 24.5, 300),
        (1, 1, 1, 1, 1, 1, 1, 1, 1, 0),
        (0.998, 0.9996, 0.9997, 0.9978, 0.9978, 0.9975, 0.998, 0.9981, 0.951, 0.004),
        (2.2e-4, 1.8e-4, 1.7e-4, 4.9e-4, 4.8e-4, 5.1e-4, 4.5e-4, 4.6e-4, 1.6e-3, 1.6e-1),
    ),
    "cifar100": (
        (61.8, 61.8, 61.8, 61.7, 61.7, 61.8, 61.8, 60.1, 59.8, 300),
        (1, 1, 1, 1, 1, 1, 1, 1, 1, 0),
        (0.959, 0.9994, 0.9981, 0.9981, 0.998, 0.9983, 0.9982, 0.9983, 0.895, 0.016),
        (5.4e-4, 3.3e-4, 3.7e-4, 3.7e-4, 3.8e-4, 3.5e-4, 3.6e-4, 3.7e-4, 1.5e-3, 1.2e-1),
    ),
    "cifar10": (
        (28.3, 28.3, 28.1, 26.5, 25.8, 25.3, 300, 300, 300, None),
        (1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
        (0.9985, 0.9996, 0.9996, 0.9997, 0.9992, 0.87, 0.523, 0.0017, 0.0019, 0.0018),
        (2.2e-4, 1.3e-4, 1.2e-4, 1.2e-4, 2.1e-4, 3.1e-3, 9.6e-3, 0.33, 0.33, 0.33),
    ),
    "mnist": (
        (11.5, 11.5, 11.2, 10.7, 7.2, 300, 300, 300, 300, 300),
        (1, 1, 1, 1, 1, 0, 0, 0, 0, 0),
        (0.99, 0.9899, 0.9891, 0.9563, 0.9289, 0.8889, 0.8137, 0.425, 0.433, 0.43),
        (2.4e-4, 2.4e-4, 2.2e-4, 1.7e-3, 8.8e-3, 2.8e-2, 5.8e-2, 0.27, 0.27, 0.27),
    ),
}
TABLE_7: PaperTable = {
    (data, f"{share} %"): {"iterations": taken, "asr_c": asr, "ssim": similar, "mse": error}
    for data, columns in _TABLE_7.items()
    for share, taken, asr, similar, error in zip(PRUNED_PERCENT, *columns, strict=True)
}

TABLE_8 = _make_rows(
    ("iterations", "asr_c", "ssim", "mse"),
    {
        ("cifar100", "none"): (61.8, 1, 0.9995, 5.4e-4),
        ("cifar100", "G-10e-4"): (61.8, 1, 0.9976, 6.9e-4),
        ("cifar100", "G-10e-3"): (61.8, 1, 0.8612, 4.1e-3),
        ("cifar100", "G-10e-2"): (300, 0, 0.019, 0.30),
        ("cifar100", "L-10e-4"): (61.8, 1, 0.9956, 6.4e-4),
        ("cifar100", "L-10e-3"): (61.8, 1, 0.7309, 6.4e-3),
        ("cifar100", "L-10e-2"): (300, 0, 0.017, 0.31),
        ("lfw", "none"): (25, 1, 0.998, 2.2e-4),
        ("lfw", "G-10e-4"): (25, 1, 0.9976, 3.7e-4),
        ("lfw", "G-10e-3"): (25, 1, 0.8645, 3.0e-3),
        ("lfw", "G-10e-2"): (300, 0, 0.013, 0.19),
        ("lfw", "L-10e-4"): (25, 1, 0.9965, 4.0e-4),
        ("lfw", "L-10e-3"): (25, 1, 0.803, 3.9e-3),
        ("lfw", "L-10e-2"): (300, 0, 0.009, 0.20),
    },
)

_TABLE_9 = {
    "cifar10": (
        (28.3, 29.5, 31.6, 35.2, 42.5, 71.5, 115.3, 116.3, 117.2, 117.5),
        (0.973, 0.971, 0.921, 0.875, 0.835, 0.758, 0.612, 0.5, 0.406, 0.292),
        (0.9985, 0.9981, 0.997, 0.956, 0.915, 0.901, 0.893, 0.822, 0.748, 0.715),
        (2.2e-4, 2.5e-4, 2.9e-4, 1.1e-3, 2.4e-3, 2.5e-3, 2.7e-3, 3.0e-3, 4.5e-3, 5.0e-3),
    ),
    "cifar100": (
        (61.8, 63.8, 66.5, 72.4, 78.3, 95.3, 113.7, 114.1, 114.3, 114.4),
        (0.981, 0.977, 0.958, 0.949, 0.933, 0.893, 0.842, 0.78, 0.557, 0.437),
        (0.9959, 0.996, 0.996, 0.959, 0.907, 0.803, 0.771, 0.666, 0.557, 0.505),
        (5.4e-4, 5.8e-4, 6.9e-4, 1.1e-3, 1.7e-3, 2.2e-3, 3.5e-3, 4.2e-3, 6.4e-3, 6.9e-3),
    ),
    "lfw": (
        (25, 34.7, 42.5, 68.3, 94.2, 95.5, 95.6, 98.3, 97.9, 98.1),
        (1, 1, 1, 1, 0.97, 0.91, 0.85, 0.78, 0.39, 0.07),
        (0.998, 0.996, 0.981, 0.976, 0.898, 0.811, 0.659, 0.573, 0.471, 0.41),
        (2.2e-4, 4.3e-4, 6.8e-4, 8.6e-4, 1.8e-3, 2.8e-3, 3.8e-3, 4.3e-3, 5.5e-3, 6.5e-3),
    ),
    "mnist": (
        (11.5, 34.7, 93.2, 96.7, 97.1, 96.5, 300, 300, 300, 300),
        (1, 0.82, 0.57, 0.44, 0.25, 0.06, 0, 0, 0, None),
        (0.99, 0.982, 0.974, 0.963, 0.954, 0.935, 0.583, 0.576, 0.581, 0.574),
        (1.5e-5, 2.3e-4, 2.8e-4, 1.2e-3, 1.5e-3, 2.4e-3, 1.7e-2, 1.7e-2, 1.7e-2, 1.7e-2),
    ),
}
"""The last success rate of LFW is taken from the paper's text; the last success rate of MNIST is missing."""
TABLE_9: PaperTable = {
    (data, str(steps)): {"iterations": taken, "asr_c": asr, "ssim": similar, "mse": error}
    for data, columns in _TABLE_9.items()
    for steps, taken, asr, similar, error in zip(range(1, 11), *columns, strict=True)
}

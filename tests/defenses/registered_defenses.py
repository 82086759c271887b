"""Specifications of all registered defenses, and what each sends of an update with difficult tensors."""

import torch
from generators import seeded
from torch import Generator, Tensor

from defenses import DEFENSES, Defense, DefenseSpec, State, Update

NAMES = sorted(DEFENSES)
KINDS = {name: DEFENSES[name] for name in NAMES}
OTHERS = [
    "gaussian(snr_db=10)",
    "gaussian(snr_db=-5, scope='tensor')",
    "top_k(0.3, scope='global', error_feedback=True)",
    "random_k(0.3, scope='global', rescale=True)",
    "random_k(0.3, error_feedback=True)",
    "prune(threshold=0.5, error_feedback=True)",
    "gradient_dropout(0.5, rescale=True)",
    "gradient_dropout(0.5, error_feedback=True)",
    "dgc(0.3, clip_norm=1, workers=4, warm_up_rounds=3, masking=False, nesterov=True, dense_vectors=False)",
    "sign('mean', error_feedback=True)",
    "qsgd(2, norm='linf', kappa=0.5)",
    "uniform(2, stochastic=True)",
    "masked(top_k(0.3, error_feedback=True) | gaussian(0.1), ['*.weight', 'scalar'])",
    "in_gradient_units(dgc(0.3) | laplace(0.1), 0.1)",
    "clip(0.5) | gaussian(0.25)",
    "dgc(keep=0.25) | gaussian(0.01)",
    "",
]
"""Settings that the examples leave out: other scopes, states, units, random variants, and nested defenses."""
EXAMPLES = {name: f"{name}({KINDS[name].example})" for name in NAMES}
LIMITS = {name: f"{name}({KINDS[name].limit})" for name in NAMES if KINDS[name].limit is not None}
SPECS = [*EXAMPLES.values(), *LIMITS.values(), *OTHERS]
RANDOM = [name for name in NAMES if KINDS[name].random]


def update(dtype: torch.dtype = torch.float32, seed: int = 7) -> dict[str, Tensor]:
    """Return an update with difficult tensors: 0-d, empty, all zero, not contiguous, and with unsorted names."""
    drawn = Generator().manual_seed(seed)
    return {
        "z.weight": torch.randn(3, 4, generator=drawn).to(dtype),
        "scalar": torch.randn((), generator=drawn).to(dtype),
        "a.zero": torch.zeros(5, dtype=dtype),
        "empty": torch.zeros(0, 2, dtype=dtype),
        "turned": torch.randn(2, 3, generator=drawn).to(dtype).T,
    }


def apply_once(defense: Defense, given: Update, seed: int = 0) -> Update:
    """Return what a defense in its first state sends of an update."""
    return defense.apply(given, defense.init(given), seeded(seed))[0]


def run(spec: str, given: Update, seed: int = 0, rounds: int = 1) -> tuple[Update, State]:
    """Return what is sent in the last of several rounds with the same update, and the state after it."""
    defense = DefenseSpec.parse(spec).build()
    state, stream, sent = defense.init(given), seeded(seed), given
    for _ in range(rounds):
        sent, state = defense.apply(given, state, stream)
    return sent, state


def send(spec: str, given: Update, seed: int = 0) -> Update:
    return run(spec, given, seed)[0]


def same(a: Update, b: Update) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def look(given: Update) -> dict[str, tuple[torch.Size, torch.dtype, torch.device]]:
    return {name: (t.shape, t.dtype, t.device) for name, t in given.items()}


def sum_of(given: Update) -> Tensor:
    return torch.stack([t.sum() for t in given.values()]).sum()

"""Lower bounds on epsilon from guesses which of two canaries (test examples) a client used, beside the accountant's epsilon."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.contract import Options, ResultRow

from attacker.audit.canaries import guess_canaries
from attacker.scoring import Scorer
from defenses.privacy.accounting import compute_epsilon
from defenses.privacy.empirical import bound_epsilon_of_independent_guesses, bound_gaussian_epsilon, choose_guesses
from defenses.privacy.sensitivity import Noise
from fedsim.config.experiment import validate
from fedsim.engine import engines
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.round_metrics import read_metrics

DELTA = 1e-5
MECHANISMS = ((0.7, 1), (1.0, 1), (2.0, 1), (4.0, 1), (6.0, 9), (30.0, 100))
"""Noise multipliers and numbers of rounds.

In every round, each canary adds 1 or -1, by its coin, to a coordinate of its own; the noise multiplier is the standard deviation
of the noise on this coordinate.
"""
NUM_CANARIES = (1000, 10_000)
REPETITIONS = 200
FEDERATIONS = (1.0, 2.0, 4.0)
"""Noise multipliers of `dp_sgd` in federations on digits."""


def measure_canaries(options: Options, folder: Path) -> list[ResultRow]:
    """Return one row for each of `MECHANISMS` and number of canaries, and one for each of `FEDERATIONS`; with --quick fewer.

    folder: where the runs of the federations are written.
    """
    rows = [
        _measure_mechanism(options, multiplier, rounds, canaries)
        for multiplier, rounds in MECHANISMS[:: 3 if options.quick else 1]
        for canaries in NUM_CANARIES
    ]
    return rows + [_measure_federation(options, noise, folder) for noise in FEDERATIONS[: 1 if options.quick else None]]


def _measure_mechanism(options: Options, multiplier: float, rounds: int, canaries: int) -> ResultRow:
    accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=rounds)
    guesses = choose_guesses(canaries, epsilon=accounted, delta=DELTA)
    independent, general = [], []
    for seed in range(20 if options.quick else REPETITIONS):
        rng = np.random.default_rng((options.seed, seed))
        coins = rng.integers(0, 2, canaries) * 2 - 1
        seen = sum(coins + multiplier * rng.standard_normal(canaries) for _ in range(rounds))
        right = np.sign(seen) == coins
        surest = np.argpartition(-np.abs(seen), guesses - 1)[:guesses]
        independent.append(bound_epsilon_of_independent_guesses(int(right.sum()), canaries, delta=DELTA))
        if seed < 20:  # it takes seconds for many guesses
            general.append(bound_gaussian_epsilon(int(right[surest].sum()), guesses, canaries=canaries, delta=DELTA))
    return {
        "kind": "canaries",
        "federation": f"Gaussian mechanism, multiplier {multiplier:g}, {rounds} round{'s' * (rounds > 1)}",
        "canaries": canaries,
        "epsilon": accounted,
        "ratio of medians": float(np.median(independent)) / accounted,
        "ratio of 5 % quantiles": float(np.quantile(independent, 0.05)) / accounted,
        "above": float(np.mean(np.array(independent) > accounted)),
        "general ratio": float(np.median(general)) / accounted,
    }


def _measure_federation(options: Options, noise: float, folder: Path) -> ResultRow:
    settings: dict[str, Any] = {
        "rounds": 4,
        "model": {"name": "mlp", "hidden": [64]},
        "data": "digits",
        "clients": {"count": 6, "canaries": 100},
        "training": {"learning_rate": 0.1, "batch_size": 1000, "epochs": 1},
        "privacy": {"delta": DELTA},
        "gradient": f"dp_sgd(max_norm=0.5, noise={noise})",
        "seed": options.seed,
    }
    run = folder / f"canaries-{noise:g}"
    engines.run(FederationRun(experiment=validate(settings, source="canaries"), out=run, client_seed=1), engine="local")
    accounted = float(read_metrics(run)[-1]["privacy"]["epsilon"])
    guesses = guess_canaries(Scorer(run, [run / "truth"]), Recording(run / "recording"), epsilon=accounted, delta=DELTA)
    assert guesses is not None
    bound = partial(bound_epsilon_of_independent_guesses, guesses.right_of_all, guesses.canaries, delta=DELTA)
    return {
        "kind": "canaries",
        "federation": f"digits, dp_sgd(max_norm=0.5, noise={noise:g}), 4 rounds",
        "canaries": guesses.canaries,
        "epsilon": accounted,
        "right": guesses.right_of_all,
        "overlap": guesses.overlap,
        "ratio of medians": bound(overlap=guesses.overlap) / accounted,
    }

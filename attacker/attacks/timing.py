"""Measurement of the time of one evaluation of an attack's gradient, from which the cost of an attack is forecast."""

import time
from collections.abc import Callable

import torch

from attacker.attacks.base import Attack, Measurable
from attacker.attacks.cases import Case

MAX_WARM_UP_SECONDS = 0.5
"""Largest time in seconds of a first evaluation after which a second one is measured. The first one also fills caches, which
matters only if it is short."""


def time_evaluation(attack: Attack, case: Case) -> float | None:
    """Return the time of one evaluation as `Measurable.time_evaluation`; None if it cannot be measured.

    The state of PyTorch's random generators is left as it was.
    """
    if not isinstance(attack, Measurable):
        return None
    try:
        with torch.random.fork_rng():
            return attack.time_evaluation(case)
    except Exception:  # the attack itself reports the error; a user's network may fail in any way
        return None


def time_call(evaluate: Callable[[], object], device: str) -> float:
    """Call a function, and once more if the first call was short; return the seconds of the fastest call.

    On the CPU, it is the processor time of one thread, which hardly depends on other processes. (Several threads would wait for
    each other on a busy machine, and use processor time while they do.)
    """
    on_gpu = device.startswith("cuda")
    clock = time.perf_counter if on_gpu else time.process_time

    def measure() -> float:
        started = clock()
        evaluate()
        if on_gpu:
            torch.cuda.synchronize(torch.device(device))
        return clock() - started

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = measure()
        return first if first > MAX_WARM_UP_SECONDS else min(first, measure())
    finally:
        torch.set_num_threads(threads)

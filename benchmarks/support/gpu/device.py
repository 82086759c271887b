"""Searches on a GPU or another device: agreement with the CPU, memory, and iterations per second of many at once.

    agreement   median absolute difference between reconstructed values on the device and on the CPU, for several attacks
    memory      ratio of the peak memory of searches that run together to the memory planned for them
    lenet       iterations per second of 1 to 256 searches at once on DLG's LeNet
    resnet      iterations per second of 1 to 32 searches at once on ResNet20-4 (a ResNet-20 of four times the width), in
                float32 and with convolutions in bfloat16
    sharing     ratio of the time of two concurrent processes to the time of the same processes in sequence

Seconds are wall time, after synchronisation with the device. With `--quick`, and for speed also on a CPU, one or two searches
only check that the table runs. `make bench-gpu` starts this script, with the folder `benchmarks` on the path.
"""

import subprocess
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow, TableAndSummary, run_selected_table
from support.single_cases import LocalClient, make_image_cases

from attacker.attacks import AttackSpec, Case, inverting_gradients
from attacker.attacks.gradients.hardware import get_fast_dtype
from attacker.replay.batching import LIVE_TENSORS

COMPARED_ATTACKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("inverting_gradients", "lenet_dlg", {"steps": 2}),
    ("cpl", "lenet_cpl", {"steps": 3}),
    ("dlg", "lenet_dlg", {"steps": 3}),
    ("inverting_gradients", "resnet20_4", {"steps": 10}),
    ("exact", "mlp", {}),
    ("rgap", "lenet_dlg", {}),
)


def measure_agreement(options: Options) -> TableAndSummary:
    """Run each of `COMPARED_ATTACKS` on the device and on the CPU with the same seed; return rows with the median difference."""
    rows = []
    for name, network, arguments in COMPARED_ATTACKS[:1] if options.quick else COMPARED_ATTACKS:
        made = make_image_cases(options, network, 2)[1]
        attack = AttackSpec(name=name, arguments=arguments).build()
        placed = (options, replace(options, device="cpu"))
        found = [torch.cat([answer.x for answer in run_attack(attack, made, where)[0]]) for where in placed]
        difference = (found[0] - found[1]).abs()
        row: ResultRow = {
            "attack": name,
            "network": network,
            "device": options.device,
            "median_difference": float(difference.median()),
        }
        rows.append(row | {"finite": bool(found[0].isfinite().all())})
    return rows, {"largest_median_difference": max(row["median_difference"] for row in rows)}


def measure_memory(options: Options) -> TableAndSummary:
    """Measure the ratio of the peak GPU memory of searches that run together to the memory planned for them.

    Returns a row for each network and number of searches, and a summary with the largest ratio. Above 1, a replay (the attack on
    a recording) may run too many searches together. On a CPU the ratio is not measured: it is None in the rows and 0 in the
    summary.
    """
    rows = []
    for network in ("lenet_dlg",) if options.quick else ("lenet_dlg", "lenet_cpl", "resnet20_4"):
        for count in (1,) if options.quick else (1, 8, 64):
            of, made, _ = make_image_cases(options, network, count)
            parameters = sum(weight.numel() for weight in of.weights.values())
            if options.device != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            _run_search(options, made, 3)
            peak = torch.cuda.max_memory_allocated() / 1e6 if options.device != "cpu" else None
            planned = 4e-6 * count * _count_planned_values(of)
            row: ResultRow = {
                "network": network,
                "searches": count,
                "parameters": parameters,
                "planned_mb": planned,
                "peak_mb": peak,
            }
            rows.append(row | {"peak_over_plan": None if peak is None else peak / planned})
    return rows, {"largest_peak_over_plan": max((row["peak_over_plan"] or 0.0 for row in rows), default=0.0)}


def _count_planned_values(of: LocalClient) -> float:
    """Return the number of tensor elements that a replay plans for a search for one example.

    It is `LIVE_TENSORS` times the number of the network's parameters and of its activations for one example.
    """
    from attacker.replay.batching import count_activations
    from fedsim import models

    layout = models.build_layout(of.model, of.data)
    values = sum(weight.numel() for weight in of.weights.values())
    return LIVE_TENSORS * (values + count_activations(layout, of.data.shape))


def measure_speed(options: Options) -> TableAndSummary:
    """Measure the iterations per second, summed over searches that run at once, without the time to start.

    Returns a row for each number of searches and each precision, and a summary with the largest rate.
    """
    network = "lenet_dlg" if options.table == "lenet" else "resnet20_4"
    if options.quick or options.device == "cpu":
        counts, iterations = (1, 2) if network == "lenet_dlg" else (1,), 2
    else:
        counts, iterations = (1, 8, 64, 256) if network == "lenet_dlg" else (1, 8, 32), 100
    ways = (0.0, 0.999) if network == "resnet20_4" and get_fast_dtype(options.device) is not None else (0.0,)
    rows = []
    for count in counts:
        _, made, _ = make_image_cases(options, network, count)
        for coarse in ways:
            if not options.quick:
                _run_search(options, made, 2, coarse)  # loads code
            seconds = _measure_time(options, made, iterations + 1, coarse) - _measure_time(options, made, 1, coarse)
            row: ResultRow = {"network": network, "searches": count, "precision": "bfloat16" if coarse else "float32"}
            rows.append(row | {"iterations_a_second": count * iterations / seconds if seconds > 0 else None})
    return rows, {"most_iterations_a_second": max(row["iterations_a_second"] or 0.0 for row in rows)}


def measure_sharing(options: Options) -> TableAndSummary:
    """Measure the wall time of two concurrent processes with searches, divided by their wall time one after the other."""
    words = [sys.executable, __file__, "lenet", "--quick", "--device", options.device]

    def measure_time(at_once: bool) -> float:
        started, running = perf_counter(), []
        for _ in range(2):
            running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
            if not at_once:
                running[-1].wait()
        if any(process.wait() for process in running):
            raise RuntimeError("one of the measured processes failed; see its output above")
        return perf_counter() - started

    in_turn, together = measure_time(False), measure_time(True)
    return [{"in_turn_seconds": in_turn, "at_once_seconds": together}], {"at_once_over_in_turn": together / in_turn}


def _measure_time(options: Options, made: list[Case], iterations: int, coarse: float) -> float:
    started = perf_counter()
    _run_search(options, made, iterations, coarse)
    return perf_counter() - started


def _run_search(options: Options, made: list[Case], iterations: int, coarse: float = 0.0) -> None:
    """Run one search by `inverting_gradients` for each case, all at once, and wait until the device has finished.

    coarse: share of the iterations, at the beginning, that compute convolutions in bfloat16.
    """
    run_attack(inverting_gradients(steps=iterations).copy_with(coarse=coarse), made, options)


TABLES = {
    "agreement": measure_agreement,
    "memory": measure_memory,
    "lenet": measure_speed,
    "resnet": measure_speed,
    "sharing": measure_sharing,
}


if __name__ == "__main__":
    run_selected_table("device", __doc__ or "", TABLES)

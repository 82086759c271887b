"""Division of the cases of a replay into chunks, which are attacked at once, by estimates of memory and time.

By default, chunks on the CPU do not depend on the load of the machine, so that an interrupted replay forms the same chunks again
when it resumes. On a GPU they depend on the memory that is free at the start.
"""

import os
from collections.abc import Sequence
from itertools import groupby
from math import ceil

import torch
from torch import Tensor, nn

from attacker.attacks.base import Effort
from attacker.attacks.simulation.client import choose_simulated_steps, count_ordered_steps
from attacker.replay.cases import PlannedCase
from attacker.replay.executors.process_usage import read_memory_limit
from fedsim import models
from fedsim.recording import Manifest

LIVE_TENSORS = 12
"""Number of tensors that one search of a case keeps alive: of the model's size per observation, and of the activations' size per
example."""
STEP_TENSORS = 4
"""Number of such tensors that each further local step adds, if it is simulated."""
SEARCH_VECTORS = 12
"""Number of vectors of the length of the optimised variable that a search keeps per case, besides the optimiser's state."""
MEMORY_FACTOR = 2.5
"""Largest number of copies of the optimiser's state in memory: the state, its copy in a checkpoint, and half a copy for the new
part while the state is enlarged."""
MIN_TENSORS = 3
"""Number of tensors of the model's size, and number of tensors of the size of all examples, that every attack needs."""
MAX_CASES_AT_ONCE = 64
"""Largest number of cases attacked at once; more do not make it faster."""
MEMORY_SHARE = 0.5
"""Share of the machine's memory for all workers together, or of a GPU's free memory for one worker."""
MAX_BATCHED_PARAMETERS = 1_000_000
"""Number of parameters, summed over the cases of a chunk, beyond which larger chunks save no time. Attacking cases together saves
only the overhead of each layer's call, which matters if layers are small."""


def split_into_chunks(
    cases: Sequence[PlannedCase], footprint: "CaseFootprint", chunk: int | None
) -> list[tuple[PlannedCase, ...]]:
    """Return the cases that can be attacked, grouped into chunks. All cases of a chunk have the same `PlannedCase.sizes`.

    chunk: largest number of cases per chunk; None lets `CaseFootprint.choose_chunk_size` decide.
    """
    able = [case for case in cases if not case.reason]
    ordered = sorted(able, key=lambda case: case.sizes)  # stable: then in the order of the recording
    chunks = []
    for sizes, same in groupby(ordered, key=lambda case: case.sizes):
        group = tuple(same)
        size = chunk or footprint.choose_chunk_size(sizes, len(group))
        chunks += [group[i : i + size] for i in range(0, len(group), size)]
    return chunks


NO_EFFORT = Effort()
"""The effort of an attack that reports none."""


class CaseFootprint:
    """An estimate of the memory and time that one case takes, from the sizes of the model's parameters and activations.

    The model is built on the meta device, which allocates no memory.
    shapes:    shapes of the model's parameters by name; a parameter that layers share has several names.
    distinct:  the names of the parameters, with only the first name of a parameter that layers share.
    effort:    what the attack reports about its cost.
    """

    def __init__(self, manifest: Manifest, device: str, effort: Effort = NO_EFFORT) -> None:
        model = models.build_layout(manifest.model, manifest.data)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self.distinct = frozenset(name for name, _ in model.named_parameters())
        self.parameters = sum(p.numel() for p in model.parameters())
        self.activations = count_activations(model, manifest.data.shape) or 20 * manifest.data.size
        vectors = SEARCH_VECTORS + MEMORY_FACTOR * effort.vectors if effort.vectors else 0
        self.latents = int(manifest.data.size * vectors)
        self.values, self.device, self.effort = manifest.data.size, device, effort
        self.training = manifest.training

    def estimate_bytes(self, sizes: Sequence[int]) -> int:
        """Return the estimated bytes of a case. sizes: examples of each observation; 0, if unknown, counts as 1."""
        examples = sum(max(1, size) for size in sizes)
        steps = max(self._count_simulated_steps(size) for size in sizes)
        tensors = LIVE_TENSORS + STEP_TENSORS * (steps - 1)
        networks = tensors * (len(sizes) * self.parameters + examples * self.activations)
        return 4 * self.effort.searches * (networks + examples * self.latents)

    def _count_simulated_steps(self, examples: int) -> int:
        """Return the number of local steps that the attack simulates one by one for a client with this number of examples."""
        if not examples or self.effort.local_steps == "one_batch":
            return 1
        if self.effort.local_steps == "auto":
            return max(choose_simulated_steps(self.training, examples), count_ordered_steps(self.training, examples))
        try:
            return len(self.training.count_step_examples(examples) or (1,))
        except ValueError:  # more steps than a round can have, which the attack reports for this client alone
            return 1

    def explain_too_large(self, sizes: Sequence[int]) -> str:
        """Return why a case does not fit into the memory of the device, or "" if it may fit. sizes: as in `estimate_bytes`."""
        examples = sum(max(1, size) for size in sizes)
        minimum, there = 4 * MIN_TENSORS * (self.parameters + examples * self.values), read_memory(self.device)
        if minimum <= there:
            return ""
        return (
            f"{examples:,} examples of {self.values:,} values, and a model of {self.parameters:,} parameters, take at least "
            f"{minimum / 1e9:,.1f} GB of memory, but {self.device} has {there / 1e9:,.1f} GB; attack fewer rounds at once, or "
            "use a machine with more memory"
        )

    def explain_risk(self, largest: int) -> str:
        """Return a warning if the estimated bytes of the largest chunk exceed the memory of the device, otherwise ""."""
        there = read_memory(self.device)
        if largest <= there:
            return ""
        return (
            f"the largest chunk may take up to {largest / 1e9:,.0f} GB of memory, and {self.device} has {there / 1e9:,.0f} GB: "
            "its process may be killed. The estimate is high; if it is killed, use a machine with more memory"
        )

    def count_concurrent(self, largest: int) -> int:
        """Return how many chunks of at most `largest` bytes fit into the device's memory at once, at least 1."""
        return max(1, read_memory(self.device) // max(1, largest))

    def estimate_seconds(self, sizes: Sequence[int], cases: int) -> float:
        """Return the rough time in seconds of one gradient evaluation for `cases` similar cases at once on one core.

        sizes: number of examples of each observation of one case, as in `estimate_bytes`; the same for all cases.
        """
        values = len(sizes) * self.parameters + sum(max(1, size) for size in sizes) * self.activations
        return len(sizes) * 5e-3 + 2e-8 * cases * values  # observations of a case are simulated one after the other

    def choose_chunk_size(self, sizes: Sequence[int], count: int) -> int:
        """Return the number of cases to attack at once if there are `count` similar cases; it may be larger than `count`.

        The number is large enough for one chunk per worker, or for larger chunks as long as these save time
        (`MAX_BATCHED_PARAMETERS`, at most 16 cases). It is limited by `MAX_CASES_AT_ONCE` and by what fits into memory, but is at
        least 1.
        It is 1 for cases of several rounds of an attack without an optimiser. Such an attack treats cases one after the other, so
        that a larger chunk would only take more memory.
        sizes: number of examples of each observation of one case, as in `estimate_bytes`; the same for all cases.
        """
        if len(sizes) > 1 and not self.latents:
            return 1
        room, workers = divide_memory(self.device)
        fitting = max(1, min(MAX_CASES_AT_ONCE, int(room // self.estimate_bytes(sizes))))
        worthwhile = max(1, min(16, MAX_BATCHED_PARAMETERS // max(1, self.parameters)))  # fewer would cost as much
        return min(fitting, max(worthwhile, ceil(count / workers)))


def divide_memory(device: str) -> tuple[float, int]:
    """Return the memory in bytes for one chunk, and the number of workers that may run at once: 1 on a GPU, else one per core.

    On a GPU the memory is the share `MEMORY_SHARE` of what is free now, since other processes may use the rest. On the CPU it is
    this share of the total memory, divided by the number of cores, so that chunks do not depend on the momentary load.
    """
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return MEMORY_SHARE * free, 1
    cores = os.cpu_count() or 1
    return MEMORY_SHARE * read_memory(device) / cores, cores


def read_memory(device: str) -> int:
    """Return the total memory of a device in bytes; for the CPU, at most the memory limit of this container."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    return read_memory_limit()


def count_activations(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return how many values the model's layers output for one example of `shape`; 0 if the model cannot run.

    Only modules without submodules whose output is a tensor count. The model is left in evaluation mode.
    """
    sizes: list[int] = []

    def count(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    hooks = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, *shape, device=next(model.parameters()).device))
    except Exception:  # foreign code may fail in any way on the meta device
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes)

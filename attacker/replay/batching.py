"""How many cases are attacked at once: as many as memory holds and as leave work for every core. The same on one machine."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import ceil
from pathlib import Path

import torch
from torch import Tensor, nn

from attacker.replay.cases import Planned
from fedsim import models
from fedsim.recording import Manifest

COPIES = 12
"""Tensors of the size of the model, and of the size of all activations, that one problem keeps alive at once."""
LATENTS = 12
"""Vectors as long as a latent that a search keeps of each problem, beside what its optimiser remembers."""
TIMES = 2.5
"""How often what an optimiser remembers is in memory at most: itself, as it is written down, and half of it while it grows."""
LEAST = 3
"""Tensors of the size of the model, and of the size of all examples, that no attack does without."""
MOST = 64
"""Cases that are attacked at once; more of them gain nothing."""
SHARE = 0.5
"""Of a machine's memory, for all workers together; of a device's for one."""
BATCHED = 1_000_000
"""Parameters above which a batch of cases costs as much as each by itself: what is saved is the overhead of small layers."""


def chunked(cases: Sequence[Planned], footprint: "CaseFootprint", chunk: int | None = None) -> list[tuple[Planned, ...]]:
    """Cases of equal shape, in the order of their sizes; chunk: so many at once, where the user says."""
    able = [case for case in cases if not case.reason]
    ordered = sorted(able, key=lambda case: case.sizes)  # stable: then in the order of the recording
    return [part for _, group in groupby(ordered, key=lambda case: case.sizes) for part in _parts(list(group), footprint, chunk)]


def _parts(cases: list[Planned], footprint: "CaseFootprint", chunk: int | None) -> Iterator[tuple[Planned, ...]]:
    size = chunk or footprint.cases_at_once(cases[0].sizes, len(cases))
    return (tuple(cases[i : i + size]) for i in range(0, len(cases), size))


class CaseFootprint:
    """What one case takes, about, from its model: parameters and activations on the meta device.

    remembers: vectors as long as a latent that the attack's optimiser keeps of each case; 0 of an attack without one.
    """

    def __init__(self, manifest: Manifest, device: str, remembers: int = 0) -> None:
        model = models.layout(manifest.model, manifest.data)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.activations = _activations(model, manifest.data.shape) or 20 * manifest.data.size
        self.latents = int(manifest.data.size * (LATENTS + TIMES * remembers if remembers else 0))
        self.values, self.device = manifest.data.size, device

    def bytes(self, sizes: Sequence[int]) -> int:
        """Of a case with observations of `sizes` examples."""
        examples = sum(max(1, size) for size in sizes)
        return 4 * (COPIES * (len(sizes) * self.parameters + examples * self.activations) + examples * self.latents)

    def too_large(self, sizes: Sequence[int]) -> str:
        """Why a case cannot be attacked on this machine, in words: the model and the examples alone fill its memory; or ""."""
        examples = sum(max(1, size) for size in sizes)
        least, there = 4 * LEAST * (self.parameters + examples * self.values), memory(self.device)
        if least <= there:
            return ""
        return (
            f"{examples:,} examples of {self.values:,} values, and a model of {self.parameters:,} parameters, take at least "
            f"{least / 1e9:,.1f} GB of memory, and {self.device} has {there / 1e9:,.1f} GB; attack fewer rounds at once, or "
            "elsewhere"
        )

    def seconds(self, sizes: Sequence[int], cases: int) -> float:
        """Of one evaluation of the gradient of so many cases at once, on one core, about."""
        values = len(sizes) * self.parameters + sum(max(1, size) for size in sizes) * self.activations
        return 5e-3 + 2e-8 * cases * values

    def cases_at_once(self, sizes: Sequence[int], count: int) -> int:
        """How many of `count` such cases make one chunk."""
        room, workers = budget(self.device)
        fitting = max(1, min(MOST, int(room // self.bytes(sizes))))
        worthwhile = max(1, min(16, BATCHED // max(1, self.parameters)))  # fewer would cost as much
        return min(fitting, max(worthwhile, ceil(count / workers)))


def budget(device: str) -> tuple[float, int]:
    """Bytes for one chunk, and how many workers there may be.

    Of a GPU, a share of what is free now, for other searches may be on it. Of the machine, a share of all memory: what is free of
    that changes from day to day.
    """
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return SHARE * free, 1
    cores = os.cpu_count() or 1
    return SHARE * memory(device) / cores, cores


def memory(device: str) -> int:
    """Bytes of a device; of the CPU those of this machine, or of the container that this is."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _activations(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Values that all layers of a model put out for one example; 0 where the model cannot be run without values."""
    sizes: list[int] = []

    def count(module: nn.Module, given: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    hooks = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, *shape, device=next(model.parameters()).device))
    except Exception:  # code of others may not run without values
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes)

"""Adaptation to the machine: the choice of a faster data type, and a setting by which glibc's allocator reuses freed memory."""

import ctypes
import os
import sys
from functools import lru_cache

import torch

CPU_FEATURES = ("avx512_bf16", "amx_bf16")


def get_fast_dtype(device: str) -> torch.dtype | None:
    """Return bfloat16 if the device has own instructions to multiply it, which are faster than those for float32; else None."""
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    able = torch.cpu.get_capabilities() if device == "cpu" else {}
    return torch.bfloat16 if any(able.get(name) for name in CPU_FEATURES) else None


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers of `mallopt`, from glibc's malloc.h."""
MAX_TENSOR_BYTES = 32 * 2**20
"""Size of the largest tensor whose memory is kept; glibc allows no larger threshold."""
MAX_KEPT_BYTES = 512 * 2**20
"""Largest amount of free memory that is kept."""


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Make glibc keep the memory of freed tensors, each of up to MAX_TENSOR_BYTES, for reuse; return whether that succeeded.

    At most MAX_KEPT_BYTES of free memory are kept. The setting holds for the rest of this process. By default, glibc returns the
    memory of large tensors to the system, and every iteration of an attack allocates and clears it again, which took a fifth of
    the time of an iteration with 64 small networks.
    Changes nothing and returns False on systems without glibc, or if an environment variable MALLOC_* is set.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # another C library than glibc
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, MAX_TENSOR_BYTES) and library.mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES))

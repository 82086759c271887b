"""Memory that one iteration gives back stays in the process for the next."""

import ctypes
import os
import sys
from functools import lru_cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
SINGLE = 32 * 2**20
"""Bytes of a tensor above which it is given back all the same; the C library knows no larger threshold."""
KEPT = 512 * 2**20
"""Bytes that are kept at most."""


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, for the rest of this process; whether it does.

    Otherwise it hands tensors of megabytes back to the system and gets them anew in every iteration, page by page, each cleared:
    a fifth of an iteration of 64 small networks. An environment that says how to do it has its way.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # another C library than glibc
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, SINGLE) and library.mallopt(M_TRIM_THRESHOLD, KEPT))

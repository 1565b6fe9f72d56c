"""How the C library treats the memory of freed CPU tensors."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Keep the memory that CPU tensors free for the next ones, for the rest of the process.

    By default glibc takes every large tensor's memory from the system and gives it back when it is freed, so a training
    step faults in and clears its activations' pages anew each time. The process then holds on to its peak use.
    Call it once, before the first large tensor. Returns False, having done nothing, where the C library is not glibc or
    another allocator is preloaded. A process of its own (a benchmark, a job) does this; a library should not.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))

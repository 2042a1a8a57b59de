"""How the C library of this process handles freed memory."""

from __future__ import annotations

import ctypes

# mallopt's names: freed memory stays below the first size, and blocks up to the second come from
# it. Both are far above what one tensor of a training step takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TRIM_ABOVE = 2**31 - 1
_MMAP_ABOVE = 2**30

_kept = False


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed for the next tensor; returns whether it could be told so.

    glibc hands blocks of 32 MiB and more back to the system as soon as they are freed, and the
    next tensor of that size pays for fresh pages, one fault for every 4 KiB. A training step frees
    and takes the same sizes over and over. For programs, not for libraries: it holds for the whole
    process, whose memory then stays at its peak. `MALLOC_MMAP_THRESHOLD_=1073741824
    MALLOC_TRIM_THRESHOLD_=2147483647` in the environment does the same for any program.
    """
    global _kept
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, which has its own ways
        return False
    _kept = bool(mallopt(_MMAP_THRESHOLD, _MMAP_ABOVE) and mallopt(_TRIM_THRESHOLD, _TRIM_ABOVE))
    return _kept


def keeps_freed_memory() -> bool:
    """Whether `keep_freed_memory` was called here and worked."""
    return _kept

"""Tuning of glibc malloc's caching of freed memory; other C libraries are left alone.

A prefill allocates and frees tensors of megabytes. Returned to the system each time, they cost a page fault per 4 KiB
at the next layer: a tenth of the time of a long prompt, with torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from penstock.device.process_setting import ProcessSetting

# Parameters of mallopt(3). Setting one of the thresholds turns glibc's dynamic adjustment of both off.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# glibc's initial value of all three.
_DEFAULT = 128 << 10
# glibc's own maximum of the dynamic threshold. Larger blocks are mmapped, and unmapped when they are freed.
_LARGEST_IN_HEAP = 32 << 20
# More than the peak of a step's tensors up to that size.
_KEPT_AT_END = 256 << 20
# Arenas of other threads consist of 64 MiB heaps; an empty one is kept if the rest has less free memory than this.
_KEPT_OF_PARTS = 64 << 20

# Cache freed memory for the next allocation, up to a limit.
KEEP = {_MMAP_THRESHOLD: _LARGEST_IN_HEAP, _TRIM_THRESHOLD: _KEPT_AT_END, _TOP_PAD: _KEPT_OF_PARTS}
# Return freed blocks of 128 KiB or more to the system at once.
GIVE_BACK = {_MMAP_THRESHOLD: _DEFAULT, _TRIM_THRESHOLD: _DEFAULT, _TOP_PAD: _DEFAULT}
_AS_FAR_AS_IT_ADAPTS = {_MMAP_THRESHOLD: _LARGEST_IN_HEAP, _TRIM_THRESHOLD: 2 * _LARGEST_IN_HEAP, _TOP_PAD: _DEFAULT}


def return_free_pages() -> None:
    """Return all free pages of the heap (malloc_trim)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _write(parameters: Mapping[int, int]) -> None:
    libc = ctypes.CDLL(None)
    # Other C libraries have a mallopt with other parameters.
    if hasattr(libc, "gnu_get_libc_version"):
        for parameter, value in parameters.items():
            libc.mallopt(parameter, value)


# glibc's current values cannot be read, nor its dynamic adjustment restored: the maximum it may reach is set instead.
FREED_MEMORY: ProcessSetting[Mapping[int, int]] = ProcessSetting(lambda: _AS_FAR_AS_IT_ADAPTS, _write)

"""What the C library's allocator does with memory that is freed: glibc's; another library's is left as it is.

A prefill makes tensors of megabytes and frees them a moment later. Given back to the system each time, they cost a page
fault per 4 KiB when the next layer asks for as much: a tenth of the time of a long prompt, with torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from penstock.device.process_setting import ProcessSetting

# Parameters of mallopt(3). Setting one of the thresholds ends glibc's own adapting of both.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
# What glibc begins with, for all three.
_DEFAULT = 128 << 10
# As far as glibc raises it by itself. Whatever is larger is the system's own, and goes back when it is freed.
_LARGEST_IN_HEAP = 32 << 20
# More than the tensors of a step that are not larger than that, at its fullest moment.
_KEPT_AT_END = 256 << 20
# The heap of any thread but the first is in parts of 64 MiB, and an empty one is kept if the rest has less than this.
_KEPT_OF_PARTS = 64 << 20

# Keep what is freed for the next allocation, up to a limit.
KEEP = {_MMAP_THRESHOLD: _LARGEST_IN_HEAP, _TRIM_THRESHOLD: _KEPT_AT_END, _TOP_PAD: _KEPT_OF_PARTS}
# Give what is freed back to the system at once, if it was allocated in one piece of 128 KiB or more.
GIVE_BACK = {_MMAP_THRESHOLD: _DEFAULT, _TRIM_THRESHOLD: _DEFAULT, _TOP_PAD: _DEFAULT}
_AS_FAR_AS_IT_ADAPTS = {_MMAP_THRESHOLD: _LARGEST_IN_HEAP, _TRIM_THRESHOLD: 2 * _LARGEST_IN_HEAP, _TOP_PAD: _DEFAULT}


def return_free_pages() -> None:
    """Give back the pages that are free now, wherever in the heap they are."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _write(parameters: Mapping[int, int]) -> None:
    libc = ctypes.CDLL(None)
    # Other libraries have a mallopt too, with parameters of their own.
    if hasattr(libc, "gnu_get_libc_version"):
        for parameter, value in parameters.items():
            libc.mallopt(parameter, value)


# What glibc has cannot be asked for, nor does its adapting begin again: it is left at what that comes to at most.
FREED_MEMORY: ProcessSetting[Mapping[int, int]] = ProcessSetting(lambda: _AS_FAR_AS_IT_ADAPTS, _write)

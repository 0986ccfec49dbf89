"""Memory bandwidth, the limit of decoding: a decode step reads all weights and the KV cache once."""

from __future__ import annotations

import time

_BUFFER_BYTES = 256 << 20
_PASSES = 9


def read_speed(num_threads: int | None = None) -> float:
    """Measure the read bandwidth of memory in bytes/s with torch's threads: the best of a few sums over 256 MiB."""
    import torch

    former = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        buffer = torch.ones(_BUFFER_BYTES // 4)
        seconds = []
        for _ in range(_PASSES):
            begin = time.perf_counter()
            buffer.sum()
            seconds.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(former)
    return _BUFFER_BYTES / min(seconds)

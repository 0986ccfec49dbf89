"""Memory bandwidth, the limit of decoding: a decode step reads all weights and the KV cache once."""

from __future__ import annotations

import time

_BUFFER_BYTES = 256 << 20
_PASSES = 9


def read_speed() -> float:
    """Measure the read bandwidth of memory in bytes/s with torch's threads: the best of a few sums over 256 MiB."""
    import torch

    buffer = torch.ones(_BUFFER_BYTES // 4)
    seconds = []
    for _ in range(_PASSES):
        begin = time.perf_counter()
        buffer.sum()
        seconds.append(time.perf_counter() - begin)
    return _BUFFER_BYTES / min(seconds)

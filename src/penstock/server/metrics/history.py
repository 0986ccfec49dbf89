"""History of a whole server: a sample per second for its views, and a log line per ten seconds of work."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path

import msgspec

from penstock.engine.live.live_view import LiveSample, sample_of
from penstock.engine.messages import BrokerStatus
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.server.metrics.folder import FRONT_END, SharedFile, shared_files

logger = logging.getLogger(__name__)
_INTERVAL_S = 1.0
# Seconds that a view shows.
_KEPT_S = 120
# Seconds of work between two lines of the log.
_LINE_S = 10.0
_HISTORY = "history"


class _FrontEnd(msgspec.Struct):
    """Totals of a front end, of which this room needs those of requests."""

    requests: RequestTotals


class Samples(msgspec.Struct):
    """File of the history, oldest first."""

    samples: list[LiveSample]


class ServerHistory:
    """Samples the server's load at heartbeats of its broker, in the launcher; front ends read them.

    folder: see `SharedFile`. max_num_seqs: of each core. logs: whether to log throughput.
    """

    def __init__(self, folder: Path, *, max_num_seqs: int, logs: bool) -> None:
        self._folder = folder
        self._file = SharedFile(folder, _HISTORY)
        self._max_num_seqs = max_num_seqs
        self._logs = logs
        self._samples: deque[LiveSample] = deque(maxlen=int(_KEPT_S / _INTERVAL_S))
        # Begin of the next line's time.
        self._since: LiveSample | None = None

    def note(self, status: BrokerStatus) -> None:
        """Note a heartbeat of the broker."""
        if self._samples and time.time() - self._samples[-1].time < _INTERVAL_S:
            return
        totals = RequestTotals()
        for file in shared_files(self._folder, FRONT_END):
            if (front := file.read(_FrontEnd)) is not None:
                totals.add(front.requests)
        sample = sample_of(totals, status, self._max_num_seqs)
        self._samples.append(sample)
        self._file.write(Samples(list(self._samples)))
        self._since = self._since or sample
        if sample.time - self._since.time >= _LINE_S:
            if self._logs and (line := throughput(self._since, sample)) is not None:
                logger.info("%s", line)
            self._since = sample


def read_history(folder: Path) -> list[LiveSample]:
    """Samples of the last two minutes, oldest first; none before the first."""
    file = SharedFile(folder, _HISTORY).read(Samples)
    return [] if file is None else file.samples


def throughput(since: LiveSample, now: LiveSample) -> str | None:
    """Line about the time between two samples; None without work in it."""
    before, after = since.counters, now.counters
    prompt, generated = after.prompt_tokens - before.prompt_tokens, after.generated_tokens - before.generated_tokens
    requests, kv_cache = now.requests, now.kv_cache
    if not (prompt or generated or requests.unfinished):
        return None
    seconds = now.time - since.time
    parts = (
        f"{generated / seconds:,.1f} tokens/s generated",
        f"{prompt / seconds:,.1f} tokens/s of prompts",
        f"{requests.running} running",
        f"{max(0, requests.unfinished - requests.running)} waiting",
        f"KV cache {100 * kv_cache.usage:.1f}% used",
        f"prefix hits {_percent(after.cached_prompt_tokens - before.cached_prompt_tokens, prompt)}",
    )
    return f"Last {seconds:.0f} s: {', '.join(parts)}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0.0:.1f}%"

"""A line of the log, now and then, about what became of drafts."""

from __future__ import annotations

import copy
import logging
import time

from penstock.scheduler.acceptance import SpecDecodeMetrics

logger = logging.getLogger(__name__)
_INTERVAL_S = 10.0


class DraftLog:
    """Says what was counted since the line before, and at the end what was counted in all."""

    def __init__(self, metrics: SpecDecodeMetrics) -> None:
        self._metrics = metrics
        self._told = copy.deepcopy(metrics)
        self._last_time = time.monotonic()

    def note_step(self) -> None:
        """A step had drafts."""
        now = time.monotonic()
        if now - self._last_time >= _INTERVAL_S:
            logger.info("Speculation: %s", self._metrics.since(self._told).describe())
            self._told, self._last_time = copy.deepcopy(self._metrics), now

    def close(self) -> None:
        if self._metrics.num_drafts:
            logger.info("Speculation in all: %s", self._metrics.describe())

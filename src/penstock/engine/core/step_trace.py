"""Trace of a core's steps (`profiler="steps"`): the phases of the core and of its ranks, in one file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.observability.spans import ProcessSpans, SpanLog, write_trace
from penstock.worker.profiler import RankTrace

logger = logging.getLogger(__name__)


class StepTrace:
    """Writer of traces. phases: log of the core's phases, which records while the workers do; None without traces."""

    def __init__(self, config: EngineConfig) -> None:
        self.phases = SpanLog() if config.profiler.profiler == "steps" else None
        number = config.parallel.engine_number
        self._name = "engine core" if number is None else f"engine core {number}"

    def after_call(self, answers: list[Any]) -> list[Any]:
        """Start, or write the trace, after a call of `profile` of the workers; returns its path instead of their spans.

        Raises ConfigError for a file that cannot be written.
        """
        if self.phases is None:
            return answers
        ranks = [answer for answer in answers if isinstance(answer, RankTrace)]
        if not ranks:
            self.phases.start()
            return answers
        own = ProcessSpans(self._name, self.phases.take())
        path = Path(ranks[0].path)
        self._write(path, [own, *(rank.process for rank in ranks)])
        logger.info("Profile written to %s", path)
        return [str(path), *[None] * (len(answers) - 1)]

    def _write(self, path: Path, processes: Sequence[ProcessSpans]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(path, processes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"profiler_dir={str(path.parent)!r} cannot be written to: {error.strerror}. Give another folder."
            ) from error

"""Worker side of sleep: memory is backed up, given back, and comes again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from penstock.contract.memory_tags import WEIGHTS
from penstock.device.backup import Backup
from penstock.errors import OutOfMemory
from penstock.features.sleep.state import SLEPT_AT_LEVEL_2
from penstock.observability.units import format_bytes
from penstock.worker.feature import WorkerFeature, WorkerServices
from penstock.worker.memory_by_tag import MemoryByTag

logger = logging.getLogger(__name__)
_LESS = "Sleeping with level=2 needs less, and the weights must be sent again then."


class _Asleep(NamedTuple):
    """Memory of a tag that is not there. kept_weights: whether the model's weights are in the backup."""

    tensors: Sequence[Tensor]
    backup: Backup
    freed_bytes: int
    kept_weights: bool


class SleepWorker(WorkerFeature):
    """Gives memory of one rank back by tag. No step runs meanwhile; the scheduler's side sees to it.

    Methods return texts instead of raising what only some ranks may meet: all of them do a call, or none.
    """

    def __init__(self, services: WorkerServices) -> None:
        self._device = services.device
        self._folder: Path = services.config.sleep.folder
        self._services_memory = services.memory
        self._reserved: dict[str, Backup] = {}
        self._asleep: dict[str, _Asleep] = {}

    @property
    def _memory(self) -> MemoryByTag:
        assert self._services_memory is not None, "a plan's features get no calls"
        return self._services_memory

    def reserve_sleep(self, level: int, tags: Sequence[str]) -> str | None:
        """Back up what these tags keep, before anything is given back. Returns why that fails."""
        self.cancel_sleep()
        if WEIGHTS in tags and self._memory.updates.are_arriving:
            return "Weights of a trainer are arriving. Let the engine sleep once update_weights has returned."
        self._device.synchronize()
        for tag in tags:
            if tag in self._asleep:
                continue
            try:
                kept = self._memory.tensors(tag, keeps_weights=level == 1).kept
                self._reserved[tag] = self._device.back_up(kept, self._folder)
            except OutOfMemory as error:
                self.cancel_sleep()
                return f"{error} {_LESS}" if level == 1 else str(error)
        return None

    def cancel_sleep(self) -> None:
        """Drop what was backed up for a sleep that does not begin."""
        for backup in self._reserved.values():
            backup.close()
        self._reserved.clear()

    def sleep(self, level: int) -> dict[str, int]:
        """Give the memory back that `reserve_sleep` has named. Returns the bytes by tag."""
        freed: dict[str, int] = {}
        if level == 2 and WEIGHTS in self._asleep:
            # Those of an idle engine, which sleeps deeper now.
            self._asleep[WEIGHTS] = self._asleep[WEIGHTS]._replace(kept_weights=False)
        while self._reserved:
            tag, backup = self._reserved.popitem()
            self._memory.before_release(tag)
            kept, others, mapped = self._memory.tensors(tag, keeps_weights=level == 1)
            tensors = [*kept, *others]
            size = self._device.release(tensors)
            self._asleep[tag] = _Asleep(tensors, backup, size, level == 1)
            # They need no free memory to come again.
            freed[tag] = size + self._device.release(mapped)
        self._device.return_unused_memory()
        logger.info("Asleep: %s given back", ", ".join(f"{format_bytes(size)} of {tag}" for tag, size in freed.items()))
        return freed

    def why_not_wake_up(self, tags: Sequence[str]) -> str | None:
        """Why memory of these tags cannot come again now; None if it can."""
        needed = sum(self._asleep[tag].freed_bytes for tag in tags if tag in self._asleep)
        free = self._device.memory_snapshot().free
        if needed <= free:
            return None
        return (
            f"Waking {', '.join(tags)} needs {format_bytes(needed)} of memory, but only {format_bytes(free)} are free. "
            "The engine stays asleep. Free some, such as by letting the engine that has taken it sleep, and repeat the "
            "call."
        )

    def wake_up(self, tags: Sequence[str]) -> str | None:
        """Let memory of these tags come again, with what was kept of it. Returns why that could not be read."""
        why: str | None = None
        for tag in tags:
            asleep = self._asleep.pop(tag, None)
            if asleep is None:
                continue
            self._device.restore(asleep.tensors)
            try:
                asleep.backup.restore()
            except OSError as error:
                why = f"What was kept of the {tag} of a sleeping engine could not be read: {error}."
            asleep.backup.close()
            if tag == WEIGHTS and not asleep.kept_weights:
                self._memory.updates.undefine(SLEPT_AT_LEVEL_2)
            self._memory.after_restore(tag)
        return why

    def undefine_weights(self) -> None:
        """Let there be no weights to compute with, until they are sent: an earlier worker slept at level 2."""
        self._memory.updates.undefine(SLEPT_AT_LEVEL_2)

    def why_weights_undefined(self) -> str | None:
        """Why there are no weights to compute with; None if there are."""
        updates = self._memory.updates
        updates.note_failure()
        return updates.why_undefined

    def close(self) -> None:
        self.cancel_sleep()
        for asleep in self._asleep.values():
            asleep.backup.close()
        self._asleep.clear()

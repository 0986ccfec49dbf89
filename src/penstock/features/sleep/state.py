"""States of an engine: running, paused, sleeping, and with undefined weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from penstock.contract.memory_tags import MEMORY_TAGS, WEIGHTS
from penstock.errors import InvalidRequest

LEVELS = (1, 2)
SLEPT_AT_LEVEL_2 = "the engine has slept at level 2, which keeps none"


class PauseMode(StrEnum):
    """Treatment of requests by a pause.

    ABORT: unfinished ones end, and new ones are refused. WAIT: running ones finish, and others wait. KEEP: all wait,
    and running ones go on from their tokens afterwards.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class EngineState(msgspec.Struct, frozen=True):
    """State of an engine, or of one of its cores.

    paused: mode of a pause that `resume` ends; None without one. sleeping: mode of a sleep, until all memory is back.
    tags: memory that is not there. level: of the sleep: 2 if the weights come from the caller afterwards.
    is_idle: it sleeps by itself, until the next request; also below a pause. undefined: why there are no weights to
    compute with; "" if there are.
    """

    paused: PauseMode | None = None
    sleeping: PauseMode | None = None
    tags: tuple[str, ...] = ()
    level: int = 1
    is_idle: bool = False
    undefined: str = ""

    @property
    def is_running(self) -> bool:
        return self.paused is None and self.sleeping is None and not self.undefined

    @property
    def mode(self) -> PauseMode:
        """Treatment of requests meanwhile. Those that a pause keeps cannot finish before a sleep within it."""
        if self.paused is PauseMode.KEEP and self.sleeping is PauseMode.WAIT:
            return PauseMode.KEEP
        return self.sleeping or self.paused or PauseMode.ABORT

    @property
    def name(self) -> str:
        """Name for people, such as "sleeping (level 1: weights, kv_cache)"."""
        if self.tags and not (self.is_idle and self.paused):
            return f"sleeping ({'idle, ' if self.is_idle else ''}level {self.level}: {', '.join(self.tags)})"
        if self.undefined:
            return "weights undefined"
        if self.sleeping is not None:
            return "falling asleep"
        return "running" if self.paused is None else f"paused ({self.paused})"

    @property
    def how_to_run(self) -> str:
        """Sentence for callers who need it to run."""
        if self.undefined and not self.tags:
            return f"The weights are undefined: {self.undefined}. Send all of them (reload_weights, load_weights)."
        return "Let it go on first (resume)." if self.sleeping is None else "Wake it up first (wake_up)."

    def without(self, tags: Iterable[str]) -> EngineState:
        """The state once memory of these tags is there again."""
        woken = set(tags)
        left = tuple(tag for tag in self.tags if tag not in woken)
        undefined = self.undefined
        if self.level == 2 and WEIGHTS in self.tags and WEIGHTS not in left:
            undefined = SLEPT_AT_LEVEL_2
        sleeping = self.sleeping if left or undefined else None
        level = self.level if left else 1
        return msgspec.structs.replace(self, tags=left, sleeping=sleeping, level=level, undefined=undefined)

    def with_weights(self) -> EngineState:
        """The state once there are weights again."""
        return msgspec.structs.replace(self, undefined="", sleeping=self.sleeping if self.tags else None)


def checked_mode(mode: str) -> PauseMode:
    """Raise InvalidRequest for an unknown mode."""
    if mode not in list(PauseMode):
        raise InvalidRequest(f"mode={mode!r} is not valid. Allowed: {', '.join(PauseMode)}.")
    return PauseMode(mode)


def checked_level(level: int) -> int:
    """Raise InvalidRequest for an unknown level."""
    if type(level) is not int or level not in LEVELS:
        raise InvalidRequest(f"level={level!r} is not valid. Allowed: 1 (weights are kept), 2 (they are dropped).")
    return level


def checked_tags(tags: Sequence[str] | None) -> tuple[str, ...]:
    """Tags in their order; None for all. Raises InvalidRequest for an unknown one, and for none."""
    if tags is None:
        return MEMORY_TAGS
    given = [tags] if isinstance(tags, str) else list(tags)
    unknown = next((tag for tag in given if tag not in MEMORY_TAGS), None)
    if unknown is not None or not given:
        raise InvalidRequest(
            f"tags={given!r} is not valid. Allowed: some of {', '.join(MEMORY_TAGS)}, or None for all."
        )
    return tuple(tag for tag in MEMORY_TAGS if tag in given)

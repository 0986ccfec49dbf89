"""State of the weights of an engine, as its cores and their owner know it."""

from __future__ import annotations

from typing import Any

import msgspec


class WeightsState(msgspec.Struct, frozen=True):
    """version: of the complete weights; 0 for those of the start. is_pushed: whether a trainer sent them. folder: where
    they are kept for workers that replace lost ones; None if they are not.
    """

    version: int = 0
    is_pushed: bool = False
    folder: str | None = None


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank's weights. is_waiting: for the trainer. error: of the last transfer. num_missing: tensors of the
    update that is going on; None without one. why_undefined: why no step may run. is_pushed, folder: as in
    `WeightsState`.
    """

    is_waiting: bool = False
    error: Any = None
    is_updating: bool = False
    num_missing: int | None = None
    missing: list[str] = []
    why_undefined: str | None = None
    version: int = 0
    is_pushed: bool = False
    folder: str | None = None

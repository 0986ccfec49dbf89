"""Services of an engine core for the scheduler sides of features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.scheduler.scheduler import Scheduler


class SchedulerServices(NamedTuple):
    """Services of an engine core for a feature.

    scheduler: it, with its KV cache, is complete when a method of the feature is called. A transfer of KV reserves a
    waiting request's blocks through it (`reserve_blocks`, `blocks_loaded`), and holds blocks that it reads or writes
    (`kv_cache.hold_blocks`, `release_blocks`).
    call_workers: calls every worker between two steps. tell_ends: sends the last outputs of requests that the feature
    has ended. call_soon: calls a function in the core's thread before its next step, and ends its wait for work; from
    any thread. has_lost_workers: whether workers are to be replaced. replace_lost_workers: replaces them now, if any
    are lost or a reason for it is given, also while the core rests.
    """

    config: EngineConfig
    scheduler: Scheduler
    call_workers: Callable[[RpcCall], list[Any]]
    tell_ends: Callable[[list[EngineCoreOutput]], None]
    call_soon: Callable[[Callable[[], None]], None]
    has_lost_workers: Callable[[], bool] = lambda: False
    replace_lost_workers: Callable[[str | None], None] = lambda _: None

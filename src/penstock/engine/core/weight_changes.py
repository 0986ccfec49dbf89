"""Changes of the weights by calls, kept for replacements of the workers that have made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.contract.rpc import WeightChange


class ReplacesWorkers(Protocol):
    """Owner of workers, or of a core, that starts replacements.

    config: configuration with which the current weights were loaded. weight_calls: calls since then that change the
    next load, which replacements repeat.
    """

    config: EngineConfig
    weight_calls: list[RpcCall]


def keep_weight_change(call: RpcCall, owners: Iterable[ReplacesWorkers], config: Callable[[], EngineConfig]) -> None:
    """Keep what a completed call has changed. config: returns the configuration of weights that were loaded by it."""
    change = call.effects.weights
    if change is WeightChange.NEXT_LOAD:
        for owner in owners:
            owner.weight_calls.append(replace(call, timeout_s=None, unique_reply_rank=None))
    elif change is WeightChange.NOW:
        loaded = config()
        for owner in owners:
            owner.config = replace(loaded, parallel=owner.config.parallel)
            owner.weight_calls.clear()

"""State of the weights of an engine, as its cores and their owner know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.config.parallel import DEFAULT_WORKER, ParallelConfig
from penstock.contract import RpcCall
from penstock.contract.rpc import EFFECTS, WeightChange


class WeightsState(msgspec.Struct, frozen=True):
    """version: of the complete weights; 0 for those of the start. num_updates: complete updates and reloads until then.
    is_pushed: whether a trainer sent them. folder: where they are kept for workers that replace lost ones; None if they
    are not.
    """

    version: int = 0
    num_updates: int = 0
    is_pushed: bool = False
    folder: str | None = None


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank's weights. is_waiting: for the trainer. error: of the last transfer. num_missing: tensors of the
    update that is going on; None without one. why_undefined: why no step may run. Others: as in `WeightsState`.
    """

    is_waiting: bool = False
    error: Any = None
    is_updating: bool = False
    num_missing: int | None = None
    missing: list[str] = []
    why_undefined: str | None = None
    version: int = 0
    num_updates: int = 0
    is_pushed: bool = False
    folder: str | None = None


def state_of(statuses: Sequence[RankStatus]) -> WeightsState:
    """State of the weights that all ranks of a core have."""
    first = min(statuses, key=lambda status: status.num_updates)
    return WeightsState(first.version, first.num_updates, is_pushed=first.is_pushed, folder=statuses[0].folder)


def may_change_weights(call: RpcCall, parallel: ParallelConfig) -> bool:
    """Whether workers may have other weights after a call.

    Functions and methods of extensions may call the model's `load_weights`, and say so afterwards only.
    """
    is_own = parallel.worker_cls == DEFAULT_WORKER and parallel.worker_extension_cls is None
    is_unknown = not call.method_name or not (is_own or call.method_name in EFFECTS)
    return is_unknown or call.effects.may_load_weights or call.effects.weights is WeightChange.NOW

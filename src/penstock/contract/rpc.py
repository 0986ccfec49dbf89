"""Calls of the workers between two steps, and what a method's name implies for the engine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.contract.memory_tags import MEMORY_TAGS, WEIGHTS
from penstock.errors import ConfigError


class WeightChange(enum.Enum):
    """Change of the weights by a call, which all workers must complete or none.

    NEXT_LOAD: options of the next load, which replacement workers get again.
    NOW: other weights, for which cached blocks are void.
    """

    NEXT_LOAD = enum.auto()
    NOW = enum.auto()


@dataclass(frozen=True, slots=True)
class RpcEffects:
    """Effects of a worker method on the engine that calls it; a method without an entry in `EFFECTS` has none.

    weights: change of the weights. may_load_weights: whether it calls a function, which may call the model's
    `load_weights`. on_first_engine: whether engine 0 alone runs it, since the others would write the
    same files. is_profile: whether it starts or ends a profile. uses: tags of the memory that must be there for it.
    """

    weights: WeightChange | None = None
    may_load_weights: bool = False
    on_first_engine: bool = False
    is_profile: bool = False
    uses: tuple[str, ...] = ()


LOAD_WEIGHTS = "load_weights"
EFFECTS: Mapping[str, RpcEffects] = {
    "update_config": RpcEffects(weights=WeightChange.NEXT_LOAD),
    "reload_weights": RpcEffects(weights=WeightChange.NOW, uses=(WEIGHTS,)),
    LOAD_WEIGHTS: RpcEffects(weights=WeightChange.NOW, uses=(WEIGHTS,)),
    "save_sharded_state": RpcEffects(on_first_engine=True, uses=(WEIGHTS,)),
    "save_tensorized_model": RpcEffects(on_first_engine=True, uses=(WEIGHTS,)),
    "apply_model": RpcEffects(may_load_weights=True, uses=(WEIGHTS,)),
    "execute_dummy_batch": RpcEffects(uses=MEMORY_TAGS),
    "profile": RpcEffects(is_profile=True),
}
_NO_EFFECTS = RpcEffects()


@dataclass(frozen=True, slots=True)
class RpcCall:
    """Call of a method of every worker, or of a function whose first argument is the worker.

    method: name, or a function; pickled for workers in other processes. timeout_s: timeout for workers in other
    processes; None for none. unique_reply_rank: the only rank that sends its result; all ranks run the call, so that
    their states stay equal.

    Raises ConfigError unless the timeout is positive or None.
    """

    method: str | Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    unique_reply_rank: int | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                f"timeout={self.timeout_s!r} is not valid. Allowed: a positive number of seconds, or None."
            )

    @property
    def method_name(self) -> str:
        """Name of the method; "" for a function, whatever its name."""
        return self.method if isinstance(self.method, str) else ""

    @property
    def name(self) -> str:
        """Name of the method or function, for errors."""
        return self.method if isinstance(self.method, str) else getattr(self.method, "__name__", repr(self.method))

    @property
    def effects(self) -> RpcEffects:
        """Effects of the method; none of a function."""
        return EFFECTS.get(self.method_name, _NO_EFFECTS)

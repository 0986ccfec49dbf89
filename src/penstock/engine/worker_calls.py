"""Calls of the workers as `LLM` and `AsyncEngine` offer them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from penstock.config.vllm import also_from_vllm
from penstock.contract import RpcCall

_Answers = TypeVar("_Answers")


class WorkerCalls(ABC, Generic[_Answers]):
    """Public method for calls of the workers; `AsyncEngine` awaits its answers."""

    @also_from_vllm
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> _Answers:
        """Call a method of every worker (or of its extension class), or a function of the worker, between two steps.

        method: a name, or a function whose first argument is the worker; it is pickled for workers in other processes.
        timeout: seconds to wait for workers in other processes; a worker in this process cannot be interrupted.
        unique_reply_rank: rank whose result is returned alone. All ranks run the call, so that their state is equal.

        Returns one result per worker. Raises ConfigError for an unknown method, UnsupportedFeature for one that is not
        built yet, WorkerError with the method's name, the rank and the cause when it fails; Penstock's own errors are
        raised unchanged; LifecycleError after the engine is closed.
        """
        return self._call_workers(RpcCall(method, tuple(args), kwargs or {}, timeout, unique_reply_rank))

    @abstractmethod
    def _call_workers(self, call: RpcCall) -> _Answers:
        """Results of the workers."""

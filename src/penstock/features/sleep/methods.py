"""Methods of `LLM`, `LLMEngine` and `AsyncEngine` for sleep and pauses."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from penstock.config.vllm import also_from_vllm
from penstock.contract import RpcCall
from penstock.errors import WaitTimeout
from penstock.features.sleep.state import EngineState, PauseMode

# Poll interval while requests finish.
_POLL_S = 0.005


class SleepMethods(ABC):
    """Methods of an offline engine."""

    @abstractmethod
    def _call_workers(self, call: RpcCall) -> list[Any]:
        """Answers of the feature."""

    @abstractmethod
    def _let_rest(self, rests: Callable[[], bool]) -> None:
        """Run steps until the engine rests, which is asked for between them; this thread lets it go on later."""

    @also_from_vllm
    def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> None:
        """Give the memory of the weights and of the KV cache back to the system, until `wake_up`.

        level: 1 keeps the weights, in a file of `sleep_dir` or in a GPU's host memory; 2 drops them, and they must be
            sent again (`reload_weights`) before requests run.
        mode: "abort" ends unfinished requests, and refuses new ones with EngineAsleep; "wait" lets running ones finish;
            "keep" lets them go on after the sleep. Other requests wait then.
        tags: of the memory: "weights", "kv_cache"; None for both.

        Raises EngineAsleep for a level that this state does not allow, OutOfMemory without room for the weights, and
        gives nothing back then.
        """
        self._let_rest(lambda: self._is_done("sleep", level, mode, tags))

    @also_from_vllm
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Let memory come again. tags: as of `sleep`, one after the other.

        Raises OutOfMemory without enough memory; the engine sleeps on then. Does nothing for what is awake.
        """
        self._call_workers(RpcCall("wake_up", (tags,)))

    @also_from_vllm
    def is_sleeping(self) -> bool:
        """Whether memory is given back."""
        return self._is_done("is_sleeping")

    @also_from_vllm
    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Run no steps until `resume_generation`. mode: as of `sleep`.

        clear_cache: clear the prefix cache, and let running requests compute their KV cache again.
        """
        self._let_rest(lambda: self._is_done("pause", mode, clear_cache))

    @also_from_vllm
    def resume_generation(self) -> None:
        """End a pause."""
        self._call_workers(RpcCall("resume"))

    @also_from_vllm
    def is_paused(self) -> bool:
        """Whether the engine runs no steps, because of a pause or a sleep."""
        return self._is_done("is_paused")

    def engine_state(self) -> EngineState:
        """State of the engine: running, paused, asleep, or with undefined weights."""
        (state,) = self._call_workers(RpcCall("engine_state"))
        assert isinstance(state, EngineState)
        return state

    def _is_done(self, method: str, *args: Any) -> bool:
        return bool(self._call_workers(RpcCall(method, args))[0])


class AsyncSleepMethods(ABC):
    """Methods of an asynchronous engine; requests finish while they wait."""

    @abstractmethod
    async def _call_workers(self, call: RpcCall) -> list[Any]:
        """Answers of the feature."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Requests of this front end that have not ended."""

    @also_from_vllm
    async def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> None:
        """As `LLM.sleep`."""
        while not await self._is_done("sleep", level, mode, tags):
            await asyncio.sleep(_POLL_S)

    @also_from_vllm
    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLM.wake_up`."""
        await self._call_workers(RpcCall("wake_up", (tags,)))

    @also_from_vllm
    async def is_sleeping(self) -> bool:
        """As `LLM.is_sleeping`."""
        return await self._is_done("is_sleeping")

    @also_from_vllm
    async def pause_generation(
        self,
        mode: str = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        """As `LLM.pause_generation`. wait_for_inflight_requests: as mode="wait"."""
        given = PauseMode.WAIT if wait_for_inflight_requests else mode
        while not await self._is_done("pause", given, clear_cache):
            await asyncio.sleep(_POLL_S)

    @also_from_vllm
    async def resume_generation(self) -> None:
        """As `LLM.resume_generation`."""
        await self._call_workers(RpcCall("resume"))

    @also_from_vllm
    async def is_paused(self) -> bool:
        """As `LLM.is_paused`."""
        return await self._is_done("is_paused")

    @also_from_vllm
    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request of this front end is unfinished. Raises WaitTimeout after so many seconds."""
        deadline = time.monotonic() + drain_timeout
        while num_left := self.get_num_unfinished_requests():
            if time.monotonic() > deadline:
                raise WaitTimeout(f"{num_left} requests have not ended within drain_timeout={drain_timeout:g} s.")
            await asyncio.sleep(_POLL_S)

    async def engine_state(self) -> EngineState:
        """As `LLM.engine_state`."""
        (state,) = await self._call_workers(RpcCall("engine_state"))
        assert isinstance(state, EngineState)
        return state

    async def _is_done(self, method: str, *args: Any) -> bool:
        return bool((await self._call_workers(RpcCall(method, args)))[0])

"""Methods of `LLM` and `AsyncEngine` for LoRA adapters."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.errors import ProcessLost
from penstock.features.lora.request import LoRARequest

logger = logging.getLogger(__name__)

# Poll interval while an adapter is loaded.
_LOADING_POLL_S = 0.005


class AdapterMethods(ABC):
    """Methods of an offline engine for adapters."""

    _config: EngineConfig

    @abstractmethod
    def _call_workers(self, call: RpcCall) -> list[Any]:
        """Answers of the feature."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; False if there is one of its id already, unless `load_inplace` replaces it.

        A replaced adapter's running requests are preempted and go on with the new weights.
        Raises CheckpointError or UnsupportedFeature for one that cannot be loaded, InvalidRequest without room for it.
        """
        return any(self._call("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; False for an unknown id. Requests that run keep it until they end."""
        return all(self._call("remove_lora", lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory and in its slot on the device; False for an unknown id."""
        return all(self._call("pin_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Ids of the adapters in host memory."""
        return _numbers(self._call("known_loras"), self._call("list_loras"))

    def _call(self, method: str, *arguments: LoRARequest | int) -> list[Any]:
        return self._call_workers(RpcCall(method, arguments))

    def _add_adapters(self, adapters: Sequence[LoRARequest | None]) -> None:
        """Load adapters before their requests, as many as host memory has room for, so that errors come at once."""
        distinct = {adapter.lora_int_id: adapter for adapter in adapters if adapter is not None}
        held = self.list_loras() if any(adapter.tensors is not None for adapter in distinct.values()) else set()
        for lora_id, adapter in list(distinct.items())[: self._config.lora.num_on_host]:
            is_there = adapter.tensors is not None and not adapter.load_inplace and lora_id in held
            if adapter.has_weights and not is_there:
                self.add_lora(adapter)


class AsyncAdapterMethods(ABC):
    """Loads, removes and lists adapters while requests run."""

    @abstractmethod
    async def _call_workers(self, call: RpcCall) -> list[Any]:
        """Answers of the feature."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLM.add_lora`, while requests run: folders are read in a thread, and steps go on.

        A core that is lost meanwhile is replaced, and the new one loads the adapter.
        """
        return await self._add(lora_request)

    async def add_lora_of_new_name(self, lora_request: LoRARequest) -> bool:
        """As `add_lora`; raises InvalidRequest for a name that an adapter of another number has."""
        return await self._add(lora_request, owns_name=True)

    async def _add(self, lora_request: LoRARequest, **options: bool) -> bool:
        while True:
            if lora_request.lora_path:
                (adapter,) = await self._repeated("prefetch_lora", lora_request)
                while any(adapter.key in keys for keys in await self._repeated("loading_loras")):
                    await asyncio.sleep(_LOADING_POLL_S)
            try:
                return any(await self._call_workers(RpcCall("add_lora", (lora_request,), options)))
            except ProcessLost as error:
                # It ends with EngineDead where cores are not replaced any more.
                logger.warning("The adapter %s is loaded again: %s", lora_request.lora_name, error)

    async def _repeated(self, method: str, *args: Any) -> list[Any]:
        """Call a method that may be called twice, again if the core or broker is lost before it answers."""
        while True:
            try:
                return await self._call_workers(RpcCall(method, args))
            except ProcessLost as error:
                logger.info("%s is called again: %s", method, error)

    async def _add_given(self, lora_request: Any) -> None:
        """Add an adapter that a request brings with it in memory, or that is to be replaced: others are read later."""
        if not isinstance(lora_request, LoRARequest) or not (lora_request.tensors or lora_request.load_inplace):
            return
        if lora_request.load_inplace or all(
            adapter.lora_int_id != lora_request.lora_int_id for adapter in await self.known_loras()
        ):
            await self.add_lora(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """As `LLM.remove_lora`."""
        return all(await self._repeated("remove_lora", lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """As `LLM.pin_lora`."""
        return all(await self._repeated("pin_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """As `LLM.list_loras`."""
        return _numbers(await self._repeated("known_loras"), await self._repeated("list_loras"))

    async def offer_loras(self, lora_requests: Sequence[LoRARequest]) -> None:
        """Let requests use adapters by their ids, which are loaded once they do; removed ones stay so."""
        await self._repeated("offer_loras", list(lora_requests))

    async def known_loras(self) -> list[LoRARequest]:
        """Adapters that requests may use, loaded or not, by number; without the tensors of those in memory."""
        (known,) = await self._repeated("known_loras")
        return list(known)

    async def take_lora_number(self) -> int:
        """A `lora_int_id` that no adapter has had, for a new one."""
        (number,) = await self._repeated("take_lora_number")
        return int(number)


def _numbers(known: list[list[LoRARequest]], held: list[set[int]]) -> set[int]:
    """Numbers of the known adapters whose keys all workers hold."""
    on_all = set.intersection(*held)
    return {adapter.lora_int_id for adapter in known[0] if adapter.key in on_all}

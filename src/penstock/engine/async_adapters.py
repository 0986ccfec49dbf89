"""Methods of `AsyncEngine` for LoRA adapters."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from penstock.contract.lora import LoRARequest

# Poll interval while an adapter is loaded.
_LOADING_POLL_S = 0.005


class AsyncAdapterMethods(ABC):
    """Loads, removes and lists adapters while requests run."""

    @abstractmethod
    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """As `AsyncEngine`."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter while requests run; False if there is one of its id already.

        With `load_inplace` it replaces that one, between two steps; requests that run with it go on with the new
        weights. Raises CheckpointError or UnsupportedFeature for one that cannot be loaded, InvalidRequest without
        room for it.
        """
        lora_id = lora_request.lora_int_id
        is_new = lora_id not in await self.list_loras()
        if is_new:
            await self.collective_rpc("prefetch_lora", args=(lora_request,))
            while any(status.get(lora_id) == "" for status in await self.collective_rpc("lora_status")):
                await asyncio.sleep(_LOADING_POLL_S)
        return any(await self.collective_rpc("add_lora", args=(lora_request,))) or is_new

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; False for an unknown id. Requests that run keep it until they end."""
        return all(await self.collective_rpc("remove_lora", args=(lora_id,)))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory and in its slot on the device; False for an unknown id."""
        return all(await self.collective_rpc("pin_lora", args=(lora_id,)))

    async def list_loras(self) -> set[int]:
        """Ids of the adapters in host memory."""
        of_workers: list[set[int]] = await self.collective_rpc("list_loras")
        return set.intersection(*of_workers)

    async def known_loras(self) -> list[LoRARequest]:
        """Adapters that requests may use by their ids, loaded or not; without the tensors of those in memory."""
        of_cores: list[list[LoRARequest]] = await self.collective_rpc("known_loras")
        known = {adapter.lora_int_id: adapter for of_core in of_cores for adapter in of_core}
        return [known[lora_id] for lora_id in sorted(known)]

"""LoRA adapters that the HTTP API serves, by their names."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.contract.lora import LoRARequest
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import ModelError, UnsupportedFeature
from penstock.server.http.errors import ApiError

# Age of the list of adapters that another front end may have changed.
_MAX_AGE_S = 1.0


class ServedAdapters:
    """Adapters of the command line, and those that were loaded since.

    Engines know the latter, so that every front end serves them.
    """

    def __init__(self, engine: AsyncEngine, modules: Sequence[LoRARequest]) -> None:
        self._engine = engine
        self._modules = {adapter.lora_name: adapter for adapter in modules}
        self._unloaded: set[str] = set()
        self._loaded: dict[str, LoRARequest] = {}
        self._read_at = float("-inf")

    async def all(self) -> list[LoRARequest]:
        """All adapters, those of the command line first."""
        return list((await self._by_name()).values())

    async def find(self, name: str) -> LoRARequest | None:
        """Return an adapter by its name; None for an unknown one."""
        return (await self._by_name()).get(name)

    async def load(self, name: str, path: str, *, load_inplace: bool) -> None:
        """Load an adapter under a new name, or again under its own. Raises ApiError for one that cannot be loaded."""
        self._require_enabled()
        known = await self._by_name(max_age_s=0.0)
        if name in known and not load_inplace:
            raise ApiError(400, f"The adapter {name!r} is there already. Unload it first, or set load_inplace.")
        number = max((adapter.lora_int_id for adapter in (*known.values(), *self._modules.values())), default=0) + 1
        number = known[name].lora_int_id if name in known else number
        try:
            await self._engine.add_lora(LoRARequest(name, number, path, load_inplace=name in known))
        except (ModelError, UnsupportedFeature) as error:
            raise ApiError(400, str(error), param="lora_path") from error
        self._unloaded.discard(name)
        self._read_at = float("-inf")

    async def unload(self, name: str) -> None:
        """Remove an adapter; running requests keep it until they end. Raises ApiError for an unknown name."""
        self._require_enabled()
        adapter = (await self._by_name(max_age_s=0.0)).get(name)
        if adapter is None:
            raise ApiError(404, f"There is no adapter {name!r}.", param="lora_name", code="model_not_found")
        await self._engine.remove_lora(adapter.lora_int_id)
        self._unloaded.add(name)
        self._read_at = float("-inf")

    async def _by_name(self, max_age_s: float = _MAX_AGE_S) -> dict[str, LoRARequest]:
        if not self._engine.has_adapters:
            return {}
        if time.monotonic() - self._read_at > max_age_s:
            self._loaded = {adapter.lora_name: adapter for adapter in await self._engine.known_loras()}
            self._read_at = time.monotonic()
        modules = {name: adapter for name, adapter in self._modules.items() if name not in self._unloaded}
        return {**modules, **self._loaded}

    def _require_enabled(self) -> None:
        if not self._engine.has_adapters:
            raise ApiError(400, "LoRA adapters are not enabled. Start the server with --enable-lora.")

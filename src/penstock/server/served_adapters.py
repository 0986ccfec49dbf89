"""LoRA adapters that the HTTP API serves, by their names."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.contract.lora import LoRARequest
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import InvalidRequest, ModelError, UnsupportedFeature
from penstock.server.http.errors import ApiError

# Age of the list of adapters that another front end may have changed.
_MAX_AGE_S = 1.0


class ServedAdapters:
    """Adapters that the engine knows: those of the command line, and those that were loaded since.

    They are the same in every front end. model_names: those of the base model, which no adapter may have.
    """

    def __init__(self, engine: AsyncEngine, modules: Sequence[LoRARequest], model_names: Sequence[str]) -> None:
        self._engine = engine
        self._model_names = model_names
        # Adapters of the command line that were not offered to the engine yet.
        self._modules = list(modules)
        self._by_name: dict[str, LoRARequest] = {}
        self._read_at = float("-inf")

    async def all(self) -> list[LoRARequest]:
        """All adapters, in the order of their numbers."""
        await self._read(_MAX_AGE_S)
        return list(self._by_name.values())

    async def find(self, name: str) -> LoRARequest | None:
        """Return an adapter by its name; None for an unknown one."""
        await self._read(_MAX_AGE_S)
        if name not in self._by_name:
            # Another front end may have loaded it just now.
            await self._read(0.0)
        return self._by_name.get(name)

    async def load(self, name: str, path: str, *, load_inplace: bool) -> None:
        """Load an adapter under a new name, or again under its own. Raises ApiError for one that cannot be loaded."""
        self._require_enabled()
        if name in self._model_names:
            raise ApiError(400, f"{name!r} is the model's name. Give the adapter another one.", param="lora_name")
        numbers: set[int] = set()
        while True:
            await self._read(0.0)
            known = self._by_name.get(name)
            if known is not None and not load_inplace:
                raise ApiError(400, f"The adapter {name!r} is there already. Unload it first, or set load_inplace.")
            number = known.lora_int_id if known is not None else self._free_number()
            try:
                await self._engine.add_lora(LoRARequest(name, number, path, load_inplace=known is not None))
            except (ModelError, UnsupportedFeature) as error:
                raise ApiError(400, str(error), param="lora_path") from error
            except InvalidRequest:
                # Another front end may have taken the number meanwhile.
                await self._read(0.0)
                if number in numbers or self._free_number() == number:
                    raise
                numbers.add(number)
            else:
                self._read_at = float("-inf")
                return

    async def unload(self, name: str) -> None:
        """Remove an adapter; running requests keep it until they end. Raises ApiError for an unknown name."""
        self._require_enabled()
        await self._read(0.0)
        adapter = self._by_name.get(name)
        if adapter is None:
            raise ApiError(404, f"There is no adapter {name!r}.", param="lora_name", code="model_not_found")
        await self._engine.remove_lora(adapter.lora_int_id)
        self._read_at = float("-inf")

    async def _read(self, max_age_s: float) -> None:
        """Read the adapters from the engine, unless those of the last time are recent enough."""
        if not self._engine.has_adapters or time.monotonic() - self._read_at <= max_age_s:
            return
        if self._modules:
            await self._engine.offer_loras(self._modules)
            self._modules = []
        self._by_name = {adapter.lora_name: adapter for adapter in await self._engine.known_loras()}
        self._read_at = time.monotonic()

    def _free_number(self) -> int:
        return max((adapter.lora_int_id for adapter in self._by_name.values()), default=0) + 1

    def _require_enabled(self) -> None:
        if not self._engine.has_adapters:
            raise ApiError(400, "LoRA adapters are not enabled. Start the server with --enable-lora.")

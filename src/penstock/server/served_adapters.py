"""LoRA adapters that the HTTP API serves, by their names."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.engine.async_engine import AsyncEngine
from penstock.errors import ModelError, UnsupportedFeature
from penstock.features.lora.request import LoRARequest
from penstock.server.http.errors import ApiError


class ServedAdapters:
    """Adapters that the engine knows: those of the command line, and those that were loaded since.

    The engine's list is asked each time, so all front ends serve the same. model_names: those of the base model, which
    no adapter may have. modules: adapters of the command line, which are offered to the engine at the first question.
    """

    def __init__(self, engine: AsyncEngine, modules: Sequence[LoRARequest], model_names: Sequence[str]) -> None:
        self._engine = engine
        self._model_names = model_names
        self._modules, self._are_offered = modules, False

    async def all(self) -> list[LoRARequest]:
        """All adapters, in the order of their numbers."""
        if not self._engine.has_adapters:
            return []
        if self._modules and not self._are_offered:
            await self._engine.offer_loras(self._modules)
            self._are_offered = True
        return await self._engine.known_loras()

    async def find(self, name: str) -> LoRARequest | None:
        """Return an adapter by its name; None for an unknown one."""
        return next((adapter for adapter in await self.all() if adapter.lora_name == name), None)

    async def load(self, name: str, path: str, *, load_inplace: bool) -> None:
        """Load an adapter under a new name, or again under its own. Raises ApiError for one that cannot be loaded."""
        self._require_enabled()
        if name in self._model_names:
            raise ApiError(400, f"{name!r} is the model's name. Give the adapter another one.", param="lora_name")
        known = await self.find(name)
        if known is not None and not load_inplace:
            raise ApiError(400, f"The adapter {name!r} is there already. Unload it first, or set load_inplace.")
        if known is None:
            adapter = LoRARequest(name, await self._engine.take_lora_number(), path)
        else:
            adapter = replace(known, lora_path=path, load_inplace=True)
        try:
            await self._engine.add_lora_of_new_name(adapter)
        except (ModelError, UnsupportedFeature) as error:
            raise ApiError(400, str(error), param="lora_path") from error

    async def unload(self, name: str) -> None:
        """Remove an adapter; running requests keep it until they end. Raises ApiError for an unknown name."""
        self._require_enabled()
        adapter = await self.find(name)
        if adapter is None:
            raise ApiError(404, f"There is no adapter {name!r}.", param="lora_name", code="model_not_found")
        await self._engine.remove_lora(adapter.lora_int_id)

    def _require_enabled(self) -> None:
        if not self._engine.has_adapters:
            raise ApiError(400, "LoRA adapters are not enabled. Start the server with --enable-lora.")

"""Worker side of LoRA adapters: loading in the background, host cache, and slots on the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor, nn

from penstock.contract.memory_tags import WEIGHTS
from penstock.errors import CheckpointError, InvalidRequest
from penstock.features.lora.cache import AdapterCache
from penstock.features.lora.checkpoint import read_adapter
from penstock.features.lora.low_rank import digest_of
from penstock.features.lora.request import AdapterPart, LoRARequest, stamp_of
from penstock.features.lora.slots import adapter_owners
from penstock.features.lora.tables import AdapterTables, PackedModelAdapter
from penstock.models.interface import LanguageModel
from penstock.runner.slot_owner import SlotOwner
from penstock.worker.feature import WorkerFeature, WorkerServices

logger = logging.getLogger(__name__)


class LoRAWorker(WorkerFeature):
    """Adapters that requests of one rank may use."""

    def __init__(self, services: WorkerServices) -> None:
        config, device, model = services.config.lora, services.device, services.model
        assert isinstance(model, nn.Module), "the registry makes torch modules"
        self.tables = AdapterTables(model, config, device.torch_device, services.dtype)
        self._owners = adapter_owners(device, services.num_slots, self)
        self._max_rank = config.max_lora_rank
        self._needs_digests, self._kept_as = services.config.keeps_kv, f"{config.max_lora_rank} {config.lora_dtype}"
        self._cache: AdapterCache[Future[PackedModelAdapter]] = AdapterCache(config.num_on_host, config.max_loras)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="penstock-adapters")

    def slot_owners(self) -> Sequence[SlotOwner]:
        return self._owners

    def replace_model(self, model: LanguageModel) -> None:
        assert isinstance(model, nn.Module), "the registry makes torch modules"
        self.tables.attach(model)

    def tensors(self, tag: str) -> Sequence[Tensor]:
        return self.tables.tensors if tag == WEIGHTS else ()

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter; False if there is one of its key, which `load_inplace` replaces.

        Raises CheckpointError or UnsupportedFeature for an adapter that cannot be loaded, InvalidRequest without room.
        """
        known = self._cache.get(request.key)
        if known is not None and not request.load_inplace:
            self._loaded(request.key, known)
            return False
        source, staged = self._cache.staged.pop(request.key, (None, None))
        is_staged = staged is not None and source == (request.lora_path, request.stamp)
        loaded = staged.result() if staged is not None and is_staged else self._load(request)
        slot = self._cache.slots.get(request.key)
        if slot is not None:
            self._replace(slot, loaded, known)
        done: Future[PackedModelAdapter] = Future()
        done.set_result(loaded)
        self._cache.put(request.key, done)
        return True

    def prefetch_lora(self, request: LoRARequest) -> None:
        """Start loading an adapter in the background, unless it is there. Raises InvalidRequest without room.

        With `load_inplace` its weights replace those of an adapter once it is added.
        """
        if request.load_inplace:
            source = request.lora_path, request.stamp
            self._cache.staged[request.key] = source, self._reader.submit(self._load, request)
        elif self._cache.get(request.key) is None:
            self._cache.put(request.key, self._reader.submit(self._load, request))

    def loading_loras(self) -> set[int]:
        """Ids of the adapters that are being loaded, or whose new weights are."""
        cached = {lora_id for lora_id in self._cache.ids if not self._cache.peek(lora_id).done()}
        return cached | {lora_id for lora_id, (_, staged) in self._cache.staged.items() if not staged.done()}

    def lora_status(self) -> dict[int, str | None]:
        """Adapters by id: None for loaded ones, "" for those that load, and the error of those that cannot be loaded.

        Failed adapters are forgotten.
        """
        found: dict[int, str | None] = {}
        for lora_id in sorted(self._cache.ids):
            loading = self._cache.peek(lora_id)
            if not loading.done():
                found[lora_id] = ""
                continue
            error = loading.exception()
            found[lora_id] = None if error is None else f"{type(error).__name__}: {error}"
            if error is not None:
                self._cache.remove(lora_id)
        return found

    def lora_digests(self) -> dict[int, str]:
        """Digests of the loaded adapters by id, where blocks of the KV cache are kept beyond the engine."""
        loaded = {lora_id: self._cache.peek(lora_id) for lora_id in self._cache.ids}
        return {
            lora_id: one.result().digest for lora_id, one in loaded.items() if one.done() and one.exception() is None
        }

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; False for an unknown id. Running requests keep it until they end."""
        self._cache.staged.pop(lora_id, None)
        return self._cache.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory and in its slot; False for an unknown id. Raises InvalidRequest without a slot."""
        return self._cache.pin(lora_id)

    def list_loras(self) -> set[int]:
        """Ids of the adapters in host memory."""
        return self._cache.ids

    def acquire(self, part: AdapterPart) -> tuple[int, PackedModelAdapter]:
        """Return the slot of a request's adapter, loading it where needed, and the adapter; `release` follows."""
        key = part.key
        if self._cache.get(key) is None:
            if not part.lora_path:
                raise InvalidRequest(
                    f"The adapter {part.lora_name!r} ({part.lora_int_id}) was removed or has made room for others, and "
                    "it has no lora_path. Add it again, or pin it."
                )
            # Other adapters have taken its place in host memory since the request was admitted.
            self.prefetch_lora(part.adapter)
        loading = self._cache.get(key)
        assert loading is not None, "it was put there"
        loaded = self._loaded(key, loading)
        return self._cache.acquire(key, lambda slot: self.tables.write(slot, loaded)), loaded

    def release(self, slot: int) -> None:
        """Note that a request does not use the adapter of this slot any more."""
        self._cache.release(slot)

    def close(self) -> None:
        """End the thread that loads."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _replace(self, slot: int, loaded: PackedModelAdapter, before: Future[PackedModelAdapter] | None) -> None:
        """Write other weights of an adapter into its slot, or leave those of before there."""
        try:
            self.tables.write(slot, loaded)
        except Exception:
            if before is not None:
                self.tables.write(slot, before.result())
            raise

    def _loaded(self, lora_id: int, loading: Future[PackedModelAdapter]) -> PackedModelAdapter:
        """Wait for an adapter, which is forgotten if it cannot be loaded."""
        try:
            return loading.result()
        except Exception:
            self._cache.remove(lora_id)
            raise

    def _load(self, request: LoRARequest) -> PackedModelAdapter:
        matrices = read_adapter(request, self._max_rank, self.tables.stacked, self.tables.named)
        packed = self.tables.pack(request.lora_name, matrices)
        if self._needs_digests:
            packed = replace(packed, digest=digest_of(matrices, self._kept_as))
        if request.stamp and stamp_of(request.lora_path) != request.stamp:
            raise CheckpointError(
                f"The adapter {request.lora_name!r} has other files in {request.lora_path} than when it was added. "
                "Load it again in place, or under a new name, and give each training's weights a folder of their own."
            )
        logger.info("Adapter %s (%d) loaded", request.lora_name, request.lora_int_id)
        return packed

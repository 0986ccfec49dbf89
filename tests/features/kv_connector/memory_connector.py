"""A connector that keeps blocks of prompts in this process, by the hash of all tokens before their end.

Options: "beside" loads beside the steps, in so many calls of `get_finished`; "keeps" holds blocks of ended requests for
so many such calls; "fails_at" is the block of a prompt that cannot be loaded; "later" answers so many look-ups later;
"store" is the name of its store.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.contract import SchedulerOutput
from penstock.features.kv_connector.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorStats, SupportsHMA

# Pages of a block by layer, by the hash of its prefix and its group.
STORES: dict[str, dict[Any, dict[str, Tensor]]] = defaultdict(dict)


@dataclass
class _Metadata(KVConnectorMetadata):
    """Blocks, with their keys: of loads by request, and of saves. fails: whether each block cannot be loaded."""

    loads: dict[str, list[tuple[Any, int, bool]]] = field(default_factory=dict)
    saves: list[tuple[Any, int]] = field(default_factory=list)


@dataclass
class LoadedBlocks(KVConnectorStats):
    """data: number of blocks, under "blocks"."""

    def aggregate(self, other: KVConnectorStats) -> LoadedBlocks:
        return LoadedBlocks({"blocks": self.data.get("blocks", 0) + other.data.get("blocks", 0)})

    def reduce(self) -> dict[str, int | float]:
        return {"Num loaded blocks": self.data["blocks"]}


class BlockStored:
    """Event of a block that is saved."""


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        option = self._kv_transfer_config.get_from_extra_config
        self._store = STORES[option("store", "default")]
        self._num_beside, self._num_keeping = option("beside", 0), option("keeps", 0)
        self._fails_at, self._later = option("fails_at", None), option("later", 0)
        self._groups = self._kv_cache_config.groups
        self._asked: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[list[int]]] = {}
        self._metadata = _Metadata()
        self._receiving: dict[str, int] = {}
        self._sending: dict[str, int] = {}
        self._errors: set[int] = set()
        self.calls: list[str] = []
        self._num_loaded = self._num_stored = 0

    # Scheduler role.

    def _key(self, request: Any, group: int, index: int) -> Any:
        hashes, size = request.block_hashes, self._groups[group].spec.block_size
        of_hash = min(one.spec.block_size for one in self._groups)
        return group, hashes[(index + 1) * size // of_hash - 1]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        if self._asked[request.request_id] <= self._later:
            return None, False
        size, end = self._groups[0].spec.block_size, 0
        while end + size < request.num_tokens and all(
            self._key(request, group, end // size) in self._store for group in range(len(self._groups))
        ):
            end += size
        return max(0, end - num_computed_tokens), self._num_beside > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        block_ids = blocks.get_block_ids()
        if not num_external_tokens:
            return
        size = self._groups[0].spec.block_size
        end = request.num_computed_tokens // size
        if self._num_beside:  # it is told before the load
            end += num_external_tokens // size
        self._metadata.loads[request.request_id] = [
            (self._key(request, group, index), block_ids[group][index], index == self._fails_at)
            for group in range(len(self._groups))
            for index in range(end - num_external_tokens // size, end)
            if block_ids[group][index]
        ]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=False):
            for known, ids in zip(self._blocks[req_id], block_ids or (), strict=False):
                known.extend(ids)
        for req_id, start in scheduler_output.first_positions():
            request = self._requests[req_id]
            end = min(start + scheduler_output.num_scheduled_tokens[req_id], request.num_prompt_tokens)
            for group, blocks in enumerate(self._blocks[req_id]):
                size = self._groups[group].spec.block_size
                for index in range(start // size, end // size):
                    if blocks[index]:
                        self._metadata.saves.append((self._key(request, group, index), blocks[index]))
        metadata, self._metadata = self._metadata, _Metadata()
        self._num_stored += len(metadata.saves)
        return metadata if metadata.loads or metadata.saves else None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        params = {"finish_reason": request.finish_reason, "given": request.kv_transfer_params}
        return self._num_keeping > 0, params

    def reset_cache(self) -> bool:
        self._store.clear()
        return True

    def take_events(self) -> list[BlockStored]:
        num_stored, self._num_stored = self._num_stored, 0
        return [BlockStored()] * num_stored

    # Worker role.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._layers = kv_caches
        self._of_group = [
            [name for name in group.layer_names if name in kv_caches] for group in self._kv_cache_config.groups
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        for req_id, blocks in metadata.loads.items():
            self._num_loaded += len(blocks)
            for key, block_id, fails in blocks:
                for name in self._of_group[key[0]]:
                    if fails:
                        self._layers[name][block_id].fill_(1)
                        self._errors.add(block_id)
                    else:
                        self._layers[name][block_id].copy_(self._store[key][name])
            if self._num_beside:
                self._receiving[req_id] = self._num_beside

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        for key, block_id in metadata.saves:
            if layer_name in self._of_group[key[0]]:
                self._store.setdefault(key, {}).setdefault(layer_name, kv_layer[block_id].clone())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if self._num_keeping:
            self._sending |= dict.fromkeys(finished_req_ids, self._num_keeping)
        return _count_down(self._sending), _count_down(self._receiving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        num_loaded, self._num_loaded = self._num_loaded, 0
        return LoadedBlocks({"blocks": num_loaded} if num_loaded else {})

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        raise AssertionError("it takes all groups")


def _count_down(calls: dict[str, int]) -> set[str]:
    for req_id in calls:
        calls[req_id] -= 1
    done = {req_id for req_id, left in calls.items() if left <= 0}
    for req_id in done:
        del calls[req_id]
    return done

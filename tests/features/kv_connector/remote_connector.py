"""A connector that pulls blocks from another engine of this process, as vLLM's proxies arrange it by two requests.

Option: "lease_s", for how long an engine keeps the blocks of a prompt that no other engine pulls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.contract import SchedulerOutput
from penstock.features.kv_connector.base import KVConnectorBase_V1, KVConnectorMetadata

# By engine: the pages of its layers, when the lease of each of its requests ends, and those whose blocks were pulled.
PAGES: dict[str, dict[str, Tensor]] = {}
LEASES: dict[str, dict[str, float]] = defaultdict(dict)
PULLED: dict[str, set[str]] = defaultdict(set)


@dataclass
class _Metadata(KVConnectorMetadata):
    """By request: the engine and its request, and pairs of a block of its and one of this engine."""

    pulls: dict[str, tuple[str, str, list[tuple[int, int]]]] = field(default_factory=dict)


class RemoteConnector(KVConnectorBase_V1):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._engine_id = str(self._kv_transfer_config.engine_id)
        self._lease_s = self._kv_transfer_config.get_from_extra_config("lease_s", 60.0)
        assert self._kv_cache_config is not None
        self._size = self._kv_cache_config.groups[0].spec.block_size
        self._metadata = _Metadata()
        self._received: set[str] = set()
        self._errors: set[int] = set()

    # Scheduler role.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        num_blocks = min(len(params["remote_block_ids"]), (request.num_prompt_tokens - 1) // self._size)
        return max(0, num_blocks * self._size - num_computed_tokens), True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        params, own = request.kv_transfer_params, blocks.get_block_ids()[0]
        first = len(own) - num_external_tokens // self._size
        pairs = list(zip(params["remote_block_ids"][first : len(own)], own[first:], strict=True))
        self._metadata.pulls[request.request_id] = params["remote_engine_id"], params["remote_request_id"], pairs

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        metadata, self._metadata = self._metadata, _Metadata()
        return metadata if metadata.pulls else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        whole = block_ids[: request.num_prompt_tokens // self._size]
        if not params.get("do_remote_decode") or request.finish_reason != "length" or not whole:
            return False, None
        LEASES[self._engine_id][request.request_id] = time.monotonic() + self._lease_s
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": whole,
        }

    # Worker role.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        PAGES[self._engine_id] = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        for req_id, (engine_id, remote_req_id, pairs) in metadata.pulls.items():
            for theirs, own in pairs:
                for name, pages in PAGES[self._engine_id].items():
                    pages[own].copy_(PAGES[engine_id][name][theirs])
            # The blocks may be others' by now.
            if LEASES[engine_id].get(remote_req_id, 0.0) <= time.monotonic():
                self._errors.update(own for _, own in pairs)
            PULLED[engine_id].add(remote_req_id)
            self._received.add(req_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        leases, now = LEASES[self._engine_id], time.monotonic()
        sent = {req_id for req_id, end in leases.items() if end <= now or req_id in PULLED[self._engine_id]}
        for req_id in sent:
            del leases[req_id]
        received, self._received = self._received, set()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors

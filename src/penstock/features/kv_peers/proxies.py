"""Parameters of proxies that send a request to an engine for its prompt, and then to another one, as vLLM's do.

Blocks are found by their content, so these parameters decide nothing here: the second engine looks for the blocks in
its folder, and asks its own `kv_peers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import part_of
from penstock.features.kv_transfer import KVTransferPart, KVTransferResult
from penstock.scheduler.request import Request


class Proxies:
    """Answers of requests whose parameters say that another engine continues them (`do_remote_decode`)."""

    def __init__(self, config: EngineConfig) -> None:
        host, _, port = (config.kv_tiers.kv_listen or "").rpartition(":")
        self._of_engine: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": config.kv_tiers.kv_listen,
            "remote_host": host.strip("[]") or None,
            "remote_port": int(port) if port else None,
            # None are held for the other engine.
            "remote_block_ids": [],
            "tp_size": config.parallel.tensor_parallel_size,
        }
        self._answers: dict[str, KVTransferResult] = {}

    def note_end(self, request: Request) -> bool:
        """Whether a request that ends has an answer now."""
        part = part_of(request.parts, KVTransferPart)
        if part is None or part.params.get("do_remote_decode") is not True:
            return False
        params = {**self._of_engine, "remote_request_id": request.req_id}
        self._answers[request.req_id] = KVTransferResult(params=params)
        return True

    def take(self) -> Mapping[str, KVTransferResult]:
        """Answers of the requests that have ended since the last call."""
        answers, self._answers = self._answers, {}
        return answers

"""Requests and blocks, as KV connectors see them, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contract import part_of
from penstock.features.kv_transfer import KVTransferPart
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.request import Request


@dataclass(frozen=True)
class KVCacheBlocks:
    """Blocks of a request."""

    block_ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Ids per KV-cache group; 0 for positions that are not read."""
        return self.block_ids


class ConnectorRequest:
    """A request. Compared by its id."""

    def __init__(self, request: Request, kv_cache: KVCacheManager, *, has_ended: bool = False) -> None:
        self._request, self._kv_cache, self._has_ended = request, kv_cache, has_ended

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConnectorRequest) and other.request_id == self.request_id

    def __hash__(self) -> int:
        return hash(self.request_id)

    @property
    def request_id(self) -> str:
        return self._request.req_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.prompt_token_ids

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt, and all tokens that are known so far."""
        return self._request.all_token_ids

    @property
    def num_tokens(self) -> int:
        return self._request.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._request.num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self._request.num_computed_tokens

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    @property
    def cache_salt(self) -> str | None:
        return self._request.cache_salt

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hashes of all tokens up to the end of each block, and of what else the blocks depend on, such as adapters,
        images and the salt."""
        return self._kv_cache.block_hashes(self._request)

    @property
    def has_lasting_keys(self) -> bool:
        """Whether these hashes mean the same to other engines, and after a restart."""
        return self._request.has_lasting_keys

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """Parameters of the caller for the connector."""
        part = part_of(self._request.parts, KVTransferPart)
        return None if part is None else part.params

    @property
    def finish_reason(self) -> str | None:
        """Of an ended request: "length", "stop", or "abort", also for one that failed; None before the end."""
        request = self._request
        if not self._has_ended:
            return None
        last = request.all_token_ids[-1:]
        if request.num_output_tokens and request.end_token_ids.issuperset(last):
            return "stop"
        return "length" if request.num_tokens >= request.length_limit else "abort"

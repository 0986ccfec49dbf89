"""Length limits of requests, and checks for those that the engine can never serve."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Limits of a request's length.

    max_model_len: maximum context length in tokens, prompt and output together. longest_chunk: the token budget where a
    step must run a whole prompt, without chunked prefill; None with it.
    """

    max_model_len: int
    longest_chunk: int | None
    kv_cache: KVCacheManager

    def apply(self, request: Request) -> None:
        """Set the request's `length_limit`.

        Raises InvalidRequest for an empty prompt, or a complete request; ContextTooLong for a request that can never
        fit: no room for an output token, a prompt longer than a chunk, or more blocks than there are.
        """
        _check_prompt(request, self.max_model_len)
        max_tokens = 0 if request.pools else request.sampling_params.max_tokens
        length = self.max_model_len if max_tokens is None else request.num_prompt_tokens + max_tokens
        request.length_limit = min(length, self.max_model_len)
        _check_unfinished(request)
        if self.longest_chunk is not None:
            _check_chunks(request, self.longest_chunk)
        _check_fits(request, self.kv_cache, max_model_len=self.max_model_len)


def _check_prompt(request: Request, max_model_len: int) -> None:
    """Raise InvalidRequest for an empty prompt, and ContextTooLong for one without room for an output token.

    A pooling request needs no room for output, nor does a single token, which is never computed.
    """
    if request.num_prompt_tokens == 0:
        raise InvalidRequest(
            f"The prompt of request {request.req_id!r} has no tokens. Send at least one; most models begin a text "
            "with a token of their own."
        )
    num_output_tokens = 0 if request.pools or request.sampling_params.max_tokens == 1 else 1
    longest = max_model_len - num_output_tokens
    if request.num_prompt_tokens > longest:
        reserved = "" if not num_output_tokens else ", of which one at least is the answer's"
        raise ContextTooLong(
            f"The prompt has {request.num_prompt_tokens:,} tokens, but this engine was started for a context of "
            f"{max_model_len:,}{reserved}. Shorten the prompt to {longest:,} tokens, or start with max_model_len="
            f"{request.num_prompt_tokens + num_output_tokens} or more."
        )


def _check_chunks(request: Request, max_num_batched_tokens: int) -> None:
    """Raise ContextTooLong for a prompt longer than the token budget, without chunked prefill."""
    if request.num_tokens > max_num_batched_tokens:
        raise ContextTooLong(
            f"The prompt has {request.num_tokens:,} tokens, but with enable_chunked_prefill=False a step runs whole "
            f"prompts of up to max_num_batched_tokens={max_num_batched_tokens:,}. Shorten the prompt, or start with "
            f"max_num_batched_tokens={request.num_tokens} or more."
        )


def _check_unfinished(request: Request) -> None:
    """Raise InvalidRequest for a resumed request that is complete already."""
    if not request.pools and request.num_output_tokens and request.num_tokens >= request.length_limit:
        limit = request.length_limit - request.num_prompt_tokens
        raise InvalidRequest(
            f"Request {request.req_id!r} comes with {request.num_output_tokens:,} generated tokens, but ends at "
            f"{limit:,}. Resume only what has not ended."
        )


def _check_fits(request: Request, kv_cache: KVCacheManager, *, max_model_len: int) -> None:
    """Raise ContextTooLong when the request's `length_limit` needs more blocks than there are."""
    for index, pool in enumerate(kv_cache.pools):
        num_usable = pool.num_blocks - 1

        def needed(length: int, index: int = index) -> int:
            return kv_cache.blocks_needed(request, length)[index]

        num_needed = needed(request.length_limit)
        if num_needed <= num_usable:
            continue
        lengths = range(1, max_model_len + 1)
        longest = bisect.bisect_right(lengths, num_usable, key=needed)
        raise ContextTooLong(
            f"The prompt has {request.num_prompt_tokens:,} tokens and may grow to {request.length_limit:,}, which need "
            f"{num_needed:,} blocks of KV cache, but there are {num_usable:,}: enough for {longest:,} tokens. Shorten "
            "the prompt, ask for fewer tokens, or give the KV cache more memory (memory_fraction or "
            "kv_cache_memory_bytes)."
        )

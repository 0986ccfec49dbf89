"""Checks for requests that the engine can never serve."""

from __future__ import annotations

import bisect

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.scheduler.kv_cache_manager import KVCacheManager
from penstock.scheduler.request import Request


def check_prompt(request: Request, max_model_len: int) -> None:
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


def check_chunks(request: Request, max_num_batched_tokens: int) -> None:
    """Raise ContextTooLong for a prompt longer than the token budget, without chunked prefill."""
    if request.num_tokens > max_num_batched_tokens:
        raise ContextTooLong(
            f"The prompt has {request.num_tokens:,} tokens, but with enable_chunked_prefill=False a step runs whole "
            f"prompts of up to max_num_batched_tokens={max_num_batched_tokens:,}. Shorten the prompt, or start with "
            f"max_num_batched_tokens={request.num_tokens} or more."
        )


def check_unfinished(request: Request) -> None:
    """Raise InvalidRequest for a resumed request that is complete already."""
    if not request.pools and request.num_output_tokens and request.num_tokens >= request.length_limit:
        limit = request.length_limit - request.num_prompt_tokens
        raise InvalidRequest(
            f"Request {request.req_id!r} comes with {request.num_output_tokens:,} generated tokens, but ends at "
            f"{limit:,}. Resume only what has not ended."
        )


def check_fits(request: Request, kv_cache: KVCacheManager, *, max_model_len: int) -> None:
    """Raise ContextTooLong when the request's `length_limit` needs more blocks than there are."""
    num_usable = kv_cache.pool.num_blocks - 1
    num_needed = kv_cache.blocks_needed(request, request.length_limit)
    if num_needed <= num_usable:
        return
    lengths = range(1, max_model_len + 1)
    longest = bisect.bisect_right(lengths, num_usable, key=lambda length: kv_cache.blocks_needed(request, length))
    raise ContextTooLong(
        f"The prompt has {request.num_prompt_tokens:,} tokens and may grow to {request.length_limit:,}, which need "
        f"{num_needed:,} blocks of KV cache, but there are {num_usable:,}: enough for {longest:,} tokens. Shorten "
        "the prompt, ask for fewer tokens, or give the KV cache more memory (memory_fraction or "
        "kv_cache_memory_bytes)."
    )

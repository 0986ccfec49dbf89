"""Layout of the KV cache from the layers' specs and the available memory.

Layers with equal specs share a block table. Where a model has several kinds of layers, each kind is split into groups
of about equally many layers, and the i-th layers of all groups share one tensor: a block id then costs the same memory
in every group, so that one pool of ids serves them all.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from penstock.contract import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)
from penstock.errors import OutOfMemory, UnsupportedFeature
from penstock.observability.units import format_bytes

# Below this ratio between the most and the least frequent kind, padding the smaller costs less than splitting further.
_PADDING_RATIO = 1.25


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec], available_bytes: int, *, max_model_len: int, max_num_batched_tokens: int
) -> KVCacheConfig:
    """Plan the KV cache that fills `available_bytes`.

    Raises OutOfMemory when a single request of `max_model_len` tokens would not fit into it, and UnsupportedFeature
    when the layers' pages cannot be given one size.
    """
    groups = group_layers(specs)
    if not groups:
        return make_kv_cache_config(groups, num_blocks=1)
    num_blocks = available_bytes // bytes_per_block(groups)
    if blocks_per_request(groups, max_model_len, max_num_batched_tokens) > num_blocks - 1:
        raise OutOfMemory(_too_small(groups, available_bytes, max_model_len, max_num_batched_tokens))
    return make_kv_cache_config(groups, num_blocks)


def make_kv_cache_config(groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> KVCacheConfig:
    """Return the KV cache of so many blocks, the null block included."""
    page_size_bytes = _page_size_bytes(groups)
    tensors = []
    for index in range(_num_tensors(groups)):
        shared_by = tuple(group.layer_names[index] for group in groups if index < len(group.layer_names))
        tensors.append(KVCacheTensor(size_bytes=page_size_bytes * num_blocks, shared_by=shared_by))
    return KVCacheConfig(num_blocks=num_blocks, tensors=tuple(tensors), groups=tuple(groups))


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """Sort layers into groups with pages of equal size; no groups without any KV cache.

    Raises UnsupportedFeature when the pages cannot be given one size.
    """
    if not specs:
        return ()
    kinds: dict[KVCacheSpec, list[str]] = {}
    for layer_name, spec in _with_equal_pages(specs).items():
        kinds.setdefault(spec, []).append(layer_name)
    group_size = _group_size([len(layer_names) for layer_names in kinds.values()])
    groups: list[KVCacheGroupSpec] = []
    for spec, layer_names in kinds.items():
        num_groups = math.ceil(len(layer_names) / group_size)
        # Every n-th layer, so that each pipeline stage has about the same share of each group.
        groups += [
            KVCacheGroupSpec(layer_names=tuple(layer_names[first::num_groups]), spec=spec)
            for first in range(num_groups)
        ]
    return tuple(groups)


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes of one block id, in all tensors together."""
    return _num_tensors(groups) * _page_size_bytes(groups)


def blocks_per_request(groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the maximum of blocks, of all groups, that a request of `num_tokens` holds at once."""
    return sum(group.spec.max_blocks_per_request(num_tokens, max_num_batched_tokens) for group in groups)


def bytes_per_request(groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the KV cache of one request of `num_tokens` in bytes, without the null block."""
    return blocks_per_request(groups, num_tokens, max_num_batched_tokens) * bytes_per_block(groups)


def bytes_to_serve(groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the smallest KV cache for a request of `num_tokens` in bytes, with the null block."""
    return bytes_per_request(groups, num_tokens, max_num_batched_tokens) + bytes_per_block(groups)


def longest_request(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, *, limit: int, max_num_batched_tokens: int
) -> int:
    """Return the tokens of the longest request that fits into `num_blocks` (with the null block), at most `limit`.

    0 when none fits. This is what `max_model_len="auto"` becomes, with the model's own context as the limit.
    """
    return bisect.bisect_right(
        range(1, limit + 1), num_blocks - 1, key=lambda n: blocks_per_request(groups, n, max_num_batched_tokens)
    )


def longest_request_in_bytes(
    groups: Sequence[KVCacheGroupSpec], available_bytes: int, *, limit: int, max_num_batched_tokens: int
) -> int:
    """Return `longest_request` of the KV cache that fills `available_bytes`."""
    if not groups:
        return limit
    num_blocks = available_bytes // bytes_per_block(groups)
    return longest_request(groups, num_blocks, limit=limit, max_num_batched_tokens=max_num_batched_tokens)


def max_concurrency(config: KVCacheConfig, *, max_model_len: int, max_num_batched_tokens: int) -> float:
    """Return how many requests of `max_model_len` tokens fit at once; infinity without any KV cache."""
    if not config.groups:
        return math.inf
    return (config.num_blocks - 1) / blocks_per_request(config.groups, max_model_len, max_num_batched_tokens)


def num_tokens_that_fit(config: KVCacheConfig, *, max_model_len: int, max_num_batched_tokens: int) -> int:
    """Return the tokens that fit, in requests of `max_model_len`; 0 without any KV cache.

    The length matters with sliding windows, which keep few positions of a long request.
    """
    if not config.groups:
        return 0
    concurrency = max_concurrency(config, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens)
    return int(concurrency * max_model_len)


def _num_tensors(groups: Sequence[KVCacheGroupSpec]) -> int:
    return max((len(group.layer_names) for group in groups), default=0)


def _page_size_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    return groups[0].spec.page_size_bytes if groups else 0


def _group_size(layers_per_kind: Sequence[int]) -> int:
    fewest, most = min(layers_per_kind), max(layers_per_kind)
    return most if most < _PADDING_RATIO * fewest else fewest


def _with_equal_pages(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Enlarge block sizes until all pages are as large as the largest."""
    largest_name, largest = max(specs.items(), key=lambda item: item[1].page_size_bytes)
    target = largest.page_size_bytes
    result: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        equal = spec if spec.page_size_bytes == target else spec.with_pages_of(target)
        if equal is None:
            raise UnsupportedFeature(
                f"The KV cache needs pages of one size, but a block of {name} ({type(spec).__name__}) takes "
                f"{spec.page_size_bytes:,} bytes and one of {largest_name} ({type(largest).__name__}) {target:,}, "
                "and more positions per block cannot make them equal. This model's mix of layers is not supported."
            )
        result[name] = equal
    return result


def _too_small(
    groups: Sequence[KVCacheGroupSpec], available_bytes: int, max_model_len: int, max_num_batched_tokens: int
) -> str:
    needed = bytes_to_serve(groups, max_model_len, max_num_batched_tokens)
    longest = longest_request_in_bytes(
        groups, available_bytes, limit=max_model_len, max_num_batched_tokens=max_num_batched_tokens
    )
    return (
        f"One request of max_model_len={max_model_len:,} tokens needs {format_bytes(needed)} of KV cache, but only "
        f"{format_bytes(max(0, available_bytes))} are left for it, which hold a request of {longest:,} tokens."
    )

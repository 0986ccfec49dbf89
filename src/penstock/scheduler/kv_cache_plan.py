"""Layout of the KV cache from the layers' specs and the available memory.

Layers with equal specs share a block table. Where a model has several kinds of attention, block sizes grow until the
pages are equal, each kind is split into groups of about equally many layers, and the i-th layers of all groups share
one tensor: a block id then costs the same memory in every group, so that one pool of ids serves them all. Pages of
another size, such as those of recurrent states, have a pool of their own, and no influence on attention's block size.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

import msgspec

from penstock.contract import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePool,
    KVCacheSpec,
    KVCacheTensor,
    RecurrentStateSpec,
)
from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes

# Below this ratio between the most and the least frequent kind, padding the smaller costs less than splitting further.
_PADDING_RATIO = 1.25
# Shares of the memory beyond one request's: of states of running requests, and of snapshots.
_SHARE_OF_STATES = 0.25
_SHARE_OF_SNAPSHOTS = {"none": 0.0, "align": 0.25, "all": 0.5}
# Attention's tokens for which there is a snapshot; with `snapshots="all"`, those between two borders.
_TOKENS_PER_SNAPSHOT = 1024


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> KVCacheConfig:
    """Plan the KV cache that fills `available_bytes`.

    Every pool gets what one request of `max_model_len` tokens needs. Of the rest, the recurrent states of further
    requests, of `max_num_seqs` in all, get up to a quarter, and snapshots as much as there are tokens for them: up to
    another quarter, or a half with one at every border. Attention gets what is left, each pool in proportion to one
    request's need.

    Raises OutOfMemory when a single request of `max_model_len` tokens would not fit into it.
    """
    groups = group_layers(specs)
    needs = _needs(groups, max_model_len, max_num_batched_tokens)
    if sum(needs) > available_bytes:
        raise OutOfMemory(_too_small(groups, available_bytes, max_model_len, max_num_batched_tokens))
    sizes = [bytes_per_block(groups, pool) for pool in range(len(needs))]
    of_states = [pool for pool, spec in _first_of_pools(groups).items() if isinstance(spec, RecurrentStateSpec)]
    of_positions = [pool for pool in range(len(needs)) if pool not in of_states]
    rest = available_bytes - sum(needs)
    extra = [0] * len(needs)
    if of_positions and of_states:
        bytes_per_token = sum(needs[pool] - sizes[pool] for pool in of_positions) / max_model_len
        for pool, num_bytes in _bytes_of_states(groups, rest, bytes_per_token, max_num_seqs).items():
            extra[pool] = num_bytes
        rest -= sum(extra)
    shared_by = of_positions or of_states
    for pool in shared_by:
        extra[pool] = rest * needs[pool] // sum(needs[other] for other in shared_by)
    num_blocks = [(need + more) // size for need, more, size in zip(needs, extra, sizes, strict=True)]
    return make_kv_cache_config(groups, num_blocks)


def make_kv_cache_config(groups: Sequence[KVCacheGroupSpec], num_blocks: Sequence[int]) -> KVCacheConfig:
    """Return the KV cache of so many blocks in each pool, null blocks included."""
    pools = []
    for pool, count in enumerate(num_blocks):
        of_pool = [group for group in groups if group.pool == pool]
        size_bytes = of_pool[0].spec.page_size_bytes * count
        tensors = []
        for index in range(max(len(group.layer_names) for group in of_pool)):
            shared_by = tuple(group.layer_names[index] for group in of_pool if index < len(group.layer_names))
            tensors.append(KVCacheTensor(size_bytes=size_bytes, shared_by=shared_by))
        pools.append(KVCachePool(num_blocks=count, tensors=tuple(tensors)))
    return KVCacheConfig(pools=tuple(pools), groups=tuple(groups))


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """Sort layers into groups, and these into pools of equal pages; no groups without any KV cache."""
    groups: list[KVCacheGroupSpec] = []
    for pool, of_pool in enumerate(_pools(specs)):
        kinds: dict[KVCacheSpec, list[str]] = {}
        for layer_name, spec in of_pool.items():
            kinds.setdefault(spec, []).append(layer_name)
        group_size = _group_size([len(layer_names) for layer_names in kinds.values()])
        for spec, layer_names in kinds.items():
            num_groups = math.ceil(len(layer_names) / group_size)
            # Every n-th layer, so that each pipeline stage has about the same share of each group.
            groups += [
                KVCacheGroupSpec(layer_names=tuple(layer_names[first::num_groups]), spec=spec, pool=pool)
                for first in range(num_groups)
            ]
    return tuple(groups)


def num_pools(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the number of pools of these groups."""
    return max((group.pool + 1 for group in groups), default=0)


def bytes_per_block(groups: Sequence[KVCacheGroupSpec], pool: int) -> int:
    """Return the bytes of one block id of a pool, in all its tensors together."""
    return max(len(group.layer_names) * group.spec.page_size_bytes for group in groups if group.pool == pool)


def blocks_per_request(
    groups: Sequence[KVCacheGroupSpec], pool: int, num_tokens: int, max_num_batched_tokens: int
) -> int:
    """Return the maximum of blocks of a pool that a request of `num_tokens` holds at once."""
    return sum(
        group.spec.max_blocks_per_request(num_tokens, max_num_batched_tokens) for group in groups if group.pool == pool
    )


def bytes_per_request(groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the KV cache of one request of `num_tokens` in bytes, without the null blocks."""
    return sum(
        blocks_per_request(groups, pool, num_tokens, max_num_batched_tokens) * bytes_per_block(groups, pool)
        for pool in range(num_pools(groups))
    )


def bytes_to_serve(groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the smallest KV cache for a request of `num_tokens` in bytes, with the null blocks."""
    return sum(_needs(groups, num_tokens, max_num_batched_tokens))


def longest_request(
    groups: Sequence[KVCacheGroupSpec], available_bytes: int, *, limit: int, max_num_batched_tokens: int
) -> int:
    """Return the tokens of the longest request that fits into `available_bytes`, at most `limit`; 0 when none fits.

    This is what `max_model_len="auto"` becomes, with the model's own context as the limit.
    """
    return bisect.bisect_right(
        range(1, limit + 1), available_bytes, key=lambda n: bytes_to_serve(groups, n, max_num_batched_tokens)
    )


def max_concurrency(config: KVCacheConfig, *, max_model_len: int, max_num_batched_tokens: int) -> float:
    """Return how many requests of `max_model_len` tokens fit at once; infinity without any KV cache."""

    def held(pool: int) -> int:
        if pool in snapshots:
            # They make room for the states of requests.
            return _num_own_blocks(config.groups, pool)
        return blocks_per_request(config.groups, pool, max_model_len, max_num_batched_tokens)

    snapshots = num_snapshots(config, 0)
    return min(((pool.num_blocks - 1) / held(index) for index, pool in enumerate(config.pools)), default=math.inf)


def named_pools(config: KVCacheConfig) -> list[tuple[KVCachePool, str]]:
    """Return the pools with what their blocks are, in the plural: "blocks of 16 tokens", "states of 1.00 MiB"."""
    names = []
    for index in range(len(config.pools)):
        of_pool = [group for group in config.groups if group.pool == index]
        if isinstance(of_pool[0].spec, RecurrentStateSpec):
            names.append(f"states of {format_bytes(bytes_per_block(config.groups, index))}")
        else:
            names.append(f"blocks of {min(group.spec.block_size for group in of_pool)} tokens")
    return list(zip(config.pools, names, strict=True))


def num_tokens_that_fit(config: KVCacheConfig, *, max_model_len: int, max_num_batched_tokens: int) -> int:
    """Return the tokens that fit, in requests of `max_model_len`; 0 without any KV cache.

    The length matters with sliding windows, which keep few positions of a long request.
    """
    if not config.groups:
        return 0
    concurrency = max_concurrency(config, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens)
    return int(concurrency * max_model_len)


def num_snapshots(config: KVCacheConfig, max_num_seqs: int) -> dict[int, int]:
    """Return the snapshots for which each pool of states has room, beside the states of `max_num_seqs` requests.

    Empty without states, or if none are kept.
    """
    return {
        pool: max(0, config.pools[pool].num_blocks - 1 - max_num_seqs * _num_own_blocks(config.groups, pool))
        for pool, spec in _first_of_pools(config.groups).items()
        if isinstance(spec, RecurrentStateSpec) and spec.snapshots != "none"
    }


def _bytes_of_states(
    groups: Sequence[KVCacheGroupSpec], rest: int, bytes_per_token: float, max_num_seqs: int
) -> dict[int, int]:
    """Bytes of each pool of states beyond one request's need. bytes_per_token: of attention."""
    first = {pool: spec for pool, spec in _first_of_pools(groups).items() if isinstance(spec, RecurrentStateSpec)}
    sizes = {pool: bytes_per_block(groups, pool) for pool in first}
    running = {pool: (max_num_seqs - 1) * _num_own_blocks(groups, pool) * size for pool, size in sizes.items()}
    share = min(1.0, rest * _SHARE_OF_STATES / max(1, sum(running.values())))
    found = {}
    for pool, size in sizes.items():
        spec = first[pool]
        num_bytes = int(running[pool] * share)
        # So that snapshots and the attention that they need fill the memory together.
        interval = spec.block_size if spec.snapshots == "all" else max(spec.block_size, _TOKENS_PER_SNAPSHOT)
        per_token = size / interval
        wanted = max(max_num_seqs * size, int((rest - num_bytes) * per_token / (per_token + bytes_per_token)))
        most = int(rest * _SHARE_OF_SNAPSHOTS[spec.snapshots] * size / sum(sizes.values()))
        found[pool] = num_bytes + min(wanted, most)
    return found


def _num_own_blocks(groups: Sequence[KVCacheGroupSpec], pool: int) -> int:
    return sum(group.spec.num_own_blocks for group in groups if group.pool == pool)


def _needs(groups: Sequence[KVCacheGroupSpec], num_tokens: int, max_num_batched_tokens: int) -> list[int]:
    """Bytes of each pool for one request of `num_tokens`, with the null block."""
    return [
        (1 + blocks_per_request(groups, pool, num_tokens, max_num_batched_tokens)) * bytes_per_block(groups, pool)
        for pool in range(num_pools(groups))
    ]


def _first_of_pools(groups: Sequence[KVCacheGroupSpec]) -> dict[int, KVCacheSpec]:
    return {group.pool: group.spec for group in reversed(groups)}


def _group_size(layers_per_kind: Sequence[int]) -> int:
    fewest, most = min(layers_per_kind), max(layers_per_kind)
    return most if most < _PADDING_RATIO * fewest else fewest


def _pools(specs: Mapping[str, KVCacheSpec]) -> list[dict[str, KVCacheSpec]]:
    """Sort layers by the size of their pages, in the order of each size's first layer.

    Block sizes of attention grow until the pages are as large as the largest, where they can be. Those of states grow
    to multiples of them: a request begins from a snapshot only where attention's blocks end too.
    """
    sized: dict[str, KVCacheSpec] = dict(specs)
    unequal = {name: spec for name, spec in specs.items() if not isinstance(spec, RecurrentStateSpec)}
    while unequal:
        target = max(spec.page_size_bytes for spec in unequal.values())
        equal = {name: larger for name, spec in unequal.items() if (larger := spec.with_pages_of(target)) is not None}
        sized |= equal
        unequal = {name: spec for name, spec in unequal.items() if name not in equal}
    border = math.lcm(*(spec.block_size for spec in sized.values() if not isinstance(spec, RecurrentStateSpec)))
    pools: dict[tuple[bool, int], dict[str, KVCacheSpec]] = {}
    for name, spec in sized.items():
        if isinstance(spec, RecurrentStateSpec):
            spec = msgspec.structs.replace(spec, block_size=math.lcm(spec.block_size, border))
        pools.setdefault((isinstance(spec, RecurrentStateSpec), spec.page_size_bytes), {})[name] = spec
    return list(pools.values())


def _too_small(
    groups: Sequence[KVCacheGroupSpec], available_bytes: int, max_model_len: int, max_num_batched_tokens: int
) -> str:
    needed = bytes_to_serve(groups, max_model_len, max_num_batched_tokens)
    longest = longest_request(
        groups, available_bytes, limit=max_model_len, max_num_batched_tokens=max_num_batched_tokens
    )
    return (
        f"One request of max_model_len={max_model_len:,} tokens needs {format_bytes(needed)} of KV cache, but only "
        f"{format_bytes(max(0, available_bytes))} are left for it, which hold a request of {longest:,} tokens."
    )

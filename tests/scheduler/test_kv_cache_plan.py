"""KV cache plan: groups of layers, pages of equal size, blocks that fit in memory, and the longest request."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_fakes import full_spec, state_spec, window_spec

from penstock.config.cache import Snapshots
from penstock.contract import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from penstock.errors import OutOfMemory
from penstock.observability.units import format_bytes
from penstock.scheduler.kv_cache_plan import (
    blocks_per_request,
    bytes_per_block,
    bytes_per_request,
    bytes_to_serve,
    group_layers,
    longest_request,
    make_kv_cache_config,
    max_concurrency,
    num_snapshots,
    num_tokens_that_fit,
    plan_kv_cache,
)

FULL = full_spec(16)
WINDOW = window_spec(64, 16)
PAGE = FULL.page_size_bytes


def layers(num_full: int, num_window: int) -> dict[str, KVCacheSpec]:
    full: dict[str, KVCacheSpec] = {f"full.{index}": FULL for index in range(num_full)}
    return full | {f"window.{index}": WINDOW for index in range(num_window)}


def shape(groups: tuple[KVCacheGroupSpec, ...]) -> list[tuple[str, int]]:
    return [(type(group.spec).__name__, len(group.layer_names)) for group in groups]


def test_equal_layers_form_one_group_with_a_tensor_each() -> None:
    config = make_kv_cache_config(group_layers(layers(5, 0)), [7])

    assert shape(config.groups) == [("FullAttentionSpec", 5)]
    assert [tensor.shared_by for tensor in config.pools[0].tensors] == [(f"full.{index}",) for index in range(5)]
    assert config.size_bytes == 7 * 5 * PAGE == 7 * bytes_per_block(config.groups, 0)


def test_twenty_windows_and_ten_full_layers_make_three_groups_of_ten() -> None:
    config = make_kv_cache_config(group_layers(layers(10, 20)), [3])

    assert shape(config.groups) == [("FullAttentionSpec", 10), ("SlidingWindowSpec", 10), ("SlidingWindowSpec", 10)]
    assert [len(tensor.shared_by) for tensor in config.pools[0].tensors] == [3] * 10
    assert config.pools[0].tensors[1].shared_by == ("full.1", "window.2", "window.3")
    assert config.size_bytes == 3 * 10 * PAGE


def test_fifty_two_windows_and_ten_full_layers_make_seven_groups_with_eight_places_empty() -> None:
    config = make_kv_cache_config(group_layers(layers(10, 52)), [3])

    assert len(config.groups) == 7
    assert len(config.pools[0].tensors) == 10
    assert sum(7 - len(tensor.shared_by) for tensor in config.pools[0].tensors) == 8
    assert sorted(name for tensor in config.pools[0].tensors for name in tensor.shared_by) == sorted(layers(10, 52))


def test_thirteen_full_and_twelve_window_layers_are_padded_instead_of_split() -> None:
    config = make_kv_cache_config(group_layers(layers(13, 12)), [3])

    assert shape(config.groups) == [("FullAttentionSpec", 13), ("SlidingWindowSpec", 12)]
    assert [len(tensor.shared_by) for tensor in config.pools[0].tensors] == [2] * 12 + [1]


def test_smaller_pages_get_more_positions_per_block() -> None:
    small = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=2, dtype="float32")

    groups = group_layers({"large": FULL, "small": small})

    assert [group.spec.block_size for group in groups] == [16, 64]
    assert {group.spec.page_size_bytes for group in groups} == {PAGE}


# DeepSeek-V2: kv_lora_rank=512, qk_rope_head_dim=64, 128 query heads, 60 layers.
LATENT = MLAAttentionSpec(block_size=16, head_size=512 + 64, dtype="bfloat16")


@pytest.mark.parametrize(("dtype", "vector_bytes"), [("float32", 2304), ("bfloat16", 1152), ("int8", 580)])
def test_a_latent_is_one_vector_per_position_however_many_heads_read_it(dtype: str, vector_bytes: int) -> None:
    spec = MLAAttentionSpec(block_size=16, head_size=512 + 64, dtype=dtype)

    assert spec.page_size_bytes == 16 * vector_bytes
    assert spec.num_kv_heads == 1


def test_a_model_of_latents_alone_is_one_group_with_blocks_as_of_full_attention() -> None:
    specs: dict[str, KVCacheSpec] = {f"layer.{index}": LATENT for index in range(60)}
    # Section 2.1.4 of the paper: (d_c + d_h^R) elements per token and layer.
    bytes_per_token = (512 + 64) * 60 * 2

    config = plan_kv_cache(
        specs, 100 * 16 * bytes_per_token + 1, max_model_len=1000, max_num_batched_tokens=32, max_num_seqs=1
    )

    assert shape(config.groups) == [("MLAAttentionSpec", 60)]
    assert (config.pools[0].num_blocks, config.size_bytes) == (100, 100 * 16 * bytes_per_token)
    for num_tokens in (1, 16, 17, 1000):
        assert blocks_per_request(config.groups, 0, num_tokens, 32) == math.ceil(num_tokens / 16)
    assert num_tokens_that_fit(config, max_model_len=1000, max_num_batched_tokens=32) == int(99 / 63 * 1000)


def test_pages_that_cannot_be_made_equal_have_a_pool_each() -> None:
    odd = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=5, dtype="float32", sliding_window=64)
    small = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=2, dtype="float32")

    groups = group_layers({"full": FULL, "odd": odd, "small": small})

    assert [(group.layer_names, group.spec.block_size, group.pool) for group in groups] == [
        (("full",), 16, 0),
        (("small",), 64, 0),
        (("odd",), 16, 1),
    ]


@pytest.mark.parametrize("state_bytes", [PAGE - 12, PAGE, 1 << 20])
def test_states_have_a_pool_of_their_own_and_attention_keeps_its_block_size(state_bytes: int) -> None:
    state = RecurrentStateSpec(state_bytes=state_bytes, block_size=16)
    specs: dict[str, KVCacheSpec] = {"state.0": state, "full.0": FULL, "state.1": state, "full.1": FULL}
    needs = (1 + 2) * 2 * state_bytes, (1 + 7) * 2 * PAGE

    config = plan_kv_cache(specs, sum(needs), max_model_len=100, max_num_batched_tokens=32, max_num_seqs=4)

    assert [(group.spec, group.pool) for group in config.groups] == [(state, 0), (FULL, 1)]
    assert [pool.num_blocks for pool in config.pools] == [3, 8]
    assert [tensor.shared_by for pool in config.pools for tensor in pool.tensors] == [
        (name,) for name in sorted(specs, key=lambda name: (name[0] != "s", name))
    ]
    assert config.size_bytes == sum(needs)
    assert max_concurrency(config, max_model_len=100, max_num_batched_tokens=32) == 1
    with pytest.raises(OutOfMemory):
        plan_kv_cache(specs, sum(needs) - 1, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=4)


@pytest.mark.parametrize(
    ("positions", "between", "expected"),
    # As with two ranks that share positions, and as with layers whose keys are of several sizes.
    [((32,), 16, 32), ((16,), 48, 48), ((32,), 48, 96), ((16, 24), 16, 48)],
)
def test_states_are_kept_where_blocks_of_attention_end(positions: tuple[int, ...], between: int, expected: int) -> None:
    specs: dict[str, KVCacheSpec] = {"state": RecurrentStateSpec(state_bytes=64, block_size=between)}
    for index, size in enumerate(positions):
        specs[f"full.{index}"] = msgspec.structs.replace(FULL, block_size=size, num_kv_heads=3 + 2 * index)
    found = {name: group.spec.block_size for group in group_layers(specs) for name in group.layer_names}
    assert found["state"] == expected
    assert all(expected % size == 0 for size in found.values())


def test_states_get_a_quarter_at_most_and_no_more_than_requests_use() -> None:
    need = 3 * 64 + 8 * PAGE

    def num_blocks(rest: int, max_num_seqs: int, snapshots: Snapshots = "align", block_size: int = 16) -> list[int]:
        state = msgspec.structs.replace(state_spec(block_size), snapshots=snapshots)
        specs: dict[str, KVCacheSpec] = {"state": state, "full": FULL}
        none_to_begin_from = 64 if snapshots == "none" else 0
        config = plan_kv_cache(
            specs,
            need + rest - none_to_begin_from,
            max_model_len=100,
            max_num_batched_tokens=32,
            max_num_seqs=max_num_seqs,
        )
        return [pool.num_blocks for pool in config.pools]

    assert num_blocks(40 * PAGE, max_num_seqs=1, snapshots="none") == [2, 48]
    assert num_blocks(40 * PAGE, max_num_seqs=5, snapshots="none") == [2 + 4, 48 - 1]
    # A state of each further request, and a snapshot of each.
    assert num_blocks(40 * PAGE, max_num_seqs=1) == [3 + 1, 48 - 1]
    assert num_blocks(40 * PAGE, max_num_seqs=5) == [3 + 4 + 5, 48 - 1]
    # A quarter for states, and one for snapshots.
    assert num_blocks(40 * PAGE, max_num_seqs=1000) == [3 + 20 * PAGE // 64, 8 + 20]
    # A snapshot for each 1,024 tokens of attention: 16 bytes of 64.
    pages = 64 * 1024 // 16
    [num_states, num_pages] = num_blocks(pages * PAGE, max_num_seqs=1)
    assert (num_states - 3) * 1024 == pytest.approx(num_pages * 16, rel=0.15)
    # One for each border of 32 tokens.
    [num_states, num_pages] = num_blocks(pages * PAGE, max_num_seqs=1, snapshots="all", block_size=32)
    assert (num_states - 3) * 32 == pytest.approx(num_pages * 16, rel=0.15)


def test_snapshots_are_what_the_states_of_running_requests_leave() -> None:
    state = RecurrentStateSpec(state_bytes=1 << 20, block_size=16, max_drafts=3)
    config = plan_kv_cache(
        {"state": state, "full": FULL}, 100 << 20, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=5
    )
    num_states = config.pools[0].num_blocks - 1
    assert num_snapshots(config, max_num_seqs=5) == {0: num_states - 5 * 4}
    assert num_states - 5 * 4 > 5
    assert num_snapshots(config, max_num_seqs=500) == {0: 0}


def test_as_many_requests_run_at_once_as_have_states_of_their_own() -> None:
    state = RecurrentStateSpec(state_bytes=1 << 20, block_size=16, max_drafts=3)
    config = plan_kv_cache({"s": state}, 41 << 20, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=5)
    assert max_concurrency(config, max_model_len=100, max_num_batched_tokens=32) == 40 / 4


def test_a_model_of_states_alone_fills_the_memory_with_them() -> None:
    only = plan_kv_cache({"state": state_spec(16)}, 6400, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=2)
    assert [pool.num_blocks for pool in only.pools] == [100]


@settings(max_examples=200, deadline=None)
@given(
    specs=st.lists(
        st.sampled_from(
            [
                FULL,
                WINDOW,
                SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=5, dtype="float32", sliding_window=9),
            ]
            + [
                RecurrentStateSpec(state_bytes=size, block_size=16, max_drafts=drafts)
                for size in (64, 99_000)
                for drafts in (0, 3)
            ]
        ),
        min_size=1,
        max_size=12,
    ),
    available=st.integers(0, 4 << 20),
    max_model_len=st.integers(1, 300),
    max_num_seqs=st.integers(1, 20),
)
def test_pools_share_the_memory_and_each_serves_the_longest_request(
    specs: list[KVCacheSpec], available: int, max_model_len: int, max_num_seqs: int
) -> None:
    by_name = {f"layer.{index}": spec for index, spec in enumerate(specs)}
    groups = group_layers(by_name)
    needed = bytes_to_serve(groups, max_model_len, 32)
    options = {"max_model_len": max_model_len, "max_num_batched_tokens": 32}
    if needed > available:
        with pytest.raises(OutOfMemory):
            plan_kv_cache(by_name, available, **options, max_num_seqs=max_num_seqs)
        return
    config = plan_kv_cache(by_name, available, **options, max_num_seqs=max_num_seqs)
    # All memory but less than one block of each pool is used.
    leftover = sum(bytes_per_block(groups, pool) for pool in range(len(config.pools)))
    assert available - leftover - len(config.pools) <= config.size_bytes <= available
    assert max_concurrency(config, **options) >= 1
    assert longest_request(groups, available, limit=max_model_len, max_num_batched_tokens=32) == max_model_len
    names = [name for pool in config.pools for tensor in pool.tensors for name in tensor.shared_by]
    assert sorted(names) == sorted(by_name)
    for index, pool in enumerate(config.pools):
        of_pool = [group for group in config.groups if group.pool == index]
        (page,) = {group.spec.page_size_bytes for group in of_pool}
        assert all(tensor.size_bytes == page * pool.num_blocks for tensor in pool.tensors)


def test_latents_beside_keys_and_values_get_pages_of_the_same_size() -> None:
    # Keys and values of four heads of 144 take twice what the latent takes.
    full = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=144, dtype="bfloat16")

    groups = group_layers({"latent": LATENT, "full": full})

    assert [group.spec.block_size for group in groups] == [32, 16]
    assert {group.spec.page_size_bytes for group in groups} == {2 * LATENT.page_size_bytes}
    assert blocks_per_request(groups, 0, 100, 32) == 4 + 7


@settings(max_examples=100, deadline=None)
@given(
    num_tokens=st.integers(1, 400),
    block_size=st.sampled_from([1, 3, 16]),
    ratio=st.integers(1, 4),
)
def test_rows_of_block_tables_hold_every_position_of_their_kind(num_tokens: int, block_size: int, ratio: int) -> None:
    for spec in (
        full_spec(block_size),
        window_spec(5, block_size),
        MLAAttentionSpec(block_size=block_size, head_size=12, dtype="float32"),
    ):
        larger = spec.with_pages_of(ratio * spec.page_size_bytes)
        assert larger is not None
        for sized in (spec, larger):
            width = sized.table_width(num_tokens)
            assert (width - 1) * sized.block_size < num_tokens <= width * sized.block_size
            assert sized.max_blocks_per_request(num_tokens, 7) <= width


def test_a_model_without_a_cache_has_no_groups_and_takes_no_memory() -> None:
    config = plan_kv_cache({}, 10**9, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=1)

    assert config == KVCacheConfig()
    assert max_concurrency(config, max_model_len=100, max_num_batched_tokens=32) == math.inf
    assert longest_request((), 0, limit=100, max_num_batched_tokens=32) == 100


def test_the_plan_fills_the_memory_with_whole_blocks() -> None:
    config = plan_kv_cache(layers(2, 0), 9 * 2 * PAGE + 1, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=1)

    assert config.pools[0].num_blocks == 9
    assert config.size_bytes == 9 * 2 * PAGE


def test_the_null_block_counts_as_memory_but_serves_no_request() -> None:
    # 100 tokens are seven blocks of 16.
    assert (
        plan_kv_cache(layers(2, 0), 8 * 2 * PAGE, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=1)
        .pools[0]
        .num_blocks
        == 8
    )
    with pytest.raises(OutOfMemory):
        plan_kv_cache(layers(2, 0), 8 * 2 * PAGE - 1, max_model_len=100, max_num_batched_tokens=32, max_num_seqs=1)


@pytest.mark.parametrize(("available", "longest"), [(5 * 2 * PAGE, 64), (1, 0), (0, 0), (-5 * 2**30, 0)])
def test_too_little_memory_is_explained_with_numbers(available: int, longest: int) -> None:
    with pytest.raises(OutOfMemory) as caught:
        plan_kv_cache(layers(2, 0), available, max_model_len=1000, max_num_batched_tokens=32, max_num_seqs=1)

    message = str(caught.value)
    assert "max_model_len=1,000 tokens needs 128.00 KiB" in message
    assert f"only {format_bytes(max(0, available))} are left" in message
    assert f"hold a request of {longest} tokens" in message


def test_one_request_needs_few_blocks_of_a_window_group() -> None:
    groups = group_layers(layers(1, 1))

    # 63 earlier positions and 32 new ones are six blocks, and one more where they straddle a border.
    assert blocks_per_request(groups, 0, 1600, 32) == 100 + 7
    assert blocks_per_request(groups, 0, 33, 32) == 3 + 3
    assert bytes_per_request(groups, 1600, 32) == 107 * PAGE
    assert bytes_to_serve(groups, 1600, 32) == 108 * PAGE


def test_concurrency_counts_requests_of_full_length() -> None:
    config = make_kv_cache_config(group_layers(layers(2, 0)), [26])

    assert max_concurrency(config, max_model_len=160, max_num_batched_tokens=32) == 2.5
    assert num_tokens_that_fit(config, max_model_len=160, max_num_batched_tokens=32) == 25 * 16


@settings(max_examples=100, deadline=None)
@given(
    num_full=st.integers(0, 2),
    num_window=st.integers(1, 3),
    num_blocks=st.integers(0, 60),
    limit=st.integers(1, 300),
    max_num_batched_tokens=st.integers(1, 64),
)
def test_the_longest_request_fits_and_one_token_more_does_not(
    num_full: int, num_window: int, num_blocks: int, limit: int, max_num_batched_tokens: int
) -> None:
    groups = group_layers(layers(num_full, num_window))

    available = num_blocks * bytes_per_block(groups, 0)
    longest = longest_request(groups, available, limit=limit, max_num_batched_tokens=max_num_batched_tokens)

    fitting = [n for n in range(1, limit + 1) if blocks_per_request(groups, 0, n, max_num_batched_tokens) < num_blocks]
    assert longest == max(fitting, default=0)

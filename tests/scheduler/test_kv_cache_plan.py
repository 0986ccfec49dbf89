"""KV cache plan: groups of layers, pages of equal size, blocks that fit in memory, and the longest request."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_fakes import encoder_spec, full_spec, window_spec

from penstock.contract import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from penstock.errors import OutOfMemory, UnsupportedFeature
from penstock.observability.units import format_bytes
from penstock.scheduler.kv_cache_plan import (
    blocks_per_request,
    bytes_per_block,
    bytes_per_request,
    bytes_to_serve,
    group_layers,
    longest_request,
    longest_request_in_bytes,
    make_kv_cache_config,
    max_concurrency,
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
    config = make_kv_cache_config(group_layers(layers(5, 0)), num_blocks=7)

    assert shape(config.groups) == [("FullAttentionSpec", 5)]
    assert [tensor.shared_by for tensor in config.tensors] == [(f"full.{index}",) for index in range(5)]
    assert config.size_bytes == 7 * 5 * PAGE == 7 * bytes_per_block(config.groups)


def test_twenty_windows_and_ten_full_layers_make_three_groups_of_ten() -> None:
    config = make_kv_cache_config(group_layers(layers(10, 20)), num_blocks=3)

    assert shape(config.groups) == [("FullAttentionSpec", 10), ("SlidingWindowSpec", 10), ("SlidingWindowSpec", 10)]
    assert [len(tensor.shared_by) for tensor in config.tensors] == [3] * 10
    assert config.tensors[1].shared_by == ("full.1", "window.2", "window.3")
    assert config.size_bytes == 3 * 10 * PAGE


def test_fifty_two_windows_and_ten_full_layers_make_seven_groups_with_eight_places_empty() -> None:
    config = make_kv_cache_config(group_layers(layers(10, 52)), num_blocks=3)

    assert len(config.groups) == 7
    assert len(config.tensors) == 10
    assert sum(7 - len(tensor.shared_by) for tensor in config.tensors) == 8
    assert sorted(name for tensor in config.tensors for name in tensor.shared_by) == sorted(layers(10, 52))


def test_thirteen_full_and_twelve_window_layers_are_padded_instead_of_split() -> None:
    config = make_kv_cache_config(group_layers(layers(13, 12)), num_blocks=3)

    assert shape(config.groups) == [("FullAttentionSpec", 13), ("SlidingWindowSpec", 12)]
    assert [len(tensor.shared_by) for tensor in config.tensors] == [2] * 12 + [1]


def test_smaller_pages_get_more_positions_per_block() -> None:
    small = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=2, dtype="float32")

    groups = group_layers({"large": FULL, "small": small})

    assert [group.spec.block_size for group in groups] == [16, 64]
    assert {group.spec.page_size_bytes for group in groups} == {PAGE}


def test_pages_that_cannot_be_made_equal_are_refused_by_name() -> None:
    odd = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=5, dtype="float32", sliding_window=64)
    with pytest.raises(UnsupportedFeature, match=r"odd\.layer \(SlidingWindowSpec\).*full\.0 \(FullAttentionSpec\)"):
        group_layers({"full.0": FULL, "odd.layer": odd})


def test_smaller_states_are_padded_and_larger_ones_refused() -> None:
    groups = group_layers({"large": FULL, "state": RecurrentStateSpec(state_bytes=PAGE - 12)})

    assert groups[1].spec == RecurrentStateSpec(state_bytes=PAGE - 12, padding_bytes=12)
    assert [group.spec.max_blocks_per_request(1000, 32) for group in groups] == [63, 1]
    with pytest.raises(UnsupportedFeature, match=r"large \(FullAttentionSpec\).*state \(RecurrentStateSpec\)"):
        group_layers({"large": FULL, "state": RecurrentStateSpec(state_bytes=PAGE + 12)})


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

    config = plan_kv_cache(specs, 100 * 16 * bytes_per_token + 1, max_model_len=1000, max_num_batched_tokens=32)

    assert shape(config.groups) == [("MLAAttentionSpec", 60)]
    assert (config.num_blocks, config.size_bytes) == (100, 100 * 16 * bytes_per_token)
    for num_tokens in (1, 16, 17, 1000):
        assert blocks_per_request(config.groups, num_tokens, 32) == math.ceil(num_tokens / 16)
    assert num_tokens_that_fit(config, max_model_len=1000, max_num_batched_tokens=32) == int(99 / 63 * 1000)


def test_latents_beside_keys_and_values_get_pages_of_the_same_size() -> None:
    # Keys and values of four heads of 144 take twice what the latent takes.
    full = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=144, dtype="bfloat16")

    groups = group_layers({"latent": LATENT, "full": full})

    assert [group.spec.block_size for group in groups] == [32, 16]
    assert {group.spec.page_size_bytes for group in groups} == {2 * LATENT.page_size_bytes}
    assert blocks_per_request(groups, 100, 32) == 4 + 7


def test_a_decoder_with_an_encoder_has_a_group_for_each() -> None:
    # Whisper: as many layers of each kind, and 1500 positions of the encoder.
    cross = encoder_spec(16, max_num_encoder_tokens=1500)
    specs: dict[str, KVCacheSpec] = {f"self.{index}": FULL for index in range(4)}
    specs |= {f"cross.{index}": cross for index in range(4)}
    num_needed = math.ceil(448 / 16) + math.ceil(1500 / 16)

    config = plan_kv_cache(specs, (num_needed + 1) * 4 * PAGE, max_model_len=448, max_num_batched_tokens=32)

    assert shape(config.groups) == [("FullAttentionSpec", 4), ("CrossAttentionSpec", 4)]
    assert [tensor.shared_by for tensor in config.tensors] == [(f"self.{i}", f"cross.{i}") for i in range(4)]
    assert config.num_blocks == num_needed + 1
    assert max_concurrency(config, max_model_len=448, max_num_batched_tokens=32) == 1
    # A request of any length holds all of the encoder's blocks.
    assert longest_request(config.groups, 95 + 3, limit=448, max_num_batched_tokens=32) == 3 * 16
    assert longest_request(config.groups, 95, limit=448, max_num_batched_tokens=32) == 0
    with pytest.raises(OutOfMemory):
        plan_kv_cache(specs, num_needed * 4 * PAGE, max_model_len=448, max_num_batched_tokens=32)


@settings(max_examples=100, deadline=None)
@given(
    num_tokens=st.integers(1, 400),
    num_encoder_tokens=st.integers(1, 400),
    block_size=st.sampled_from([1, 3, 16]),
    ratio=st.integers(1, 4),
)
def test_rows_of_block_tables_hold_every_position_of_their_kind(
    num_tokens: int, num_encoder_tokens: int, block_size: int, ratio: int
) -> None:
    positions: dict[KVCacheSpec, int] = {
        full_spec(block_size): num_tokens,
        window_spec(5, block_size): num_tokens,
        MLAAttentionSpec(block_size=block_size, head_size=12, dtype="float32"): num_tokens,
        encoder_spec(block_size, num_encoder_tokens): num_encoder_tokens,
        RecurrentStateSpec(state_bytes=8): 1,
    }
    for spec, num_positions in positions.items():
        larger = spec.with_pages_of(ratio * spec.page_size_bytes)
        assert larger is not None
        for sized in (spec, larger):
            width = sized.table_width(num_tokens)
            assert (width - 1) * sized.block_size < num_positions <= width * sized.block_size
            assert sized.max_blocks_per_request(num_tokens, 7) <= width


def test_a_model_without_a_cache_has_no_groups_and_takes_no_memory() -> None:
    config = plan_kv_cache({}, 10**9, max_model_len=100, max_num_batched_tokens=32)

    assert config == KVCacheConfig(num_blocks=1, tensors=(), groups=())
    assert max_concurrency(config, max_model_len=100, max_num_batched_tokens=32) == math.inf
    assert longest_request_in_bytes((), 0, limit=100, max_num_batched_tokens=32) == 100


def test_the_plan_fills_the_memory_with_whole_blocks() -> None:
    config = plan_kv_cache(layers(2, 0), 9 * 2 * PAGE + 1, max_model_len=100, max_num_batched_tokens=32)

    assert config.num_blocks == 9
    assert config.size_bytes == 9 * 2 * PAGE


def test_the_null_block_counts_as_memory_but_serves_no_request() -> None:
    # 100 tokens are seven blocks of 16.
    assert plan_kv_cache(layers(2, 0), 8 * 2 * PAGE, max_model_len=100, max_num_batched_tokens=32).num_blocks == 8
    with pytest.raises(OutOfMemory):
        plan_kv_cache(layers(2, 0), 8 * 2 * PAGE - 1, max_model_len=100, max_num_batched_tokens=32)


@pytest.mark.parametrize(("available", "longest"), [(5 * 2 * PAGE, 64), (1, 0), (0, 0), (-5 * 2**30, 0)])
def test_too_little_memory_is_explained_with_numbers(available: int, longest: int) -> None:
    with pytest.raises(OutOfMemory) as caught:
        plan_kv_cache(layers(2, 0), available, max_model_len=1000, max_num_batched_tokens=32)

    message = str(caught.value)
    assert "max_model_len=1,000 tokens needs 128.00 KiB" in message
    assert f"only {format_bytes(max(0, available))} are left" in message
    assert f"hold a request of {longest} tokens" in message


def test_one_request_needs_few_blocks_of_a_window_group() -> None:
    groups = group_layers(layers(1, 1))

    # 63 earlier positions and 32 new ones are six blocks, and one more where they straddle a border.
    assert blocks_per_request(groups, 1600, 32) == 100 + 7
    assert blocks_per_request(groups, 33, 32) == 3 + 3
    assert bytes_per_request(groups, 1600, 32) == 107 * PAGE
    assert bytes_to_serve(groups, 1600, 32) == 108 * PAGE


def test_concurrency_counts_requests_of_full_length() -> None:
    config = make_kv_cache_config(group_layers(layers(2, 0)), num_blocks=26)

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

    longest = longest_request(groups, num_blocks, limit=limit, max_num_batched_tokens=max_num_batched_tokens)

    fitting = [n for n in range(1, limit + 1) if blocks_per_request(groups, n, max_num_batched_tokens) < num_blocks]
    assert longest == max(fitting, default=0)


def test_the_longest_request_follows_from_bytes_as_from_blocks() -> None:
    groups = group_layers(layers(3, 0))

    assert longest_request_in_bytes(groups, 11 * 3 * PAGE, limit=1000, max_num_batched_tokens=8) == 160
    assert longest_request_in_bytes(groups, 11 * 3 * PAGE, limit=99, max_num_batched_tokens=8) == 99

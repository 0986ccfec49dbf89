"""Partial results of split-KV attention never need more than their reserved memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.kernels.native
from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.device.dtypes import has_native_kernels
from penstock.worker import split_contexts
from penstock.worker.split_contexts import chunk_positions, split_context_bytes

SOURCE = Path(penstock.kernels.native.__file__).parent / "csrc" / "attention_plan.inl"
needs_kernels = pytest.mark.skipif(not has_native_kernels(), reason="the C++ kernels were not built")


def spec_of(num_kv_heads: int, head_size: int, block_size: int, window: int | None) -> FullAttentionSpec:
    sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": "float32"}
    return FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, sliding_window=window)


def kept_bytes(spec: FullAttentionSpec, num_heads: int, requests: list[tuple[int, int]], num_threads: int) -> int:
    """`num_partials` of `attention` in csrc/attention.inl, in bytes. requests: tokens of the step, length after it."""
    group, chunk = num_heads // spec.num_kv_heads, chunk_positions(spec.block_size)
    tokens_per_item = max(1, split_contexts.QUERY_ROWS // group)
    window = getattr(spec, "sliding_window", None)

    def chunks_of(tokens: int, length: int) -> int:
        begin = 0 if window is None else max(0, length - tokens - window + 1)
        return (length - 1) // chunk - begin // chunk + 1

    total = sum(chunks_of(*one) * -(-one[0] // tokens_per_item) * spec.num_kv_heads for one in requests)

    def heads_per_unit(rows: int) -> int:
        return max(
            heads
            for heads in range(1, spec.num_kv_heads + 1)
            if heads == 1
            or (
                spec.num_kv_heads % heads == 0
                and rows <= 8
                and heads * rows <= tokens_per_item * group
                and total >= heads * 8 * num_threads
            )
        )

    def is_split(tokens: int, length: int) -> bool:
        shares = split_contexts.SHARES_OF_A_THREAD * num_threads * heads_per_unit(tokens * group)
        return tokens <= tokens_per_item and chunks_of(tokens, length) > total // shares + 1

    return sum(
        4 * spec.num_kv_heads * chunks_of(tokens, length) * tokens * group * (spec.head_size + 17)
        for tokens, length in requests
        if is_split(tokens, length)
    )


@needs_kernels
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_step_keeps_more_than_is_reserved(data: st.DataObject) -> None:
    num_kv_heads, group = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.sampled_from([1, 3, 8, 40]))
    window = data.draw(st.none() | st.integers(1, 5000))
    spec = spec_of(num_kv_heads, 64, data.draw(st.sampled_from([8, 16, 48, 128, 2048])), window)
    num_threads, longest = data.draw(st.integers(2, 64)), data.draw(st.integers(30, 200_000))
    request = st.tuples(st.integers(1, 30), st.integers(30, longest))
    requests = data.draw(st.lists(request, min_size=1, max_size=20))
    kept = kept_bytes(spec, num_kv_heads * group, requests, num_threads)
    options = {"max_model_len": longest, "num_threads": num_threads, "device": "cpu"}
    assert kept <= split_context_bytes([spec], num_kv_heads * group, **options)


@needs_kernels
def test_much_of_what_is_reserved_may_be_kept() -> None:
    """By long texts of several tokens each."""
    spec = spec_of(2, 64, 16, None)
    kept = kept_bytes(spec, 12, [(4, 100_000)] * 3, 2)
    assert kept > 0.7 * split_context_bytes([spec], 12, max_model_len=100_000, num_threads=2, device="cpu")


def test_where_nothing_is_split_nothing_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, options = [spec_of(2, 64, 16, None)], {"max_model_len": 10_000}
    assert split_context_bytes(specs, 4, num_threads=1, device="cpu", **options) == 0
    assert split_context_bytes(specs, 4, num_threads=8, device="cuda", **options) == 0
    monkeypatch.setenv("PENSTOCK_CPU_KERNELS", "torch")
    assert split_context_bytes(specs, 4, num_threads=8, device="cpu", **options) == 0


def test_the_sizes_are_those_of_the_source() -> None:
    source = SOURCE.read_text()
    for name, value in (
        ("kQueryRows", split_contexts.QUERY_ROWS),
        ("kTilePositions", split_contexts.TILE_POSITIONS),
        ("kChunkPositions", split_contexts.CHUNK_POSITIONS),
    ):
        assert re.search(rf"constexpr int64_t {name} = {value};", source), name
    assert f"num_chunks / ({split_contexts.SHARES_OF_A_THREAD} * plan.num_threads * work.num_heads)" in source
    assert "return size + kLanes + 1;" in SOURCE.with_name("attention.inl").read_text()

"""Attention in bfloat16 arithmetic over a bfloat16 KV cache, in the orders of AVX512-BF16 and of AMX.

Instruction sets without them compute the same products; those two are tested where the processor has them. That a
request has the same bits alone and in a batch is tested with the other caches (`test_cpu_native`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.attention import LayerAttention
from penstock.attention.cpu_native import bfloat16_layout
from penstock.kernels.native import (
    NATIVE,
    Bfloat16Layout,
    NativeKernels,
)
from penstock.kernels.native.attention import HeadShape, StepRequests
from support.bfloat16_sums import sum_in_order
from support.checkpoints import tiny_config
from support.engines import greedy, make_core, random_prompts, run
from support.instruction_sets import needs_native_kernels

pytestmark = needs_native_kernels
TILE = 64  # positions


def attend(
    kernels: NativeKernels,
    heads_TXD: Tensor,
    num_kv_heads: int,
    layout: Bfloat16Layout | None,
    *,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of one prompt over a bfloat16 cache of NaN: [T, H, D]."""
    num_tokens, num_heads, head_size = heads_TXD.shape
    num_heads -= 2 * num_kv_heads
    num_blocks = -(-num_tokens // block_size)
    shape = (2, num_blocks + 1, num_kv_heads, block_size, head_size)
    requests = StepRequests.of(
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        torch.arange(num_blocks, 0, -1, dtype=torch.int32)[None],
        1,
    )
    sizes = num_heads, num_kv_heads, head_size, block_size
    layer = HeadShape(*sizes, head_size**-0.5, window, soft_cap, bfloat16_layout=layout)
    kv_cache = torch.full(shape, float("nan"), dtype=torch.bfloat16)
    return kernels.attention(*heads_TXD.split([num_heads, num_kv_heads, num_kv_heads], 1), kv_cache, requests, layer)


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(1, 150),
    num_kv_heads=st.integers(1, 2),
    group_size=st.sampled_from([1, 3, 8]),
    head_size=st.sampled_from([16, 18, 40, 64, 80]),
    block_size=st.sampled_from([1, 5, 16, 24, 32, 70]),
    window=st.sampled_from([None, 1, 9, 70]),
    soft_cap=st.sampled_from([None, 2.0]),
)
@pytest.mark.each_value_quick
def test_it_is_near_attention_in_float32(
    kernels: NativeKernels,
    layout: Bfloat16Layout,
    num_tokens: int,
    num_kv_heads: int,
    group_size: int,
    head_size: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    torch.manual_seed(num_tokens)
    heads_TXD = torch.randn(num_tokens, num_kv_heads * (group_size + 2), head_size)
    options = {"block_size": block_size, "window": window, "soft_cap": soft_cap}
    exact_THD = attend(kernels, heads_TXD, num_kv_heads, None, **options)  # type: ignore[arg-type]
    found_THD = attend(kernels, heads_TXD, num_kv_heads, layout, **options)  # type: ignore[arg-type]
    # A score of a few units has an error of 2^-9 of its terms' size, a weight of 2^-9 of itself.
    torch.testing.assert_close(found_THD, exact_THD, rtol=0, atol=0.03)
    assert (found_THD - exact_THD).abs().mean() < 0.002


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 64, 65, 150])
@pytest.mark.parametrize(("head_size", "block_size"), [(16, 16), (72, 24)])
@pytest.mark.each_value_quick
def test_sums_of_values_have_the_bits_of_the_reference(
    kernels: NativeKernels, layout: Bfloat16Layout, num_tokens: int, head_size: int, block_size: int
) -> None:
    """With queries of zero every weight is 1."""
    torch.manual_seed(num_tokens)
    heads_TXD = torch.randn(num_tokens, 5, head_size)
    heads_TXD[:, :3] = 0.0
    found_HD = attend(kernels, heads_TXD, 1, layout, block_size=block_size)[-1]
    tile = TILE // block_size * block_size
    sum_1D = torch.zeros(1, head_size)
    for value_LD in heads_TXD[:, 4].split(tile):
        padded_LD = torch.zeros(tile, head_size)
        padded_LD[: len(value_LD)] = value_LD
        sum_1D = sum_1D + sum_in_order(torch.ones(1, tile), padded_LD.T.bfloat16(), layout)
    expected_1D = sum_1D * (torch.tensor(1.0) / num_tokens)
    assert torch.equal(found_HD, expected_1D.expand(3, -1))


def test_one_visible_position_gives_its_value(kernels: NativeKernels, layout: Bfloat16Layout) -> None:
    heads_TXD = 30 * torch.randn(70, 3, 32)
    found_TD = attend(kernels, heads_TXD, 1, layout, window=1)[:, 0]
    assert torch.equal(found_TD, heads_TXD[:, 2].bfloat16().float())


@pytest.mark.parametrize("part", [1, 2])
def test_what_is_not_finite_is_not_hidden(kernels: NativeKernels, layout: Bfloat16Layout, part: int) -> None:
    heads_TXD = torch.randn(5, 3, 16)
    heads_TXD[4, part, 3] = float("inf")
    heads_TXD[4, 0, 3] = 1  # the score of a key is infinite, and not minus infinity
    assert not torch.isfinite(attend(kernels, heads_TXD, 1, layout, block_size=4)[4]).all()


def test_latents_and_heads_that_are_no_pairs_are_multiplied_in_float32() -> None:
    layer = LayerAttention("layer", 4, 2, 64, 0.1, cpu_arithmetic="bfloat16")
    assert NATIVE is not None
    assert bfloat16_layout(layer, torch.bfloat16) is NATIVE.bfloat16_layout
    assert bfloat16_layout(layer, torch.float32) is None
    for other in (
        LayerAttention("layer", 4, 2, 64, 0.1),
        LayerAttention("layer", 4, 2, 8, 0.1, cpu_arithmetic="bfloat16"),
        LayerAttention("layer", 4, 2, 17, 0.1, cpu_arithmetic="bfloat16"),
        LayerAttention("layer", 4, 1, 64, 0.1, latent_size=48, cpu_arithmetic="bfloat16"),
    ):
        assert bfloat16_layout(other, torch.bfloat16) is None


@pytest.mark.slow
def test_a_models_attention_follows_the_arithmetic_of_its_products(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"], head_dim=32).save_pretrained(tmp_path)
    options = {"load_format": "dummy", "max_logprobs": -1, "dtype": "bfloat16", "kv_cache_memory_bytes": 8 << 20}
    caplog.set_level("INFO", logger="penstock")
    rows = {}
    for arithmetic in ("float32", "bfloat16"):
        for cache in ("float32", "bfloat16"):
            caplog.clear()
            core = make_core(tmp_path, cpu_arithmetic=arithmetic, kv_cache_dtype=cache, **options)
            rows[arithmetic, cache] = run(core, random_prompts([50], 90, seed=1), [greedy(1, logprobs=-1)])[0].logprobs
            core.close()
            assert ("attention in it too" in caplog.text) == (arithmetic == cache == "bfloat16")
    assert rows["bfloat16", "bfloat16"] != rows["bfloat16", "float32"]
    assert rows["float32", "bfloat16"] != rows["bfloat16", "bfloat16"]

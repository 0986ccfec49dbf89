"""Attention layers of models, from which the KV cache is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.models.attention_layers import attention_layers, kv_cache_specs
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelState
from penstock.scheduler.kv_cache_plan import bytes_per_request, group_layers
from support.checkpoints import tiny_checkpoint


def build(tmp_path: Path, family: str, **overrides: Any) -> nn.Module:
    config = tiny_checkpoint(tmp_path, family, **overrides)
    return find_model_class(config)(config, ParallelState())


def test_each_layer_has_the_spec_of_its_own_kind(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = tiny_checkpoint(
        tmp_path,
        "qwen3",
        head_dim=32,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=40,
        layer_types=kinds,
    )
    model = find_model_class(config)(config, ParallelState())
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype="bfloat16")
    sliding = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype="bfloat16", sliding_window=40)
    specs = kv_cache_specs(model, 16, "bfloat16")
    assert list(specs.values()) == [full, sliding, full]
    layers = attention_layers(model)
    assert list(layers) == list(specs)
    assert [layer.name for layer in layers.values()] == list(layers)
    assert {(layer.num_heads, layer.scale) for layer in layers.values()} == {(4, 32**-0.5)}


def test_gemma2_caps_and_scales_every_layer_and_narrows_every_second(tmp_path: Path) -> None:
    model = build(tmp_path, "gemma2", num_hidden_layers=4, sliding_window=9, query_pre_attn_scalar=100)
    layers = list(attention_layers(model).values())
    assert [layer.sliding_window for layer in layers] == [9, None, 9, None]
    assert {(layer.soft_cap, layer.scale) for layer in layers} == {(50.0, 0.1)}


def test_gemma3_narrows_all_but_every_sixth_layer(tmp_path: Path) -> None:
    model = build(tmp_path, "gemma3", num_hidden_layers=13, sliding_window=9)
    layers = list(attention_layers(model).values())
    assert [layer.sliding_window for layer in layers] == [*[9] * 5, None, *[9] * 5, None, 9]
    assert {layer.soft_cap for layer in layers} == {None}


def test_gpt2_may_scale_each_layer_differently_within_one_group(tmp_path: Path) -> None:
    model = build(tmp_path, "gpt2", n_layer=3, scale_attn_by_inverse_layer_idx=True)
    assert [layer.scale for layer in attention_layers(model).values()] == pytest.approx([1 / 4, 1 / 8, 1 / 12])
    assert len(group_layers(kv_cache_specs(model, 16, "float32"))) == 1


@pytest.mark.parametrize(
    ("family", "num_layers", "num_windowed"), [("gemma2", 4, 2), ("gemma2", 5, 3), ("gemma3", 6, 5), ("gemma3", 26, 22)]
)
def test_windowed_layers_take_the_memory_of_their_window(
    tmp_path: Path, family: str, num_layers: int, num_windowed: int
) -> None:
    window, block_size, max_num_batched_tokens, length = 40, 4, 16, 4000
    model = build(tmp_path, family, num_hidden_layers=num_layers, sliding_window=window, max_position_embeddings=length)
    specs = kv_cache_specs(model, block_size, "float32")
    assert sum(isinstance(spec, SlidingWindowSpec) for spec in specs.values()) == num_windowed
    needed = bytes_per_request(group_layers(specs), length, max_num_batched_tokens)

    bytes_per_position = 2 * 2 * 16 * 4
    # What a step may read and write, and the rest of the block that the window begins in.
    window_positions = window - 1 + max_num_batched_tokens + 1 + block_size
    ideal = bytes_per_position * ((num_layers - num_windowed) * length + num_windowed * window_positions)
    without_windows = bytes_per_position * num_layers * length
    # Groups of unequally many layers leave some places empty.
    assert ideal * 0.99 <= needed <= ideal * 1.26 < without_windows

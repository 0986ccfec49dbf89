"""What the KV cache is planned from: every attention layer, with its geometry."""

from __future__ import annotations

from pathlib import Path

from penstock.contract import FullAttentionSpec, SlidingWindowSpec
from penstock.models.attention_layers import attention_layers, kv_cache_specs
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelContext
from support.checkpoints import tiny_checkpoint


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
    model = find_model_class(config)(config, ParallelContext())
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype="bfloat16")
    sliding = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype="bfloat16", sliding_window=40)
    specs = kv_cache_specs(model, 16, "bfloat16")
    assert list(specs.values()) == [full, sliding, full]
    layers = attention_layers(model)
    assert list(layers) == list(specs)
    assert [layer.name for layer in layers.values()] == list(layers)
    assert {(layer.num_heads, layer.scale) for layer in layers.values()} == {(4, 32**-0.5)}

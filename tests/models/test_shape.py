"""The shape that is read from config.json is that of the model: Transformers' cache and our own models say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from penstock.errors import ModelError, UnsupportedFeature
from penstock.loader.loader import build_model
from penstock.models.attention_layers import kv_cache_specs
from penstock.models.shape import read_shape
from penstock.parallel import ParallelContext
from support.checkpoints import edit_config, load_config, tiny_checkpoint, tiny_config

COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PLAIN = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
GPT2 = {"vocab_size": 50, "n_embd": 48, "n_layer": 7, "n_head": 6, "n_positions": 64}
OPT = {**PLAIN, "ffn_dim": 80, "word_embed_proj_dim": 48}
del OPT["intermediate_size"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", COMMON),
    ("Llama", {**COMMON, "head_dim": 20}),
    ("Mistral", {**COMMON, "sliding_window": 9}),
    ("Mistral", {**COMMON, "sliding_window": None}),
    ("Qwen2", COMMON),
    ("Qwen2", {**COMMON, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}),
    ("Qwen3", COMMON),
    ("Phi3", {**COMMON, "sliding_window": 9}),
    ("Phi3", COMMON),
    ("Gemma2", {**COMMON, "sliding_window": 9}),
    ("Gemma3", {**COMMON, "sliding_window": 9, "head_dim": 16}),
    ("GPT2", GPT2),
    ("Olmo2", COMMON),
    ("GPTNeoX", PLAIN),
    ("StableLm", COMMON),
    ("Granite", COMMON),
    ("Starcoder2", {**COMMON, "sliding_window": 9}),
    ("Cohere2", {**COMMON, "sliding_window": 9}),
    ("SmolLM3", {**COMMON, "use_sliding_window": True, "sliding_window": 9}),
    ("SmolLM3", COMMON),
    ("Glm4", {**COMMON, "head_dim": 8}),
    ("Phi", COMMON),
    ("OPT", OPT),
]


@pytest.mark.parametrize(
    ("family", "sizes"), CASES, ids=[f"{index}-{family}" for index, (family, _) in enumerate(CASES)]
)
def test_the_kv_cache_is_that_of_transformers(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    """Heads and head size as a forward pass writes them; windows as the cache of the configuration has them."""
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    class_name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    config = getattr(transformers, config_name)(**sizes, architectures=[class_name])
    model = getattr(transformers, class_name)(config).eval()
    config.save_pretrained(tmp_path)
    shape = read_shape(load_config(tmp_path))
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
    assert shape.num_layers == len(cache.layers)
    assert {(shape.num_kv_heads, shape.head_size)} == {
        (layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers
    }
    assert list(shape.windows) == [getattr(layer, "sliding_window", None) for layer in cache.layers]
    assert shape.vocab_size == 50
    assert shape.hidden_size == 48
    assert shape.ties_embeddings == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 24}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_the_kv_cache_is_that_of_the_models_here(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    config = tiny_checkpoint(tmp_path, family, **changes)
    expected = kv_cache_specs(build_model(config, ParallelContext()), 16, "bfloat16")
    assert list(read_shape(config).kv_cache_specs(16, "bfloat16").values()) == list(expected.values())


def test_fields_of_older_configurations(tmp_path: Path) -> None:
    """Before `layer_types` there was `sliding_window_pattern`, or nothing but the family's habit."""
    config = transformers.Gemma2Config(**{**COMMON, "sliding_window": 9}, architectures=["Gemma2ForCausalLM"])
    config.save_pretrained(tmp_path)
    assert read_shape(edit_config(tmp_path, remove=("layer_types",))).windows == (9, None, 9, None, 9, None, 9)
    changed = edit_config(tmp_path, remove=("layer_types",), sliding_window_pattern=3)
    assert read_shape(changed).windows == (9, 9, None, 9, 9, None, 9)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_attention_heads": "6"}, ModelError, "num_attention_heads='6'"),
        ({"hidden_size": None}, ModelError, "hidden_size=None. It must be a positive integer"),
        ({"layer_types": ["full_attention", "mamba"]}, UnsupportedFeature, r"layer_types=\['mamba'\]"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, UnsupportedFeature, "but no sliding_window"),
    ],
)
def test_what_is_missing_or_unknown_is_named(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        read_shape(edit_config(tmp_path, **changes))

"""Checkpoints and configurations of mixtures as they were published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import ModelError, UnsupportedFeature
from penstock.layers.experts import SOFTMAX, SPARSEMIXER, MoE
from penstock.loader.loader import build_model, load_model
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import (
    MIXTURES,
    TINY_LONGROPE,
    edit_config,
    oracle_logits,
    save_checkpoint,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)
from support.plain_attention import sequence_logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
_ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "vocab_size": 103424,
}
_HUNYUAN = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_moe",
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "position_embedding_xdrope": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_mla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 128167,
}
_PHI = {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "input_jitter_noise": 0.01,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "model_type": "phimoe",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.5] * 64,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64,
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
# With numbers of parameters, as published.
PUBLISHED = {"ernie": (_ERNIE, 21.8e9), "hunyuan": (_HUNYUAN, 80.4e9), "phi": (_PHI, 41.9e9)}
# Names and shapes of a few tensors, without those of one layer's other experts and projections.
NAMES: dict[str, dict[str, list[int]]] = {
    "ernie4_5_moe": {
        "model.layers.0.mlp.gate_proj.weight": [112, 64],
        "model.layers.1.mlp.experts.5.down_proj.weight": [64, 48],
        "model.layers.1.mlp.gate.weight": [6, 64],
        "model.layers.1.mlp.moe_statics.e_score_correction_bias": [1, 6],
        "model.layers.1.mlp.shared_experts.up_proj.weight": [96, 64],
    },
    "hunyuan_v1_moe": {
        "model.layers.0.mlp.experts.0.gate_proj.weight": [48, 64],
        "model.layers.0.mlp.gate.wg.weight": [6, 64],
        "model.layers.0.mlp.shared_mlp.down_proj.weight": [64, 48],
        "model.layers.0.self_attn.query_layernorm.weight": [16],
        "model.layers.0.self_attn.key_layernorm.weight": [16],
    },
    "phimoe": {
        "lm_head.bias": [97],
        "model.layers.0.block_sparse_moe.experts.4.w2.weight": [64, 48],
        "model.layers.0.block_sparse_moe.gate.weight": [5, 64],
        "model.layers.0.input_layernorm.bias": [64],
        "model.layers.0.self_attn.o_proj.bias": [64],
        "model.norm.bias": [64],
    },
}


def load(config: ModelConfig) -> CausalLM:
    options = LoadConfig(use_tqdm_on_load=False)
    return load_model(config, options, ParallelState(), torch.device("cpu"), torch.float32)


def logits_of(config: ModelConfig) -> Tensor:
    return sequence_logits(load(config), [TOKENS])[0]


def build(content: dict[str, Any], **changes: Any) -> CausalLM:
    content = {**content, **changes}
    config = ModelConfig("some/model", Path("nowhere"), Path("nowhere"), content, {}, max_model_len=100)
    return build_model(config, ParallelState())


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_understood(name: str) -> None:
    content, num_parameters = PUBLISHED[name]
    model = build(content)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(num_parameters, rel=5e-3)
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    routing = mixtures[0].gate.routing
    found = routing.num_experts, routing.top_k, routing.scoring, routing.normalizes
    assert (len(mixtures), *found) == {
        "ernie": (27, 64, 6, SOFTMAX, True),
        "hunyuan": (32, 64, 8, SOFTMAX, True),
        "phi": (32, 16, 2, SPARSEMIXER, False),
    }[name]


@pytest.mark.parametrize("family", NAMES)
def test_tensors_have_the_names_of_published_checkpoints(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: list(stored[name].shape) for name in NAMES[family]} == NAMES[family]


def test_ernie_s_layers_for_more_tokens_are_not_loaded_and_the_correction_may_be_within_the_router(
    tmp_path: Path,
) -> None:
    oracle = tiny_model("ernie4_5_moe")
    config = save_checkpoint(oracle, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    correction = tensors.pop("model.layers.1.mlp.moe_statics.e_score_correction_bias")
    tensors["model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"] = correction
    tensors["model.mtp_block.0.mlp.up_proj.weight"] = torch.ones(3, 3)
    tensors["model.mtp_linear_proj.0.weight"] = torch.ones(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits_of(config), oracle_logits(oracle, TOKENS), rtol=0, atol=1e-4)


def test_phi_has_the_name_of_published_configurations(tmp_path: Path) -> None:
    oracle = tiny_model("phimoe")
    save_checkpoint(oracle, tmp_path)
    config = edit_config(tmp_path, architectures=["PhiMoEForCausalLM"])
    torch.testing.assert_close(logits_of(config), oracle_logits(oracle, TOKENS), rtol=0, atol=1e-4)


def test_phi_beyond_its_first_length_has_the_long_factors(tmp_path: Path) -> None:
    """Transformers switches the factor on cosines and sines, but keeps the frequencies for short contexts."""
    long = {"short_factor": TINY_LONGROPE["long_factor"], "short_mscale": TINY_LONGROPE["long_mscale"]}
    oracle = tiny_model("phimoe", rope_parameters={**TINY_LONGROPE, **long})
    save_checkpoint(oracle, tmp_path)
    expected = oracle_logits(oracle, TOKENS)
    rope = {**TINY_LONGROPE, "original_max_position_embeddings": 64}
    found = logits_of(edit_config(tmp_path, rope_parameters=rope, original_max_position_embeddings=64))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    short = logits_of(edit_config(tmp_path, rope_parameters=TINY_LONGROPE, original_max_position_embeddings=128))
    assert (short - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid'.*'softmax'"),
        ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free=False"),
        ("ernie4_5_moe", {"moe_k": 7}, r"moe_k=7. It must be at most moe_num_experts=6"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, r"moe_topk=\[1, 2\].*the same for all layers"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [40, 40]}, "moe_intermediate_size=40.*48"),
        ("hunyuan_v1_moe", {"num_shared_expert": [2, 2]}, "num_shared_expert=2.*1"),
        ("hunyuan_v1_moe", {"use_mla": True}, "use_mla=True"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3.*2"),
        ("phimoe", {"tie_word_embeddings": True}, "lm_head_bias=True.*tie_word_embeddings"),
        ("phimoe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'.*longrope"),
        ("phimoe", {"rope_parameters": {**TINY_LONGROPE, "short_mscale": None}}, "short_mscale=None"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(family: str, changes: dict[str, Any], words: str) -> None:
    content = tiny_config(family).to_dict() | {"architectures": [MIXTURES[family].architecture]}
    with pytest.raises((UnsupportedFeature, ModelError), match=words):
        build(content, **changes)

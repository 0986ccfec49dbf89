"""Of models as large as people run, headers say what a run without values counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from penstock.config import EngineConfig
from penstock.device.dtypes import DtypeChoice
from penstock.engine.model_sizes import PlannedModel, _size_without_memory, size_model
from penstock.loader.headers import TensorHeader
from penstock.worker.estimate import HEADS, WORKSPACE_BYTES
from support.checkpoints import edit_config

pytestmark = pytest.mark.slow
# The most is missed in Apertus, whose activation has masks too.
TOLERANCE = {"float32": 0.04, "bfloat16": 0.08}
# Without arguments their configurations are those of the models that they were made for.
CLASSES = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BeamForCausalLM",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "CTRLLMHeadModel",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "GemmaForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GraniteMoeForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "Jais2ForCausalLM",
    "LagunaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "ModernBertDecoderForCausalLM",
    "MoshiForCausalLM",
    "Olmo3ForCausalLM",
    "PhimoeForCausalLM",
    "SeedOssForCausalLM",
    "SolarOpenForCausalLM",
)
# Those whose configurations are not, and more of a family: by name, the class and what its configuration has.
_LARGE_GEMMA4: dict[str, Any] = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CLASSES},
    "gemma-4-26b-a4b": (
        "Gemma4ForCausalLM",
        {
            **_LARGE_GEMMA4,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
    "gemma-4-31b": (
        "Gemma4ForCausalLM",
        {
            **_LARGE_GEMMA4,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
    ),
    "hunyuan-a13b": (
        "HunYuanMoEV1ForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 64,
            "moe_topk": [8] * 32,
            "vocab_size": 128167,
        },
    ),
    "starcoderbase-1b": (
        "GPTBigCodeForCausalLM",
        {"n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192, "n_positions": 8192, "vocab_size": 49152},
    ),
}


def save_without_weights(name: str, folder: Path) -> dict[str, TensorHeader]:
    """`config.json`, and the headers that a checkpoint would have."""
    class_name, fields = MODELS[name]
    model_class: type[PreTrainedModel] = getattr(transformers, class_name)
    config = model_class.config_class(**fields)
    config.save_pretrained(folder)
    edit_config(folder, architectures=[class_name])
    with torch.device("meta"):
        model = model_class._from_config(config)
    headers = {name: TensorHeader("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        for head in HEADS:
            headers.pop(head, None)
    return headers


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_hub(tmp_path: Path, name: str, compute: str) -> None:
    headers = save_without_weights(name, tmp_path)
    config = EngineConfig.create(str(tmp_path), model_impl="transformers")
    dtype = DtypeChoice(compute, "", "bfloat16")
    planned = PlannedModel(config, headers, dtype, compute, "cuda", config.model.longest_context)
    derived, counted = size_model(planned), _size_without_memory(planned, "it is asked for")
    assert derived.remark.startswith("estimated as a decoder of usual layers")
    assert list(derived.specs.values()) == list(counted.specs.values())
    assert derived.num_heads == counted.num_heads
    assert derived.num_parameters == pytest.approx(counted.num_parameters, rel=0.001)
    assert derived.weights == pytest.approx(counted.weights, rel=0.001)
    tensors = derived.step.activations - WORKSPACE_BYTES["cuda"]
    assert tensors == pytest.approx(counted.step.activations, rel=TOLERANCE[compute])

"""Models that paged attention cannot run are refused by name, with the reason, and before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig
from penstock.errors import UnsupportedFeature, UnsupportedModel
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelContext
from support.transformers_models import load, save_for_fallback, tiny_config_of, tiny_transformers_model


def config_of(class_name: str, **overrides: Any) -> ModelConfig:
    content = tiny_config_of(class_name, **overrides).to_dict() | {"architectures": [class_name]}
    return as_model_config({"max_position_embeddings": 128, "vocab_size": 97, **content})


def as_model_config(content: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        model="some/model",
        folder=Path("nowhere"),
        tokenizer_folder=Path("nowhere"),
        hf_config=content,
        generation_config={},
        model_impl="transformers",
    )


def build(model_config: ModelConfig, parallel: ParallelContext | None = None) -> None:
    find_model_class(model_config)(model_config, parallel or ParallelContext())


NO_INTERFACE = "does not go through the attention interface"
STATE = "keeps a recurrent state"
OTHER_MASK = "neither causal nor causal with a sliding window"


@pytest.mark.parametrize(
    ("class_name", "overrides", "reason"),
    [
        ("BloomForCausalLM", {}, NO_INTERFACE),
        ("MptForCausalLM", {}, NO_INTERFACE),
        ("FalconForCausalLM", {}, NO_INTERFACE),
        ("GPTJForCausalLM", {}, NO_INTERFACE),
        ("MambaForCausalLM", {}, STATE),
        ("JambaForCausalLM", {}, STATE),
        ("FalconH1ForCausalLM", {}, STATE),
        ("Llama4ForCausalLM", {}, "layers of the kind chunked_attention"),
        ("DeepseekV3ForCausalLM", {}, r"queries 192, keys 192, values 128.*latent attention"),
        ("GptOssForCausalLM", {}, r"attention sinks \(s_aux\)"),
        ("BertLMHeadModel", {}, OTHER_MASK),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, OTHER_MASK),
        ("BartForCausalLM", {}, "encoder-decoder"),
        ("GraniteForCausalLM", {"add_cross_attention": True}, "cross attention"),
        ("BartForConditionalGeneration", {}, "no causal language model"),
    ],
)
def test_a_model_is_refused_with_the_reason(class_name: str, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"some/model \({class_name}\) cannot run through.*{reason}"):
        build(config_of(class_name, **overrides))


def test_code_that_comes_with_a_model_is_not_run() -> None:
    content = {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    with pytest.raises(UnsupportedModel, match=r"OwnForCausalLM.*auto_map\) is not run"):
        build(as_model_config(content))


def test_a_quantized_model_is_refused() -> None:
    config = config_of("GraniteForCausalLM", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedFeature, match=r"some/model is quantized.*gptq"):
        build(config)


@pytest.mark.parametrize(
    ("parallel", "option"),
    [
        (ParallelContext(world_size=2, tensor_parallel_size=2), "tensor_parallel_size=2"),
        (ParallelContext(world_size=2, pipeline_parallel_size=2), "pipeline_parallel_size=2"),
    ],
)
def test_parallelism_that_is_not_built_is_refused(parallel: ParallelContext, option: str) -> None:
    with pytest.raises(UnsupportedFeature, match=option):
        build(config_of("GraniteForCausalLM"), parallel)


def test_a_model_that_counts_positions_by_itself_is_refused_once_it_is_loaded(tmp_path: Path) -> None:
    """Bart's decoder takes no positions, which neither its configuration nor a run without weights shows."""
    model = tiny_transformers_model("BartForCausalLM", is_encoder_decoder=False, decoder_layers=2, d_model=64)
    with pytest.raises(UnsupportedModel, match="by other ways than attention"):
        load(save_for_fallback(model, tmp_path))


def test_a_model_whose_positions_do_not_count_from_0_is_refused_once_it_is_loaded(tmp_path: Path) -> None:
    model = tiny_transformers_model("RobertaForCausalLM", is_decoder=True, pad_token_id=1, bos_token_id=0)
    with pytest.raises(UnsupportedModel, match="positions do not count from 0"):
        load(save_for_fallback(model, tmp_path))

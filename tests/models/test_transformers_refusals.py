"""Models that paged attention cannot run are refused by name, with the reason, and before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import GraniteConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import UnsupportedFeature, UnsupportedModel
from penstock.models.registry import find_model_class, refuse_unsuitable
from penstock.models.transformers_fallback import hf_class
from penstock.parallel import ParallelState
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
        hf_generation_config={},
        model_impl="transformers",
    )


def build(model_config: ModelConfig) -> None:
    find_model_class(model_config)(model_config, ParallelState())


STATE = "keeps a recurrent state"
OTHER_MASK = "neither causal nor causal with a sliding window"


@pytest.mark.parametrize(
    ("class_name", "overrides", "reason"),
    [
        ("MambaForCausalLM", {}, STATE),
        ("JambaForCausalLM", {}, STATE),
        ("FalconH1ForCausalLM", {}, STATE),
        ("Llama4ForCausalLM", {}, "layers of the kind chunked_attention"),
        ("DiffLlamaForCausalLM", {}, "computes attention more than once"),
        ("JetMoeForCausalLM", {}, "by values that it reads on the host"),
        ("BertLMHeadModel", {}, OTHER_MASK),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, OTHER_MASK),
        ("BartForCausalLM", {}, "encoder-decoder"),
        ("GraniteForCausalLM", {"add_cross_attention": True}, "cross attention"),
        ("BigBirdPegasusForConditionalGeneration", {}, "encoder-decoder"),
    ],
)
def test_a_model_is_refused_with_the_reason(class_name: str, overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"some/model \({class_name}\) cannot run through.*{reason}"):
        build(config_of(class_name, **overrides))


@pytest.mark.parametrize(
    ("class_name", "reason"),
    [
        ("T5Model", "it is an encoder-decoder model"),
        ("T5EncoderModel", "it is an encoder-decoder model"),
        ("BartModel", "it is an encoder-decoder model"),
        ("RwkvModel", f"it {STATE}"),
        ("XLNetModel", "config.json limits no context"),
    ],
)
def test_a_model_that_cannot_embed_is_refused_for_its_kind(class_name: str, reason: str, tmp_path: Path) -> None:
    config = getattr(transformers, class_name).config_class()
    content = {"vocab_size": 97, **config.to_dict(), "architectures": [class_name]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=rf"\({class_name}\) cannot run through Transformers: {reason}"):
        refuse_unsuitable(EngineConfig.create(tmp_path).model)


class OwnForCausalLM(PreTrainedModel):
    """Computes its attention itself, not through the interface."""

    config_class = GraniteConfig

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Tensor, **options: object) -> CausalLMOutput:
        hidden = self.embed_tokens(input_ids)
        mixed = functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        return CausalLMOutput(logits=mixed @ self.embed_tokens.weight.t())


@pytest.mark.parametrize("claims_to_ask", [True, False])
def test_a_model_that_computes_attention_by_itself_is_refused(
    claims_to_ask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_class.transformers, "OwnForCausalLM", OwnForCausalLM, raising=False)
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "own", "OwnForCausalLM")
    monkeypatch.setattr(OwnForCausalLM, "_can_set_attn_implementation", lambda: claims_to_ask)
    with pytest.raises(UnsupportedModel, match="its attention does not go through the attention interface"):
        build(as_model_config({**config_of("GraniteForCausalLM").hf_config, "architectures": ["OwnForCausalLM"]}))


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


def test_a_model_that_counts_positions_by_itself_is_refused_once_it_is_loaded(tmp_path: Path) -> None:
    """Bart's decoder takes no positions, which neither its configuration nor a run without weights shows."""
    model = tiny_transformers_model("BartForCausalLM", is_encoder_decoder=False, decoder_layers=2, d_model=64)
    with pytest.raises(UnsupportedModel, match="by other ways than attention"):
        load(save_for_fallback(model, tmp_path))


def test_a_model_whose_positions_do_not_count_from_0_is_refused_once_it_is_loaded(tmp_path: Path) -> None:
    model = tiny_transformers_model("RobertaForCausalLM", is_decoder=True, pad_token_id=1, bos_token_id=0)
    with pytest.raises(UnsupportedModel, match="positions do not count from 0"):
        load(save_for_fallback(model, tmp_path))

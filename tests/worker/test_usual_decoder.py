"""A model without a table of its own is a decoder of usual layers only where its headers show one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.device.dtypes import DtypeChoice
from penstock.engine.model_sizes import ModelSizes, PlannedModel, size_model
from penstock.loader.headers import TensorHeader, read_headers
from penstock.worker import class_source
from penstock.worker.unloaded_model import UnloadedModel, try_without_memory
from penstock.worker.usual_decoder import UsualDecoder, read_usual_decoder
from penstock.worker.usual_matrices import NotUsual
from support.checkpoints import edit_config
from support.transformers_models import save_for_fallback, tiny_transformers_model, wider_overrides

TOLERANCE = 0.1
NUM_TOKENS = 3000
# Where attention takes the most, and where the feed-forward network does.
SHAPES: dict[str, dict[str, Any]] = {
    "attention": {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 8},
    "network": {"hidden_size": 64, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 1},
}
# Heads of another size where there is no window, as in all models of this family.
_GEMMA4: dict[str, Any] = {"head_dim": 32, "global_head_dim": 64}
# Each head has a key of its own, made of the narrow state that all have in common.
_LATENT: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
# What classes call the size of their networks, and by how much that is wider.
_NETWORK_SIZES = {"CTRLLMHeadModel": ("dff", 1), "GPT2LMHeadModel": ("n_inner", 1), "MoshiForCausalLM": ("ffn_dim", 2)}
_SPARSE_FROM_SECOND = ["dense", "sparse"]
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", {"num_hidden_layers": 4}),
    "afmoe-wide-heads": ("AfmoeForCausalLM", {"num_dense_layers": 2, "head_dim": 64}),
    "apertus": ("ApertusForCausalLM", {}),
    "aria": ("AriaTextForCausalLM", {}),
    "beam": ("BeamForCausalLM", {"mlp_layer_types": _SPARSE_FROM_SECOND}),
    "beam-wide-heads": ("BeamForCausalLM", {"head_dim": 64}),
    "biogpt": ("BioGptForCausalLM", {}),
    "bitnet": ("BitNetForCausalLM", {}),
    "cohere2-moe": ("Cohere2MoeForCausalLM", {}),
    "ctrl": ("CTRLLMHeadModel", {}),
    "dots1": ("Dots1ForCausalLM", {}),
    "ernie-4.5": ("Ernie4_5ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "flex-olmo": ("FlexOlmoForCausalLM", {}),
    "gemma4": ("Gemma4ForCausalLM", {**_GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4-layer-inputs": ("Gemma4ForCausalLM", {**_GEMMA4, "hidden_size_per_layer_input": 1000}),
    "gemma4-keys-as-values": (
        "Gemma4ForCausalLM",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        {**_GEMMA4, "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-unified": ("Gemma4UnifiedForCausalLM", _GEMMA4),
    "glm": ("GlmForCausalLM", {}),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", {**_LATENT, "qk_nope_head_dim": 48, "v_head_dim": 64}),
    "glm4-moe-lite-narrow-heads": ("Glm4MoeLiteForCausalLM", {**_LATENT, "q_lora_rank": None}),
    "gpt2": ("GPT2LMHeadModel", {"pad_token_id": None}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", {}),
    "gpt-bigcode-heads-of-keys": ("GPTBigCodeForCausalLM", {"multi_query": False}),
    "granite-moe": ("GraniteMoeForCausalLM", {}),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", {"moe_topk": [2, 2]}),
    "hy3": ("HYV3ForCausalLM", {}),
    "laguna": (
        "LagunaForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": _SPARSE_FROM_SECOND},
    ),
    "laguna-gate-per-element": ("LagunaForCausalLM", {"gating": "per-element", "head_dim": 64}),
    "minimax-m2": ("MiniMaxM2ForCausalLM", {}),
    "minimax-m3": ("MiniMaxM3VLForCausalLM", {"shared_intermediate_size": 80}),
    "modernbert": ("ModernBertDecoderForCausalLM", {"num_hidden_layers": 4, "local_attention": 18}),
    "moshi": ("MoshiForCausalLM", {}),
    "nemotron": ("NemotronForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
}


def save(folder: Path, class_name: str, **overrides: Any) -> None:
    if class_name in _NETWORK_SIZES and "intermediate_size" in overrides:
        name, factor = _NETWORK_SIZES[class_name]
        overrides[name] = overrides["intermediate_size"] * factor
    made = tiny_transformers_model(class_name, **{**wider_overrides(class_name), **overrides})
    save_for_fallback(made, folder)


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.create(str(folder), model_impl="transformers", max_num_batched_tokens=NUM_TOKENS, **options)


def derive_and_build(
    folder: Path,
    dtype: str = "float32",
    weights: str = "float32",
    more_headers: Mapping[str, TensorHeader] | None = None,
    **options: Any,
) -> tuple[ModelSizes, UnloadedModel]:
    """Sizes from headers, and of the model as it is built without memory."""
    config, headers = engine_config(folder, **options), read_headers(folder)
    assert headers is not None
    choice = DtypeChoice(dtype, "", weights)
    planned = PlannedModel(config, {**headers, **(more_headers or {})}, choice, dtype, "cpu", 128)
    built = try_without_memory(config.model, NUM_TOKENS, config.cache.block_size, choice, dtype, "cpu")
    return size_model(planned), built


def read(folder: Path, **more_headers: TensorHeader) -> UsualDecoder:
    headers = read_headers(folder)
    assert headers is not None
    return read_usual_decoder(engine_config(folder).model, {**headers, **more_headers})


@pytest.mark.parametrize(("shape", "dtype"), [("attention", "float32"), ("network", "bfloat16")])
@pytest.mark.parametrize("name", CLASSES)
def test_headers_say_what_the_built_model_has(tmp_path: Path, name: str, shape: str, dtype: str) -> None:
    class_name, overrides = CLASSES[name]
    save(tmp_path, class_name, **{**SHAPES[shape], **overrides})
    derived, built = derive_and_build(tmp_path, dtype, "bfloat16")
    assert derived.remark.startswith("estimated as a decoder of usual layers, since ")
    assert list(derived.specs.values()) == list(built.specs.values())
    assert derived.num_heads == built.num_heads
    assert derived.num_parameters == pytest.approx(built.num_parameters, rel=0.001)
    assert derived.step.activations == pytest.approx(built.activations, rel=TOLERANCE)
    assert derived.weights == pytest.approx(built.weights, rel=0.002)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["biogpt", "gemma4-layer-inputs", "gemma4-moe", "nemotron"])
def test_what_rounding_leaves_as_it_is(tmp_path: Path, name: str, quantization: str) -> None:
    """Embeddings that do more than to look rows up stay in floating point, beside a head that is rounded."""
    class_name, overrides = CLASSES[name]
    save(tmp_path, class_name, **{**SHAPES["network"], **overrides, "hidden_size": 128, "intermediate_size": 384})
    derived, built = derive_and_build(tmp_path, quantization=quantization)
    assert derived.remark.startswith("estimated as a decoder of usual layers, since ")
    assert derived.weights == pytest.approx(built.weights, rel=0.002)
    assert derived.num_parameters == pytest.approx(built.num_parameters, rel=0.001)


@pytest.mark.parametrize(
    "class_name", ["CohereForCausalLM", "Gemma2ForCausalLM", "Exaone4ForCausalLM", "NemotronForCausalLM"]
)
def test_absent_fields_mean_what_they_mean_to_transformers(tmp_path: Path, class_name: str) -> None:
    save(tmp_path, class_name, head_dim=16, num_key_value_heads=4)
    absent = {"hidden_act", "hidden_activation", "tie_word_embeddings", "use_sliding_window", "partial_rotary_factor"}
    if class_name == "CohereForCausalLM":  # others need them, or give them a size of their own
        absent |= {"head_dim", "num_key_value_heads"}
    edit_config(tmp_path, remove=tuple(absent))
    derived, built = derive_and_build(tmp_path)
    assert derived.remark.startswith("estimated")
    assert list(derived.specs.values()) == list(built.specs.values())
    assert derived.step.activations == pytest.approx(built.activations, rel=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["afmoe", "beam-wide-heads", "exaone4", "gemma4", "gemma4-unified", "modernbert", "olmo3"]
)
def test_windows_that_no_field_names_are_where_the_class_has_them(tmp_path: Path, name: str) -> None:
    class_name, overrides = CLASSES[name]
    save(tmp_path, class_name, **{**overrides, "num_hidden_layers": 7, "sliding_window": 9})
    absent = {"layer_types"} if class_name != "ModernBertDecoderForCausalLM" else {"layer_types", "sliding_window"}
    edit_config(tmp_path, remove=tuple(absent))
    derived, built = derive_and_build(tmp_path)
    assert derived.remark.startswith("estimated")
    assert len({type(spec) for spec in derived.specs.values()}) == 2
    assert list(derived.specs.values()) == list(built.specs.values())


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_that_is_not_in_the_checkpoint_is_the_embedding(tmp_path: Path, tie: bool) -> None:
    save(tmp_path, "SeedOssForCausalLM", tie_word_embeddings=tie)
    assert read(tmp_path).kinds[0].shape.decoder.ties_embeddings == tie


def test_a_window_of_which_no_layer_is_named_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the source of the class has no rule that can be told."""
    save(tmp_path, "Olmo3ForCausalLM", num_hidden_layers=5)
    edit_config(tmp_path, remove=("layer_types",))
    monkeypatch.setattr(class_source, "_layer_types_rule", lambda _body: None)
    with pytest.raises(NotUsual, match="does not say in which layers"):
        read(tmp_path)


def test_a_tensor_that_usual_decoders_lack_is_named(tmp_path: Path) -> None:
    save(tmp_path, "SeedOssForCausalLM")
    read(tmp_path)
    with pytest.raises(NotUsual, match=r"the checkpoint has model\.layers\.0\.self_attn\.sinks"):
        read(tmp_path, **{"model.layers.0.self_attn.sinks": TensorHeader("F32", (4,))})


def test_a_further_layer_is_not_overlooked(tmp_path: Path) -> None:
    """Checkpoints may hold layers that predict more tokens, which Transformers leaves out."""
    save(tmp_path, "SeedOssForCausalLM")
    edit_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(NotUsual, match="the checkpoint has 2 layers"):
        read(tmp_path)


@pytest.mark.parametrize("tensor", ["eh_proj.weight", "self_attn.q_proj.weight"])
def test_a_further_layer_that_the_class_ignores_is_not_counted(tmp_path: Path, tensor: str) -> None:
    """GLM 4.5 has one that predicts a further token, after as many others as its class says."""
    save(tmp_path, "Glm4MoeForCausalLM")
    derived, built = derive_and_build(
        tmp_path, more_headers={f"model.layers.46.{tensor}": TensorHeader("F32", (64, 4096))}
    )
    assert derived.remark.startswith("estimated")
    assert derived.num_parameters == pytest.approx(built.num_parameters, rel=0.001)
    with pytest.raises(NotUsual):
        read(tmp_path, **{f"model.layers.45.{tensor}": TensorHeader("F32", (64, 4096))})


def test_matrices_that_do_not_fit_each_other_are_not_taken_for_a_network(tmp_path: Path) -> None:
    save(tmp_path, "SeedOssForCausalLM")
    with pytest.raises(NotUsual, match="the sizes of its networks' projections do not fit each other"):
        read(tmp_path, **{"model.layers.1.mlp.down_proj.weight": TensorHeader("F32", (64, 96))})


def test_heads_of_keys_and_values_that_differ_in_size_are_not_usual(tmp_path: Path) -> None:
    save(tmp_path, "Glm4MoeLiteForCausalLM", v_head_dim=48)
    with pytest.raises(NotUsual, match="not those of plain attention"):
        read(tmp_path)


def test_without_a_checkpoint_nothing_is_derived(tmp_path: Path) -> None:
    save(tmp_path, "SeedOssForCausalLM")
    with pytest.raises(NotUsual, match="no checkpoint"):
        read_usual_decoder(engine_config(tmp_path).model, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["FalconForCausalLM"], "model_type": "falcon"},  # attention of its own
        {"architectures": ["JambaForCausalLM"], "model_type": "jamba"},  # a recurrent state
        {"architectures": ["OtherForCausalLM"]},  # no class at all
        {"use_bidirectional_attention": True},
        {"hidden_act": "prelu"},
        {"num_attention_heads": 3},
        {"num_attention_heads_per_layer": [4]},
        {"num_kv_shared_layers": 1},  # which the engine does not run
    ],
    ids=str,
)
def test_what_may_not_run_or_is_not_known_is_left_to_the_model_itself(tmp_path: Path, changes: dict[str, Any]) -> None:
    save(tmp_path, "SeedOssForCausalLM")
    edit_config(tmp_path, **changes)
    with pytest.raises(NotUsual):
        read(tmp_path)

"""Families with delta rules and lightning attention: names, published sizes, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.config import ModelConfig
from penstock.errors import UnsupportedFeature
from penstock.models.causal_lm import CausalLM
from penstock.models.config_fields import FULL, LINEAR
from penstock.models.decoder import DecoderForCausalLM
from penstock.models.registry import find_model_class
from penstock.parallel import ParallelState
from support.checkpoints import RECURRENT, tiny_config

# Defaults of Transformers are sizes of published models. Changes of them, for fewer modules.
_FEWER = {"num_hidden_layers": 5, "num_experts_per_tok": 2}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_FEWER, "num_experts": 3},
    "qwen3_5": {"num_hidden_layers": 5},
    "qwen3_5_moe": {**_FEWER, "num_experts": 3},
    "olmo_hybrid": {"num_hidden_layers": 5},
    "kimi_linear": {**_FEWER, "num_local_experts": 8, "n_group": 1},
    "minimax": {**_FEWER, "num_local_experts": 3},
}
# What follows from the configuration, and experts, which Transformers stacks.
_NOT_COMPARED = re.compile(r".*\.experts\..*|.*\.(slope_rate|query_decay|key_decay|diagonal_decay)")
# Names in checkpoints of what Transformers has under others, in these families.
_BLOCKS = {"kimi_linear": re.compile(r"\.mlp(?=\.(gate|shared_experts)\.)"), "minimax": re.compile(r"\.mlp(?=\.)")}
KIMI_LAYERS = {"full_attn_layers": [2], "kda_layers": [1, 3, 4], "num_heads": 4, "head_dim": 12}


def build(content: dict[str, Any]) -> CausalLM:
    config = ModelConfig("some/model", Path("nowhere"), Path("nowhere"), content, {}, max_model_len=64)
    with torch.device("meta"):
        model = find_model_class(config)(config, ParallelState())
    assert isinstance(model, CausalLM)
    return model


def content_of(family: str, **changes: Any) -> dict[str, Any]:
    """Fields as in `config.json`."""
    made = {**tiny_config(family).to_dict(), "architectures": [RECURRENT[family].architecture], **changes}
    return {name: value for name, value in made.items() if value != "absent"}


@pytest.mark.parametrize("family", PUBLISHED)
def test_names_and_shapes_of_published_sizes_are_those_of_transformers(family: str) -> None:
    made = RECURRENT[family]
    hf_config = getattr(transformers, made.config_class)(**PUBLISHED[family])
    with torch.device("meta"):
        oracle = getattr(transformers, made.architecture)(hf_config)
    expected = {}
    for name, tensor in oracle.state_dict().items():
        if family in _BLOCKS:
            name = _BLOCKS[family].sub(".block_sparse_moe", name).replace(".forget_gate.", ".")
        expected[name] = tuple(tensor.shape)
    slots = build({**hf_config.to_dict(), "architectures": [made.architecture]}).checkpoint_slots()
    found = {name: slot.shape for name, slot in slots.items()}
    assert without_experts(found) == without_experts(expected)


def without_experts(shapes: dict[str, Any]) -> dict[str, Any]:
    return {name: shape for name, shape in shapes.items() if not _NOT_COMPARED.fullmatch(name)}


def test_the_published_form_of_kimi_linears_configuration_is_read() -> None:
    names = ("layer_types", "linear_num_heads", "linear_head_dim", "mlp_layer_types")
    absent = dict.fromkeys(names, "absent")
    model = build(content_of("kimi_linear", **absent, linear_attn_config=KIMI_LAYERS, first_k_dense_replace=1))
    assert isinstance(model, DecoderForCausalLM)
    assert list(model.layer_kinds) == [LINEAR, FULL, LINEAR, LINEAR]
    slots, expected = model.checkpoint_slots(), build(content_of("kimi_linear")).checkpoint_slots()
    assert {name: slot.shape for name, slot in slots.items()} == {name: one.shape for name, one in expected.items()}


def minimax_text_01() -> dict[str, Any]:
    """Fields of the original format, of the same model as the tiny one of Transformers."""
    made = content_of("minimax", architectures=["MiniMaxText01ForCausalLM"], model_type="minimax_text_01")
    names = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    for ours, theirs in names.items():
        for factor in ("alpha", "beta"):
            made[f"layernorm_{theirs}_{factor}"] = made.pop(f"{ours}_{factor}_factor")
    made["attn_type_list"] = [int(kind == FULL) for kind in made.pop("layer_types")]
    return {**made, "postnorm": True, "shared_intermediate_size": 0, "rotary_dim": 8}


def test_the_original_format_of_minimax_text_01_is_read() -> None:
    expected = build(content_of("minimax", rope_parameters={"rope_theta": 1e6, "rope_type": "default"}))
    found = build(minimax_text_01())
    assert isinstance(found, DecoderForCausalLM)
    assert isinstance(expected, DecoderForCausalLM)
    assert list(found.layer_kinds) == list(expected.layer_kinds)
    for layer, like in zip(found.model.layers, expected.model.layers, strict=True):
        assert layer.factors == like.factors
    rope = found.config.rope
    assert rope is not None
    assert rope.rotary_dim == 8
    shapes = [{name: slot.shape for name, slot in model.checkpoint_slots().items()} for model in (found, expected)]
    assert shapes[0] == shapes[1]
    with pytest.raises(UnsupportedFeature, match="postnorm=False"):
        build({**minimax_text_01(), "postnorm": False})
    with pytest.raises(UnsupportedFeature, match="attn_type_list"):
        build({**minimax_text_01(), "attn_type_list": [2]})


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_next", {"linear_num_key_heads": 3}, ["linear_num_key_heads=3", "divisors of 4"]),
        ("qwen3_5", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ("qwen3_5", {"layer_types": ["mamba"] * 4}, ["layer_types", FULL, LINEAR]),
        ("minimax", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ("kimi_linear", {"mla_use_nope": False}, ["mla_use_nope=False", "True"]),
        ("kimi_linear", {"q_lora_rank": 8}, ["q_lora_rank=8", "None"]),
        ("kimi_linear", {"linear_attn_config": {**KIMI_LAYERS, "kda_layers": [1]}}, ["kda_layers", "from 1 on"]),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(family: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedFeature) as raised:
        build(content_of(family, **changes))
    for word in words:
        assert word in str(raised.value)

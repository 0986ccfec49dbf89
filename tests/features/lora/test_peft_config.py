"""Fields of PEFT's `LoraConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from penstock.errors import CheckpointError, UnsupportedFeature
from penstock.features.lora.peft_config import _IMPLEMENTED, _WITHOUT_EFFECT, PeftConfig

# A value of each refused field that a training may have set.
REFUSED: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 2},
    "bias": "all",
    "corda_config": {"cache_file": "x"},
    "ensure_weight_tying": True,
    "init_lora_weights": "pissa",
    "kasa_config": {"beta": 1},
    "layer_replication": [[0, 2], [1, 3]],
    "loftq_config": {"loftq_bits": 4},
    "lora_bias": True,
    "lora_ga_config": {"direction": "ArB2r"},
    "megatron_config": {"tp": 2},
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"num_samples": 2},
    "trainable_token_indices": [5],
    "use_bdlora": {"nblocks": 2},
    "use_dora": True,
    "use_qalora": True,
    "velora_config": {"num_groups": 2},
}


def test_every_field_of_the_installed_peft_is_implemented_or_refused() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    # A training's choice of modules and values of one that has ended.
    known = _IMPLEMENTED | _WITHOUT_EFFECT | set(REFUSED)
    assert fields - known == set()


def test_the_defaults_of_peft_are_accepted() -> None:
    config = PeftConfig.read("a", LoraConfig(r=8, lora_alpha=16).to_dict())
    assert config.scaling_of("model.layers.0.self_attn.q_proj") == 2


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_changes_the_outputs_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"The adapter 'a' has {field}="):
        PeftConfig.read("a", {"r": 4, "lora_alpha": 4, field: REFUSED[field]})


def test_a_new_field_of_peft_is_refused_if_it_is_set() -> None:
    assert PeftConfig.read("a", {"r": 4, "lora_alpha": 4, "brand_new": None}).rank == 4
    with pytest.raises(UnsupportedFeature, match="brand_new=3"):
        PeftConfig.read("a", {"r": 4, "lora_alpha": 4, "brand_new": 3})


@pytest.mark.parametrize("fields", [{}, {"r": 0, "lora_alpha": 1}, {"r": 4}, {"r": True, "lora_alpha": 1}])
def test_a_rank_or_alpha_that_is_no_positive_number_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="r="):
        PeftConfig.read("a", fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"(": 3}},
        {"rank_pattern": {"(?i)q_proj": 3}},
        {"rank_pattern": {"a{99999999999999}": 3}},
        {"rank_pattern": {"q_proj": 2.5}},
        {"alpha_pattern": {"*": 3}},
        {"alpha_pattern": {"q_proj": float("inf")}},
        {"target_parameters": "mlp.experts.down_proj"},
    ],
)
def test_a_pattern_that_is_not_valid_is_an_error_that_names_its_field(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"The adapter 'a' has .*{next(iter(fields))}"):
        PeftConfig.read("a", {"r": 4, "lora_alpha": 4, **fields})


def test_other_methods_of_peft_are_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="peft_type='IA3'"):
        PeftConfig.read("a", {"peft_type": "IA3"})


@pytest.mark.parametrize(
    "pattern",
    [
        {"q_proj": 2},
        {r"layers\.[01]\..*": 2, "q_proj": 3},
        {"model.layers.0.self_attn.q_proj": 2, "self_attn.(?!q)._proj": 3},
        {"^model.layers.1.self_attn.q_proj": 2, "proj": 3},
        {"q_proj|k_proj": 2},
        {r"\.q_proj": 2},
    ],
)
def test_a_pattern_means_what_it_means_in_peft(pattern: dict[str, int]) -> None:
    modules = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1, 10) for part in "qk"]
    config = PeftConfig.read("a", {"r": 8, "lora_alpha": 8, "rank_pattern": pattern}).matched("a", modules)
    for module in modules:
        assert config.rank_of(module) == pattern.get(get_pattern_key(pattern, module), 8), module


def test_a_pattern_on_which_backtracking_never_ends_is_matched() -> None:
    fields = {"r": 8, "lora_alpha": 8, "rank_pattern": {"([a-z_.0-9]+)+!": 2, "q_proj": 4}}
    module = f"model.layers.0.{'deep.' * 20}q_proj"
    assert PeftConfig.read("a", fields).matched("a", [module]).rank_of(module) == 4

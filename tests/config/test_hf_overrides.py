"""The option hf_overrides replaces fields of config.json."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, EngineConfig, SamplingParams
from penstock.config.hf_overrides import as_fields, with_overrides
from penstock.engine.planning.plan import plan_engine
from penstock.errors import ConfigError, ModelError
from penstock.layers.rope_scaling import read_rope_parameters
from support.checkpoints import save_checkpoint, tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "overrides", "result"),
    [
        ({"a": 1}, None, {"a": 1}),
        ({"a": 1}, '{"a": 2, "b": null}', {"a": 2, "b": None}),
        ({"text_config": {"a": 1, "b": 2}}, {"text_config": {"b": 3}}, {"text_config": {"a": 1, "b": 3}}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"c": 2}}),
    ],
)
def test_fields_are_replaced(fields: Any, overrides: Any, result: Any) -> None:
    assert with_overrides(fields, overrides) == result


OLD = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
NEW = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}


@pytest.mark.parametrize("written", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize(
    ("overrides", "rope_type", "theta"),
    [
        ({"rope_theta": 7.0}, "linear", 7.0),
        ({"rope_scaling": YARN}, "yarn", 500.0),
        ({"rope_scaling": YARN, "rope_theta": 7.0}, "yarn", 7.0),
        ({"rope_scaling": None}, "default", 500.0),
        ({"rope_parameters": {**YARN, "rope_theta": 7.0}}, "yarn", 7.0),
    ],
)
def test_rotary_settings_replace_those_of_either_form(
    written: Any, overrides: Any, rope_type: str, theta: float
) -> None:
    changed = with_overrides({"max_position_embeddings": 64, **written}, overrides)
    rope = read_rope_parameters(changed, head_size=8, num_positions=64)
    assert (rope.rope_type, rope.theta) == (rope_type, theta)


def test_settings_by_kind_of_layer_are_not_replaced_by_one(tmp_path: Path) -> None:
    kinds = {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}}
    with pytest.raises(ConfigError, match=r"hf_overrides has rope_theta, but .* each kind of layer \(full_attention"):
        with_overrides(kinds, {"rope_theta": 3.0})


@pytest.mark.parametrize("given", ["{", "[1]", 7, {1: 2}])
def test_another_value_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="hf_overrides"):
        EngineConfig.create("demo", hf_overrides=given)


def test_a_function_changes_the_configuration_before_it_is_sent() -> None:
    def change(config: Any) -> Any:
        config.update({"max_position_embeddings": 4096, "architectures": ["Other"]})
        config.model_type = "other"
        config.note = (1, 2)
        return config

    config = EngineConfig.create("demo", hf_overrides=change)
    assert config.model.hf_overrides == {
        "max_position_embeddings": 4096,
        "architectures": ["Other"],
        "model_type": "other",
        "note": [1, 2],
    }
    assert pickle.loads(pickle.dumps(config)) == config == EngineConfig.create("demo", **config.options())


def test_a_function_changes_single_fields_of_nested_configurations_and_keeps_the_base() -> None:
    fields = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2}}

    def change(config: Any) -> Any:
        config.text_config.num_hidden_layers = 1
        return config

    assert as_fields(change, fields) == {"text_config": {"num_hidden_layers": 1}}
    rope = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}

    def scale(config: Any) -> Any:
        config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": None}
        return config

    assert as_fields(scale, rope) == {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda config: config.update({"a": 1}), "a function that returned None"),
        (lambda config: config.nothing, "a function that failed: AttributeError"),
        (lambda config: (setattr(config, "a", object()), config)[1], "whose changes are not plain values"),
    ],
)
def test_a_function_that_does_not_give_a_configuration_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"hf_overrides is .*{message}"):
        EngineConfig.create("demo", hf_overrides=function)


def test_a_name_that_may_be_misspelt_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = {"num_hidden_layers": 2, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert (
        with_overrides(config, {"num_hidden_layer": 1, "sliding_window": 8, "rope_theta": 1e5})["sliding_window"] == 8
    )
    (line,) = caplog.messages
    assert line == (
        "hf_overrides has num_hidden_layer, which config.json does not have. Did you mean num_hidden_layers?"
    )


def test_a_model_computes_with_the_fields_and_saves_them(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("llama"), tmp_path / "model")
    save_checkpoint(
        tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 3.0}), tmp_path / "other"
    )
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

    def tokens(model: str, **options: Any) -> list[int]:
        with LLM(tmp_path / model, tokenizer="demo", dtype="float32", kv_cache_memory_bytes=1 << 22, **options) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [5, 17, 3, 88]}], params)
            if options:
                llm.collective_rpc("save_sharded_state", args=(str(tmp_path / "state"),))
        return list(output.outputs[0].token_ids)

    own = tokens("model")
    assert own != tokens("other") == tokens("model", rope_theta=3.0)
    assert json.loads((tmp_path / "state/config.json").read_text())["rope_parameters"]["rope_theta"] == 3.0


def test_errors_name_the_option_beside_the_file() -> None:
    overrides = {"num_attention_heads": -1, "rope_theta": 5.0}
    with pytest.raises(ModelError, match="of demo with num_attention_heads, rope_theta of hf_overrides has"):
        plan_engine("demo", hf_overrides=overrides)
    with pytest.raises(ModelError, match="config.json of demo with num_hidden_layers of hf_overrides has"):
        EngineConfig.create("demo", hf_overrides='{"num_hidden_layers": 1e9}')


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "llama3", "yarn"])
def test_scaling_without_its_factor_is_refused_by_the_plan(rope_type: str) -> None:
    with pytest.raises(ModelError, match=rf"rope_type='{rope_type}'\) has factor=None"):
        plan_engine("demo", hf_overrides={"rope_scaling": {"rope_type": rope_type}})


def test_a_longer_context_can_be_asked_for() -> None:
    config = EngineConfig.create("demo", max_model_len=4096, hf_overrides={"max_position_embeddings": 4096})
    assert config.model.longest_context == 4096
    assert EngineConfig.create("demo", **config.options()) == config

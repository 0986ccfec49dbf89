"""The option hf_config_path names another configuration than the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.config import ModelConfig
from penstock.errors import ModelNotFound, UnsupportedFeature, UnsupportedModel
from support.checkpoints import save_checkpoint, tiny_model
from support.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def _tokens(model: Path, **options: object) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    with LLM(model, tokenizer="demo", dtype="float32", kv_cache_memory_bytes=1 << 22, **options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5, 17, 3, 88]}], params)
    return list(output.outputs[0].token_ids)


def test_a_gguf_file_computes_with_the_fields_of_another_configuration(tmp_path):
    model = tiny_model("llama")
    slow_rotation = {"rope_type": "default", "rope_theta": 3.0}
    save_checkpoint(tiny_model("llama", rope_parameters=slow_rotation), tmp_path / "other")
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf")
    own, other = _tokens(path), _tokens(path, hf_config_path=tmp_path / "other")
    assert own != other
    assert other == _tokens(tmp_path / "other")


def test_a_file_whose_metadata_cannot_be_expressed_takes_a_given_configuration(tmp_path):
    model = tiny_model("llama")
    save_checkpoint(model, tmp_path / "original")
    changes = {"llama.rope.scaling.type": "unheard-of"}
    path = write_gguf(model, "llama", tmp_path / "tiny.gguf", changes=changes)
    with pytest.raises(UnsupportedFeature, match="unheard-of"):
        ModelConfig.load(path)
    assert _tokens(path, hf_config_path=tmp_path / "original") == _tokens(tmp_path / "original")


def test_an_architecture_without_names_is_refused_even_with_a_configuration(tmp_path):
    save_checkpoint(tiny_model("llama"), tmp_path / "original")
    changes = {"general.architecture": "rwkv7"}
    path = write_gguf(tiny_model("llama"), "llama", tmp_path / "tiny.gguf", changes=changes)
    with pytest.raises(UnsupportedModel, match="rwkv7"):
        LLM(path, hf_config_path=tmp_path / "original", tokenizer="demo")


def test_it_takes_the_place_of_a_folders_own_configuration(tmp_path):
    save_checkpoint(tiny_model("llama"), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({**written, "max_position_embeddings": 64}))
    config = ModelConfig.load(tmp_path / "model", hf_config_path=tmp_path / "config")
    assert (config.longest_context, config.folder) == (64, tmp_path / "model")


def test_a_saved_state_has_the_configuration_that_it_was_made_with(tmp_path):
    save_checkpoint(tiny_model("llama"), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({**written, "max_position_embeddings": 64}))
    options = {"hf_config_path": tmp_path / "config", "tokenizer": "demo", "kv_cache_memory_bytes": 1 << 22}
    with LLM(tmp_path / "model", **options) as llm:
        llm.collective_rpc("save_sharded_state", args=(str(tmp_path / "state"),))
    assert ModelConfig.load(tmp_path / "state").longest_context == 64


def test_a_folder_that_is_not_there_is_refused_by_the_options_name(tmp_path):
    save_checkpoint(tiny_model("llama"), tmp_path / "model")
    with pytest.raises(ModelNotFound, match="hf_config_path="):
        ModelConfig.load(tmp_path / "model", hf_config_path=str(tmp_path / "nowhere"))

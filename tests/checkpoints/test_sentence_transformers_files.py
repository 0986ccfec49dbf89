"""Files of sentence-transformers that say what cannot be are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoints.sentence_transformers import SentenceTransformersFiles
from penstock.checkpoints.sentence_transformers_modules import lower_cases
from penstock.errors import ModelError, UnsupportedModel


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", [], "modules.json is not a list of modules"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "q: "}, "default_prompt_name": "passage"},
            r"default_prompt_name='passage', which is none of its prompts: query",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": ["query"]}, "it has none"),
    ],
)
def test_damaged_files_are_refused(file: str, content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        SentenceTransformersFiles.read(tmp_path)


@pytest.mark.parametrize("place", ["../other", "1_Pooling/../../other", "/etc", ".."])
def test_modules_outside_of_the_models_folder_are_refused(place: str, tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": place}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"modules\.json has the path .* which is not in the model's folder"):
        SentenceTransformersFiles.read(tmp_path)


def test_a_default_prompt_that_every_model_has_is_empty(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "document"}))
    files = SentenceTransformersFiles.read(tmp_path)
    assert files is not None
    assert files.default_prompt_name is None


_TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
_POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
_DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
_NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"}
_MEAN = {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}


def _read(folder: Path, modules: list[Any], files: dict[str, Any]) -> SentenceTransformersFiles:
    for name, content in {"modules.json": modules, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    found = SentenceTransformersFiles.read(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_a_limit_of_tokens_is_read_from_the_file_of_each_kind_of_model(kind: str, tmp_path: Path) -> None:
    content = {"max_seq_length": 77, "do_lower_case": True}
    found = _read(tmp_path, [_TRANSFORMER, _POOLING], {**_MEAN, f"sentence_{kind}_config.json": content})
    assert found.max_length == 77
    assert lower_cases(tmp_path)


def test_the_tokenizers_own_limit_comes_first(tmp_path: Path) -> None:
    content = {"max_seq_length": 77, "tokenizer_args": {"model_max_length": 33, "padding_side": "left"}}
    assert _read(tmp_path, [_TRANSFORMER], {"sentence_bert_config.json": content}).max_length == 33


def test_what_newer_versions_write_is_read(tmp_path: Path) -> None:
    content = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"text": {"padding": True, "truncation": True}},
        "unpad_inputs": None,
        "model_kwargs": {"dtype": "bfloat16", "trust_remote_code": True},
    }
    found = _read(tmp_path, [_TRANSFORMER, _POOLING, _DENSE, _DENSE, _NORMALIZE], {
        **_MEAN, "sentence_bert_config.json": content, "2_Dense/config.json": {"out_features": 4}
    })  # fmt: skip
    assert (found.pooling, found.dense, found.normalize) == ("mean", ("2_Dense", "2_Dense"), True)
    assert not lower_cases(tmp_path)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"max_seq_length": "512"}, ModelError, r"max_seq_length='512'. It must be an integer"),
        ({"max_seq_length": 0}, ModelError, r"max_seq_length=0. It must be a positive integer"),
        ({"max_seq_length": -1}, ModelError, r"max_seq_length=-1"),
        ({"do_lower_case": "yes"}, ModelError, r"do_lower_case='yes'. It must be true or false"),
        ({"query_length": 12}, UnsupportedModel, r"query_length, document_length or query_expansion"),
        ({"transformer_task": "fill-mask"}, UnsupportedModel, r"transformer_task='fill-mask'"),
        ({"tokenizer_args": {"do_lower_case": True}}, UnsupportedModel, r"tokenizer_args\.do_lower_case=True"),
        ({"processor_kwargs": {"add_eos_token": True}}, UnsupportedModel, r"tokenizer_args\.add_eos_token=True"),
        ({"config_args": {"is_causal": False}}, UnsupportedModel, r"config_args\.is_causal=False"),
        ({"model_args": {"add_pooling_layer": False}}, UnsupportedModel, r"model_args\.add_pooling_layer=False"),
        ({"tokenizer_name_or_path": "other"}, UnsupportedModel, r"tokenizer_name_or_path='other'.*option tokenizer"),
        ({"module_output_name": "sentence_embedding"}, UnsupportedModel, r"module_output_name='sentence_embedding'"),
        ({"modality_config": {"image": {}}}, UnsupportedModel, r"modality_config="),
        ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, UnsupportedModel, r"text\.add_special_tokens"),
        ({"processing_kwargs": {"common": {"truncation": False}}}, UnsupportedModel, r"common\.truncation=False"),
    ],
)
def test_fields_of_the_transformer_are_read_or_refused_by_name(
    content: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        _read(tmp_path, [_TRANSFORMER, _POOLING], {**_MEAN, "sentence_bert_config.json": content})


def test_fields_that_nothing_knows_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        _read(tmp_path, [_TRANSFORMER, _POOLING], {**_MEAN, "sentence_bert_config.json": {"shout": 1}})
    assert "has fields that are not known, and not used: 'shout'" in caplog.text


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        ([_TRANSFORMER, _POOLING, _NORMALIZE, _DENSE], {}, "Transformer, Pooling, Normalize, Dense, an order"),
        ([_TRANSFORMER, _DENSE, _POOLING], {}, "an order that is not supported"),
        ([_TRANSFORMER, _POOLING, _POOLING], {}, "an order that is not supported"),
        ([{"type": "custom_st.Transformer"}, _POOLING], {}, r"module 'custom_st\.Transformer'"),
        ([_TRANSFORMER, {"type": "sentence_transformers.models.WordWeights"}], {}, r"WordWeights'"),
        (
            [_TRANSFORMER, _POOLING, _NORMALIZE],
            {"3_Normalize/config.json": {"module_output_name": "other"}},
            r"module_output_name='other'.*sentence_embedding, its input",
        ),
    ],
)
def test_modules_that_compute_something_else_are_refused(
    modules: list[Any], files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        _read(tmp_path, modules, {**_MEAN, "2_Dense/config.json": {"out_features": 4}, **files})


def test_pooling_without_a_mode_is_the_mean(tmp_path: Path) -> None:
    files = {"1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False}}
    assert _read(tmp_path, [_TRANSFORMER, _POOLING], files).pooling == "mean"


@pytest.mark.parametrize("changes", [{"pooling_mode": 3}, {"pooling_mode_cls_token": "yes"}, {"include_prompt": 0}])
def test_fields_of_pooling_of_another_type_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"1_Pooling/config\.json has {next(iter(changes))}="):
        _read(tmp_path, [_TRANSFORMER, _POOLING], {"1_Pooling/config.json": changes})

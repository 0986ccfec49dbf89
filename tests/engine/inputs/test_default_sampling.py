"""Requests without sampling parameters take the model's own, from its generation_config.json."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncEngine, EngineConfig, SamplingParams
from penstock.cli.options import with_defaults
from penstock.engine.inputs.default_sampling import default_sampling_params
from penstock.errors import ConfigError, InvalidParameter, ModelError
from support.fake_engine import FakeCore, install_fake_core, write_model

FILE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [1, 9]}
OF_FILE = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)


@pytest.fixture(autouse=True)
def _fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.engine.core.engine_core", None)
    install_fake_core()


def model_with(folder: Path, content: Any) -> Path:
    write_model(folder)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def defaults_of(folder: Path, **options: Any) -> SamplingParams:
    return default_sampling_params(EngineConfig.create(folder, **options).model)


def asked_of(llm: LLM) -> list[SamplingParams]:
    """Sampling parameters that reached the core, without their seeds."""
    core = llm._session._core
    assert isinstance(core, FakeCore)
    return [request.sampling_params.clone(seed=None) for request in core.added]


def test_requests_without_parameters_take_those_of_the_file(tmp_path: Path) -> None:
    with LLM(model_with(tmp_path / "model", FILE)) as llm:
        assert llm.get_default_sampling_params() == OF_FILE
        llm.generate(["a", "b"])
        (llm._session.tokenizer.folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        llm.chat([{"role": "user", "content": "a"}])
        assert asked_of(llm) == [OF_FILE] * 3


def test_what_a_caller_sets_changes_neither_defaults_nor_requests(tmp_path: Path) -> None:
    with LLM(model_with(tmp_path / "model", FILE)) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens = 3
        params.seed = 7  # without one it would be a copy with a seed
        llm.generate("a", params)
        params.max_tokens = 2
        assert asked_of(llm) == [OF_FILE.clone(max_tokens=3)]
        assert llm.get_default_sampling_params() == OF_FILE


def test_parameters_that_are_given_are_taken_as_they_are(tmp_path: Path) -> None:
    with LLM(model_with(tmp_path / "model", FILE)) as llm:
        llm.generate("a", SamplingParams(max_tokens=3))
        assert asked_of(llm) == [SamplingParams(max_tokens=3)]


def test_an_async_engine_takes_them_too(tmp_path: Path) -> None:
    async def generate(folder: Path) -> tuple[SamplingParams, int]:
        # In this process, where the fake core is.
        async with AsyncEngine(folder, enable_multiprocessing=False) as engine:
            outputs = [output async for output in engine.generate("a")]
            return engine.get_default_sampling_params(), len(outputs[-1].outputs[0].token_ids)

    folder = model_with(tmp_path / "model", {"temperature": 0.6, "max_new_tokens": 5})
    assert asyncio.run(generate(folder)) == (SamplingParams(temperature=0.6, max_tokens=5), 5)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 7}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"temperature": None, "top_p": None, "num_beams": 4, "typical_p": 0.5}, {}),
        ({"do_sample": True}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        # What chooses among likely tokens has no meaning where the likeliest is taken.
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.5, "top_k": 4, "min_p": 0.1}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.5}, {"temperature": 0.0, "repetition_penalty": 1.5}),
        ({"temperature": 0}, {"temperature": 0}),
    ],
)
def test_fields_mean_what_they_mean_in_transformers(tmp_path: Path, content: Any, expected: dict[str, Any]) -> None:
    expected |= {"max_tokens": content["max_new_tokens"]} if "max_new_tokens" in content else {}
    assert defaults_of(model_with(tmp_path / "model", content)) == SamplingParams(**expected)


@pytest.mark.parametrize("word", ["none", "vllm"])
def test_the_files_parameters_can_be_passed_over_and_its_end_tokens_stay(tmp_path: Path, word: str) -> None:
    config = EngineConfig.create(model_with(tmp_path / "model", FILE), generation_config=word).model
    assert default_sampling_params(config) == SamplingParams()
    assert config.eos_token_ids == {1, 9}


@pytest.mark.parametrize(
    ("of_file", "of_config", "expected"),
    [
        ({"eos_token_id": None}, 7, {7}),
        ({"eos_token_id": []}, [7, 8], {7, 8}),
        ({}, 7, {7}),
        ({"eos_token_id": 9}, 7, {9}),
        ({"eos_token_id": 0}, 7, {0}),
        ({"eos_token_id": None}, None, set()),
    ],
)
def test_end_tokens_are_those_of_the_first_file_that_names_any(
    tmp_path: Path, of_file: dict[str, Any], of_config: Any, expected: set[int]
) -> None:
    folder = model_with(tmp_path / "model", of_file)
    write_model(folder, eos_token_id=of_config)
    assert EngineConfig.create(folder).model.eos_token_ids == expected


def test_another_folders_file_can_be_read(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", FILE)
    other = model_with(tmp_path / "other", {"top_k": 3, "eos_token_id": 8})
    for folder in (other, str(other)):
        config = EngineConfig.create(model, generation_config=folder).model
        assert default_sampling_params(config) == SamplingParams(top_k=3)
        assert config.eos_token_ids == {8}


@pytest.mark.parametrize(
    ("content", "override", "expected"),
    [
        (FILE, {"temperature": 0.3, "max_new_tokens": 5}, OF_FILE.clone(temperature=0.3, max_tokens=5)),
        (FILE, {"temperature": None, "top_k": None}, SamplingParams(top_p=0.95)),
        (FILE, {"do_sample": False}, SamplingParams(temperature=0)),
        ({"do_sample": False, "top_p": 0.9}, {"temperature": 0.3}, SamplingParams(temperature=0.3, top_p=0.9)),
        ({"do_sample": False}, {"max_new_tokens": 5}, SamplingParams(temperature=0, max_tokens=5)),
        ({"temperature": "hot"}, {"temperature": 0.3}, SamplingParams(temperature=0.3)),
    ],
)
def test_an_override_counts_instead_of_the_file(
    tmp_path: Path, content: Any, override: dict[str, Any], expected: SamplingParams
) -> None:
    folder = model_with(tmp_path / "model", content)
    assert defaults_of(folder, override_generation_config=override) == expected
    without = defaults_of(folder, override_generation_config=override, generation_config="none")
    fields = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in override.items()}
    if fields.pop("do_sample", None) is False:
        fields["temperature"] = 0.0
    assert without == SamplingParams(**{name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "nowhere"}, "generation_config='nowhere'.*no generation_config.json.*'auto', 'none'"),
        ({"generation_config": 7}, "generation_config=7 is not valid. Allowed: 'auto', 'none', or a folder"),
        ({"override_generation_config": 7}, "override_generation_config=7 is not valid. Allowed: a dictionary"),
        ({"override_generation_config": {"max_tokens": 7}}, "has 'max_tokens' .*Did you mean max_new_tokens"),
        ({"override_generation_config": {"temprature": 7}}, "has 'temprature' .*Did you mean temperature"),
        (
            {"override_generation_config": {"top_p": 2}},
            "override_generation_config: top_p=2 is not valid",
        ),
        ({"override_generation_config": {"max_new_tokens": 0}}, "max_new_tokens=0 is not valid. Allowed: at least 1"),
        ({"override_generation_config": {"do_sample": 1}}, "do_sample=1 is not valid. Allowed: true or false"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model_with(tmp_path / "model", FILE), **options)


def test_a_bad_value_of_the_file_is_a_warning_that_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {"temperature": "hot", "top_k": 2.5, "do_sample": "no", "max_new_tokens": -1, "top_p": 0.5}
    folder = model_with(tmp_path / "model", content)
    with caplog.at_level(logging.INFO):
        assert defaults_of(folder) == SamplingParams(top_p=0.5)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    path, end = folder / "generation_config.json", "The field is passed over."
    assert sorted(warnings) == [
        f"{path}: do_sample='no' is not valid. Allowed: true or false. {end}",
        f"{path}: max_new_tokens=-1 is not valid. Allowed: at least 1, or None. {end}",
        f"{path}: temperature='hot' is not valid. Allowed: 0 (greedy) to 10000. {end}",
        f"{path}: top_k=2.5 is not valid. Allowed: -1 or 0 (all tokens), or a positive integer. {end}",
    ]


def test_the_log_says_once_where_defaults_come_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = model_with(tmp_path / "model", FILE)
    with caplog.at_level(logging.INFO), LLM(folder, override_generation_config={"top_k": 4}) as llm:
        llm.generate(["a", "b"], use_tqdm=False)
        llm.generate("c", use_tqdm=False)
    (line,) = [record.getMessage() for record in caplog.records if "sampling parameters" in record.getMessage()]
    assert line == (
        "Requests without sampling parameters take temperature=0.6, top_p=0.95 "
        f"(from {folder}/generation_config.json); "
        "top_k=4 (from override_generation_config). generation_config='none' passes the file over."
    )


def test_a_model_without_defaults_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert defaults_of(write_model(tmp_path / "plain")) == SamplingParams()
        assert defaults_of(model_with(tmp_path / "model", {"eos_token_id": 1, "do_sample": True})) == SamplingParams()
        assert default_sampling_params(EngineConfig.create("demo").model) == SamplingParams()
    assert caplog.records == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is damaged"):
        LLM(folder)


def test_a_commands_flags_count_most_and_its_own_defaults_least(tmp_path: Path) -> None:
    model = str(model_with(tmp_path / "model", {**FILE, "max_new_tokens": 9}))
    own = {"max_tokens": 128, "min_p": 0.25}
    flags = {"max_tokens": None, "temperature": 0.1, "top_p": None, "seed": None}
    fields = with_defaults(flags, model, {}, **own)
    assert fields == {"max_tokens": 9, "min_p": 0.25, "temperature": 0.1, "top_p": 0.95, "top_k": 20}
    options = {"generation_config": "none", "override_generation_config": {"top_k": 5}, "dtype": "auto"}
    assert with_defaults(flags, model, options, **own) == {**own, "temperature": 0.1, "top_k": 5}
    with pytest.raises(InvalidParameter, match="top_p=7"):
        with_defaults({"top_p": 7}, "/nowhere", {})

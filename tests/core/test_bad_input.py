"""Every kind of bad input has its own exception and says what to do; the engine serves the next request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.checkpoints.resolve import resolve_model_folder
from penstock.errors import (
    CheckpointError,
    ConfigError,
    ContextTooLong,
    InvalidParameter,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    OutOfMemory,
    TokenizerError,
    UnknownOption,
    UnsupportedModel,
)
from support.checkpoints import tiny_checkpoint

SMALL = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}
pytestmark = pytest.mark.one_path(reason="what is refused never becomes a step")
SHORT = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("demo", max_model_len=128, fast_paths="auto", **SMALL) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ({"prompt_token_ids": [5] * 128}, SHORT, ContextTooLong, "128"),
        ({"prompt_token_ids": []}, SHORT, InvalidRequest, "no tokens|empty"),
        ({"prompt_token_ids": [10**6]}, SHORT, InvalidRequest, "1000000"),
        ({"prompt_token_ids": [-1]}, SHORT, InvalidRequest, "-1"),
        ({"promt": "a typo"}, SHORT, InvalidRequest, "promt"),
        (3.5, SHORT, InvalidRequest, "float"),
        ("fine", SamplingParams(logprobs=10**6), InvalidParameter, "logprobs"),
        ("fine", SamplingParams(stop_token_ids=(10**6,)), InvalidParameter, "stop_token_ids"),
        ("fine", SamplingParams(prompt_logprobs=21), InvalidParameter, "prompt_logprobs=21.*max_logprobs=21"),
        ("fine", SamplingParams(logprobs=-1), InvalidParameter, "logprobs=-1 asks for all.*max_logprobs=-1"),
        ("fine", SamplingParams(allowed_token_ids=[5, 10**6]), InvalidParameter, "allowed_token_ids has 1000000"),
        ("fine", SamplingParams(logit_bias={10**6: 1.0}), InvalidParameter, "logit_bias has 1000000"),
        ("fine", SamplingParams(bad_words=["  "]), InvalidParameter, "bad_words has '  ', which has no tokens"),
        ("fine", SamplingParams(bad_words_token_ids=[[5, 10**6]]), InvalidParameter, "bad_words_token_ids has 1000000"),
        (
            "fine",
            SamplingParams(extra_args={"nobody": 1}),
            InvalidParameter,
            "extra_args has 'nobody'.*thinking_budget",
        ),
        ("fine", SamplingParams(extra_args={"thinking_budget": 1}), InvalidParameter, "'thinking_budget' refuses"),
        ("fine", "not params", InvalidRequest, "sampling_params"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_is_served(
    llm: LLM, prompt: Any, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(["first", prompt, "last"], params)
    outputs = llm.generate(["first", "last"], SHORT, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]


def _edit(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), ModelError, "config.json is missing"),
        (_write("config.json", "{"), ModelError, "config.json is damaged"),
        (_write("config.json", "[1]"), ModelError, "holds a list"),
        (_edit("config.json", lambda c: c.pop("architectures")), ModelError, "architectures=None"),
        (_edit("config.json", lambda c: c.update(architectures=["RwkvModel"])), UnsupportedModel, "RwkvModel"),
        (_edit("config.json", lambda c: c.pop("hidden_size")), ModelError, "hidden_size"),
        (_edit("config.json", lambda c: c.update(intermediate_size=48)), CheckpointError, "misshapen"),
        (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, "no model.safetensors"),
        (_truncate, CheckpointError, "model.safetensors"),
        (_write("model.safetensors", "garbage"), CheckpointError, "model.safetensors"),
        (_write("tokenizer.json", "{"), TokenizerError, "tokenizer.json"),
    ],
)
def test_a_damaged_model_folder_is_refused_by_file(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    tiny_checkpoint(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((resolve_model_folder("demo") / name).read_bytes())
    damage(tmp_path)
    with pytest.raises(error, match=message):
        LLM(str(tmp_path), **SMALL)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8"}, ConfigError, "dtype='float8'.*float32, bfloat16, float16"),
        ({"device": "tpu"}, ConfigError, "device='tpu'.*auto, cpu, cuda"),
        ({"load_format": "onnx"}, ConfigError, "load_format='onnx'"),
        ({"max_num_sequences": 3}, UnknownOption, "max_num_sequences.*Did you mean max_num_seqs"),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len=1000000.*max_position_embeddings"),
        ({"max_model_len": "long"}, ConfigError, "max_model_len='long'"),
        ({"block_size": 0}, ConfigError, "block_size=0"),
        ({"memory_fraction": 1.5}, ConfigError, "memory_fraction=1.5"),
        ({"gpu_memory_utilization": 0}, ConfigError, "memory_fraction=0"),
        ({"policy": "random"}, ConfigError, "policy='random'.*fcfs, priority"),
        ({"attention_backend": "magic"}, ConfigError, "attention_backend='magic'"),
        ({"max_logprobs": -2}, ConfigError, "max_logprobs=-2"),
        ({"logprobs_mode": "cooked"}, ConfigError, "logprobs_mode='cooked'.*raw_logprobs, processed_logprobs"),
        ({"logits_processors": ["nowhere:Nothing"]}, ConfigError, "nowhere:Nothing"),
        ({"reasoning_end_str": ""}, ConfigError, "reasoning_end_str=''"),
        ({"kv_cache_memory_bytes": 1 << 50}, OutOfMemory, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 1000}, OutOfMemory, "max_model_len"),
    ],
)
def test_a_bad_option_is_named_with_what_is_allowed(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM("demo", **{**SMALL, **options})


@pytest.mark.parametrize("name", ["no/such-model", "./nowhere", "nowhere"])
def test_a_model_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=name):
        LLM(name, **SMALL)


def test_auto_length_takes_what_fits() -> None:
    with LLM("demo", max_model_len="auto", **{**SMALL, "kv_cache_memory_bytes": 600_000}) as engine:
        fits = engine._session._core.max_model_len
        assert 16 <= fits < 1024
        prompt = {"prompt_token_ids": [7] * (fits - 2)}
        assert len(engine.generate([prompt], SHORT)[0].outputs[0].token_ids) == 2

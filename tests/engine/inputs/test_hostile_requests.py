"""Requests with values that no message, encoder or error message can hold: each is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import SamplingParams
from penstock.config import EngineConfig
from penstock.contract.param_checks import MAX_DEPTH
from penstock.engine.inputs.input_processor import InputProcessor
from penstock.errors import InvalidParameter, InvalidRequest
from penstock.text.tokenizer import load_tokenizer
from support.fake_engine import write_model

SURROGATE = "a\ud800"
PLAIN = SamplingParams(max_tokens=2)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: list[Any] = [
    10**400,
    -(10**400),
    10**5000,
    2**70,
    SURROGATE,
    "9" * 5000,
    [SURROGATE],
    [10**5000],
    [2**70],
    {"9" * 5000: 1},
    {10**5000: 1},
    {2**70: 1},
    {1: 10**400},
    {"a": SURROGATE},
    {SURROGATE: 1},
    {"a": {"b": [1, SURROGATE]}},
    {"a": 2**70},
    {"a": nested(5000)},
    {"regex": SURROGATE},
    {"json": {"enum": [SURROGATE]}},
    {"grammar": SURROGATE},
    nested(5000),
    float("nan"),
    object(),
    b"\xff",
]


def check_readable(error: InvalidRequest) -> None:
    assert len(str(error).encode()) < 2000


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    model = EngineConfig.create(str(folder)).model
    return InputProcessor(model, load_tokenizer(folder), max_model_len=64, vocab_size=1000, policy="priority")


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_parameter_of_any_value_is_taken_or_refused_by_name(processor: InputProcessor, name: str) -> None:
    for value in HOSTILE:
        try:
            accepted = processor.process("the fox", SamplingParams(**{name: value}))
        except InvalidRequest as error:
            check_readable(error)
        else:
            msgspec.msgpack.encode(accepted.request)


@pytest.mark.parametrize("value", HOSTILE, ids=[f"value{index}" for index in range(len(HOSTILE))])
def test_any_part_of_a_request_is_taken_or_refused(processor: InputProcessor, value: Any) -> None:
    requests: list[tuple[Any, dict[str, Any]]] = [
        (value, {}),
        ({"prompt": value}, {}),
        ({"prompt_token_ids": value}, {}),
        ({"prompt": "a", "cache_salt": value}, {}),
        ("a", {"priority": value}),
        ({"prompt": value, "prompt_token_ids": [1]}, {}),
    ]
    if isinstance(value, str):
        requests.append(("a", {"request_id": value}))
    for prompt, options in requests:
        try:
            accepted = processor.process(prompt, PLAIN, **options)
        except InvalidRequest as error:
            check_readable(error)
        else:
            msgspec.msgpack.encode((accepted.request, accepted.prompt))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": [SURROGATE]}, r"sampling_params.stop\[0\] has '\\ud800' at position 1"),
        ({"bad_words": ["x", SURROGATE]}, r"sampling_params.bad_words\[1\] has"),
        ({"extra_args": {"a": {"b": [1, SURROGATE]}}}, r"extra_args\['a'\]\['b'\]\[1\] has"),
        ({"extra_args": {SURROGATE: 1}}, "sampling_params.extra_args has"),
        ({"extra_args": {"a": 2**70}}, r"extra_args\['a'\]=1180591620717411303424 is not valid.*64 bits"),
    ],
)
def test_the_error_says_where(processor: InputProcessor, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        processor.process("the fox", SamplingParams(**fields))


def test_nesting_is_allowed_up_to_the_limit() -> None:
    SamplingParams(extra_args={"a": nested(MAX_DEPTH - 2)})
    with pytest.raises(InvalidParameter, match=f"nested {MAX_DEPTH} levels at most"):
        SamplingParams(extra_args={"a": nested(MAX_DEPTH)})


@pytest.mark.parametrize(
    "name",
    ["stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "seed", "max_tokens", "logprobs",
     "prompt_logprobs", "structured_outputs", "thinking_token_budget", "extra_args", "truncate_prompt_tokens",
     "bad_words_token_ids", "all_stop_token_ids"],
)  # fmt: skip
def test_none_asks_for_nothing(name: str) -> None:
    params = SamplingParams(**{name: None})
    assert not getattr(params, name)
    changed = SamplingParams()
    setattr(changed, name, None)
    assert getattr(changed, name) == getattr(params, name)

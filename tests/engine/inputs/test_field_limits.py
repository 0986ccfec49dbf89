"""Limits of a request's fields: larger ones are refused by name before any work, and choices share what they have."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from penstock import SamplingParams
from penstock.config import EngineConfig
from penstock.config.request_limits import RequestLimits
from penstock.contract import PoolingParams
from penstock.engine.inputs.field_limits import check_choices, check_pairs
from penstock.engine.inputs.input_processor import InputProcessor, PooledPrompt
from penstock.engine.output.fan_out import sample_requests
from penstock.errors import ConfigError, InvalidParameter, InvalidRequest
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from support.fake_engine import write_model
from support.pooling_models import random_model, save

SMALL = RequestLimits(
    max_choice_tokens=64,
    max_prompt_characters=6000,
    max_stop_strings=2,
    max_stop_characters=10,
    max_bad_words=2,
    max_bad_word_characters=10,
    max_stop_token_ids=2,
    max_allowed_token_ids=2,
    max_logit_bias=2,
    max_prompt_logprobs=20,
    max_name_characters=10,
    max_field_bytes=20,
)


class NoTokenizer:
    """Tokenizer that must not be used."""

    bos_token_id = eos_token_id = None

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is work")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def processor_of(folder: Path, tokenizer: Any, limits: RequestLimits) -> InputProcessor:
    model = EngineConfig.create(str(folder)).model
    return InputProcessor(model, tokenizer, max_model_len=64, vocab_size=400, limits=limits)


LARGE: list[tuple[dict[str, Any], str]] = [
    ({"stop": ["a", "b", "c"]}, "stop has 3 texts. Allowed: at most 2 .max_stop_strings."),
    ({"stop": "a" * 11}, "stop has 11 characters. Allowed: at most 10 .max_stop_characters."),
    ({"stop": ["a" * 6, "b" * 5]}, "stop has 11 characters"),
    ({"bad_words": ["a", "b", "c"]}, "bad_words has 3 texts. Allowed: at most 2 .max_bad_words."),
    ({"bad_words": ["a" * 11]}, "bad_words has 11 characters"),
    ({"bad_words_token_ids": [[1], [2], [3]]}, "bad_words_token_ids has 3 lists"),
    ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids has 3 token ids"),
    ({"all_stop_token_ids": [1, 2, 3]}, "all_stop_token_ids has 3 token ids"),
    ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids has 3 token ids"),
    ({"logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias has 3 token ids"),
    ({"extra_args": {"a": "b" * 20}}, "extra_args has 28 bytes as JSON. Allowed: at most 20 .max_field_bytes."),
]


@pytest.mark.parametrize(("fields", "message"), LARGE, ids=lambda value: str(value)[:40])
def test_a_large_parameter_is_refused_before_any_work(folder: Path, fields: dict[str, Any], message: str) -> None:
    processor = processor_of(folder, NoTokenizer(), SMALL)
    with pytest.raises(InvalidParameter, match=f"^{message}"):
        processor.process("the fox", SamplingParams(**fields))


def test_every_parameter_with_many_values_has_a_limit() -> None:
    named = {name for fields, _ in LARGE for name in fields}
    # Of structured_outputs max_grammar_bytes is the limit.
    many = {
        name
        for name, kind in SamplingParams.__annotations__.items()
        if kind.startswith(("Sequence", "dict")) or "| dict" in kind
    }
    assert many == named


def test_a_long_prompt_is_refused_before_it_is_tokenised(folder: Path) -> None:
    processor = processor_of(folder, NoTokenizer(), SMALL)
    with pytest.raises(InvalidRequest, match="The prompt has 6,001 characters.*at most 6,000 .max_prompt_characters."):
        processor.process("a" * 6001, SamplingParams(truncate_prompt_tokens=10))
    with pytest.raises(InvalidParameter, match="cache_salt has 11 characters.*max_name_characters"):
        processor.process({"prompt": "a", "cache_salt": "s" * 11}, SamplingParams())


def test_a_long_text_to_pool_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    folder = save(random_model("BertModel", "BertConfig"), tmp_path)
    model = EngineConfig.create(str(folder), runner="pooling").model
    processor = InputProcessor(model, load_tokenizer(folder), max_model_len=64, vocab_size=400, limits=SMALL)
    with pytest.raises(InvalidRequest, match=r"input\[0\]: The text has 6,001 characters"):
        processor.process_pooled([PooledPrompt("a" * 6001, PoolingParams(), "input[0]")])


def test_the_default_length_of_prompts_grows_with_the_context() -> None:
    assert RequestLimits().resolved(64).max_prompt_characters == 1 << 20
    assert RequestLimits().resolved(1 << 20).max_prompt_characters == 8 << 20
    assert SMALL.resolved(1 << 20) is SMALL


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(RequestLimits)])
def test_limits_are_options_of_an_engine(folder: Path, option: str) -> None:
    assert getattr(EngineConfig.create(str(folder), **{option: 7}).limits, option) == 7
    for wrong in (0, "x"):
        with pytest.raises(ConfigError, match=option):
            EngineConfig.create(str(folder), **{option: wrong})


def test_what_grows_with_a_prompt_and_a_parameter_is_limited_together(folder: Path, tokenizer: Tokenizer) -> None:
    processor = processor_of(folder, tokenizer, SMALL)
    prompt = {"prompt_token_ids": [5] * 11}
    processor.process(prompt, SamplingParams(n=5, prompt_logprobs=1))
    with pytest.raises(InvalidParameter, match="n=6 with a prompt of 11 tokens makes 66 tokens.*max_choice_tokens"):
        processor.process(prompt, SamplingParams(n=6))
    with pytest.raises(InvalidParameter, match="n=5 with a prompt of 11 tokens and 2 listed token ids makes 65"):
        processor.process(prompt, SamplingParams(n=5, stop_token_ids=[7, 8]))
    with pytest.raises(InvalidParameter, match="prompt_logprobs=2 with a prompt of 11 tokens makes 22"):
        processor.process(prompt, SamplingParams(prompt_logprobs=2))
    processor.process({"prompt_token_ids": [5] * 63}, SamplingParams(max_tokens=1))


def test_choices_of_all_prompts_are_limited_together() -> None:
    limits = RequestLimits(max_request_choices=8, max_choice_tokens=100)
    check_choices(["a"] * 4, 2, limits)
    check_choices([[5] * 101], 1, limits)
    with pytest.raises(InvalidParameter, match="n=9 makes 9 choices. Allowed: at most 8 .max_request_choices."):
        check_choices(["a"], 9, limits)
    with pytest.raises(InvalidParameter, match="prompt has 3 prompts, with n=3 each, which makes 9 choices"):
        check_choices(["a"] * 3, 3, limits)
    for prompt in ("a" * 208, [5] * 26, {"prompt_token_ids": [5] * 26}):
        with pytest.raises(InvalidParameter, match="n=2 with the tokens of 2 prompts makes 104 tokens or more"):
            check_choices([prompt] * 2, 2, limits)


def test_a_query_counts_with_each_of_its_documents() -> None:
    limits = RequestLimits(max_choice_tokens=100)
    check_pairs([("q" * 80, "d")] * 9, limits)
    with pytest.raises(InvalidRequest, match="10 pairs of texts with 101 tokens or more.*max_choice_tokens"):
        check_pairs([("q" * 80, "d")] * 10, limits)


def test_a_prompt_that_is_cut_is_tokenised_no_further_than_it_is_kept(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = random.Random(0).choices(["the", "quick", "fox,", "über", "x", "zebra\n"], k=8000)
    text = " ".join(words)
    processor = processor_of(folder, tokenizer, RequestLimits())
    whole = tokenizer.encode(text)
    lengths: list[int] = []
    encoding = tokenizer._backend._encoding  # type: ignore[union-attr]
    monkeypatch.setattr(
        tokenizer._backend, "_encoding", lambda text, *rest: lengths.append(len(text)) or encoding(text, *rest)
    )
    for kept in (1, 10, 63, -1):
        accepted = processor.process(text, SamplingParams(truncate_prompt_tokens=kept, max_tokens=1))
        assert accepted.request.prompt_token_ids == whole[-(63 if kept == -1 else kept) :]
    assert max(lengths) < len(text) // 4


def test_samples_of_a_prompt_share_their_values(folder: Path, tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=3, logit_bias={5: 1.0}, allowed_token_ids=[5, 6], bad_words=["fox"], extra_args=None)
    request = processor_of(folder, tokenizer, RequestLimits()).process("the fox", params).request
    samples = sample_requests(request)
    for name in ("logit_bias", "allowed_token_ids", "bad_words_token_ids"):
        assert len({id(getattr(sample.sampling_params, name)) for sample in samples}) == 1
    assert len({id(sample.prompt_token_ids) for sample in samples}) == 1
    assert len({sample.sampling_params.seed for sample in samples}) == 3
    assert [sample.num_choices for sample in samples] == [3, 1, 1]

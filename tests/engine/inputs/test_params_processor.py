"""Checks of sampling parameters, and token sequences that the front end adds."""

from __future__ import annotations

import pytest

from penstock.config import SamplingConfig, StructuredOutputsConfig
from penstock.contract import SamplingParams
from penstock.engine.inputs.params_processor import ParamsProcessor
from penstock.errors import InvalidParameter
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from support.fake_engine import write_model

VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


def make(tokenizer: Tokenizer, **config: object) -> ParamsProcessor:
    return ParamsProcessor(
        SamplingConfig(**config),  # type: ignore[arg-type]
        tokenizer,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({1, 9}),
    )


def test_bad_words_are_spelt_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    params = make(tokenizer).process(SamplingParams(bad_words=["fox", " dog"]))
    texts = {tokenizer.decode(list(sequence)) for sequence in params.bad_words_token_ids}
    assert texts == {"fox", " fox", "dog", " dog"}
    assert all(0 not in sequence for sequence in params.bad_words_token_ids), "no begin token among them"


def test_sequences_that_are_given_are_kept(tokenizer: Tokenizer) -> None:
    params = make(tokenizer).process(SamplingParams(bad_words="fox", bad_words_token_ids=[[5, 6]]))
    assert params.bad_words_token_ids[0] == (5, 6)
    assert len(params.bad_words_token_ids) == 3


def test_min_tokens_holds_back_the_end_tokens_and_the_requests_own(tokenizer: Tokenizer) -> None:
    process = make(tokenizer).process
    assert process(SamplingParams(min_tokens=3, stop_token_ids=[30])).all_stop_token_ids == (1, 9, 30)
    assert process(SamplingParams(min_tokens=3, ignore_eos=True)).all_stop_token_ids == (1, 9)
    assert process(SamplingParams(stop_token_ids=[30])).all_stop_token_ids == ()


def test_a_thinking_budget_takes_the_tokens_of_its_texts_along(tokenizer: Tokenizer) -> None:
    process = make(tokenizer, reasoning_start_str="the", reasoning_end_str="lazy dog").process
    params = process(SamplingParams(thinking_token_budget=5))
    encode = tokenizer.encode
    assert params.extra_args == {
        "thinking_budget": {
            "budget": 5,
            "start_token_ids": encode("the", add_special_tokens=False),
            "end_token_ids": encode("lazy dog", add_special_tokens=False),
        }
    }
    assert process(SamplingParams(thinking_token_budget=-1)).extra_args is None


def test_a_thinking_budget_goes_by_the_markers_of_the_reasoning_parser(tokenizer: Tokenizer) -> None:
    processor = ParamsProcessor(
        SamplingConfig(),
        tokenizer,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({1, 9}),
        structured=StructuredOutputsConfig(reasoning_parser="seed_oss"),
    )
    arguments = (processor.process(SamplingParams(thinking_token_budget=5)).extra_args or {})["thinking_budget"]
    assert tokenizer.decode(arguments["end_token_ids"]) == "</seed:think>"


@pytest.mark.parametrize("parser", ["deepseek_r1", "minimax_m2", "qwen3"])
@pytest.mark.parametrize(
    ("prompt", "is_thinking"),
    [
        ("the fox", True),
        ("the fox<think>", True),
        ("<think>dog</think>quick. the fox", True),
        ("the fox<think></think>\n", False),
    ],
)
def test_a_budget_counts_from_the_first_token_where_models_think_from_it(
    tokenizer: Tokenizer, parser: str, prompt: str, is_thinking: bool
) -> None:
    processor = ParamsProcessor(
        SamplingConfig(),
        tokenizer,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({1, 9}),
        structured=StructuredOutputsConfig(reasoning_parser=parser),
    )
    params = processor.process(SamplingParams(thinking_token_budget=5), tokenizer.encode(prompt))
    said = (params.extra_args or {})["thinking_budget"].get("starts_in_thinking", False)
    assert said == (is_thinking and parser != "qwen3")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(bad_words=["fox"], min_tokens=2, thinking_token_budget=7, stop_token_ids=[3], logprobs=2),
    ],
)
def test_what_has_been_processed_stays_as_it_is(tokenizer: Tokenizer, params: SamplingParams) -> None:
    process = make(tokenizer).process
    once = process(params)
    assert process(once) == once


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs_bounds_what_requests_ask_for(tokenizer: Tokenizer, name: str) -> None:
    def ask(number: int) -> SamplingParams:
        return SamplingParams(**{name: number})  # type: ignore[arg-type]

    for most, number in ((20, 20), (-1, 5), (-1, -1), (-1, 10**6), (VOCAB_SIZE, -1), (0, 0)):
        assert make(tokenizer, max_logprobs=most).process(ask(number)) == ask(number)
    for most, number in ((20, 21), (20, -1), (0, 1), (VOCAB_SIZE - 1, -1)):
        with pytest.raises(InvalidParameter, match=rf"^{name}={number}.*Start the engine with max_logprobs="):
            make(tokenizer, max_logprobs=most).process(ask(number))

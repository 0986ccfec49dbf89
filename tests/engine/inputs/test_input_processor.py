"""Input processor: prompts and parameters become checked requests with tokens, seed, id and limits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig
from penstock.contract import SamplingParams
from penstock.engine.inputs.input_processor import InputProcessor
from penstock.engine.inputs.prompts import RenderedText
from penstock.errors import ContextTooLong, InvalidParameter, InvalidRequest
from penstock.text.tokenizer import load_tokenizer
from support.fake_engine import byte_level_tokenizer, write_model, write_tokenizer

VOCAB_SIZE = 400
MAX_MODEL_LEN = 16
DEFAULTS = SamplingParams()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", longest_context=64)


def make(folder: Path, *, seed: int = 0) -> InputProcessor:
    model = ModelConfig.load(str(folder), seed=seed)
    tokenizer = load_tokenizer(folder)
    return InputProcessor(model, tokenizer, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)


@pytest.fixture
def processor(folder: Path) -> InputProcessor:
    return make(folder)


def test_text_is_encoded_with_the_begin_token(processor: InputProcessor, folder: Path) -> None:
    accepted = processor.process("the fox", DEFAULTS)
    assert accepted.request.prompt_token_ids == load_tokenizer(folder).encode("the fox")
    assert accepted.request.prompt_token_ids[0] == 0
    assert accepted.prompt == "the fox"


def test_a_second_begin_token_is_warned_of_once(
    processor: InputProcessor, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rendered: Any = {"prompt": RenderedText("<s>the fox")}
    for prompt in ("the fox", "the <s> fox", rendered, [0, 0, 5], {"prompt": "<s>", "prompt_token_ids": [0, 5]}):
        processor.process(prompt, DEFAULTS)
    assert not caplog.records
    for _ in range(2):
        accepted = processor.process("<s>the fox", DEFAULTS)
        assert accepted.request.prompt_token_ids[:2] == [0, 0]
    processor.process("<s>the fox", SamplingParams(truncate_prompt_tokens=3))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "begins with '<s>', and the tokenizer puts another such token (BOS) in front" in record.getMessage()
    other = make(folder)
    other.process("<s>the fox", SamplingParams(truncate_prompt_tokens=-1))
    assert len(caplog.records) == 2


def test_a_tokenizer_that_adds_no_begin_token_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder, byte_level_tokenizer(adds_bos=False))
    assert make(folder).process("<s>the fox", DEFAULTS).request.prompt_token_ids[0] == 0
    assert not caplog.records


@pytest.mark.parametrize("prompt", [[5, 6, 7], (5, 6, 7), {"prompt_token_ids": [5, 6, 7]}])
def test_token_ids_are_taken_as_they_are(processor: InputProcessor, prompt: Any) -> None:
    accepted = processor.process(prompt, DEFAULTS)
    assert accepted.request.prompt_token_ids == [5, 6, 7]
    assert accepted.prompt is None


def test_the_callers_list_is_not_shared(processor: InputProcessor) -> None:
    ids = [5, 6]
    request = processor.process(ids, DEFAULTS).request
    ids.append(7)
    assert request.prompt_token_ids == [5, 6]


def test_a_dictionary_may_bring_text_and_salt(processor: InputProcessor) -> None:
    accepted = processor.process({"prompt": "shown", "prompt_token_ids": [5], "cache_salt": "mine"}, DEFAULTS)
    assert (accepted.prompt, accepted.request.prompt_token_ids) == ("shown", [5])
    assert accepted.request.cache_salt == "mine"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"),
        ({"prompt_token_ids": []}, "is empty"),
        ([5, VOCAB_SIZE], "token id 400.*has 400 tokens.*0 to 399"),
        ([5, -1], "token id -1.*0 to 399"),
        ([5, True], r"True \(bool\) at position 1"),
        ([5, 2.0], r"2.0 \(float\) at position 1"),
        (["5"], r"'5' \(str\) at position 0"),
        ({"prompt_token_ids": "5"}, "is a str"),
        (7, "is a int"),
        (None, "is a NoneType"),
        ({}, "neither text nor tokens"),
        ({"prompt": 7}, "prompt=7 is a int"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt=3 is a int"),
        ({"prompt": "x", "salt": "y"}, "'salt'.*prompt, prompt_token_ids, cache_salt"),
        ("lone \udcff", r"prompt has .\\udcff. at position 5.*lone surrogates"),
    ],
)
def test_a_bad_prompt_is_refused_by_what_is_wrong_with_it(processor: InputProcessor, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        processor.process(prompt, DEFAULTS)


def test_an_empty_text_is_the_begin_token(processor: InputProcessor) -> None:
    assert processor.process("", DEFAULTS).request.prompt_token_ids == [0]


def test_the_highest_token_id_is_allowed(processor: InputProcessor) -> None:
    assert processor.process([VOCAB_SIZE - 1], DEFAULTS).request.prompt_token_ids == [VOCAB_SIZE - 1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logprobs=21), "logprobs=21.*at most 20"),
        (SamplingParams(stop_token_ids=(3, 400)), "stop_token_ids has 400.*0 to 399"),
        (SamplingParams(truncate_prompt_tokens=16), "truncate_prompt_tokens=16 is not valid. Allowed: at most 15"),
        ({"temperature": 1}, "sampling_params is a dict"),
        (None, "sampling_params is a NoneType"),
    ],
)
def test_bad_parameters_are_refused_by_name(processor: InputProcessor, params: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        processor.process([5], params)


def test_a_prompt_needs_room_for_one_token(processor: InputProcessor) -> None:
    assert processor.process([5] * (MAX_MODEL_LEN - 1), DEFAULTS)
    with pytest.raises(ContextTooLong) as caught:
        processor.process([5] * MAX_MODEL_LEN, SamplingParams(max_tokens=30))
    assert str(caught.value) == (
        "The prompt has 16 tokens and asks for 30 more, but this engine was started for 16 (max_model_len), of which "
        "at least one is the answer's. Shorten the prompt to 15 tokens, or start with max_model_len=46."
    )


def test_a_single_token_needs_no_room(processor: InputProcessor) -> None:
    one = SamplingParams(max_tokens=1)
    assert processor.process([5] * MAX_MODEL_LEN, one)
    with pytest.raises(ContextTooLong, match="has 17 tokens"):
        processor.process([5] * (MAX_MODEL_LEN + 1), one)


def test_advice_goes_no_further_than_the_model(processor: InputProcessor) -> None:
    with pytest.raises(ContextTooLong, match=r"max_model_len=64\.$"):
        processor.process([5] * 60, SamplingParams(max_tokens=30))
    with pytest.raises(ContextTooLong, match=r"Shorten the prompt to 15 tokens; .* was made for no more than 64\.$"):
        processor.process([5] * 64, DEFAULTS)


def test_asking_for_as_much_as_fits_names_no_number(processor: InputProcessor) -> None:
    with pytest.raises(ContextTooLong, match="has 16 tokens, but .*max_model_len=17"):
        processor.process([5] * MAX_MODEL_LEN, SamplingParams(max_tokens=None))


def test_a_given_seed_is_kept(processor: InputProcessor) -> None:
    assert processor.process([5], SamplingParams(seed=-3)).request.sampling_params.seed == -3


def drawn_seeds(processor: InputProcessor, num_requests: int = 100) -> list[int | None]:
    return [processor.process([5], DEFAULTS).request.sampling_params.seed for _ in range(num_requests)]


def test_drawn_seeds_differ_and_use_64_bits(processor: InputProcessor) -> None:
    seeds = drawn_seeds(processor)
    assert len(set(seeds)) == 100
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert any(seed is not None and abs(seed) > 2**61 for seed in seeds)


def test_equal_engines_draw_equal_seeds_and_others_do_not(folder: Path) -> None:
    seeds = drawn_seeds(make(folder, seed=7))
    assert drawn_seeds(make(folder, seed=7)) == seeds
    assert not set(drawn_seeds(make(folder, seed=8))) & set(seeds)


def test_a_refused_request_does_not_change_the_seeds_of_later_ones(folder: Path) -> None:
    processor = make(folder)
    with pytest.raises(InvalidRequest):
        processor.process([], DEFAULTS)
    assert drawn_seeds(processor) == drawn_seeds(make(folder))


def test_the_callers_parameters_are_not_changed(processor: InputProcessor) -> None:
    params = SamplingParams()
    processor.process([5], params)
    assert params.seed is None


def test_ids_are_fresh_and_arrival_is_now(processor: InputProcessor) -> None:
    before = time.monotonic()
    requests = [processor.process([5], DEFAULTS).request for _ in range(20)]
    assert len({request.req_id for request in requests}) == 20
    assert before <= requests[0].arrival_time <= requests[-1].arrival_time <= time.monotonic()


def test_the_text_ends_at_the_models_and_the_tokenizers_end_token(tmp_path: Path) -> None:
    folder = write_model(tmp_path, eos_token_id=[9, 10])
    assert make(folder).process([5], DEFAULTS).request.eos_token_ids == {9, 10, 1}


def test_errors_say_where_the_request_came_from(processor: InputProcessor) -> None:
    with pytest.raises(InvalidParameter, match=r"^prompts\[3\]: logprobs=21"):
        processor.process([5], SamplingParams(logprobs=21), where="prompts[3]")


@pytest.mark.parametrize(
    ("kept", "expected"), [(None, [5, 6, 7, 8]), (2, [7, 8]), (4, [5, 6, 7, 8]), (9, [5, 6, 7, 8]), (-1, [5, 6, 7, 8])]
)
def test_a_prompt_is_cut_to_its_last_tokens_when_asked(
    processor: InputProcessor, kept: int | None, expected: list[int]
) -> None:
    accepted = processor.process([5, 6, 7, 8], SamplingParams(truncate_prompt_tokens=kept))
    assert accepted.request.prompt_token_ids == expected


def test_minus_one_keeps_what_leaves_room_for_a_token(processor: InputProcessor) -> None:
    prompt = list(range(5, 105))
    accepted = processor.process(prompt, SamplingParams(truncate_prompt_tokens=-1))
    assert accepted.request.prompt_token_ids == prompt[-(MAX_MODEL_LEN - 1) :]


def test_text_is_cut_too_and_shown_as_it_was(processor: InputProcessor, folder: Path) -> None:
    accepted = processor.process("the lazy fox", SamplingParams(truncate_prompt_tokens=3))
    assert accepted.request.prompt_token_ids == load_tokenizer(folder).encode("the lazy fox")[-3:]
    assert accepted.prompt == "the lazy fox"


def test_a_request_may_bring_its_id(processor: InputProcessor) -> None:
    assert processor.process([5], DEFAULTS, request_id="mine").request.req_id == "mine"


@pytest.mark.parametrize("priority", [1.5, "1", True, None])
def test_a_priority_is_an_integer(processor: InputProcessor, priority: Any) -> None:
    with pytest.raises(InvalidParameter, match="priority=.*integers"):
        processor.process([5], DEFAULTS, priority=priority)


def test_a_priority_is_refused_where_it_would_mean_nothing(processor: InputProcessor) -> None:
    assert processor.process([5], DEFAULTS, priority=0).request.priority == 0
    with pytest.raises(InvalidParameter, match="priority=-3 has no meaning under the policy 'fcfs'.*policy='priority'"):
        processor.process([5], DEFAULTS, priority=-3)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = processor._tokenizer.longest_token
    assert longest is not None
    text = "x" * (longest * MAX_MODEL_LEN)
    encoded: list[int] = []
    monkeypatch.setattr(
        "penstock.text.tokenizer.FastBackend._encoding", lambda self, text, special: encoded.append(len(text))
    )
    for prompt in (text, {"prompt": text}):
        with pytest.raises(ContextTooLong, match=rf"has {len(text):,} characters, which are 16 tokens at least, but"):
            processor.process(prompt, DEFAULTS)
    assert not encoded


def test_a_text_that_is_cut_to_its_end_may_be_of_any_length(processor: InputProcessor) -> None:
    accepted = processor.process("the fox " * 5000, SamplingParams(truncate_prompt_tokens=4))
    assert len(accepted.request.prompt_token_ids) == 4


def test_a_list_of_ids_that_is_too_long_is_refused_before_they_are_looked_at(processor: InputProcessor) -> None:
    for prompt in (["no id"] * MAX_MODEL_LEN, {"prompt_token_ids": (None,) * MAX_MODEL_LEN}):
        with pytest.raises(ContextTooLong, match="has 16 tokens"):
            processor.process(prompt, DEFAULTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "params", "is_quick"),
    [
        ("the fox", DEFAULTS, True),
        ([5] * 100, DEFAULTS, True),
        ({"prompt": "x", "prompt_token_ids": [5], "cache_salt": None}, DEFAULTS, True),
        ("x" * 10_000, DEFAULTS, False),
        ({"prompt": "x" * 10_000}, DEFAULTS, False),
        ([5] * 10_000, DEFAULTS, False),
        (iter([5]), DEFAULTS, False),
        ("x", SamplingParams(bad_words=["word"] * 1000), False),
        ("x", SamplingParams(structured_outputs={"regex": "a"}), False),
    ],
)
def test_what_takes_long_is_known_beforehand(
    processor: InputProcessor, prompt: Any, params: SamplingParams, is_quick: bool
) -> None:
    assert processor.is_quick(prompt, params) is is_quick

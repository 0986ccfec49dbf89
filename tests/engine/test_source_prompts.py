"""Prompts of encoder-decoder models: the encoder's input, and the decoder's first tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor

from penstock import LLM, SamplingParams
from penstock.contract.feature import register_built_in_features
from penstock.engine.inputs.input_processor import InputProcessor
from penstock.errors import ContextTooLong, InvalidRequest, ModelError
from penstock.features.encoder_decoder.messages import SourcePart
from penstock.text.tokenizer import load_tokenizer
from support.checkpoints import edit_config
from support.encoder_decoders import (
    START,
    AskedOfAudio,
    assert_as_the_oracle,
    tiny_encoder_decoder,
    tone,
    write_encoder_decoder,
    write_whisper,
)
from support.engines import SMALL, Result
from support.fake_engine import byte_level_tokenizer, write_tokenizer

VOCAB_SIZE = 380
FEATURES = {"encoder_decoder"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_encoder_decoder(tmp_path_factory.mktemp("bart"), vocab_size=VOCAB_SIZE)
    write_tokenizer(path, byte_level_tokenizer())
    return path


def processor(folder: Path, **changes: Any) -> InputProcessor:
    register_built_in_features()
    model = edit_config(folder, **changes)
    return InputProcessor(
        model, load_tokenizer(model.folder), max_model_len=64, vocab_size=VOCAB_SIZE, features=FEATURES
    )


def sides(found: InputProcessor, prompt: Any) -> tuple[list[int], list[int]]:
    request = found.process(prompt, PARAMS).request
    assert request.parts is not None
    part = request.parts["source"]
    assert isinstance(part, SourcePart)
    assert part.length == len(part.token_ids)
    return part.token_ids, request.prompt_token_ids


@pytest.mark.one_path(reason="requests are made before a step")
def test_a_prompt_is_the_encoders_unless_it_says_otherwise(folder: Path) -> None:
    found = processor(folder)
    of_text = sides(found, "abc")[0]
    assert sides(found, "abc") == (of_text, [START])
    assert sides(found, [5, 6]) == ([5, 6], [START])
    assert sides(found, {"prompt_token_ids": [5, 6], "cache_salt": "x"}) == ([5, 6], [START])
    assert sides(found, {"encoder_prompt": "abc", "decoder_prompt": None}) == (of_text, [START])
    assert sides(found, {"encoder_prompt": {"prompt": "abc"}, "decoder_prompt": [7, 8]}) == (of_text, [START, 7, 8])
    assert sides(found, {"encoder_prompt": [5], "decoder_prompt": [START, 7]}) == ([5], [START, 7])
    with_text = sides(found, {"encoder_prompt": [5], "decoder_prompt": {"prompt": "abc"}})
    assert with_text == ([5], [START, *load_tokenizer(found.model.folder).encode("abc", add_special_tokens=False)])


@pytest.mark.one_path(reason="requests are made before a step")
def test_a_forced_first_token_follows_the_start_token(tmp_path: Path) -> None:
    folder = write_encoder_decoder(tmp_path, vocab_size=VOCAB_SIZE)
    write_tokenizer(folder, byte_level_tokenizer())
    assert sides(processor(folder, forced_bos_token_id=9), [5]) == ([5], [START, 9])
    (folder / "generation_config.json").unlink()
    with pytest.raises(ModelError, match="has no decoder_start_token_id"):
        processor(folder, decoder_start_token_id=None, bos_token_id=None)


@pytest.mark.one_path(reason="requests are made before a step")
@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"encoder_prompt": [5] * 65}, ContextTooLong, "encoder's prompt has 65 tokens, .* takes 64"),
        ({"encoder_prompt": "a b " * 99}, ContextTooLong, r"encoder's prompt has \d+ tokens, .* takes 64"),
        ({"encoder_prompt": []}, InvalidRequest, "The encoder's prompt has no tokens"),
        ({"encoder_prompt": [VOCAB_SIZE]}, InvalidRequest, "a token id that the model's vocabulary of 380"),
        ({"encoder_prompt": [5], "decoder_prompt": [-1]}, InvalidRequest, "The decoder's prompt has a token id"),
        ({"encoder_prompt": None}, InvalidRequest, "nothing for the encoder"),
        ({"encoder_prompt": [5], "prompt": "a"}, InvalidRequest, "a field 'prompt'. Allowed: encoder_prompt"),
        ({"encoder_prompt": [5], "decoder_prompt": [5] * 64}, ContextTooLong, "The prompt has 65 tokens"),
    ],
    ids=str,
)
def test_prompts_that_the_model_cannot_take_are_refused(
    folder: Path, prompt: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        processor(folder).process(prompt, PARAMS)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", **SMALL) as engine:
        yield engine


@pytest.mark.one_path(reason="equal to Transformers in either case")
def test_text_is_what_transformers_generates(folder: Path, llm: LLM) -> None:
    oracle = tiny_encoder_decoder("bart", vocab_size=VOCAB_SIZE)
    prompts: list[Any] = ["the cat sat", {"encoder_prompt": "the hat", "decoder_prompt": [START, 80]}]
    for prompt, output in zip(prompts, llm.generate(prompts, PARAMS, use_tqdm=False), strict=True):
        source, decoder = sides(processor(folder), prompt)
        assert output.prompt_token_ids == decoder
        with torch.no_grad():
            tokens = oracle.generate(
                torch.tensor([source]),
                decoder_input_ids=torch.tensor([decoder]),
                max_new_tokens=6,
                min_new_tokens=6,
                num_beams=1,
                do_sample=False,
            )
        assert output.outputs[0].token_ids == tokens[0, len(decoder) :].tolist()


@pytest.mark.one_path(reason="refused before a step")
def test_a_model_with_a_decoder_only_takes_no_encoder_prompt() -> None:
    with LLM("demo", **SMALL) as llm, pytest.raises(InvalidRequest, match="It is for encoder-decoder models"):
        llm.generate({"encoder_prompt": "a", "decoder_prompt": "b"})  # type: ignore[typeddict-unknown-key]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, oracle = write_whisper(tmp_path_factory.mktemp("whisper"), vocab_size=VOCAB_SIZE)
    write_tokenizer(folder, byte_level_tokenizer())
    return folder, oracle


@pytest.mark.one_path(reason="equal to Transformers in either case")
def test_a_sound_is_what_transformers_hears(whisper: tuple[Path, Any]) -> None:
    folder, oracle = whisper
    sound = tone(0.8)
    audio = {"audio": (sound, 16_000)}
    prompts: list[Any] = [
        {"prompt": "", "multi_modal_data": audio},
        {"prompt_token_ids": [START, 80], "multi_modal_data": audio},
        {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": [sound]}}, "decoder_prompt": [START, 80]},
    ]
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(sound, sampling_rate=16_000, return_tensors="pt")["input_features"]
    with LLM(str(folder), dtype="float32", **SMALL) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [one.prompt_token_ids for one in outputs] == [[START], [START, 80], [START, 80]]
    for output in outputs:
        asked = AskedOfAudio(features[0], output.prompt_token_ids)
        assert_as_the_oracle(oracle, asked, Result(tokens=list(output.outputs[0].token_ids)))


@pytest.mark.one_path(reason="requests are made before a step")
def test_a_sound_of_another_rate_is_resampled(whisper: tuple[Path, Any]) -> None:
    found = processor(whisper[0])
    sources = [
        found.process({"multi_modal_data": {"audio": (tone(0.8, rate), rate)}}, PARAMS).request.parts
        for rate in (16_000, 48_000)
    ]
    features = [parts["source"].features.to_numpy() for parts in sources]  # type: ignore[index,attr-defined]
    assert features[0].shape == features[1].shape == (20, 100)
    assert abs(features[0][:10] - features[1][:10]).mean() < 0.2


@pytest.mark.one_path(reason="requests are made before a step")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("text", "takes one sound"),
        ({"multi_modal_data": {"audio": [tone(0.1), tone(0.1)]}}, "2 items of audio. Allowed: 1"),
        ({"encoder_prompt": {"multi_modal_data": {"audio": [tone(0.1)] * 2}}}, "2 items of audio. Allowed: 1"),
        ({"multi_modal_data": {"image": [tone(0.1)]}}, "'image', which this model does not take"),
        ({"multi_modal_data": {"audio": (tone(1.1), 16_000)}}, "It has 1.1 s, and the encoder takes 1 s"),
        ({"multi_modal_data": {"audio": (tone(0.1), 10)}}, "It has a rate of 10 Hz"),
    ],
    ids=["text", "two", "two beside", "image", "long", "slow"],
)
def test_sounds_that_the_model_cannot_take_are_refused(whisper: tuple[Path, Any], prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        processor(whisper[0]).process(prompt, PARAMS)


@pytest.mark.one_path(reason="requests are made before a step")
def test_a_model_of_texts_takes_no_sound(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="takes text"):
        processor(folder).process({"prompt": "a", "multi_modal_data": {"audio": tone(0.1)}}, PARAMS)

"""Answers to prompts with images, videos or audio equal those of Transformers in float32, however steps are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.media.processors.reading import read_processor
from support.multimodal_answers import Prompt, answer, assert_answered_as_by
from support.multimodal_models import (
    AUDIO,
    MODEL_TYPES,
    PLACEHOLDERS,
    PROCESSORS,
    film,
    picture,
    save_multimodal,
    tone,
    words,
)

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128}


# Families whose prompts have videos, and whether these may be beside images in Transformers.
WITH_VIDEOS = {
    "qwen2-vl": True,
    "qwen2.5-vl": True,
    "qwen3-vl": True,
    "llava-onevision": True,
    "smolvlm": False,
    "internvl": True,
}


def prompts_of(name: str) -> list[Prompt]:
    """Texts with items of several sizes: one, several, none; at the beginning, in the middle and at the end."""
    if name in ("audioflamingo3", "glmasr"):
        # Transformers' processors take one clip in a text.
        return [
            (f"{words(5, 6)} <audio> {words(7)}", {"audio": [tone(0.5)]}),
            (words(*range(10, 31)), {}),
            (f"<audio> {words(11)}", {"audio": [tone(2.5, 900)]}),
        ]
    if name in AUDIO:
        return [
            (f"{words(5, 6)} <audio> {words(7)}", {"audio": [tone(0.5)]}),
            (words(*range(10, 31)), {}),
            (
                f"<audio> {words(11)} <audio>",
                {"audio": [tone(0.31, 200), tone(2.0 if name == "qwen2-audio" else 2.5, 900)]},
            ),
        ]
    image = PLACEHOLDERS.get(name, "<image>")
    prompts: list[Prompt] = [
        (f"{words(5, 6)} {image} {words(7, 8, 9)}", {"image": [picture(40, 24, 1)]}),
        (words(*range(10, 31)), {}),
        (f"{image} {words(11)} {image} {words(12, 13)}", {"image": [picture(16, 48, 2), picture(33, 31, 3)]}),
        (f"{words(*range(20, 30))} {image}", {"image": [picture(24, 24, 4)]}),
    ]
    if name in WITH_VIDEOS:
        prompts.append((f"{words(5)} <video> {words(7, 8)}", {"video": [film(5, 24, 16, 5)]}))
    if WITH_VIDEOS.get(name):
        data = {"image": [picture(20, 20, 6), picture(30, 20, 7)], "video": [film(4, 24, 24, 8)]}
        prompts.append((f"{image} {words(9)} <video> {words(6)} {image}", data))
    return prompts


@pytest.fixture(scope="module", params=list(PROCESSORS))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save_multimodal(folder, request.param)


@pytest.mark.each_value_quick
def test_answers_equal_those_of_transformers(seeing: tuple[str, Path, Any]) -> None:
    name, folder, model = seeing
    processor = read_processor(folder, MODEL_TYPES[name])
    prompts = prompts_of(name)
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False, fast_paths="off") as llm:
        alone = [answer(llm, [prompt])[0] for prompt in prompts]
    for (text, data), output in zip(prompts, alone, strict=True):
        assert_answered_as_by(model, processor, text, data, output)
    for options in ({}, {"max_num_batched_tokens": 7, "async_scheduling": False}):
        with LLM(str(folder), **OPTIONS, **options) as llm:
            for _ in range(2):
                for output, expected in zip(answer(llm, prompts), alone, strict=True):
                    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
                    assert output.outputs[0].logprobs == expected.outputs[0].logprobs

"""Gemma 3: the tokens of an image see one another in both directions; those of text see what is before them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from core.test_multimodal import OPTIONS
from penstock import LLM, SamplingParams
from penstock.attention.cpu_native import CpuNativeBackend
from penstock.attention.cpu_paged import CpuPagedBackend
from penstock.errors import UnsupportedFeature
from penstock.kernels.native import NATIVE
from penstock.media.processors.reading import read_processor
from support.multimodal_answers import TOLERANCE, Prompt, answer, as_prompt, assert_answered_as_by
from support.multimodal_models import IMAGE as IMAGE_ID
from support.multimodal_models import picture, save_multimodal, words
from support.padded_attention import PaddedBackend, use_graphs

# A text begins an image, which has four tokens and one behind them.
IMAGE = "<vision_start>"
PROMPTS: list[Prompt] = [
    (
        f"{IMAGE} {IMAGE} {words(11)} {IMAGE} {words(12, 13)}",
        {"image": [picture(16, 48, 1), picture(33, 31, 2), picture(9, 9, 3)]},
    ),
    (words(*range(10, 31)), {}),
    (f"{words(*range(20, 33))} {IMAGE}", {"image": [picture(24, 24, 4)]}),
    (f"{words(5, 6)} {IMAGE} {words(*range(7, 20))}", {"image": [picture(16, 48, 1)]}),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model whose windows are shorter than an image."""
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, save_multimodal(folder, "gemma3", sliding_window=3)


def assert_equal(llm: LLM, expected: Sequence[Any]) -> None:
    for output, other in zip(answer(llm, PROMPTS), expected, strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        assert output.outputs[0].logprobs == other.outputs[0].logprobs


def test_images_longer_than_a_window_and_side_by_side(gemma: tuple[Path, PreTrainedModel]) -> None:
    folder, model = gemma
    processor = read_processor(folder, "gemma3")
    with LLM(str(folder), **OPTIONS, enable_prefix_caching=False, fast_paths="off") as llm:
        alone = [answer(llm, [prompt])[0] for prompt in PROMPTS]
    for (text, data), output in zip(PROMPTS, alone, strict=True):
        assert_answered_as_by(model, processor, text, data, output)
    if NATIVE is None:
        return  # torch's kernels have other bits in a batch
    for options in ({}, {"max_num_batched_tokens": 7, "async_scheduling": False}):
        with LLM(str(folder), **OPTIONS, **options) as llm:
            assert_equal(llm, alone)
            assert_equal(llm, alone)


@pytest.mark.skipif(NATIVE is None, reason="torch's kernels have other bits in a batch")
def test_a_prefix_hit_that_ends_inside_an_image(gemma: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = gemma
    with LLM(str(folder), **OPTIONS) as llm:
        first, second = answer(llm, PROMPTS[2:3]), answer(llm, PROMPTS[2:3])
    image = [place for place, token_id in enumerate(second[0].prompt_token_ids or ()) if token_id == IMAGE_ID]
    assert second[0].num_cached_tokens in image[1:]
    assert second[0].outputs[0].token_ids == first[0].outputs[0].token_ids
    assert second[0].outputs[0].logprobs == first[0].outputs[0].logprobs


@pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels")
@pytest.mark.one_path(reason="looks at what is recorded of a model, which on the plain path is nothing")
def test_steps_with_images_are_one_program_and_others_another(gemma: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = gemma

    def segments(worker: Any) -> tuple[list[int], list[str]]:
        programs = worker.runner.execution.programs
        return [program.num_segments for program in programs._recorded.values() if program], list(programs.refusals)

    with LLM(str(folder), **OPTIONS) as llm:
        answer(llm, PROMPTS[:2])
        assert llm.collective_rpc(segments) == [([1, 1], [])]


@pytest.mark.one_path(reason="runs engines with and without fast paths itself")
@pytest.mark.parametrize("mode", ["full_and_piecewise", "full"])
def test_graphs_of_steps_with_images(
    gemma: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    folder, _ = gemma
    use_graphs(monkeypatch)
    options = {**OPTIONS, "attention_backend": PaddedBackend.name, "cudagraph_mode": mode, "max_num_batched_tokens": 16}
    answers = []
    for fast_paths in ("auto", "off"):
        with LLM(str(folder), **options, enable_prefix_caching=False, fast_paths=fast_paths) as llm:
            # The second and third time all graphs are there.
            answers.append([output.outputs[0] for _ in range(3) for output in answer(llm, PROMPTS)])
    for output, expected in zip(*answers, strict=True):
        assert output.token_ids == expected.token_ids
        for row, other in zip(output.logprobs, expected.logprobs, strict=True):
            assert max(abs(row[token].logprob - other[token].logprob) for token in row) < TOLERANCE


def test_log_probabilities_of_a_prompt(gemma: tuple[Path, PreTrainedModel]) -> None:
    """All hidden states of the last layer are wanted."""
    folder, model = gemma
    text, data = PROMPTS[0]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(str(folder), **OPTIONS) as llm:
        (output,) = llm.generate([as_prompt(text, data)], params, use_tqdm=False)
    given = read_processor(folder, "gemma3")(text=[text], images=data["image"], return_tensors="pt")
    with torch.no_grad():
        expected = torch.log_softmax(model(**given).logits[0].float(), -1)
    token_ids, logprobs = output.prompt_token_ids, output.prompt_logprobs
    assert token_ids is not None
    assert logprobs is not None
    for position, token_id in enumerate(token_ids[1:]):
        of_token = logprobs[position + 1]
        assert of_token is not None
        assert abs(of_token[token_id].logprob - float(expected[position, token_id])) <= TOLERANCE


def test_a_backend_without_such_attention_is_refused(
    gemma: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = gemma
    for backend in (CpuNativeBackend, CpuPagedBackend):
        monkeypatch.setattr(backend, "sees_later_tokens", False)
    with pytest.raises(UnsupportedFeature, match="attention backend cpu_.* language_model_only"):
        LLM(str(folder), **OPTIONS)
    with LLM(str(folder), **OPTIONS, language_model_only=True) as llm:
        assert answer(llm, PROMPTS[1:2])[0].outputs[0].token_ids

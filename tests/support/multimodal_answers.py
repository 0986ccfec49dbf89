"""Answers of engines to prompts with media, and their comparison with Transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.video_utils import VideoMetadata

from penstock import LLM, RequestOutput, SamplingParams

TOLERANCE = 1e-4
NUM_TOKENS = 6
RATE = 2.0
# Text, and items by modality.
Prompt = tuple[str, dict[str, list[Any]]]


def as_prompt(text: str, data: dict[str, list[Any]]) -> Any:
    data = {**data, **({"audio": [(samples, 16000) for samples in data["audio"]]} if "audio" in data else {})}
    data = {**data, **({"video": [(frames, {"fps": RATE}) for frames in data["video"]]} if "video" in data else {})}
    return {"prompt": text, "multi_modal_data": data} if data else text


def arguments_of(data: dict[str, list[Any]]) -> dict[str, Any]:
    """Arguments of a processor of Transformers."""
    given: dict[str, Any] = {"images": data["image"]} if "image" in data else {}
    if "audio" in data:
        given |= {"audio": data["audio"], "sampling_rate": 16000}
    if "video" in data:
        given["videos"] = data["video"]
        given["video_metadata"] = [
            VideoMetadata(len(one), RATE, duration=len(one) / RATE, frames_indices=list(range(len(one))))
            for one in data["video"]
        ]
    return given


def answer(llm: LLM, prompts: Sequence[Prompt]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=2, ignore_eos=True)
    return llm.generate([as_prompt(*prompt) for prompt in prompts], params, use_tqdm=False)


def assert_answered_as_by(
    model: PreTrainedModel, processor: Any, text: str, data: dict[str, list[Any]], output: RequestOutput
) -> None:
    """Tokens and log-probabilities are those of Transformers, up to a token that is as likely as another one."""
    given = processor(text=[text], **arguments_of(data), return_tensors="pt")
    assert given["input_ids"][0].tolist() == list(output.prompt_token_ids or ())
    with torch.no_grad():
        expected = model.generate(
            **given,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    sampled = output.outputs[0]
    assert sampled.logprobs is not None
    tokens = expected.sequences[0, given["input_ids"].shape[1] :].tolist()
    for logits, token, own, logprobs in zip(expected.logits, tokens, sampled.token_ids, sampled.logprobs, strict=True):
        row = torch.log_softmax(logits[0].float(), -1)
        assert float(row.max() - row[own]) <= TOLERANCE
        for token_id, value in logprobs.items():
            assert abs(float(row[token_id]) - value.logprob) <= TOLERANCE
        if own != token:
            break

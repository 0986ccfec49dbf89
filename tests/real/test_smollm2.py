"""SmolLM2-135M-Instruct beside Transformers: `make real` fetches it and runs these tests."""

from __future__ import annotations

import pytest
import torch

from penstock import SamplingParams
from support.real_model import MARKS, NUM_TOKENS, PROMPTS

pytestmark = MARKS


def _expected(oracle, token_ids: list[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = oracle.generate(
            torch.tensor([token_ids]), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
        )
    return ids[0, len(token_ids) :].tolist()


def test_greedy_tokens_are_those_of_transformers(llm, oracle):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for output in llm.generate(PROMPTS, params):
        assert list(output.outputs[0].token_ids) == _expected(oracle, output.prompt_token_ids, NUM_TOKENS), (
            output.prompt
        )


@pytest.mark.timeout(1200)
def test_tokens_of_a_long_prompt_are_those_of_transformers(llm, oracle):
    prompt = " ".join(f"Item {number} costs {number * 7 % 90} euros." for number in range(600)) + " Item 600 costs"
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(output.prompt_token_ids) > 6000
    assert list(output.outputs[0].token_ids) == _expected(oracle, output.prompt_token_ids, 8)


@pytest.mark.parametrize("text", [*PROMPTS, " a  b\n\n c", "<|im_start|>user\nHi<|im_end|>", "it's 3.14 \t€"])
def test_every_text_survives_the_tokenizer(llm, text):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_digits_are_tokens_of_their_own(llm):
    assert len(llm.get_tokenizer().encode("12345")) == 5


def test_a_chat_of_several_turns_keeps_to_the_template_and_ends_its_turns(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=64)
    (first,) = llm.chat(messages, params)
    assert first.prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Paris" in first.outputs[0].text
    assert first.outputs[0].finish_reason == "stop"
    messages += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "And of Italy?"}]
    (second,) = llm.chat(messages, params)
    assert second.prompt.startswith(first.prompt + first.outputs[0].text + "<|im_end|>\n")
    assert "Rome" in second.outputs[0].text

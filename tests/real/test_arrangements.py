"""Several ranks, stages and replicas, and adapters, compute what one engine and Transformers compute."""

from __future__ import annotations

import pytest
import torch

from penstock import LLM, LoRARequest, SamplingParams
from support.adapters import make_adapter, with_adapter
from support.real_model import EXACT, MARKS, NUM_TOKENS, PROMPTS, greedy

pytestmark = MARKS
_SMALL = {**EXACT, "max_model_len": 512, "kv_cache_memory_bytes": "64MiB"}
_TEXT = (
    "The old lighthouse stood on the northern cliff for more than two hundred years. Every evening the keeper climbed "
    "the narrow stairs, cleaned the glass and lit the lamp, so that ships could find their way past the rocks."
)


@pytest.mark.parametrize(
    "options",
    [
        # Three ranks: the model has nine heads and three KV heads.
        {"tensor_parallel_size": 3},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
    ids=["tensor_parallel", "pipeline_parallel", "data_parallel"],
)
def test_several_workers_give_the_same_tokens(llm, options):
    expected = greedy(llm)
    with LLM("smollm2", **_SMALL, **options) as other:
        assert greedy(other) == expected


def test_ranks_compute_from_the_blocks_of_the_file_as_one_does():
    """Sums of ranks are rounded in another order, and activations to 8 bits after it: a little changes."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for size in (1, 3):
        with LLM("smollm2", tensor_parallel_size=size, max_model_len=512, kv_cache_memory_bytes="64MiB") as llm:
            (output,) = llm.generate([_TEXT], params, use_tqdm=False)
        tokens = output.prompt_token_ids[1:]
        found.append([one[token].logprob for token, one in zip(tokens, output.prompt_logprobs[1:], strict=True)])
    changes = [abs(one - other) for one, other in zip(*found, strict=True)]
    assert sum(changes) / len(changes) < 0.1


def test_an_adapter_made_by_peft_gives_the_tokens_of_peft(llm, oracle, tmp_path):
    make_adapter(
        oracle, tmp_path / "adapter", seed=3, r=8, lora_alpha=1, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    adapted = with_adapter(oracle, tmp_path / "adapter")
    texts, expected = PROMPTS[:2], []
    for prompt in map(llm.get_tokenizer().encode, texts):
        with torch.inference_mode():
            ids = adapted.generate(
                input_ids=torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        expected.append(ids[0, len(prompt) :].tolist())
    adapted.unload()
    plain = greedy(llm, texts)
    assert expected != plain
    with LLM("smollm2", **_SMALL, enable_lora=True, max_lora_rank=8) as adapters:
        assert greedy(adapters, texts, lora_request=LoRARequest("one", 1, str(tmp_path / "adapter"))) == expected
        assert greedy(adapters, texts) == plain

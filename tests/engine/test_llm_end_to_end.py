"""`LLM` with the real core and the shipped demo model, on the CPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, RequestOutput, SamplingParams
from penstock.errors import ContextTooLong, InvalidRequest, LifecycleError

# One thread, since several that share a core with other processes wait for each other.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "num_threads": 1,
    "kv_cache_memory_bytes": 32 * 1024**2,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}
PROMPTS = ["ROMEO:", "What is 3 plus 4?", "To be", "Good morrow, cousin.\n\nJULIET:\nWhat"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SMALL) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_are_continued_in_order(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer.encode(prompt)
        completion = output.outputs[0]
        assert len(completion.token_ids) == 12
        token_ids = output.prompt_token_ids + completion.token_ids
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == prompt + completion.text


def test_company_does_not_change_an_answer(llm: LLM) -> None:
    together = tokens(llm.generate(PROMPTS, GREEDY))
    assert [tokens(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS] == together


def test_a_seed_decides_sampled_tokens_in_any_company(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in (1, 2, 3, 1)]
    together = tokens(llm.generate(["To be"] * 4, params))
    assert together[0] == together[3] != together[1]
    assert tokens(llm.generate("To be", params[1])) == [together[1]]


def test_equal_engines_draw_equal_tokens() -> None:
    def answers() -> list[list[int]]:
        with LLM("demo", seed=3, **SMALL) as engine:
            return tokens(engine.generate(["To be", "To be"], SamplingParams(max_tokens=8, ignore_eos=True)))

    first = answers()
    assert answers() == first
    assert first[0] != first[1]


def test_logprobs_of_greedy_tokens_are_the_highest(llm: LLM) -> None:
    (output,) = llm.generate("To be", SamplingParams(temperature=0.0, max_tokens=5, logprobs=3))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(row) == 3
        assert row[token_id].rank == 1
        assert row[token_id].logprob == max(value.logprob for value in row.values()) <= 0
    sampled = [row[token_id].logprob for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(sampled))


def test_a_stop_token_ends_the_text_and_is_not_in_it(llm: LLM) -> None:
    free = llm.generate("To be", GREEDY)[0].outputs[0]
    stop = free.token_ids[6]
    (output,) = llm.generate("To be", SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,)))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert free.text.startswith(completion.text)


def test_a_conversation_ends_at_the_models_own_end_token(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=200))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] == tokenizer.eos_token_id


def test_text_ends_where_the_context_ends(llm: LLM) -> None:
    prompt = [40] * 1020
    (output,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")
    with pytest.raises(ContextTooLong, match="has 1,024 tokens"):
        llm.generate({"prompt_token_ids": [40] * 1024})


def test_a_repeated_prompt_comes_from_the_cache_unless_salted(llm: LLM) -> None:
    prompt = list(range(100, 200))
    first, again = (llm.generate({"prompt_token_ids": prompt}, GREEDY)[0] for _ in range(2))
    (salted,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": "mine"}, GREEDY)
    assert (first.num_cached_tokens, salted.num_cached_tokens) == (0, 0)
    assert again.num_cached_tokens >= 80
    assert tokens([first]) == tokens([again]) == tokens([salted])


def test_metrics_are_in_order(llm: LLM) -> None:
    metrics = llm.generate("To be", GREEDY)[0].metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
    ]
    known = [time for time in times if time is not None]
    assert len(known) == 5
    assert known == sorted(known)
    assert metrics.num_generated_tokens == 12


def test_after_ctrl_c_the_engine_serves_as_before(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["To be"] * 20, SamplingParams(max_tokens=None, ignore_eos=True))
    timer.join()
    assert not llm._session._core.has_unfinished_requests()
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: .*token id 1536"):
        llm.generate(["fine", [1536]])
    assert not llm._session._core.has_unfinished_requests()


def test_two_engines_live_in_one_process_and_may_be_created_again(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS[:1], GREEDY))
    for _ in range(2):
        with LLM("demo", **SMALL) as other:
            assert tokens(other.generate(PROMPTS[:1], GREEDY)) == expected
        with pytest.raises(LifecycleError, match="closed"):
            other.generate("x")
    assert tokens(llm.generate(PROMPTS[:1], GREEDY)) == expected

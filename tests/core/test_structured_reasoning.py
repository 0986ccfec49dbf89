"""Constraints behind reasoning in a real engine: the answer has its form, however steps are made."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.contract import StructuredOutputsParams
from penstock.contract.sampling_params import THINKING_BUDGET
from penstock.errors import ConfigError
from penstock.scheduler.outputs import FinishReason
from support.constraints import END, VOCAB_SIZE, demo_tokenizer, encode
from support.disturbed_workers import FailingWorker
from support.engines import Result, add, finish, make_core

# Markers of several tokens; the budget makes the model say the end, token by token.
START, STOP = "<think>", "</think>"
OPTIONS: dict[str, Any] = {"reasoning_parser": "qwen3"}
PROMPTS = ["Who are you?<think>", "Tell me about a cat.", "Once upon a time<think>\n", "Who?<think>hm</think>\n\n"]
CODE = "[A-Z]{2}-[0-9]{2,3}"
NUM_REQUESTS = 9
TOKENS = [encode(PROMPTS[index % len(PROMPTS)]) for index in range(NUM_REQUESTS)]


def params(number: int) -> SamplingParams:
    """Each third is not constrained. Where the prompt does not begin to reason, every other output is made to."""
    budget = {"budget": 3 + 2 * number, "start_token_ids": encode(START), "end_token_ids": encode(STOP)}
    return SamplingParams(
        seed=number,
        temperature=0.0 if number % 4 == 0 else 1.0,
        max_tokens=60,
        logit_bias={encode(START)[0]: 100.0} if number == 1 else None,
        structured_outputs=None if number % 3 == 2 else StructuredOutputsParams(regex=CODE),
        extra_args={THINKING_BUDGET: budget},
    )


REQUESTS = [params(number) for number in range(NUM_REQUESTS)]


def serve(core: Any) -> list[Result]:
    for index, request in enumerate(REQUESTS):
        add(core, f"r{index}", TOKENS[index], request, eos_token_ids=frozenset({END}))
    results: dict[str, Result] = {}
    finish(core, results, max_steps=200_000)
    return [results[f"r{index}"] for index in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    core = make_core("demo", async_scheduling=False, fast_paths="auto", **OPTIONS)
    results = serve(core)
    core.close()
    num_reasoned = 0
    for index, (result, request) in enumerate(zip(results, REQUESTS, strict=True)):
        assert result.error is None
        if request.structured_outputs is None or result.finish_reason is FinishReason.LENGTH:
            continue
        text = demo_tokenizer().decode(result.tokens)
        reasoning, marker, answer = text.rpartition(STOP)
        num_reasoned += bool(marker)
        assert re.fullmatch(CODE, answer)
        assert bool(marker) == (PROMPTS[index % len(PROMPTS)].rstrip().endswith(START) or text.startswith(START))
        assert not re.fullmatch(CODE, reasoning) or not reasoning
    assert num_reasoned >= 3
    return [result.tokens for result in results]


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"async_scheduling": True, "max_model_len": 96, "num_blocks": 9},
    ],
    ids=str,
)
@pytest.mark.processor
def test_tokens_are_the_same_however_steps_are_made(undisturbed: list[list[int]], options: dict[str, Any]) -> None:
    core = make_core("demo", **OPTIONS, **options)
    results = serve(core)
    core.close()
    assert [result.tokens for result in results] == undisturbed
    if "num_blocks" in options:
        assert sum(result.num_preemptions for result in results) > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.each_value_quick
def test_a_worker_that_fails_takes_nothing_of_it_along(
    undisturbed: list[list[int]], async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = {("execute", 3), ("sample", 9), ("sample", 17), ("execute", 30)}
    monkeypatch.setattr(FailingWorker, "fails_at", events, raising=False)
    worker = "support.disturbed_workers.FailingWorker"
    core = make_core("demo", async_scheduling=async_scheduling, worker_cls=worker, **OPTIONS)
    assert [result.tokens for result in serve(core)] == undisturbed
    assert not events, "every failure happened"
    core.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_marker_may_lie_within_drafts(undisturbed: list[list[int]], async_scheduling: bool) -> None:
    worker = "support.disturbed_workers.DraftingWorker"
    core = make_core("demo", worker_cls=worker, async_scheduling=async_scheduling, **OPTIONS)
    rng = random.Random(3)
    for index, one in enumerate(REQUESTS):
        add(core, f"r{index}", TOKENS[index], one, eos_token_ids=frozenset({END}))
    results: dict[str, Result] = {}
    steps: list[list[int]] = []
    while core.has_unfinished_requests():
        drafts = {}
        for index, truth in enumerate(undisturbed):
            num_known = len(results[f"r{index}"].tokens) if f"r{index}" in results else 0
            ahead = truth[num_known : num_known + 3]
            num_right = rng.choice([0, 2, 3, 3])
            drafts[f"r{index}"] = ahead[:num_right] + [rng.randrange(VOCAB_SIZE) for _ in ahead[num_right:]]
        core.scheduler.update_draft_token_ids(drafts)
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
            steps.append(output.new_token_ids)
    core.close()
    assert [results[f"r{index}"].tokens for index in range(NUM_REQUESTS)] == undisturbed
    if not async_scheduling:
        last = encode(STOP)[-1]
        assert any(last in step[:-1] for step in steps), "the end of a marker came before the end of a step"


@pytest.mark.parametrize("num_known", [2, 5, 10])
def test_a_request_that_was_begun_elsewhere_goes_on(undisturbed: list[list[int]], num_known: int) -> None:
    core = make_core("demo", **OPTIONS)
    begun = undisturbed[0][:num_known]
    add(core, "r", TOKENS[0], REQUESTS[0], eos_token_ids=frozenset({END}), output_token_ids=begun)
    results: dict[str, Result] = {}
    finish(core, results, max_steps=200_000)
    core.close()
    assert begun + results["r"].tokens == undisturbed[0]


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_several_outputs_of_a_prompt_reason_each_for_itself(in_reasoning: bool) -> None:
    asked = SamplingParams(
        n=4, seed=1, structured_outputs=StructuredOutputsParams(regex=CODE), thinking_token_budget=6, max_tokens=60
    )
    options = {"reasoning_parser": "custom", "reasoning_start_str": "<|user|>", "reasoning_end_str": "<|assistant|>"}
    with LLM("demo", num_threads=1, kv_cache_memory_bytes=8 << 20, enable_in_reasoning=in_reasoning, **options) as llm:
        (result,) = llm.generate({"prompt_token_ids": encode("Who are you?<|user|>")}, asked)
    (marker,) = encode("<|assistant|>")
    for output in result.outputs:
        token_ids = list(output.token_ids)
        begin = 0 if in_reasoning else token_ids.index(marker) + 1
        if output.finish_reason == "stop":
            assert re.fullmatch(CODE, demo_tokenizer().decode(token_ids[begin:]))
        assert (marker in token_ids) == (not in_reasoning)
    assert any(output.finish_reason == "stop" for output in result.outputs)


@pytest.mark.parametrize("parser", ["deepseek_r1", "minimax_m2"])
def test_the_end_of_reasoning_is_forced_where_the_prompt_does_not_begin_it(parser: str) -> None:
    asked = SamplingParams(
        seed=1, structured_outputs=StructuredOutputsParams(regex=CODE), thinking_token_budget=6, max_tokens=60
    )
    end = encode(STOP)
    with LLM("demo", num_threads=1, kv_cache_memory_bytes=8 << 20, reasoning_parser=parser) as llm:
        unfinished, ended = llm.generate(["Who are you?", "Who are you?<think></think>\n"], asked)
    token_ids = list(unfinished.outputs[0].token_ids)
    assert token_ids[6 : 6 + len(end)] == end
    assert re.fullmatch(CODE, demo_tokenizer().decode(token_ids[6 + len(end) :]))
    assert re.fullmatch(CODE, ended.outputs[0].text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reasoning_parser": "qwen"}, "reasoning_parser='qwen'.*deepseek_r1.*qwen3.*custom"),
        ({"reasoning_parser": "qwen3", "reasoning_end_str": "x"}, "reasoning_end_str='x'.*qwen3.*'</think>'.*custom"),
        ({"enable_in_reasoning": "yes"}, "enable_in_reasoning='yes'"),
        (
            {"structured_outputs_backend": "outlines"},
            "backend='outlines' is not supported.*llguidance",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM("demo", **options)

"""Constrained requests in a real engine: every output has its form, and nothing that happens there changes it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from penstock import LLM, SamplingParams
from penstock.contract import StructuredOutputsParams
from penstock.engine.beam_search import BeamSearchParams
from penstock.errors import InvalidParameter
from penstock.scheduler.outputs import FinishReason
from support.constraints import END, VOCAB_SIZE, demo_tokenizer
from support.disturbed_workers import FailingWorker
from support.engines import Result, add, finish, make_core

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CODE = "[A-Z]{2}-[0-9]{3,5}"
CHOICES = ["yes", "no", "perhaps tomorrow"]
PROMPTS = ["Tell me about a cat that lives by the sea, and about its friends.", "Who are you?", "Once upon a time"]


def params(number: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"seed": number, "max_tokens": 90, "structured_outputs": StructuredOutputsParams(json=PERSON), **fields}  # type: ignore[arg-type]
    )


# Constrained and not, drawn and greedy, and with whatever else shapes logits.
REQUESTS: list[SamplingParams] = [
    params(0),
    params(1, temperature=0.0),
    params(2, structured_outputs={"regex": CODE}, top_k=20, min_p=0.001),
    params(3, structured_outputs={"choice": CHOICES}),
    params(4, structured_outputs=None, max_tokens=20, ignore_eos=True),
    params(5, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={END: 100.0, 40: 5.0}),
    params(6, structured_outputs=None, temperature=0.0, max_tokens=20, ignore_eos=True),
    params(7, structured_outputs={"grammar": 'root ::= "<" [0-9]+ ("," [0-9]+)* ">"'}, frequency_penalty=0.4),
    params(8, structured_outputs={"json_object": True}, min_tokens=12, all_stop_token_ids=[END]),
]
TOKENS = [demo_tokenizer().encode(PROMPTS[index % len(PROMPTS)]) for index in range(len(REQUESTS))]


def serve(core: Any, requests: Sequence[SamplingParams] = REQUESTS) -> list[Result]:
    for index, one in enumerate(requests):
        add(core, f"r{index}", TOKENS[index], one, eos_token_ids=frozenset({END}))
    results: dict[str, Result] = {}
    finish(core, results, max_steps=200_000)
    return [results[f"r{index}"] for index in range(len(requests))]


def check(result: Result, request: SamplingParams) -> None:
    """The output has its form, or could not be finished."""
    constraint = request.structured_outputs
    assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), result.error
    if constraint is None or result.finish_reason is FinishReason.LENGTH:
        return
    text = demo_tokenizer().decode(result.tokens)
    assert result.tokens[-1] == END
    if constraint.json is not None:
        jsonschema.validate(json.loads(text), json.loads(constraint.json))
    elif constraint.regex is not None:
        assert re.fullmatch(constraint.regex, text)
    elif constraint.choice is not None:
        assert text in constraint.choice
    elif constraint.grammar is not None:
        assert re.fullmatch("<[0-9]+(,[0-9]+)*>", text)
    else:
        assert isinstance(json.loads(text), dict)


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    """The tokens of each request, one step after another, and checked."""
    core = make_core("demo", async_scheduling=False, fast_paths="auto")
    results = serve(core)
    core.close()
    for result, request in zip(results, REQUESTS, strict=True):
        check(result, request)
    finished = [result for result in results if result.finish_reason is FinishReason.STOP]
    assert len(finished) >= 5, "these prompts and seeds should show something"
    return [result.tokens for result in results]


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"async_scheduling": True, "fast_paths": "off"},
        {"async_scheduling": False, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.one_case_quick
def test_tokens_are_the_same_however_steps_are_made(undisturbed: list[list[int]], options: dict[str, Any]) -> None:
    core = make_core("demo", **options)
    assert [result.tokens for result in serve(core)] == undisturbed
    again = serve(core)
    assert [result.tokens for result in again] == undisturbed
    core.close()


def test_alone_a_request_says_what_it_says_in_a_batch(undisturbed: list[list[int]]) -> None:
    core = make_core("demo", async_scheduling=True)
    for index in (0, 1, 2, 8):
        add(core, "alone", TOKENS[index], REQUESTS[index], eos_token_ids=frozenset({END}))
        results: dict[str, Result] = {}
        finish(core, results, max_steps=200_000)
        assert results["alone"].tokens == undisturbed[index]
    core.close()


@pytest.mark.processor
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_requests_go_on_in_their_form(undisturbed: list[list[int]], async_scheduling: bool) -> None:
    core = make_core("demo", async_scheduling=async_scheduling, max_model_len=128, num_blocks=12)
    results = serve(core)
    core.close()
    assert sum(result.num_preemptions for result in results) > 0
    assert [result.tokens for result in results] == undisturbed


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.each_value_quick
def test_with_workers_that_fail_requests_go_on_in_their_form(
    undisturbed: list[list[int]], async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = {("execute", 3), ("sample", 9), ("sample", 17), ("execute", 30)}
    monkeypatch.setattr(FailingWorker, "fails_at", events, raising=False)
    core = make_core("demo", async_scheduling=async_scheduling, worker_cls="support.disturbed_workers.FailingWorker")
    assert [result.tokens for result in serve(core)] == undisturbed
    assert not events, "every failure happened"
    core.close()


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"max_model_len": 128, "num_blocks": 14},
    ],
    ids=str,
)
@pytest.mark.one_case_quick
def test_drafts_change_nothing_whether_they_have_the_form_or_not(
    undisturbed: list[list[int]], options: dict[str, Any]
) -> None:
    core = make_core("demo", worker_cls="support.disturbed_workers.DraftingWorker", **options)
    rng = random.Random(7)
    for index, one in enumerate(REQUESTS):
        add(core, f"r{index}", TOKENS[index], one, eos_token_ids=frozenset({END}))
    results: dict[str, Result] = {}
    num_by_step = []
    while core.has_unfinished_requests():
        drafts = {}
        for index, truth in enumerate(undisturbed):
            num_known = len(results[f"r{index}"].tokens) if f"r{index}" in results else 0
            ahead = truth[num_known : num_known + rng.randint(0, 3)]
            num_right = rng.randint(0, len(ahead))
            drafts[f"r{index}"] = ahead[:num_right] + [rng.randrange(VOCAB_SIZE) for _ in ahead[num_right:]]
        core.scheduler.update_draft_token_ids(drafts)
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
            if REQUESTS[int(output.req_id[1:])].structured_outputs is not None:
                num_by_step.append(len(output.new_token_ids))
    core.close()
    assert [results[f"r{index}"].error for index in range(len(REQUESTS))] == [None] * len(REQUESTS)
    assert [results[f"r{index}"].tokens for index in range(len(REQUESTS))] == undisturbed
    assert max(num_by_step) > 1, "some drafts of constrained requests were accepted"


def test_a_request_that_was_begun_elsewhere_goes_on_in_its_form(undisturbed: list[list[int]]) -> None:
    core = make_core("demo")
    begun = undisturbed[0][:9]
    add(core, "r", TOKENS[0], REQUESTS[0], eos_token_ids=frozenset({END}), output_token_ids=begun)
    results: dict[str, Result] = {}
    finish(core, results, max_steps=200_000)
    assert begun + results["r"].tokens == undisturbed[0]
    core.close()


def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone(undisturbed: list[list[int]]) -> None:
    bad = params(0, structured_outputs={"json": {"minLength": 3, "maxLength": 2, "type": "string"}})
    core = make_core("demo")
    results = serve(core, [*REQUESTS[:3], bad])
    core.close()
    assert [result.tokens for result in results[:3]] == undisturbed[:3]
    assert results[3].finish_reason is FinishReason.INVALID
    assert results[3].error is not None
    assert "minLength" in results[3].error


@pytest.mark.slow
def test_one_that_takes_too_long_ends_with_an_error_and_others_do_not_wait_for_it(
    undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from penstock.structured.llguidance_backend import LLGuidanceBackend

    let_go = threading.Event()
    compile_it = LLGuidanceBackend.compile

    def compile_slowly(self: LLGuidanceBackend, constraint: StructuredOutputsParams) -> Any:
        if constraint.regex == "slow":
            let_go.wait(60)
        return compile_it(self, constraint)

    monkeypatch.setattr(LLGuidanceBackend, "compile", compile_slowly)
    core = make_core("demo", max_grammar_compile_s=6.0)
    add(core, "slow", TOKENS[0], params(0, structured_outputs={"regex": "slow"}))
    ended = []
    add(core, "free", TOKENS[4], REQUESTS[4])
    results: dict[str, Result] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
            if output.finish_reason is not None:
                ended.append(output.req_id)
    core.close()
    let_go.set()
    assert ended == ["free", "slow"]
    assert results["free"].tokens == undisturbed[4]
    assert results["slow"].error is not None
    assert "max_grammar_compile_s" in results["slow"].error


def test_where_other_parameters_leave_nothing_the_request_ends_and_says_so() -> None:
    core = make_core("demo")
    bad = params(3, structured_outputs={"choice": ["yes"]}, min_tokens=30, all_stop_token_ids=[END])
    results = serve(core, [bad, REQUESTS[3]])
    core.close()
    assert results[0].finish_reason is FinishReason.INVALID
    assert results[0].error is not None
    assert "structured_outputs" in results[0].error
    assert results[1].finish_reason is FinishReason.STOP


def test_a_request_that_is_aborted_while_it_waits_is_gone() -> None:
    core = make_core("demo")
    add(
        core, "a", TOKENS[0], params(0, structured_outputs={"json": {"minLength": 3, "maxLength": 2, "type": "string"}})
    )
    core.abort_requests(["a"])
    results = serve(core, REQUESTS[:1])
    assert results[0].finish_reason not in (FinishReason.ERROR, FinishReason.INVALID)
    core.close()


@pytest.fixture(scope="module")
def llm(fast_paths: str) -> Any:
    with LLM("demo", num_threads=1, kv_cache_memory_bytes=8 << 20, fast_paths=fast_paths) as made:
        yield made


def test_several_outputs_of_a_prompt_differ_and_each_has_its_form(llm: LLM) -> None:
    (result,) = llm.generate(PROMPTS[0], SamplingParams(n=5, seed=1, structured_outputs={"regex": CODE}, max_tokens=60))  # type: ignore[arg-type]
    texts = [output.text for output in result.outputs]
    assert all(re.fullmatch(CODE, text) for text in texts)
    assert len(set(texts)) > 1


def test_a_stop_text_ends_an_output_before_its_grammar_does(llm: LLM) -> None:
    schema = {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "type": "object", "required": ["a", "b"]}
    asked = SamplingParams(temperature=0.0, stop=[","], structured_outputs={"json": schema}, max_tokens=90)  # type: ignore[arg-type]
    (result,) = llm.generate(PROMPTS[0], asked)
    assert result.outputs[0].stop_reason == ","
    assert json.loads(result.outputs[0].text + "}") == {"a": 1}


def test_log_probabilities_come_with_constrained_tokens(llm: LLM) -> None:
    asked = SamplingParams(temperature=0.0, logprobs=3, structured_outputs={"choice": CHOICES}, max_tokens=60)  # type: ignore[arg-type]
    (result,) = llm.generate(PROMPTS[0], asked)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    # Of the model's own distribution, in which another token may be likelier.
    assert all(len(row) >= 3 for row in output.logprobs)


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        ({"json": {"items": {"uniqueItems": True}}}, "/items/uniqueItems"),
        ({"regex": "a(?=b)"}, "lookahead"),
        ({"choice": ["a" * 2000]}, "max_grammar_bytes=2000"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_anything_runs(constraint: dict[str, Any], said: str) -> None:
    with LLM("demo", num_threads=1, kv_cache_memory_bytes=8 << 20, max_grammar_bytes=1000) as llm:
        with pytest.raises(InvalidParameter) as refused:
            llm.generate(["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=constraint)])  # type: ignore[arg-type]
        assert said in str(refused.value)
        assert "prompts[1]" in str(refused.value)


def test_beam_search_refuses_it_by_name() -> None:
    with pytest.raises(InvalidParameter, match="structured_outputs=.* is not valid. Allowed: None with beam search"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="a"))

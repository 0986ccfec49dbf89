"""Outputs of a given form with speculation: every one that ends is valid, and is what it is without drafts."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tools.check_schemas import read

from penstock.contract import SamplingParams, StructuredOutputsParams
from penstock.contract.sampling_params import THINKING_BUDGET
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import PenstockError
from penstock.scheduler.outputs import FinishReason
from support.constraints import END, demo_backend, demo_tokenizer, encode
from support.engines import Result, add, make_core

_CHECKOUT = Path(__file__).resolve().parents[2]
START, STOP = "<think>", "</think>"
PROMPTS = ["Tell me about a cat.", "Who are you?", "ROMEO: ROMEO:", "Once upon a time"]
NODE = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -9, "maximum": 99}, "next": {"$ref": "#/$defs/node"}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"enum": ["yes", "no", {"perhaps": [1, 2, 3]}]},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,6}$"}, "minItems": 2, "maxItems": 5},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {"type": "string", "format": "date"},
    {
        "type": "object",
        "properties": {"kind": {"const": "greeting"}, "text": {"type": "string", "maxLength": 30}},
        "required": ["kind", "text"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "boolean"}]},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 8}], "items": False, "minItems": 2},
]
# Drafts are always made, however seldom they are right.
SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False},
    "suffix": {
        "method": "suffix",
        "suffix_decoding_min_token_prob": 0.0,
        "suffix_decoding_max_spec_factor": 4.0,
        "num_speculative_tokens": 4,
        "adaptive": False,
    },
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3, "adaptive": False},
    "draft_model": {"method": "draft_model", "model": "demo", "num_speculative_tokens": 4, "adaptive": False},
}
DRAFT_WELL = ("eagle3", "draft_model")
MAX_TOKENS, MAX_MODEL_LEN = 160, 208
# What ends things, which this model seldom says.
CLOSING = {encode(character)[0]: 9.0 for character in '}]",'} | {END: 9.0}


@dataclass
class Asked:
    """A request, and the schema that its output has, if any. reasons: whether that is behind reasoning."""

    prompt: list[int]
    params: SamplingParams
    schema: Any = None
    reasons: bool = False


@dataclass
class Served:
    """Results of requests, and the drafts of constrained ones."""

    results: dict[str, Result] = field(default_factory=dict)
    num_drafts: int = 0
    num_accepted: int = 0
    # Tokens of each step of constrained requests.
    steps: list[list[int]] = field(default_factory=list)


@functools.cache
def schemas_of_files() -> list[Any]:
    """Small ones of real use and of the suite, which are accepted; none where there are no files."""
    folder = Path(os.environ.get("PENSTOCK_TEST_DATA") or _CHECKOUT.parent / "shared" / "data") / "json_schemas"
    cases = list(read(sorted(folder.glob("*.jsonl.gz"))))[::7]
    return [case["schema"] for case in cases if len(json.dumps(case["schema"])) < 1000 and _is_accepted(case["schema"])]


def _is_accepted(schema: Any) -> bool:
    try:
        demo_backend().compile(StructuredOutputsParams(json=schema))
    except PenstockError:
        return False
    return True


def ask(schemas: Sequence[Any], seed: int, *, reasoning: bool) -> list[Asked]:
    """A sampled request for each schema, and one without for every five. reasoning: every other one begins with it."""
    asked = []
    for number, schema in enumerate(schemas):
        reasons = reasoning and number % 2 == 0
        prompt = PROMPTS[number % len(PROMPTS)] + (START if reasons else "")
        budget = {"budget": 2 + number % 9, "start_token_ids": encode(START), "end_token_ids": encode(STOP)}
        params = SamplingParams(
            seed=seed + number,
            temperature=(0.7, 1.0)[number % 2],
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=schema),
            logit_bias=CLOSING if number % 3 else None,
            extra_args={THINKING_BUDGET: budget} if reasons else None,
        )
        asked.append(Asked(encode(prompt), params, schema, reasons))
        if number % 5 == 0:
            free = SamplingParams(seed=seed + number, temperature=0.8, max_tokens=40, ignore_eos=True)
            asked.append(Asked(encode(prompt), free))
    return asked


def options(method: str, *, reasoning: bool, async_scheduling: bool, is_tight: bool) -> dict[str, Any]:
    """Options of `make_core`; with little KV cache, requests are preempted."""
    return {
        "speculative_config": SPECULATIVE[method],
        "async_scheduling": async_scheduling,
        "max_model_len": MAX_MODEL_LEN,
        **({"reasoning_parser": "qwen3"} if reasoning else {}),
        "num_blocks": 19 if is_tight else 366,
    }


def serve(asked: Sequence[Asked], **options: Any) -> Served:
    core = make_core("demo", **options)
    served = serve_with(core, asked)
    core.close()
    return served


def serve_with(core: EngineCore, asked: Sequence[Asked]) -> Served:
    for number, one in enumerate(asked):
        add(core, f"r{number}", one.prompt, one.params, eos_token_ids=frozenset({END}))
    served = Served()
    while core.has_unfinished_requests():
        for output in core.step():
            served.results.setdefault(output.req_id, Result()).take(output)
            if asked[int(output.req_id[1:])].schema is not None and output.new_token_ids:
                served.num_drafts += output.num_draft_tokens
                served.num_accepted += len(output.new_token_ids) - 1
                served.steps.append(output.new_token_ids)
    return served


def check(asked: Sequence[Asked], served: Served) -> int:
    """Every constrained output that ended is valid; their number."""
    num_valid = 0
    for number, one in enumerate(asked):
        result = served.results[f"r{number}"]
        assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), result.error
        if one.schema is None or result.finish_reason is FinishReason.LENGTH:
            continue
        text = demo_tokenizer().decode(result.tokens)
        if one.reasons:
            _, marker, text = text.partition(STOP)
            assert marker
        validator = jsonschema.validators.validator_for(one.schema, default=jsonschema.Draft202012Validator)
        validator(one.schema).validate(json.loads(text))
        num_valid += 1
    return num_valid


def assert_equal(served: Served, plain: Served) -> None:
    for req_id, result in plain.results.items():
        assert served.results[req_id].tokens == result.tokens, req_id
        assert served.results[req_id].finish_reason == result.finish_reason, req_id


@functools.cache
def few() -> tuple[list[Asked], Served]:
    """A few requests, half of which reason, and what they say without drafts."""
    asked = ask(SCHEMAS, 40, reasoning=True)
    plain = serve(asked, **options("none", reasoning=True, async_scheduling=False, is_tight=False), fast_paths="auto")
    assert check(asked, plain) >= len(SCHEMAS) // 2, "these prompts and seeds should show something"
    return asked, plain


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("method", [method for method in SPECULATIVE if method != "none"])
@pytest.mark.one_case_quick
def test_a_few_schemas_with_drafts(method: str, async_scheduling: bool) -> None:
    asked, plain = few()
    served = serve(asked, **options(method, reasoning=True, async_scheduling=async_scheduling, is_tight=False))
    assert_equal(served, plain)
    assert served.num_drafts > 0
    if method in DRAFT_WELL:
        assert served.num_accepted > 0.01 * served.num_drafts, "the host knows the drafts of constrained requests"


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.each_value_quick
def test_ends_of_outputs_and_of_reasoning_within_drafts(async_scheduling: bool) -> None:
    asked, plain = few()
    # What was said once is drafted when it is asked for again.
    core = make_core("demo", **options("suffix", reasoning=True, async_scheduling=async_scheduling, is_tight=False))
    first, again = serve_with(core, asked), serve_with(core, asked)
    core.close()
    for served in (first, again):
        assert_equal(served, plain)
    assert again.num_accepted > first.num_accepted
    assert any(step[-1] == END and len(step) > 1 for step in again.steps)
    last = encode(STOP)[-1]
    assert any(last in step[:-1] for step in again.steps)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize(
    "rule",
    [
        {"rejection_sample_method": "standard"},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
    ],
    ids=lambda rule: rule["rejection_sample_method"],
)
@pytest.mark.one_case_quick
def test_no_rule_keeps_a_draft_that_has_not_the_form(rule: dict[str, Any], async_scheduling: bool) -> None:
    asked, plain = few()
    arranged = options("suffix", reasoning=True, async_scheduling=async_scheduling, is_tight=False)
    arranged["speculative_config"] = {**arranged["speculative_config"], **rule}
    served = serve(asked, **arranged)
    assert check(asked, served) > 0
    if rule["rejection_sample_method"] == "synthetic":
        # It could keep anything, and so has nothing to decide.
        assert served.num_accepted == 0
        for number, one in enumerate(asked):
            if one.schema is not None:
                assert served.results[f"r{number}"].tokens == plain.results[f"r{number}"].tokens
    else:
        assert served.num_accepted > 0


@pytest.mark.slow
@pytest.mark.one_path(reason="both paths run with the few schemas; here it is the many that count")
@pytest.mark.parametrize("method", SPECULATIVE)
@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "preempted"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async scheduling"])
@pytest.mark.parametrize("reasoning", [False, True], ids=["answers", "reasons"])
def test_many_schemas_with_drafts(reasoning: bool, async_scheduling: bool, is_tight: bool, method: str) -> None:
    part = 4 * reasoning + 2 * async_scheduling + is_tight
    asked, plain = many(part, reasoning)
    arranged = options(method, reasoning=reasoning, async_scheduling=async_scheduling, is_tight=is_tight)
    served = serve(asked, **arranged)
    num_valid = check(asked, served)
    assert_equal(served, plain)
    num_preemptions = sum(result.num_preemptions for result in served.results.values())
    assert (num_preemptions > 0) == is_tight
    constrained = [number for number, one in enumerate(asked) if one.schema is not None]
    assert num_valid >= len(constrained) // 4
    if method in DRAFT_WELL:
        assert served.num_accepted > 0
    print(
        f"{method}: {len(constrained)} constrained, {num_valid} validated, {len(constrained) - num_valid} by length, "
        f"all equal; {served.num_accepted} of {served.num_drafts} drafts accepted, {num_preemptions} preemptions"
    )


@functools.cache
def many(part: int, reasoning: bool) -> tuple[list[Asked], Served]:
    """Requests for 25 schemas, others for each part."""
    there_are = schemas_of_files() or SCHEMAS
    schemas = SCHEMAS + [there_are[(17 * part + number) % len(there_are)] for number in range(25 - len(SCHEMAS))]
    asked = ask(schemas, 1000 * part, reasoning=reasoning)
    return asked, serve(asked, **options("none", reasoning=reasoning, async_scheduling=False, is_tight=False))


@pytest.mark.parametrize("method", DRAFT_WELL)
@pytest.mark.each_value_quick
def test_the_likeliest_tokens_of_a_form_are_those_without_drafts(method: str) -> None:
    asked = [
        Asked(
            encode(PROMPTS[number % len(PROMPTS)]),
            SamplingParams(
                seed=0,
                temperature=0,
                max_tokens=60,
                structured_outputs=StructuredOutputsParams(json=schema),
                logit_bias=CLOSING,
            ),
            schema,
        )
        for number, schema in enumerate(SCHEMAS)
    ]
    plain, served = (
        serve(asked, **options(name, reasoning=False, async_scheduling=True, is_tight=False))
        for name in ("none", method)
    )
    assert_equal(served, plain)
    assert check(asked, served) > len(SCHEMAS) // 2
    assert served.num_accepted > 0

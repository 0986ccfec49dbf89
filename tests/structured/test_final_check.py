"""What is not enforced is checked at the end: every error is told, and nothing makes the check slow."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.config.reasoning import REASONING_PARSERS
from penstock.contract import StructuredOutputsParams
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.output.outputs import RequestOutput
from penstock.errors import InvalidParameter
from penstock.structured.final_check import FinalCheck, schema_errors
from support.constraints import allows, demo_tokenizer, schema_matcher

TAGS = {"type": "array", "items": {"type": "string", "maxLength": 1}, "uniqueItems": True, "maxItems": 3}
DEEP = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}

# Python's own search of "^(a+)+$" in this name would take years.
ODD_NAME = json.dumps({"a" * 60 + "b": 1})
MANY_NAMES = json.dumps({f"y{n}": n for n in range(5000)})


@pytest.mark.parametrize(
    ("schema", "text", "said"),
    [
        (TAGS, '["a", "b"]', None),
        (TAGS, '["a", "a"]', "/: ['a', 'a'] has non-unique"),
        ({"properties": {"t/s": TAGS}}, '{"t/s": ["a", "ab"]}', "/t~1s/1: 'ab' is too long"),
        ({"multipleOf": 0.01}, "19.99", None),
        ({"multipleOf": 0.01}, "19.995", "/: Decimal('19.995') is not a multiple"),
        ({"type": "integer"}, "1.0", None),
        ({"const": 1}, "1e0", None),
        ({"type": "number"}, "1e999999999", None),
        ({"pattern": "^a+$"}, '"aab"', "/: 'aab' does not match"),
        ({"pattern": r"^\s$"}, '" "', None),
        ({"pattern": r"^\s$"}, '"\u3000"', "dialects do not agree"),
        ({"pattern": "^é$"}, '"é"', None),
        ({"pattern": "^a(?=b)"}, '"ab"', "could not be checked: the pattern"),
        ({"patternProperties": {"^x": {"type": "null"}}}, '{"xa": 1, "b": 1}', "/xa: 1 is not of type"),
        ({"$ref": "https://example.org/schema"}, "1", "could not be checked"),
        ({"$defs": {**DEEP, "d40": {}}, "$ref": "#/$defs/d0"}, "1", "more than 20,000 steps"),
        ({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}, ODD_NAME, "/: Additional properties"),
        ({"patternProperties": {"^(a+)+$": {}}, "unevaluatedProperties": False}, ODD_NAME, "that repeat or choose"),
        ({"patternProperties": {"^a": {}}, "unevaluatedProperties": False}, ODD_NAME, None),
        ({"uniqueItems": True}, json.dumps([{"a": n} for n in range(3000)]), None),
        ({"uniqueItems": True}, '[1, true, [1], "1"]', None),
        ({"uniqueItems": True}, '[{"a": 1, "b": 2}, {"b": 2.0, "a": 1}]', "has non-unique elements"),
        ({"anyOf": [{"type": "null"}] * 5000}, json.dumps(["x" * 100] * 10_000), "more than 20,000 steps"),
        ({"patternProperties": {f"^x{n}": {} for n in range(5000)}}, MANY_NAMES, "more than 20,000 steps"),
        ({"description": "x" * (1 << 18)}, "1", "more than 262,144 characters"),
        ({"not": {"$ref": "#"}}, "1", "more than 100 keywords within each other"),
        ({"items": [{"type": "null"}]}, "[1]", "/0: 1 is not of type"),
        ({"minimum": 1, "exclusiveMinimum": True}, "1", "/: 1 is less than or equal"),
        ({"dependencies": {"a": ["b"]}}, '{"a": 1}', "/: 'b' is a dependency"),
        ({"format": "date"}, '"x"', None),
        ({}, '{"a": ', "/: this is no complete JSON"),
        ({"items": False}, json.dumps([1] * 500), "/: Expected at most 0 items"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_hold_is_said_at_its_place(schema: Any, text: str, said: str | None) -> None:
    errors = schema_errors(json.dumps(schema), text)
    assert len(errors) <= 10
    assert (said is None) == (not errors)
    assert said is None or said in errors[0]


def test_what_cannot_be_enforced_is_left_out() -> None:
    with pytest.raises(InvalidParameter, match='or unenforced="check"'):
        schema_matcher(TAGS)
    matcher = schema_matcher(TAGS, unenforced="check")
    assert allows(matcher, '["a","a"]')
    assert not allows(matcher, '["ab"]')
    with pytest.raises(InvalidParameter, match=r"/minLength: .*Allowed: schemas without it\.$"):
        schema_matcher({**TAGS, "minLength": -1}, unenforced="check")


@pytest.mark.parametrize(
    "schema", [{"pattern": "a(?=b)"}, {"not": {"pattern": "a"}}, {"minimum": 2**60}, {"const": 2**60}]
)
def test_each_keyword_that_cannot_be_enforced_can_be_left_out(schema: Any) -> None:
    assert allows(schema_matcher(schema, unenforced="check"), '"x"')


def test_reasoning_is_not_checked() -> None:
    tokenizer, params = demo_tokenizer(), StructuredOutputsParams(json=TAGS, unenforced="check")
    token_ids = tokenizer.encode('Well, [1] or {</think>\n["a"]', add_special_tokens=False)
    assert FinalCheck(tokenizer, REASONING_PARSERS["qwen3"]).errors(params, token_ids) == []
    assert FinalCheck(tokenizer).errors(params, token_ids) == ["/: this is no complete JSON"]


@pytest.mark.parametrize("n", [1, 2])
def test_the_check_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    checks, may_end = threading.Semaphore(0), threading.Event()

    def errors(*_: Any) -> list[str]:
        checks.release()
        assert may_end.wait(30)
        return ["/: no"]

    monkeypatch.setattr(FinalCheck, "errors", errors)
    constraint = StructuredOutputsParams(json={"const": 1}, unenforced="check")

    async def generate() -> list[str] | None:
        async with AsyncEngine("demo", enable_multiprocessing=False, kv_cache_memory_bytes=32 << 20) as engine:

            async def last(params: SamplingParams) -> RequestOutput:
                return [output async for output in engine.generate("Who?", params)][-1]

            checked = asyncio.create_task(last(SamplingParams(structured_outputs=constraint, n=n)))
            assert await asyncio.to_thread(checks.acquire, timeout=30)
            other = await last(SamplingParams(max_tokens=2))
            assert other.outputs[0].schema_errors is None
            assert not checked.done()
            may_end.set()
            return (await checked).outputs[n - 1].schema_errors

    assert asyncio.run(generate()) == ["/: no"]


def test_the_result_says_what_does_not_hold() -> None:
    same = {"type": "array", "items": {"type": "string", "pattern": "^(aaa|bbb)$"}, "minItems": 3, "maxItems": 3}
    schema = {**same, "uniqueItems": True}
    tight = StructuredOutputsParams(json=schema, disable_any_whitespace=True, unenforced="check")
    with LLM("demo", structured_outputs_unenforced="check") as llm:
        checked, plain, other = (
            llm.generate("Who?", SamplingParams(structured_outputs=one, max_tokens=60, n=2, seed=0))[0]
            for one in (tight, {"json": {"const": 1}}, {"regex": "a"})
        )
        with pytest.raises(InvalidParameter, match="grammars cannot compare"):
            llm.generate("Who?", SamplingParams(structured_outputs={"json": schema, "unenforced": "refuse"}))
    for output in checked.outputs:
        assert output.schema_errors == schema_errors(json.dumps(schema), output.text)
        assert len(output.schema_errors) == 1
    assert plain.outputs[0].schema_errors == []
    assert other.outputs[0].schema_errors is None

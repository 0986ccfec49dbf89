"""Checks of steps follow the requests that a worker holds, by the messages alone."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.contract import (
    CachedRequestData,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePool,
    NewRequestData,
    Part,
    Parts,
    SamplingInput,
    SamplingParams,
    SchedulerOutput,
)
from penstock.contract.step_checks import StepChecks
from penstock.errors import InvalidMessage

BLOCK_SIZE = 4


@pytest.fixture
def checks() -> StepChecks:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    config = KVCacheConfig(
        pools=(KVCachePool(num_blocks=20),), groups=(KVCacheGroupSpec(layer_names=("a",), spec=spec),)
    )
    return StepChecks(config, max_num_reqs=2, max_num_tokens=16, max_model_len=24, vocab_size=50, max_drafts=3)


def new(req_id: str, num_tokens: int = 6, **fields: Any) -> NewRequestData:
    tokens = list(range(num_tokens))
    given = {"prompt_token_ids": tokens, "prefill_token_ids": tokens, "block_ids": ([1, 2],), "num_computed_tokens": 0}
    return NewRequestData(req_id=req_id, sampling_params=SamplingParams(seed=0), **{**given, **fields})


def added(*requests: NewRequestData, **fields: Any) -> SchedulerOutput:
    counts = {one.req_id: len(one.prefill_token_ids) - one.num_computed_tokens for one in requests}
    return SchedulerOutput(
        **{"step_id": 0, "scheduled_new_reqs": list(requests), "num_scheduled_tokens": counts, **fields}
    )


def going_on(step_id: int, num_computed: int, count: int = 1, req_id: str = "a", **fields: Any) -> SchedulerOutput:
    blocks = [fields.pop("blocks")] if "blocks" in fields else []
    cached = CachedRequestData(req_ids=[req_id], num_computed_tokens=[num_computed], new_block_ids=blocks)
    return SchedulerOutput(
        step_id=step_id, scheduled_cached_reqs=cached, num_scheduled_tokens={req_id: count}, **fields
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"block_ids": ([1, 20],)},
        {"block_ids": ([1, -1],)},
        {"block_ids": ([1],)},
        {"block_ids": (list(range(7)),)},
        {"block_ids": ([1, 2], [3])},
        {"prefill_token_ids": [0, 1, 2, 3, 4, 50]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": list(range(7))},
        {"num_computed_tokens": -1},
        {"num_computed_tokens": 6},
    ],
    ids=str,
)
def test_a_wrong_new_request_is_an_error_of_it_alone(checks: StepChecks, fields: dict[str, Any]) -> None:
    counts = {"num_scheduled_tokens": {"a": 6, "b": 6}}
    _, errors = checks.check(added(new("a", **fields), new("b"), **counts))
    assert list(errors) == ["a"]
    assert "Allowed: " in errors["a"]
    assert checks.check(going_on(1, 6, req_id="b")).errors == {}


@pytest.mark.parametrize(
    "step",
    [
        going_on(1, 5),
        going_on(1, 7),
        going_on(1, 6, count=2),
        going_on(1, 6, count=3, scheduled_spec_decode_tokens={"a": [1]}),
        going_on(1, 6, count=3, scheduled_spec_decode_tokens={"a": [1, 50]}),
        going_on(1, 6, count=5, scheduled_spec_decode_tokens={"a": [1, 1, 1, 1]}),
        going_on(1, 6, count=1, scheduled_spec_decode_tokens={"a": [1]}),
        going_on(1, 6, count=3, scheduled_spec_decode_tokens={"a": [1, 2]}),  # 9 positions, room for 8
        going_on(1, 6, blocks=([20],)),
        going_on(1, 6, blocks=([3], [3])),
    ],
    ids=str,
)
def test_a_wrong_step_of_a_held_request_is_an_error_of_it(checks: StepChecks, step: SchedulerOutput) -> None:
    assert checks.check(added(new("a"))).errors == {}
    assert list(checks.check(step).errors) == ["a"]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_scheduled_tokens": {}},
        {"num_scheduled_tokens": {"a": 0}},
        {"num_scheduled_tokens": {"a": 17}},
        {"num_scheduled_tokens": {"a": 6, "b": 1}},
        {"scheduled_new_reqs": [new("a"), new("a")]},
        {
            "scheduled_new_reqs": [new("a"), new("b"), new("c")],
            "num_scheduled_tokens": {"a": 1, "b": 1, "c": 1},
        },
        {"scheduled_cached_reqs": CachedRequestData(req_ids=["b"]), "num_scheduled_tokens": {"a": 6, "b": 1}},
        {"scheduled_spec_decode_tokens": {"z": [1]}},
        {"num_drafts_wanted": 4},
    ],
    ids=str,
)
def test_a_step_that_contradicts_itself_is_refused(checks: StepChecks, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage, match="Step 0 has .*Allowed: "):
        checks.check(added(new("a"), **fields))
    assert checks.check(added(new("a"))).errors == {}


def test_rejected_drafts_may_be_computed_again_and_no_more(checks: StepChecks) -> None:
    checks.check(added(new("a", block_ids=([1, 2, 3, 4],))))
    assert checks.check(going_on(1, 6, count=4, scheduled_spec_decode_tokens={"a": [1, 2, 3]})).errors == {}
    assert checks.check(going_on(2, 6)).errors != {}  # at least one token was computed
    assert checks.check(going_on(3, 8)).errors == {}
    assert checks.check(going_on(4, 12)).errors != {}


def test_a_step_repeats_the_one_that_it_names_until_a_block_is_missing(checks: StepChecks) -> None:
    checks.check(added(new("a")))
    assert not checks.check(going_on(1, 6)).may_repeat
    assert checks.check(going_on(2, 7, repeats_step_id=1)) == (True, {})
    may_repeat, errors = checks.check(going_on(3, 8, repeats_step_id=2))
    assert not may_repeat
    assert "positions=9" in errors["a"]
    assert checks.check(going_on(4, 8, blocks=([3],))) == (False, {})
    assert checks.check(going_on(5, 9, repeats_step_id=4, blocks=([4],))) == (True, {})
    assert checks.check(going_on(6, 10, repeats_step_id=5)) == (True, {})


@pytest.mark.parametrize(
    "fields",
    [{"repeats_step_id": 0}, {"finished_req_ids": {"b"}}, {"scheduled_spec_decode_tokens": {"a": []}}],
    ids=str,
)
def test_a_step_that_changes_more_repeats_none(checks: StepChecks, fields: dict[str, Any]) -> None:
    checks.check(added(new("a")))
    checks.check(going_on(1, 6))
    assert not checks.check(going_on(2, 7, **{"repeats_step_id": 1, **fields})).may_repeat


class Checked(Part, frozen=True, kw_only=True):
    feature = "checked"
    token_id: int

    def check(self, vocab_size: int) -> None:
        if self.token_id >= vocab_size:
            raise InvalidMessage(f"token_id: {self.token_id}")


def test_parts_of_a_steps_sampling_are_checked_by_their_types(checks: StepChecks) -> None:
    checks.check_sampling(SamplingInput(step_id=1))
    checks.check_sampling(SamplingInput(step_id=1, parts=Parts.of([Checked(token_id=checks.vocab_size - 1)])))
    with pytest.raises(InvalidMessage, match=f"Step 3 has token_id: {checks.vocab_size}"):
        checks.check_sampling(SamplingInput(step_id=3, parts=Parts.of([Checked(token_id=checks.vocab_size)])))

"""Bitmasks: masked tokens are never sampled, whatever the parameters, and other requests keep theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock.contract import Parts, SamplingParams, StructuredOutputsParams
from penstock.errors import InvalidMessage
from penstock.features.structured_output.bitmask import Bitmask
from penstock.features.structured_output.messages import BitmaskPart
from penstock.runner.sampling.failures import Failure, describe_failure
from penstock.runner.sampling.sampler import SamplerOutput
from penstock.step.logits_rows import DraftRows, LogitsRows
from support.plain_sampling import DEVICE, NUM_SLOTS, VOCAB_SIZE, HandDriven, random_logits

ANY = StructuredOutputsParams(json_object=True)
PROMPT = [1, 2, 3]
# By request: its slot, and what it may choose from.
SLOTS = {"a": 2, "b": 0, "c": 4}
ALLOWED = {"a": [3, 31, 32, 59], "c": [0, 1, 2, 7, 33]}
NUM_WORDS = -(-VOCAB_SIZE // 32)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 5, "temperature": 1.0, "structured_outputs": ANY, **fields})


def hand_driven(**config: object) -> HandDriven:
    return HandDriven(transforms=[Bitmask(DEVICE, NUM_SLOTS, VOCAB_SIZE)], **config)


def bitmask(allowed: Mapping[str, Sequence[Sequence[int]]]) -> Parts:
    """Parts of a step's sampling, with the bitmask rows of each request."""
    rows = [row for rows in allowed.values() for row in rows]
    words = np.zeros((len(rows), NUM_WORDS), np.uint32)
    for number, row in enumerate(rows):
        for token in row:
            words[number, token // 32] |= np.uint32(1 << token % 32)
    part = BitmaskPart(
        req_ids=list(allowed),
        bitmask=words.astype("<u4").tobytes(),
        num_rows=[len(rows) for rows in allowed.values()],
    )
    return Parts.of([part] if allowed else [])


def sampled(
    each: Mapping[str, SamplingParams], allowed: Mapping[str, Sequence[int]], *, max_rows: int = 100, **config: object
) -> dict[str, SamplerOutput]:
    """One step of requests that share a batch, by request."""
    driver = hand_driven(**config)
    driver.sampler.max_rows = max_rows
    for req_id, one in each.items():
        driver.add(SLOTS[req_id], one, PROMPT)
    driver.sampler.begin_step(bitmask({req_id: [row] for req_id, row in allowed.items()}), SLOTS)
    result = driver.step([SLOTS[req_id] for req_id in each], random_logits(3, seed=1)[: len(each)])
    return {
        req_id: SamplerOutput(result.sampled_token_ids[row], result.failures[row], result.logprobs, {})
        for row, req_id in enumerate(each)
    }


def tokens(outputs: Mapping[str, SamplerOutput]) -> dict[str, int]:
    assert not any(int(output.failures) for output in outputs.values())
    return {req_id: int(output.sampled_token_ids) for req_id, output in outputs.items()}


@pytest.mark.parametrize("max_rows", [1, 2, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 2, "min_p": 0.01},
        {"top_p": 0.5, "presence_penalty": 1.0, "logit_bias": {9: 100.0, 3: 1.0}},
        {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {9: 100.0}},
    ],
    ids=str,
)
def test_it_is_as_if_only_these_tokens_were_allowed(fields: dict[str, Any], max_rows: int) -> None:
    constrained = {"a": params(**fields), "b": params(structured_outputs=None, **fields), "c": params(**fields)}
    listed = {
        req_id: params(**fields, structured_outputs=None, allowed_token_ids=ALLOWED.get(req_id)) for req_id in "abc"
    }
    expected = tokens(sampled(listed, {}))
    assert tokens(sampled(constrained, ALLOWED, max_rows=max_rows)) == expected
    assert all(expected[req_id] in ALLOWED[req_id] for req_id in "ac")


def test_only_who_asked_for_a_form_is_constrained_and_only_by_this_step() -> None:
    plain = {req_id: params(structured_outputs=None, temperature=0.0) for req_id in "abc"}
    assert tokens(sampled(plain, ALLOWED)) == tokens(sampled(plain, {}))
    constrained = {req_id: params(temperature=0.0) for req_id in "abc"}
    assert tokens(sampled(constrained, {})) == tokens(sampled(plain, {}))


def test_who_leaves_takes_the_constraint_along() -> None:
    driver = hand_driven()
    driver.add(2, params(temperature=0.0), PROMPT)
    rows = driver.rows([2])
    assert not driver.sampler.is_plain_greedy(rows), "a step may not be chosen before its bitmask is there"
    driver.remove(2)
    driver.add(2, params(structured_outputs=None, temperature=0.0), PROMPT)
    assert driver.sampler.is_plain_greedy(driver.rows([2]))


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [4, 5]},
        {"bad_words_token_ids": [[token] for token in ALLOWED["a"]]},
        {"min_tokens": 3, "all_stop_token_ids": ALLOWED["a"]},
    ],
    ids=str,
)
def test_where_nothing_is_left_the_request_ends_and_others_go_on(fields: dict[str, Any]) -> None:
    outputs = sampled({"a": params(**fields), "c": params()}, ALLOWED)
    assert int(outputs["a"].failures) == Failure.NOTHING_LEFT
    assert "structured_outputs" in describe_failure(Failure.NOTHING_LEFT)
    assert int(outputs["c"].failures) == Failure.NONE
    assert int(outputs["c"].sampled_token_ids) in ALLOWED["c"]


def test_a_bitmask_that_allows_nothing_is_that_requests_failure() -> None:
    outputs = sampled({"a": params(), "c": params()}, {"a": [], "c": [1]})
    assert int(outputs["a"].failures) == Failure.NOTHING_LEFT
    assert int(outputs["c"].sampled_token_ids) == 1


def test_log_probabilities_are_of_the_raw_or_of_the_masked_distribution_as_the_mode_says() -> None:
    logits = random_logits(3, seed=1)[:1]
    raw = torch.log_softmax(logits[0], dim=-1)
    masked = torch.full_like(raw, -torch.inf)
    masked[ALLOWED["a"]] = torch.log_softmax(logits[0][ALLOWED["a"]], dim=-1)
    for mode, expected in (("raw_logprobs", raw), ("processed_logprobs", masked)):
        found = sampled({"a": params(logprobs=-1)}, ALLOWED, logprobs_mode=mode, max_logprobs=-1)["a"].logprobs
        assert found is not None
        by_token = torch.full_like(raw, torch.nan).scatter(0, found.token_ids_RN[0], found.logprobs_RN[0])
        torch.testing.assert_close(by_token, expected)


@pytest.mark.parametrize("max_rows", [1, 2, 100])
def test_each_draft_has_a_row_of_its_own(max_rows: int) -> None:
    driver = hand_driven()
    driver.sampler.max_rows = max_rows
    for req_id in "abc":
        driver.add(SLOTS[req_id], params(temperature=0.0), PROMPT)
    allowed = {"b": [[10], [11], [12]], "gone": [[1], [1]], "a": [[20], [21]], "c": [[30]]}
    driver.sampler.begin_step(bitmask(allowed), SLOTS)
    # "a" has one draft that is checked, "b" one of its two.
    numbers = np.array([0, 0, 1, 0, 1])
    slots = np.array([SLOTS[req_id] for req_id in "cbbaa"])
    drafts = DraftRows(np.array([0, 1, 1, 2, 2]), numbers, torch.from_numpy(numbers))
    rows = LogitsRows(torch.from_numpy(slots), slots, torch.from_numpy(2 + numbers), drafts)
    assert driver.sampler.sample(random_logits(5, seed=3), rows).sampled_token_ids.tolist() == [30, 10, 11, 20, 21]


def test_a_bitmask_has_a_row_of_each_request_and_draft() -> None:
    def part(num_bytes: int, num_rows: list[int]) -> BitmaskPart:
        return BitmaskPart(req_ids=["a", "b"], bitmask=bytes(num_bytes), num_rows=num_rows)

    part(4 * NUM_WORDS * 2, []).check(VOCAB_SIZE)
    part(4 * NUM_WORDS * 5, [4, 1]).check(VOCAB_SIZE)
    for wrong in (part(16, [1]), part(12, []), part(16, [3, -1]), part(0, []), part(24, [])):
        with pytest.raises(InvalidMessage, match="num_rows|bitmask"):
            wrong.check(VOCAB_SIZE)
    with pytest.raises(InvalidMessage, match="num_rows"):
        BitmaskPart(req_ids=[], bitmask=b"").check(VOCAB_SIZE)

"""Sampler: logits transforms combined, each request as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import SamplingParams
from penstock.device.base import PendingCopy
from penstock.device.cpu import CpuDevice
from penstock.errors import InvalidParameter
from penstock.runner.sampling.failures import Failure
from penstock.runner.sampling.min_tokens import MinTokens
from penstock.runner.sampling.penalties import Penalties
from penstock.step.logits_rows import LogitsRows
from support import plain_sampling
from support.plain_sampling import NUM_SLOTS, VOCAB_SIZE, HandDriven, random_logits, request_of

_tokens = st.integers(0, VOCAB_SIZE - 1)
_few_tokens = st.lists(_tokens, max_size=4)
_biases = st.sampled_from([-100.0, -3.0, 0.5, 4.0])

_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 59, 60, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, 0, 3, -1]),
    presence_penalty=st.sampled_from([0.0, 0.0, 2.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.none() | st.dictionaries(_tokens, _biases, max_size=4),
    allowed_token_ids=st.none() | st.lists(_tokens, min_size=1, max_size=20),
    bad_words_token_ids=st.just([]) | st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=8),
    min_tokens=st.sampled_from([0, 0, 3, 16]),
    stop_token_ids=_few_tokens,
    all_stop_token_ids=_few_tokens,
)


@dataclass
class _Request:
    params: SamplingParams
    prompt: list[int]
    slot: int
    logits_seed: int
    output: list[int] = field(default_factory=list)
    has_failed: bool = False

    def logits(self) -> torch.Tensor:
        """The model's next token, by the request and its length alone."""
        return random_logits(1, self.logits_seed * 100 + len(self.output))

    def expected(self) -> int | None:
        return plain_sampling.next_token(self.params, self.logits()[0].numpy(), self.prompt, self.output)


@settings(max_examples=60, deadline=None)
@given(params=st.lists(_params, min_size=1, max_size=10), seed=st.integers(0, 10_000))
def test_each_request_equals_a_restatement_whatever_shares_the_batch_and_after_preemptions(
    params: list[SamplingParams], seed: int
) -> None:
    rng = random.Random(seed)
    driver = HandDriven()
    slots = rng.sample(range(NUM_SLOTS), len(params))
    # Few different tokens, so that words and penalties meet what they are about.
    requests = [
        _Request(each, rng.choices(range(10), k=rng.randint(1, 8)), slot, rng.randrange(10_000))
        for each, slot in zip(params, slots, strict=True)
    ]
    for request in requests:
        driver.add(request.slot, request.params, request.prompt)
    for _ in range(7):
        step = [request for request in requests if rng.random() < 0.8 and not request.has_failed]
        if not step:
            continue
        rng.shuffle(step)
        logits = torch.cat([request.logits() for request in step])
        before = logits.clone()
        result = driver.step([request.slot for request in step], logits)
        if any(request.params.logprobs is not None for request in step):
            assert torch.equal(logits, before), "the raw logits must survive for the log-probabilities"
        for row, request in enumerate(step):
            expected = request.expected()
            request.has_failed = expected is None
            assert int(result.failures[row]) == (Failure.NOTHING_LEFT if request.has_failed else Failure.NONE)
            if expected is not None:
                assert int(result.sampled_token_ids[row]) == expected
                request.output.append(expected)
        for request in requests:
            if rng.random() < 0.15:
                driver.remove(request.slot)
                request.slot = rng.choice(sorted(set(range(NUM_SLOTS)) - driver.lengths.keys()))
                driver.add(request.slot, request.params, request.prompt, request.output)


def _alone(params: SamplingParams, logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits after all transforms, from the log-probabilities."""
    driver = HandDriven(logprobs_mode="processed_logits", max_logprobs=-1)
    driver.add(3, params, prompt, output)
    result = driver.step([3], logits).logprobs
    assert result is not None
    left = torch.full((VOCAB_SIZE,), torch.nan)
    return left.scatter(0, result.token_ids_RN[0], result.logprobs_RN[0])


PROMPT, OUTPUT = [1, 2, 3, 3, 30], [3, 4, 4, 5, 6]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [7, 3, 59, 0]},
        {"bad_words_token_ids": [[5, 6, 7], [6, 8], [9], [4, 6, 10], [30, 3, 4, 4, 5, 6, 11], [3, 4, 4, 5, 6, 12]]},
        {"min_tokens": 6, "stop_token_ids": [8], "all_stop_token_ids": [9]},
        {"min_tokens": 5, "stop_token_ids": [8], "all_stop_token_ids": [9]},
        {"logit_bias": {0: -100.0, 5: 1.25, 59: 100.0}},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 1.1},
        {"presence_penalty": -0.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4, "logit_bias": {4: 2.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(5))
def test_each_stage_alone_leaves_the_logits_of_a_restatement(fields: dict[str, Any], seed: int) -> None:
    params = SamplingParams(temperature=0, seed=0, logprobs=-1, **fields)
    logits = random_logits(1, seed)
    expected = plain_sampling.shaped(params, logits[0].numpy(), PROMPT, OUTPUT)
    assert torch.equal(_alone(params, logits, PROMPT, OUTPUT), torch.from_numpy(expected))


def test_tokens_of_unfinished_prefills_are_not_counted() -> None:
    params = SamplingParams(temperature=0, seed=0, presence_penalty=2.0, logprobs=-1)
    driver = HandDriven(logprobs_mode="processed_logits", max_logprobs=-1)
    driver.add(3, params, PROMPT)
    logits = random_logits(1, 0)
    driver.step([3], logits, num_sampled=[0])
    result = driver.step([3], logits).logprobs
    assert result is not None
    assert torch.equal(result.logprobs_RN[0, 1:], logits[0].sort(descending=True).values)


def test_the_minimal_length_is_idle_once_every_request_of_the_step_has_passed_it() -> None:
    driver = HandDriven()
    stage = next(stage for stage in driver.sampler.shaping if isinstance(stage, MinTokens))
    stops = {"stop_token_ids": [8], "all_stop_token_ids": [8]}
    driver.add(1, SamplingParams(temperature=0, seed=0, min_tokens=2, **stops), [5, 6])
    driver.add(4, SamplingParams(temperature=0, seed=0, min_tokens=4, **stops), [5])
    wants_to_stop = torch.zeros(2, VOCAB_SIZE)
    wants_to_stop[:, 8] = 9.0
    is_needed, tokens = [], []
    for step in range(7):
        # An unfinished prefill does not bring a request nearer to its minimum.
        num_sampled = [0, 0] if step == 0 else None
        tokens.append(driver.step([1, 4], wants_to_stop, num_sampled=num_sampled).sampled_token_ids.tolist())
        is_needed.append((stage.is_needed(np.array([1])), stage.is_needed(np.array([4]))))
    assert [first == 8 for first, _ in tokens] == [False, False, False, True, True, True, True]
    assert [second == 8 for _, second in tokens] == [False, False, False, False, False, True, True]
    assert is_needed == [(True, True)] * 3 + [(False, True)] * 2 + [(False, False)] * 2
    # The slot's next request has a minimum of its own.
    driver.remove(1)
    driver.add(1, SamplingParams(temperature=0, seed=0, min_tokens=1, **stops), [5, 6])
    assert int(driver.step([1], wants_to_stop[:1]).sampled_token_ids[0]) != 8


def test_a_report_that_comes_late_says_nothing_about_the_slots_next_request() -> None:
    device = LateDevice(num_threads=1)
    stage = MinTokens(device, num_slots=4, vocab_size=VOCAB_SIZE)
    params = SamplingParams(temperature=0, seed=0, min_tokens=3, stop_token_ids=[8])
    slots = np.array([2])
    rows = LogitsRows(torch.from_numpy(slots), slots, positions=torch.tensor([9]))
    stage.add_request(2, request_of(params, [5], [5]))
    stage.apply(torch.zeros(1, VOCAB_SIZE), rows)
    assert stage.is_needed(slots), "nothing is waited for"
    stage.remove_request(2)
    stage.add_request(2, request_of(params, [5] * 30, [5] * 30))
    device.has_arrived = True
    assert stage.is_needed(slots)
    assert stage.apply(torch.zeros(1, VOCAB_SIZE), rows)[0, 8] == float("-inf")


class LateDevice(CpuDevice):
    """A device whose copies to the host complete when the test says so."""

    has_arrived = False

    def download(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        copy, device = super().download(tensors), self

        class LateCopy(PendingCopy):
            tensors = copy.tensors

            def is_done(self) -> bool:
                return device.has_arrived

        return LateCopy()


def test_a_slot_forgets_its_last_owner() -> None:
    driver = HandDriven()
    logits = random_logits(1, 0)
    demanding = SamplingParams(
        temperature=1.5,
        top_k=3,
        top_p=0.5,
        min_p=0.2,
        seed=4,
        logprobs=7,
        presence_penalty=2.0,
        allowed_token_ids=[5],
        logit_bias={5: 1.0},
        bad_words_token_ids=[[1, 2]],
        min_tokens=9,
        stop_token_ids=[4],
    )
    driver.add(2, demanding, [5])
    assert driver.step([2], logits).logprobs is not None
    driver.remove(2)
    driver.add(2, SamplingParams(temperature=0.0, seed=0), [5])
    result = driver.step([2], logits)
    assert result.logprobs is None
    assert int(result.sampled_token_ids[0]) == int(logits.argmax())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": [7]}),
        ({"logit_bias": {5: 100.0}}, {"logit_bias": {7: 100.0}}),
        ({"presence_penalty": 2.0, "logit_bias": {5: 100.0}}, {"logit_bias": {7: 100.0}}),
    ],
    ids=str,
)
def test_rows_that_stay_the_same_show_the_slots_new_owner(before: dict[str, Any], after: dict[str, Any]) -> None:
    driver = HandDriven()
    driver.add(2, SamplingParams(temperature=0, seed=0, **before), [9])
    rows, logits = driver.rows([2]), random_logits(1, 0)
    assert int(driver.sampler.sample(logits, rows).sampled_token_ids[0]) in (5, 6)
    driver.remove(2)
    driver.add(2, SamplingParams(temperature=0, seed=0, **after), [9])
    assert int(driver.sampler.sample(logits, rows).sampled_token_ids[0]) == 7


def test_penalties_take_no_memory_before_one_is_asked_for() -> None:
    driver = HandDriven()
    penalties = next(stage for stage in driver.sampler.shaping if isinstance(stage, Penalties))
    driver.add(0, SamplingParams(temperature=0, seed=0, logit_bias={1: 1.0}), [5])
    driver.step([0], random_logits(1, 0))
    assert penalties._table_SV is None
    driver.add(1, SamplingParams(temperature=0, seed=0, presence_penalty=1.0), [5])
    driver.step([0, 1], random_logits(2, 0))
    assert penalties._table_SV is not None
    assert penalties._table_SV.shape == (NUM_SLOTS, VOCAB_SIZE)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [1, VOCAB_SIZE]},
        {"bad_words_token_ids": [[1, VOCAB_SIZE]]},
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"min_tokens": 1, "stop_token_ids": [VOCAB_SIZE]},
    ],
    ids=str,
)
def test_a_token_outside_the_vocabulary_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=f"has {VOCAB_SIZE}, but .*Allowed: 0 to {VOCAB_SIZE - 1}"):
        HandDriven().add(0, SamplingParams(seed=0, **fields), [5])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(temperature: float, bad: float) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=1),
        SamplingParams(temperature=temperature, seed=1),
        SamplingParams(temperature=temperature, seed=1, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.8 - temperature, seed=1),
        SamplingParams(temperature=temperature, seed=1, allowed_token_ids=[1], logit_bias={1: -100.0}),
        SamplingParams(temperature=temperature, seed=1, allowed_token_ids=[1], bad_words_token_ids=[[1]]),
    ]
    driver = HandDriven()
    for slot, each in enumerate(params):
        driver.add(slot, each, [5])
    logits = random_logits(len(params), 0)
    undisturbed = driver.step(range(4), logits[:4]).sampled_token_ids.tolist()
    for slot, each in enumerate(params):
        driver.add(slot, each, [5])
    logits[1, 17] = bad
    logits[3, 17] = bad
    result = driver.step(range(6), logits)
    assert result.failures.tolist() == [
        Failure.NONE,
        Failure.NOT_FINITE,
        Failure.NONE,
        Failure.NOT_FINITE,
        Failure.NONE,
        Failure.NOTHING_LEFT,
    ]
    tokens = result.sampled_token_ids.tolist()
    assert [tokens[0], tokens[2], tokens[4]] == [undisturbed[0], undisturbed[2], 1]
    assert all(0 <= token < VOCAB_SIZE for token in tokens)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_are_of_the_mode_asked_for(mode: str) -> None:
    params = SamplingParams(temperature=0.5, top_k=9, seed=1, logprobs=4, logit_bias={3: 2.0}, repetition_penalty=1.5)
    driver = HandDriven(logprobs_mode=mode)
    driver.add(0, params, PROMPT, OUTPUT)
    raw = random_logits(1, 0)
    outcome = driver.step([0], raw)
    result = outcome.logprobs
    assert result is not None
    expected = raw[0].double().numpy()
    if mode.startswith("processed"):
        values = plain_sampling.shaped(params, raw[0].numpy(), PROMPT, OUTPUT)
        is_kept = plain_sampling.truncated(params, values) > 0
        expected = np.where(is_kept, values / np.float32(0.5), -np.inf).astype(np.float64)
    order = (-expected).argsort(kind="stable")
    if mode.endswith("logprobs"):
        expected = torch.log_softmax(torch.from_numpy(expected), dim=-1).numpy()
    ids = result.token_ids_RN[0].numpy()
    assert ids[0] == int(outcome.sampled_token_ids[0])
    assert ids[1:].tolist() == order[:4].tolist()
    np.testing.assert_allclose(result.logprobs_RN[0].numpy(), expected[ids], atol=1e-5)
    assert int(result.ranks_R[0]) == order.tolist().index(ids[0]) + 1


def test_all_logprobs_are_a_whole_vocabulary() -> None:
    driver = HandDriven()
    driver.add(0, SamplingParams(temperature=0, seed=0, logprobs=-1), [5])
    driver.add(1, SamplingParams(temperature=0, seed=0, logprobs=2), [5])
    raw = random_logits(2, 0)
    result = driver.step([0, 1], raw).logprobs
    assert result is not None
    assert result.token_ids_RN.shape == (2, VOCAB_SIZE + 1)
    expected = torch.log_softmax(raw, dim=-1)
    assert torch.allclose(result.logprobs_RN, expected.gather(-1, result.token_ids_RN), atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(params=st.lists(_params, min_size=3, max_size=10), seed=st.integers(0, 10_000))
def test_a_batch_that_is_sampled_in_parts_gives_the_same(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(len(params), seed)
    logits[1, 3] = float("nan")
    results = []
    for max_rows in (len(params), 2):
        driver = HandDriven()
        driver.sampler.max_rows = max_rows
        for slot, each in enumerate(params):
            driver.add(slot, each, PROMPT, OUTPUT)
        results.append(driver.step(range(len(params)), logits))
    whole, parts = results
    assert parts.sampled_token_ids.tolist() == whole.sampled_token_ids.tolist()
    assert parts.failures.tolist() == whole.failures.tolist()
    assert (parts.logprobs is None) == (whole.logprobs is None)
    if whole.logprobs is not None and parts.logprobs is not None:
        for column_of_parts, column in zip(parts.logprobs, whole.logprobs, strict=True):
            torch.testing.assert_close(column_of_parts, column, rtol=0, atol=1e-6, equal_nan=True)

"""Verification of drafts: any drafts, accepted or not, leave the tokens of a run without speculative decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.config import SamplingConfig
from penstock.contract import CachedRequestData, NewRequestData, RpcCall, SamplingInput, SamplingParams, SchedulerOutput
from penstock.kernels import step_state
from penstock.kernels.native import NATIVE
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.runner.sampling import LogitsProcessor, LogitsRows
from support.checkpoints import VOCAB_SIZE as REAL_VOCAB_SIZE
from support.checkpoints import tiny_checkpoint
from support.engines import make_core
from support.runners import VOCAB_SIZE, ArithmeticModel, Driver, make_runner, new_request, next_token

MAX_DRAFTS = 4
NUM_TOKENS = 14
BLOCKS_EACH = 10


class ByPosition(LogitsProcessor):
    """Prefers a token that depends on the last one and its position only."""

    name = "by_position"
    takes_drafts = True

    def add_request(self, slot: int, params: SamplingParams, *token_ids: Sequence[int]) -> bool:
        return self.name in (params.extra_args or {})

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        last = self.context.token_ids[rows.slots, rows.positions].long()
        return logits.scatter_(1, ((last + rows.positions) % logits.shape[1]).unsqueeze(-1), 1.9)


class ByCalls(LogitsProcessor):
    """Prefers another token in every call, so it must be called exactly once per token."""

    name = "by_calls"

    def add_request(self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> bool:
        self.calls = getattr(self, "calls", torch.zeros(self.context.num_slots, dtype=torch.int64))
        self.calls[slot] = len(output)
        return self.name in (params.extra_args or {})

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        assert len(set(rows.slots_np.tolist())) == len(rows.slots_np)
        self.calls[rows.slots] += 1
        return logits.scatter_(1, (self.calls[rows.slots] * 5 % logits.shape[1]).unsqueeze(-1), 1.9)


@dataclass
class _Request:
    """A request and its run so far; `computed`: computed tokens in the scheduler's view."""

    req_id: str
    prompt: list[int]
    params: SamplingParams
    first_block: int
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float]]] = field(default_factory=list)
    num_drafts: int = 0
    num_accepted: int = 0

    def take(self, tokens: list[int], rows: list[tuple[list[int], list[float]]]) -> None:
        self.tokens += tokens
        self.logprobs += rows


class Speculator:
    """Plays the scheduler and the speculator: drafts a known part of the continuation and random tokens after it.

    Some drafts are in the message, some were put on the device before. Without `truth` nothing is drafted.
    """

    def __init__(self, runner: ModelRunner, seed: int, truth: dict[str, list[int]] | None) -> None:
        self.runner = runner
        self.rng = random.Random(seed)
        self.truth = truth
        self.step_id = 0

    def serve(self, requests: list[_Request]) -> None:
        known: set[str] = set()
        while left := [each for each in requests if len(each.tokens) < NUM_TOKENS]:
            self._step([each for each in left if self.rng.random() < 0.8] or left, known)

    def _step(self, step: list[_Request], known: set[str]) -> None:
        counts, drafts = {}, {}
        self.rng.shuffle(step)
        for each in step:
            left_of_prompt = len(each.prompt) - each.computed
            if not each.tokens:
                counts[each.req_id] = self.rng.randint(1, left_of_prompt)
                continue
            drafts[each.req_id] = self._draft(each)
            counts[each.req_id] = 1 + len(drafts[each.req_id])
        output = SchedulerOutput(
            step_id=self.step_id,
            scheduled_new_reqs=[self._new(each) for each in step if each.req_id not in known],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[each.req_id for each in step if each.req_id in known],
                num_computed_tokens=[each.computed for each in step if each.req_id in known],
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={
                req_id: self._hand_over(req_id, tokens) for req_id, tokens in drafts.items() if tokens
            },
        )
        known.update(counts)
        self.step_id += 1
        self.runner.execute_model(output)
        result = self.runner.sample_tokens(SamplingInput(step_id=output.step_id)).get_output(5.0)
        assert not result.errors
        logprobs = result.logprobs
        rows = [] if logprobs is None else list(zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True))
        by_id = {each.req_id: each for each in step}
        assert set(result.req_ids) == set(by_id)
        for req_id, tokens in zip(result.req_ids, result.sampled_token_ids, strict=True):
            each, num_drafts = by_id[req_id], len(drafts.get(req_id, ()))
            num_rejected = num_drafts - max(0, len(tokens) - 1)
            each.computed += counts[req_id] - num_rejected
            each.num_drafts += num_drafts
            each.num_accepted += num_drafts - num_rejected
            each.take(tokens, rows[: len(tokens)])
            del rows[: len(tokens)]
            slot = self.runner.requests.slot_of[req_id]
            assert int(self.runner.requests.num_computed_tokens.tensor[slot]) == each.computed
            assert int(self.runner.requests.total_len.tensor[slot]) == len(each.prompt) + len(each.tokens)
        assert not rows

    def _draft(self, request: _Request) -> list[int]:
        if self.truth is None:
            return []
        ahead = self.truth[request.req_id][len(request.tokens) :][: self.rng.randint(0, MAX_DRAFTS)]
        num_right = self.rng.randint(0, len(ahead))
        return ahead[:num_right] + [self.rng.randrange(VOCAB_SIZE) for _ in ahead[num_right:]]

    def _hand_over(self, req_id: str, tokens: list[int]) -> list[int]:
        slot = self.runner.requests.slot_of[req_id]
        if self.rng.random() < 0.5:
            return tokens
        self.runner.requests.draft_token_ids.tensor[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        return [-1] * len(tokens)

    def _new(self, each: _Request) -> NewRequestData:
        # Groups may share memory, so none may have another's blocks.
        firsts = [each.first_block + 100 * group for group in range(len(self.runner.block_tables.block_sizes))]
        return NewRequestData(
            req_id=each.req_id,
            prompt_token_ids=each.prompt,
            prefill_token_ids=each.prompt,
            sampling_params=each.params,
            block_ids=tuple(list(range(first, first + BLOCKS_EACH)) for first in firsts),
            num_computed_tokens=0,
        )


DRAWN: dict[str, Any] = {"temperature": 1.0}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {**DRAWN, "logprobs": 2},
    {**DRAWN, "top_k": 5, "min_p": 0.01},
    {**DRAWN, "presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {4: 1.0}},
    {**DRAWN, "bad_words_token_ids": [[1, 2], [7], *([a, b] for a in range(20) for b in range(20, 40))]},
    {**DRAWN, "min_tokens": 7, "stop_token_ids": list(range(60))},
    {**DRAWN, "allowed_token_ids": list(range(10, 30)), "logprobs": 0},
    {
        **DRAWN,
        "allowed_token_ids": [1, 2, 3, 4],
        "extra_args": {"thinking_budget": {"budget": 3, "start_token_ids": [1], "end_token_ids": [2, 3]}},
    },
    {**DRAWN, "extra_args": {"by_position": True}, "logprobs": 1},
    {"temperature": 0.0, "extra_args": {"by_calls": True}},
]


def _requests(seed: int, kinds: list[dict[str, Any]]) -> list[_Request]:
    rng = random.Random(seed)
    return [
        _Request(
            f"r{index}",
            [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 12))],
            SamplingParams(seed=seed + index, **kind),
            first_block=1 + BLOCKS_EACH * index,
        )
        for index, kind in enumerate(kinds)
    ]


def _assert_as_without_drafts(make: Any, seed: int, kinds: list[dict[str, Any]]) -> list[_Request]:
    plain = _requests(seed, kinds)
    Speculator(make(), seed, None).serve(plain)
    truth = {each.req_id: each.tokens for each in plain}
    drafted = _requests(seed, kinds)
    Speculator(make(), seed + 1, truth).serve(drafted)
    for expected, found in zip(plain, drafted, strict=True):
        assert found.tokens[:NUM_TOKENS] == expected.tokens[:NUM_TOKENS], expected.params
        if expected.params.logprobs is not None:
            # A step's rows are as wide as its most demanding request wants.
            width = 1 + expected.params.logprobs
            for (ids, values), (right_ids, right_values) in zip(found.logprobs, expected.logprobs, strict=False):
                assert ids[:width] == right_ids[:width]
                assert values[:width] == pytest.approx(right_values[:width], abs=1e-5)
            assert len(found.logprobs) == len(found.tokens)
    return drafted


@pytest.fixture(params=["native", "plain"])
def _bind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's bookkeeping in C++, or by its specification in torch."""
    if request.param == "plain":
        monkeypatch.setattr(step_state, "bind_native_step", lambda *arguments: None)
    elif NATIVE is None:
        pytest.skip("the C++ kernels were not built")


@pytest.mark.usefixtures("_bind")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_rows", [1000, 3])
@pytest.mark.one_case_quick
def test_drafts_change_no_token_and_no_log_probability(seed: int, max_rows: int) -> None:
    def make() -> ModelRunner:
        sampling = SamplingConfig(logits_processors=(ByPosition, ByCalls))
        runner = make_runner(
            max_num_reqs=len(KINDS), max_model_len=40, num_blocks=128, max_drafts=MAX_DRAFTS, sampling=sampling
        )
        runner.sampler.max_rows = max_rows
        return runner

    drafted = _assert_as_without_drafts(make, seed, KINDS)
    *others, by_calls = drafted
    assert sum(each.num_accepted for each in others) > 20
    assert sum(each.num_drafts - each.num_accepted for each in others) > 20
    # Its processor cannot say what it would do after a draft.
    assert by_calls.num_drafts > 0
    assert by_calls.num_accepted == 0


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("llama", {"attention_backend": "cpu_paged"}),
        ("llama", {"attention_backend": "reference"}),
    ],
    ids=str,
)
def test_what_rejected_drafts_left_in_the_cache_is_never_read(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    tiny_checkpoint(tmp_path, family)
    core = make_core(tmp_path, dtype="float32", block_size=4, max_model_len=40, **options)
    (worker,) = core.collective_rpc(RpcCall(lambda worker: worker))
    kinds = [{"temperature": 0.0, "logprobs": 2}, {**DRAWN, "logprobs": 2}, {"temperature": 0.0}, DRAWN]

    def make() -> ModelRunner:
        return ModelRunner(
            worker.own_device,
            worker.weights.language_model,
            worker.weights.layers,
            core.kv_cache_config,
            RunnerLimits(4, max_num_tokens=64, max_model_len=40, vocab_size=REAL_VOCAB_SIZE, max_drafts=MAX_DRAFTS),
            attention_backend=options.get("attention_backend"),
        )

    drafted = _assert_as_without_drafts(make, 5, kinds)
    core.close()
    assert sum(each.num_accepted for each in drafted) > 5
    assert sum(each.num_drafts - each.num_accepted for each in drafted) > 5


class _FailsAfter(ArithmeticModel):
    """Its logits are NaN after one token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def __call__(self, input_ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        hidden = super().__call__(input_ids, positions, context)
        is_bad = context.narrowed(input_ids == self.token).unsqueeze(-1)
        return hidden.masked_fill(is_bad, -1.0)

    def compute_logits(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        return super().compute_logits(hidden.clamp(min=0), context).masked_fill(hidden < 0, torch.nan)


def test_a_row_without_a_token_ends_its_request_in_the_step_that_reaches_it_as_the_last_known_token() -> None:
    prompt = [5, 6]
    first = next_token(6, 1)
    second = next_token(first, 2)
    driver = Driver(make_runner(model=_FailsAfter(second), max_drafts=2))
    assert driver.tokens({"a": 2}, [new_request("a", prompt)]) == {"a": [first]}
    drafted = driver.step({"a": 3}, drafts={"a": [second, 1]})
    assert drafted.sampled_token_ids == [[second]]
    assert not drafted.errors
    driver.computed["a"] -= 2
    failed = driver.step({"a": 1})
    assert "NaN" in failed.errors["a"]
    assert failed.not_finite_req_ids == ["a"]


def test_more_drafts_than_a_worker_takes_end_their_request_by_name() -> None:
    driver = Driver(make_runner(max_drafts=1))
    driver.step({"a": 2, "b": 1}, [new_request("a", [5, 6]), new_request("b", [7], first_block=20)])
    output = driver.step({"a": 3, "b": 1}, drafts={"a": [1, 2]})
    assert "2 drafts of this request; this worker takes up to 1" in output.errors["a"]
    assert output.req_ids == ["b"]

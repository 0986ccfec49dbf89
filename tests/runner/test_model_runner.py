"""Model runner steps: worked traces, and invariants of asynchronous scheduling."""

from __future__ import annotations

import pytest
import torch

from penstock.attention import ForwardContext
from penstock.config import DeviceConfig
from penstock.contract import NewRequestData, SamplingInput, SamplingParams, SchedulerOutput
from penstock.device import create_device
from penstock.errors import LifecycleError, WaitTimeout
from penstock.kernels.bound_step import StepOutcome
from penstock.runner.async_output import AsyncOutput
from penstock.runner.dummy_runs import run_dummy_batch
from penstock.runner.sampling.failures import Failure
from support.runners import ArithmeticModel, Driver, make_runner, new_request, next_token, state_of

PROMPT = [11, 3, 8, 20, 5, 60, 2, 9, 33, 4]


def _continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


def test_a_chunked_prefill_samples_nothing_until_its_last_chunk() -> None:
    driver = Driver(make_runner())
    assert driver.tokens({"a": 4}, [new_request("a", PROMPT)]) == {"a": []}
    assert state_of(driver.runner, "a") == (4, 10)
    assert driver.tokens({"a": 4}) == {"a": []}
    assert state_of(driver.runner, "a") == (8, 10)
    first = driver.tokens({"a": 2})["a"]
    assert first == _continuation(PROMPT, 1)
    assert state_of(driver.runner, "a") == (10, 11)
    assert first + driver.tokens({"a": 1})["a"] == _continuation(PROMPT, 2)
    assert state_of(driver.runner, "a") == (11, 12)


def test_the_model_reads_the_right_tokens_at_the_right_positions() -> None:
    driver = Driver(make_runner())
    driver.step({"a": 4, "b": 2}, [new_request("a", PROMPT), new_request("b", [7, 8], first_block=20)])
    driver.step({"a": 6, "b": 1})
    model = driver.runner.model
    assert isinstance(model, ArithmeticModel)
    assert model.calls[0] == ([7, 8, 11, 3, 8, 20], [0, 1, 0, 1, 2, 3])
    assert model.calls[1] == ([next_token(8, 1), 5, 60, 2, 9, 33, 4], [2, 4, 5, 6, 7, 8, 9])


def test_batches_are_ordered_by_tokens_and_results_carry_their_request() -> None:
    driver = Driver(make_runner())
    output = driver.step(
        {"long": 10, "short": 1, "middle": 3},
        [
            new_request("long", PROMPT),
            new_request("short", [4], first_block=20),
            new_request("middle", [1, 2, 3], first_block=30),
        ],
    )
    assert output.req_ids == ["short", "middle", "long"]
    assert output.sampled_token_ids == [[next_token(4, 0)], [next_token(3, 2)], _continuation(PROMPT, 1)]


def test_the_next_step_may_be_launched_before_the_last_ones_tokens_are_read() -> None:
    driver = Driver(make_runner())
    runner = driver.runner
    handles = []
    for step in range(5):
        new = [new_request("a", PROMPT)] if step == 0 else []
        output = driver.launch({"a": 10 if step == 0 else 1}, new)
        handles.append(runner.sample_tokens(SamplingInput(step_id=output.step_id)))
    tokens = [token for handle in handles for token in handle.get_output(5.0).sampled_token_ids[0]]
    assert tokens == _continuation(PROMPT, 5)


def test_a_preempted_request_comes_back_as_a_new_one_and_goes_on() -> None:
    driver = Driver(make_runner())
    generated = driver.tokens({"a": 10}, [new_request("a", PROMPT)])["a"]
    generated += driver.tokens({"a": 1})["a"]
    generated += driver.tokens({"a": 1})["a"]
    assert state_of(driver.runner, "a") == (12, 13)
    driver.step({}, preempted={"a"})
    assert driver.runner.requests.num_reqs == 0
    back = new_request("a", PROMPT, generated=generated, num_computed=8, first_block=30)
    assert driver.tokens({"a": 3}, [back]) == {"a": []}
    fourth = driver.tokens({"a": 2})["a"]
    assert generated + fourth == _continuation(PROMPT, 4)
    slot = driver.runner.requests.slot_of["a"]
    assert driver.runner.requests.prefill_len.host[slot] == 13


def test_an_updated_request_replaces_the_one_of_the_same_id() -> None:
    driver = Driver(make_runner(max_num_reqs=1))
    generated = driver.tokens({"a": 5}, [new_request("a", PROMPT[:5])])["a"]
    grown = PROMPT[:5] + generated + [40, 41, 42]
    assert driver.tokens({"a": 3}, [new_request("a", grown, num_computed=6)])["a"] == _continuation(grown, 1)
    assert driver.runner.requests.num_reqs == 1


def test_a_whole_prefix_hit_runs_one_prompt_token() -> None:
    driver = Driver(make_runner())
    assert driver.tokens({"a": 1}, [new_request("a", PROMPT, num_computed=9)])["a"] == _continuation(PROMPT, 1)


def test_slots_never_move_and_are_reused_after_they_are_freed() -> None:
    driver = Driver(make_runner(max_num_reqs=3))
    requests = [new_request(name, [index + 1], first_block=1 + 8 * index) for index, name in enumerate("abc")]
    driver.step({"a": 1, "b": 1, "c": 1}, requests)
    before = dict(driver.runner.requests.slot_of)
    driver.step({"a": 1, "c": 1}, finished={"b"})
    assert driver.runner.requests.slot_of == {"a": before["a"], "c": before["c"]}
    driver.step({"c": 1, "d": 1, "a": 1}, [new_request("d", [50], first_block=40)])
    assert driver.runner.requests.slot_of == {"a": before["a"], "c": before["c"], "d": before["b"]}


def test_finishing_and_adding_in_one_step_frees_first() -> None:
    driver = Driver(make_runner(max_num_reqs=1))
    driver.step({"a": 1}, [new_request("a", [1])])
    assert driver.tokens({"b": 1}, [new_request("b", [2])], finished={"a"}) == {"b": [next_token(2, 0)]}


def test_a_step_without_tokens_only_updates_state() -> None:
    driver = Driver(make_runner())
    output = driver.step({}, finished={"never seen"})
    assert output.req_ids == []
    assert output.step_id == driver.step_id
    model = driver.runner.model
    assert isinstance(model, ArithmeticModel)
    assert model.calls == []


def test_sampling_a_step_twice_or_one_never_executed_is_refused() -> None:
    driver = Driver(make_runner())
    with pytest.raises(LifecycleError, match="step 7, which is not waiting"):
        driver.runner.sample_tokens(SamplingInput(step_id=7))
    driver.step({"a": 1}, [new_request("a", [1])])
    with pytest.raises(LifecycleError, match="step 1, which is not waiting"):
        driver.runner.sample_tokens(SamplingInput(step_id=1))
    output = driver.launch({"a": 1})
    with pytest.raises(LifecycleError, match="Step 2 was executed before and is still waiting"):
        driver.runner.execute_model(output)


def test_a_step_out_of_turn_is_refused_by_name_and_changes_nothing() -> None:
    driver = Driver(make_runner())
    runner = driver.runner
    first = driver.launch({"a": 1, "b": 1}, [new_request("a", [1]), new_request("b", [2], first_block=20)])
    with pytest.raises(LifecycleError, match=r"Step 2 needs the tokens of step 1 \(requests b\), .* not sampled"):
        driver.launch({"b": 1})
    with pytest.raises(LifecycleError, match=r"Step 3 came while the inputs of step 1 \(requests a, b\) are in use"):
        driver.launch({"c": 1}, [new_request("c", [3], first_block=30)])
    assert set(runner.requests.slot_of) == {"a", "b"}
    ends = SchedulerOutput(step_id=7, finished_req_ids={"x"})
    runner.execute_model(ends)
    with pytest.raises(LifecycleError, match=r"names step 7, but it is the turn of step 1 \(requests a, b\)"):
        runner.sample_tokens(SamplingInput(step_id=7))
    runner.sample_tokens(SamplingInput(step_id=first.step_id))
    runner.sample_tokens(SamplingInput(step_id=7))
    with pytest.raises(LifecycleError, match="Step 6 came after step 7"):
        runner.execute_model(SchedulerOutput(step_id=6))


def test_a_request_that_cannot_be_added_fails_alone_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_runner(max_num_reqs=2))
    sampler = driver.runner.sampler
    add = sampler.add

    def add_or_fail(slot: int, request: NewRequestData) -> None:
        if request.sampling_params.seed == 666:
            raise ValueError("this seed is cursed")
        add(slot, request)

    monkeypatch.setattr(sampler, "add", add_or_fail)
    bad = new_request("bad", [5, 6], first_block=20, params=SamplingParams(temperature=0, seed=666))
    output = driver.step({"bad": 2, "good": 1}, [bad, new_request("good", [9])])
    assert output.errors == {"bad": "ValueError: this seed is cursed"}
    assert output.req_ids == ["good"]
    assert output.sampled_token_ids == [[next_token(9, 0)]]
    assert set(driver.runner.requests.slot_of) == {"good"}
    late = driver.step({"bad": 1, "good": 1})
    assert "does not hold" in late.errors["bad"]
    assert late.req_ids == ["good"]
    assert driver.tokens({"next": 1}, [new_request("next", [3], first_block=30)]) == {"next": [next_token(3, 0)]}


def test_nothing_is_written_for_a_request_that_cannot_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its staged writes would race with those of the slot's next owner in the same step."""
    driver = Driver(make_runner())
    driver.step({"good": 1}, [new_request("good", [9])])
    before = _snapshot(driver)

    def fail(*arguments: object) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(driver.runner.prompt_logprobs, "add", fail)
    output = driver.step({"bad": 10}, [new_request("bad", PROMPT, first_block=20)])

    assert output.errors == {"bad": "ValueError: not this one"}
    assert all(torch.equal(old, new) for old, new in zip(before, _snapshot(driver), strict=True))


def test_too_many_blocks_are_an_error_of_that_request() -> None:
    driver = Driver(make_runner(max_model_len=16))
    output = driver.step({"bad": 1}, [new_request("bad", [1], num_blocks=5)])
    assert "block_ids=5 blocks is not valid. Allowed: at most 4" in output.errors["bad"]
    assert driver.runner.requests.num_reqs == 0


def _snapshot(driver: Driver) -> list[torch.Tensor]:
    runner = driver.runner
    return [
        runner.requests.all_token_ids.tensor.clone(),
        runner.requests.total_len.tensor.clone(),
        runner.requests.num_computed_tokens.tensor.clone(),
        runner.block_tables.table(0).clone(),
        runner.kv_cache.layer_memory("layer.0").clone(),
        torch.get_rng_state(),
    ]


def test_dummy_batches_touch_no_state_no_block_and_no_random_stream() -> None:
    driver = Driver(make_runner())
    first = driver.tokens({"a": 10}, [new_request("a", PROMPT)])["a"]
    before = _snapshot(driver)
    run_dummy_batch(driver.runner, num_tokens=6, num_reqs=3)
    run_dummy_batch(driver.runner, num_tokens=1, num_reqs=1)
    assert all(torch.equal(old, new) for old, new in zip(before, _snapshot(driver), strict=True))
    assert first + driver.tokens({"a": 1})["a"] == _continuation(PROMPT, 2)


class _ModelWithNaN(ArithmeticModel):
    """Its logits are NaN after the token 13."""

    def compute_logits(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        is_bad = hidden == next_token(13, 0)
        return super().compute_logits(hidden, context).masked_fill(is_bad, torch.nan)


def test_blocks_are_cleared_for_which_one_gets_them_where_the_step_says_so() -> None:
    driver = Driver(make_runner(model=_ModelWithNaN()))
    memory = driver.runner.kv_cache.layer_memory("layer.0")
    requests = [new_request("a", PROMPT[:4], num_blocks=1), new_request("bad", [13], first_block=20, num_blocks=2)]
    errors = driver.step({"a": 4, "bad": 1}, requests).errors
    assert errors.keys() == {"bad"}
    memory[:, 20:24] = torch.nan

    # A decoding request gets one of the blocks, a new one two.
    driver.step(
        {"a": 1, "b": 3},
        [new_request("b", [1, 2, 3], first_block=22, num_blocks=2)],
        finished={"bad"},
        new_blocks={"a": ([20],)},
        clears_blocks=True,
    )

    assert memory[:, [20, 22, 23]].isfinite().all()
    assert memory[:, 21].isnan().all()


def test_of_a_row_without_a_token_that_counts_only_nan_is_a_failure() -> None:
    failures = [Failure.NONE, Failure.NOT_FINITE, Failure.NOTHING_LEFT] * 2
    output = AsyncOutput(
        create_device(DeviceConfig(device="cpu", num_threads=1)),
        step_id=1,
        req_ids=["part", "part, nan", "part, none left", "last", "last, nan", "last, none left"],
        outcome=StepOutcome(torch.tensor([[7] * 6, [0, 0, 0, 1, 1, 1], [0] * 6, failures]).T),
        logprobs=None,
        errors={"unknown": "no slot"},
        rank=0,
    ).get_output(5.0)
    assert output.sampled_token_ids == [[], [], [], [7], [7], [7]]
    assert output.errors.keys() == {"unknown", "part, nan", "last, nan", "last, none left"}
    assert output.not_finite_req_ids == ["part, nan", "last, nan"]


class _NeverDone:
    """A device whose copies never arrive."""

    def download(self, tensors: object) -> _NeverDone:
        return self

    def is_done(self) -> bool:
        return False


def test_waiting_for_tokens_has_a_limit_and_says_who_waits_for_what() -> None:
    output = AsyncOutput(
        _NeverDone(),  # type: ignore[arg-type]
        step_id=41,
        req_ids=["a", "b"],
        outcome=StepOutcome(torch.zeros(2, 4)),
        logprobs=None,
        errors={},
        rank=3,
    )
    with pytest.raises(WaitTimeout, match=r"Rank 3 waited 0.01 s in get_output .* tokens of step 41 \(2 requests\)"):
        output.get_output(0.01)

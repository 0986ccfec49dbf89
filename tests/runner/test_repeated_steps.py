"""Repeated steps: results are the same with kept frames and without."""

from __future__ import annotations

import msgspec
import pytest

from penstock.contract import CachedRequestData, SamplingInput, SchedulerOutput, decode, encode
from penstock.runner.build.frames import Frames
from penstock.runner.dummy_runs import run_dummy_batch
from penstock.runner.model_runner import ModelRunner
from penstock.step.frame import Frame
from support.runners import Driver, batcher_of, make_runner, new_request, state_of

PROMPTS = {"a": [5, 6, 7], "b": [8, 9, 10, 11, 12]}
NUM_DECODES = 12


def messages() -> list[SchedulerOutput]:
    """Two prompts, then decodes that repeat one another; "a" gets its second block on the way, "b" its third."""
    new = [new_request("a", PROMPTS["a"], first_block=1), new_request("b", PROMPTS["b"], first_block=10)]
    lengths = {name: len(prompt) for name, prompt in PROMPTS.items()}
    steps = [SchedulerOutput(step_id=0, scheduled_new_reqs=new, num_scheduled_tokens=lengths)]
    computed = list(lengths.values())
    for number in range(NUM_DECODES):
        cached = CachedRequestData(
            req_ids=list(PROMPTS),
            new_block_ids=[([7],), None] if number == 3 else [],
            num_computed_tokens=[count + number for count in computed],
        )
        steps.append(
            SchedulerOutput(
                step_id=number + 1,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"a": 1, "b": 1},
                repeats_step_id=number if number > 0 else None,
            )
        )
    return steps


def run(runner: ModelRunner, steps: list[SchedulerOutput]) -> list[list[list[int]]]:
    tokens = []
    for step in steps:
        runner.execute_model(step)
        tokens.append(runner.sample_tokens(SamplingInput(step_id=step.step_id)).get_output(5.0).sampled_token_ids)
    return tokens


@pytest.fixture
def prepared_anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps with a new frame."""
    steps: list[int] = []
    begin = Frames.begin

    def note(self: Frames, output: SchedulerOutput, buffer_set: int | None, *, may_repeat: bool) -> Frame:
        frame = begin(self, output, buffer_set, may_repeat=may_repeat)
        steps.extend([] if frame.is_repeated else [output.step_id])
        return frame

    monkeypatch.setattr(Frames, "begin", note)
    return steps


def test_a_repeated_step_gives_the_same_tokens_with_less_work(prepared_anew: list[int]) -> None:
    steps = messages()
    repeated = run(make_runner(), steps)
    assert prepared_anew == [0, 1]
    prepared_anew.clear()
    assert run(make_runner(fast_paths=False), steps) == repeated
    assert prepared_anew == list(range(NUM_DECODES + 1))


def test_what_repeats_is_known_behind_a_pipe_too(prepared_anew: list[int]) -> None:
    steps = messages()
    copies = [decode(encode(step), SchedulerOutput) for step in steps]
    assert run(make_runner(), copies) == run(make_runner(fast_paths=False), steps)
    assert prepared_anew == [0, 1, *range(NUM_DECODES + 1)]


def test_a_step_that_repeats_another_than_the_last_one_is_put_together_anew(prepared_anew: list[int]) -> None:
    steps = messages()
    expected = run(make_runner(), steps)
    prepared_anew.clear()
    # The step in between, which this runner's scheduler did not count on, changes nothing but what was kept.
    between = SchedulerOutput(step_id=100, finished_req_ids={"never seen"})
    later = [_moved(step, 100) for step in steps[5:]]
    assert run(make_runner(), [*steps[:5], between, *later]) == [*expected[:5], [], *expected[5:]]
    assert prepared_anew == [0, 1, 100, 105]


def test_a_step_that_repeats_one_from_before_the_last_is_put_together_anew(prepared_anew: list[int]) -> None:
    runner = make_runner()
    steps = messages()
    run(runner, steps[:4])
    cached = CachedRequestData(req_ids=["b"], num_computed_tokens=[8])
    run(runner, [SchedulerOutput(step_id=4, scheduled_cached_reqs=cached, num_scheduled_tokens={"b": 1})])
    cached = steps[4].scheduled_cached_reqs
    behind = msgspec.structs.replace(cached, num_computed_tokens=[cached.num_computed_tokens[0], 9])
    last = msgspec.structs.replace(steps[4], step_id=5, scheduled_cached_reqs=behind, repeats_step_id=3)
    assert len(run(runner, [last])[0]) == 2
    assert prepared_anew == [0, 1, 4, 5]


def test_a_step_after_one_that_could_not_serve_all_is_put_together_anew(
    prepared_anew: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    steps = messages()
    run(runner, steps[:2])
    slot = runner.requests.slot_of.pop("b")
    run(runner, [msgspec.structs.replace(steps[2], repeats_step_id=None)])
    runner.requests.slot_of["b"] = slot
    run(runner, [steps[3]])
    assert prepared_anew == [0, 1, 2, 3]


def _moved(step: SchedulerOutput, by: int) -> SchedulerOutput:
    repeats = None if step.repeats_step_id is None else step.repeats_step_id + by
    return msgspec.structs.replace(step, step_id=step.step_id + by, repeats_step_id=repeats)


def test_the_blocks_of_a_repeated_step_reach_the_table() -> None:
    repeated, plain = make_runner(), make_runner(fast_paths=False)
    run(repeated, messages())
    run(plain, messages())
    assert repeated.block_tables.table(0).tolist() == plain.block_tables.table(0).tolist()
    assert 7 in repeated.block_tables.table(0)[repeated.requests.slot_of["a"]].tolist()


def test_a_dummy_batch_in_between_does_no_harm(prepared_anew: list[int]) -> None:
    steps = messages()
    expected = run(make_runner(), steps)
    prepared_anew.clear()
    runner = make_runner()
    tokens = run(runner, steps[:5])
    run_dummy_batch(runner, num_tokens=2, num_reqs=2)
    assert tokens + run(runner, steps[5:]) == expected
    assert prepared_anew == [0, 1, 5]


def test_a_request_that_ends_is_gone() -> None:
    runner = make_runner()
    steps = messages()
    run(runner, steps[:4])
    cached = CachedRequestData(req_ids=["b"], new_block_ids=[None], num_computed_tokens=[8])
    end = SchedulerOutput(
        step_id=4, scheduled_cached_reqs=cached, num_scheduled_tokens={"b": 1}, finished_req_ids={"a"}
    )
    assert len(run(runner, [end])[0]) == 1
    assert list(runner.requests.slot_of) == ["b"]


@pytest.mark.parametrize("how", ["finished_req_ids", "preempted_req_ids"])
def test_a_request_that_was_not_run_is_gone(how: str) -> None:
    runner = make_runner()
    steps = messages()
    waiting = SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=[new_request("c", [1, 2], first_block=30)],
        num_scheduled_tokens={"c": 2},
    )
    run(runner, [waiting, *(_moved(step, 1) for step in steps[:3])])
    step = msgspec.structs.replace(_moved(steps[3], 1), repeats_step_id=None, **{how: {"c"}})
    run(runner, [step])
    assert set(runner.requests.slot_of) == {"a", "b"}


def test_the_hosts_bounds_keep_up_with_repeated_steps() -> None:
    runner = make_runner()
    prompts, *decodes = messages()
    run(runner, [prompts])
    for step in decodes:
        run(runner, [step])
        slots = list(runner.requests.slot_of.values())
        before_step = runner.requests.num_computed_tokens.tensor[slots, 0].numpy() - 1
        assert (runner.requests.num_computed_tokens_upper_bound(slots) >= before_step).all()
        (geometry,) = batcher_of(runner)._batch.geometry
        assert geometry.max_seq_len_upper_bound >= geometry.seq_lens.max()


def test_a_step_that_repeats_one_whose_buffers_another_has_taken_is_built_anew() -> None:
    runner = make_runner()
    driver = Driver(runner)
    driver.step({"a": 1, "b": 1}, [new_request("a", [5]), new_request("b", [6], first_block=20)])
    driver.step({"a": 1})
    driver.step({"b": 1})
    cached = CachedRequestData(req_ids=["a"], num_computed_tokens=[2])
    scheduled = {"a": 1}
    step = SchedulerOutput(
        step_id=4, scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled, repeats_step_id=driver.step_id - 1
    )
    (tokens,) = run(runner, [step])
    assert len(tokens) == 1
    assert not runner.steps.is_in_step
    assert state_of(runner, "a") == (3, 4)

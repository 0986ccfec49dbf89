"""Buffer sets of steps in flight, and their kept frames."""

from __future__ import annotations

from penstock.contract import SamplingInput, SchedulerOutput
from penstock.runner.model_runner import ModelRunner, RunnerLimits
from penstock.step.frame import Frame
from support.runners import VOCAB_SIZE, Driver, make_runner, new_request


def limits(max_concurrent_steps: int) -> RunnerLimits:
    return RunnerLimits(8, 64, 64, VOCAB_SIZE, max_concurrent_steps=max_concurrent_steps)


def begin(runner: ModelRunner, step_id: int, **num_tokens: int) -> Frame:
    output = SchedulerOutput(step_id=step_id, num_scheduled_tokens=num_tokens, finished_req_ids={"gone"})
    return runner.frames.begin(output, runner.frames.take_buffers(output))


def test_steps_take_turns_in_buffer_sets_and_one_without_tokens_takes_none() -> None:
    runner = make_runner(limits=limits(max_concurrent_steps=2))
    first, second, third = begin(runner, 0, a=1), begin(runner, 2, b=1), begin(runner, 4, a=1)
    assert first.buffer_set == third.buffer_set != second.buffer_set
    runner = make_runner(limits=limits(max_concurrent_steps=2))
    begin(runner, 0, a=1)
    assert begin(runner, 1).buffer_set is None
    assert begin(runner, 2, b=1).buffer_set != begin(runner, 3, a=1).buffer_set


def test_a_kept_frame_is_the_same_object_with_the_same_inputs_in_every_step_that_repeats_it() -> None:
    driver = Driver(make_runner())
    driver.step({"a": 5}, [new_request("a", [5, 6, 7, 8, 9])])
    frames = []
    # As many as the last block has room for: then its table gets a column.
    for number in range(3):
        output = driver.launch({"a": 1}, repeats=number > 0)
        frame = driver.runner.steps._waiting[output.step_id]
        frames.append((frame, frame.inputs, frame.context))
        driver.runner.sample_tokens(SamplingInput(step_id=output.step_id))
    assert all(one is other for of_step in frames[1:] for one, other in zip(frames[0], of_step, strict=True))


def test_a_step_that_asks_for_log_probabilities_of_a_prompt_is_not_kept() -> None:
    driver = Driver(make_runner())
    params = new_request("a", [5]).sampling_params
    asking = new_request("a", [5, 6, 7], params=type(params)(temperature=0.0, seed=0, prompt_logprobs=0))
    driver.step({"a": 1}, [asking])
    output = driver.launch({"a": 1}, repeats=True)
    assert not driver.runner.steps._waiting[output.step_id].is_repeated

"""Messages that share their lists run as their copies do."""

from __future__ import annotations

import msgspec
import pytest

from penstock.contract import CachedRequestData, GrammarOutput, SchedulerOutput, decode, encode
from penstock.runner.dummy_runs import run_dummy_batch
from penstock.runner.model_runner import ModelRunner
from support.runners import make_runner, new_request

PROMPTS = {"a": [5, 6, 7], "b": [8, 9, 10, 11, 12]}
NUM_DECODES = 12


def messages() -> list[SchedulerOutput]:
    """Two prompts, then decodes that share all they can; "a" gets its second block on the way, "b" its third."""
    req_ids = list(PROMPTS)
    nothing: list[tuple[list[int], ...] | None] = [None, None]
    counts = {"a": 1, "b": 1}
    new = [new_request("a", PROMPTS["a"], first_block=1), new_request("b", PROMPTS["b"], first_block=10)]
    lengths = {name: len(prompt) for name, prompt in PROMPTS.items()}
    steps = [SchedulerOutput(step_id=0, scheduled_new_reqs=new, num_scheduled_tokens=lengths)]
    computed = list(lengths.values())
    for number in range(NUM_DECODES):
        cached = CachedRequestData(
            req_ids=req_ids,
            new_block_ids=[([7],), None] if number == 3 else nothing,
            num_computed_tokens=[count + number for count in computed],
        )
        steps.append(SchedulerOutput(step_id=number + 1, scheduled_cached_reqs=cached, num_scheduled_tokens=counts))
    return steps


def run(runner: ModelRunner, steps: list[SchedulerOutput]) -> list[list[list[int]]]:
    tokens = []
    for step in steps:
        runner.execute_model(step)
        tokens.append(runner.sample_tokens(GrammarOutput(step_id=step.step_id)).get_output(5.0).sampled_token_ids)
    return tokens


@pytest.fixture
def prepared_anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were put together from the beginning."""
    steps: list[int] = []
    prepare = ModelRunner._prepare

    def note(self: ModelRunner, output: SchedulerOutput, errors: dict[str, str]) -> object:
        steps.append(output.step_id)
        return prepare(self, output, errors)

    monkeypatch.setattr(ModelRunner, "_prepare", note)
    return steps


def test_shared_lists_give_the_same_tokens_with_less_work(prepared_anew: list[int]) -> None:
    steps = messages()
    shared = run(make_runner(), steps)
    assert prepared_anew == [0, 1]
    prepared_anew.clear()
    copies = [decode(encode(step), SchedulerOutput) for step in steps]
    assert run(make_runner(), copies) == shared
    assert prepared_anew == list(range(NUM_DECODES + 1))


def test_the_blocks_of_a_repeated_step_reach_the_table() -> None:
    shared, copied = make_runner(), make_runner()
    run(shared, messages())
    run(copied, [decode(encode(step), SchedulerOutput) for step in messages()])
    assert shared.block_tables.table(0).tolist() == copied.block_tables.table(0).tolist()
    assert 7 in shared.block_tables.table(0)[shared.requests.slot_of["a"]].tolist()


def test_a_dummy_batch_in_between_does_no_harm(prepared_anew: list[int]) -> None:
    steps = messages()
    expected = run(make_runner(), steps)
    prepared_anew.clear()
    runner = make_runner()
    tokens = run(runner, steps[:5])
    run_dummy_batch(runner, num_tokens=2, num_reqs=2)
    assert tokens + run(runner, steps[5:]) == expected
    assert prepared_anew == [0, 1, 5]


def test_a_request_that_ends_is_gone_although_the_rest_is_shared() -> None:
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
def test_a_request_that_was_not_run_is_gone_although_all_is_shared(how: str) -> None:
    runner = make_runner()
    steps = messages()
    waiting = SchedulerOutput(
        step_id=99,
        scheduled_new_reqs=[new_request("c", [1, 2], first_block=30)],
        num_scheduled_tokens={"c": 2},
    )
    run(runner, [waiting, *steps[:3]])
    run(runner, [msgspec.structs.replace(steps[3], **{how: {"c"}})])
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
        (geometry,) = runner.repeated._batch.geometry
        assert geometry.max_seq_len_upper_bound >= geometry.seq_lens.max()

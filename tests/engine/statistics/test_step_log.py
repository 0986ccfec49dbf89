"""Steps of a core's log: token counts by kind, recorded while a live view watches."""

from __future__ import annotations

import time

import pytest

from penstock.contract import NewRequestData, SamplingParams, SchedulerOutput
from penstock.engine.statistics import step_log
from penstock.engine.statistics.step_log import StepLog, StepRecord, record_of


def step(counts: dict[str, int], new: tuple[str, ...] = (), drafts: dict[str, int] | None = None) -> SchedulerOutput:
    params = SamplingParams(seed=1)
    return SchedulerOutput(
        step_id=1,
        scheduled_new_reqs=[
            NewRequestData(
                req_id=name,
                prompt_token_ids=[1],
                prefill_token_ids=[1],
                sampling_params=params,
                block_ids=([1],),
                num_computed_tokens=0,
            )
            for name in new
        ],
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={name: [-1] * number for name, number in (drafts or {}).items()},
    )


@pytest.mark.parametrize(
    ("output", "prefill", "decode", "draft"),
    [
        (step({"a": 1, "b": 1}), 0, 2, 0),
        (step({"a": 4, "b": 1}, drafts={"a": 3}), 0, 2, 3),
        (step({"a": 7, "b": 1, "c": 1}, new=("c",)), 8, 1, 0),
        (step({"a": 7, "b": 3, "c": 1}, drafts={"b": 2}), 7, 2, 2),
        # A request that is new to the workers may have a single token left to compute.
        (step({"a": 1}, new=("a",)), 1, 0, 0),
    ],
)
def test_tokens_of_a_step_by_kind(output: SchedulerOutput, prefill: int, decode: int, draft: int) -> None:
    found = record_of(output, 0.25)
    assert (found.num_prefill_tokens, found.num_decode_tokens, found.num_draft_tokens) == (prefill, decode, draft)
    assert (found.num_reqs, found.seconds) == (len(output.num_scheduled_tokens), 0.25)
    assert abs(found.ended_at - time.time()) < 60


class Clock:
    """Clock of a log, which records a step with one token per call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.log = StepLog()
        monkeypatch.setattr(step_log.time, "monotonic", lambda: self.now)

    def run(self, seconds: float, *, is_last: bool = False) -> list[StepRecord]:
        self.log.launched = step({"a": 1})
        self.now += seconds
        return self.log.take(seconds, is_last=is_last)


def test_steps_are_recorded_while_a_view_watches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert clock.run(1.0) == []
    clock.log.watch(3.0)
    assert [len(clock.run(1.0)) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_records_are_delivered_twice_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.log.watch(60.0)
    numbers = [len(clock.run(0.125)) for _ in range(21)]
    assert sum(numbers) == 21
    assert sum(number > 0 for number in numbers) == 6
    assert clock.run(0.125) == []
    assert len(clock.run(0.125, is_last=True)) == 2


def test_a_turn_without_a_step_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.log.watch(60.0)
    clock.run(1.0)
    clock.now += 1.0
    assert clock.log.take(1.0, is_last=True) == []

"""Features of the scheduler: their parts are in the messages of steps, and they see those of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
import pytest
from scheduler_driver import Driver, make_request
from scheduler_fakes import cache_config

from penstock.config import SchedulerConfig
from penstock.contract import (
    ModelRunnerOutput,
    Part,
    Parts,
    SampledOutput,
    SchedulerOutput,
    decode,
    encode,
    part_of,
    parts,
    register_part,
)
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.request import Request
from penstock.scheduler.scheduler import Scheduler

PROMPT = [1, 2, 3, 4, 5]


class CountPart(Part, frozen=True, kw_only=True):
    """The number of a step."""

    feature: ClassVar[str] = "count"
    step_id: int


class OncePart(CountPart, frozen=True, kw_only=True):
    """A part whose step is like no other."""

    feature: ClassVar[str] = "once"
    may_repeat: ClassVar[bool] = False


class Counting(SchedulerFeature):
    """A feature whose part is the number of the step; none of steps in `silent`. seen: numbers in results."""

    def __init__(self, part_type: type[CountPart] = CountPart, silent: tuple[int, ...] = ()) -> None:
        self._part_type = part_type
        self._silent = silent
        self.seen: list[int | None] = []

    def part_of_step(self, message: SchedulerOutput) -> Part | None:
        return None if message.step_id in self._silent else self._part_type(step_id=message.step_id)

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:
        part = part_of(results.parts, self._part_type)
        self.seen.append(None if part is None else part.step_id)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "_types", {})
    register_part(CountPart)
    register_part(OncePart)
    return


def scheduler_with(feature: SchedulerFeature) -> Scheduler:
    """A scheduler with two requests."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        cache_config(40),
        max_model_len=64,
        enable_prefix_caching=True,
        async_scheduling=False,
        features=[lambda _: feature],
    )
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, PROMPT, max_tokens=30, ignore_eos=True))
    return scheduler


def steps_with(feature: SchedulerFeature, num_steps: int = 8) -> list[SchedulerOutput]:
    """Steps of two requests, of which a worker tells the parts that it was told."""
    scheduler = scheduler_with(feature)
    steps, computed = [], Counter[str]()
    for _ in range(num_steps):
        message = decode(encode(scheduler.schedule()), SchedulerOutput)
        steps.append(message)
        req_ids = list(message.num_scheduled_tokens)
        computed.update(message.num_scheduled_tokens)
        results = SampledOutput(
            step_id=message.step_id,
            req_ids=req_ids,
            sampled_token_ids=[[5] if computed[req_id] >= len(PROMPT) else [] for req_id in req_ids],
            parts=message.parts,
        )
        scheduler.update_from_output(message, results)
    return steps


def test_every_step_has_the_part_that_a_feature_adds_and_the_feature_sees_what_comes_back() -> None:
    feature = Counting(silent=(5,))
    steps = steps_with(feature)
    assert [part_of(step.parts, CountPart) for step in steps] == [
        None if step_id == 5 else CountPart(step_id=step_id) for step_id in range(8)
    ]
    assert steps[5].parts is None
    assert feature.seen == [0, 1, 2, 3, 4, 6, 7]
    assert [step.repeats_step_id for step in steps[3:]] == [2, 3, 4, 5, 6]


def test_a_step_whose_part_may_not_be_repeated_repeats_no_step_and_is_not_repeated() -> None:
    steps = steps_with(Counting(OncePart, silent=(0, 1, 2, 3, 5, 6, 7)))
    assert [step.repeats_step_id for step in steps[3:]] == [2, None, None, 5, 6]
    plain = steps_with(Counting(silent=tuple(range(8))))
    without = [msgspec.structs.replace(step, repeats_step_id=None, parts=None) for step in steps]
    assert without == [msgspec.structs.replace(step, repeats_step_id=None) for step in plain]


@pytest.mark.parametrize("part_type", [CountPart, OncePart])
def test_steps_of_a_request_are_repeated_if_its_part_says_so(part_type: type[CountPart]) -> None:
    driver = Driver(cache_config(40))
    driver.add("a", PROMPT, max_tokens=12, ignore_eos=True, parts=Parts.of([part_type(step_id=7)]))
    first, *others = [driver.turn() for _ in range(6)]
    assert part_of(first.scheduled_new_reqs[0].parts, part_type) == part_type(step_id=7)
    assert any(step.repeats_step_id is not None for step in others) is part_type.may_repeat
    driver.drain()


def test_a_request_has_its_parts_again_after_a_preemption() -> None:
    driver = Driver(cache_config(40))
    driver.add("a", PROMPT, max_tokens=12, ignore_eos=True, parts=Parts.of([CountPart(step_id=7)]))
    driver.turn()
    driver.scheduler.preempt_all()
    [new] = driver.turn().scheduled_new_reqs
    assert new.parts == {"count": CountPart(step_id=7)}
    driver.drain()


class InPieces(Counting):
    """Lets a step compute up to three tokens of a prompt, and none of it in the step that it names."""

    def __init__(self, step_without: int = -1) -> None:
        super().__init__()
        self._step_without = step_without

    def chunk(self, request: Request, start: int, num_tokens: int) -> int:
        return 0 if len(self.seen) == self._step_without else min(num_tokens, 3)


def test_a_feature_shortens_the_chunks_of_prompts_and_leaves_decodes_alone() -> None:
    whole = -(-len(PROMPT) // 3)
    counts = [set(step.num_scheduled_tokens.values()) for step in steps_with(InPieces(), whole + 3)]
    assert counts[:whole] == [{min(3, len(PROMPT) - 3 * number)} for number in range(whole)]
    assert counts[whole:] == [{1}] * 3
    steps = steps_with(InPieces(step_without=1), 3)
    assert [bool(step.num_scheduled_tokens) for step in steps] == [True, False, True]
    assert not any(step.num_scheduled_tokens for step in steps_with(InPieces(step_without=0), 1))


class OneAtATime(Counting):
    """A budget of one prompt per step. asked: requests whose chunks it was asked for, in their first step."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def chunk(self, request: Request, start: int, num_tokens: int) -> int:
        self.asked += [request.req_id] * (start == 0)
        return num_tokens

    def admits(self, request: Request, in_step: Sequence[Request]) -> bool:
        return not any(other.num_computed_tokens < other.num_prompt_tokens for other in in_step)


def test_a_request_waits_while_a_budget_of_a_feature_does_not_admit_it() -> None:
    begun = [[new.req_id for new in step.scheduled_new_reqs] for step in steps_with(OneAtATime(), 4)]
    assert begun == [["a"], ["b"], [], []]
    # A request that a feature keeps waiting has no chunk.
    asking = OneAtATime()
    scheduler = scheduler_with(asking)
    assert [list(scheduler.schedule().num_scheduled_tokens), asking.asked] == [["a"], ["a"]]
    assert [new.req_id for new in steps_with(Counting(), 1)[0].scheduled_new_reqs] == ["a", "b"]

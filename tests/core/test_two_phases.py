"""A step's forward pass is launched before the step before it is read, and its tokens are chosen after: a feature that
needs those tokens has them by then. What fails in between leaves nothing half launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import ModelRunnerOutput, Part, RpcCall, SamplingInput, SamplingParams, SchedulerOutput
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import EngineDead
from penstock.executor import StepHandle
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import FinishReason
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, make_core, random_prompts, run
from support.features import scheduler_side, use_feature

PROMPTS = random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)
NUM_TOKENS = 12

Event = tuple[str, int]


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)


ALL_PARAMS = [sampled(index) for index in range(len(PROMPTS))]


class WatchedWorker(Worker):
    """Writes down what is asked of it, and fails where a test wants it to.

    unsampled: steps that this one executed, and that were not sampled.
    failures: by event, what happens then, once. fails_reading: whether no result can ever be read.
    """

    events: list[Event]
    samplings: list[SamplingInput]
    failures: dict[Event, BaseException]
    fails_reading: bool

    def init_device(self) -> None:
        self.unsampled: set[int] = set()
        super().init_device()

    def execute_model(self, output: SchedulerOutput) -> None:
        super().execute_model(output)
        self.unsampled.add(output.step_id)
        self._note("executed", output.step_id)

    def sample_tokens(self, sampling: SamplingInput) -> Any:
        result = super().sample_tokens(sampling)
        self.unsampled.remove(sampling.step_id)
        self._note("sampled", sampling.step_id)
        self.samplings.append(sampling)
        return WatchedHandle(self, result)

    def _note(self, what: str, step_id: int) -> None:
        self.events.append((what, step_id))
        if (what, step_id) in self.failures:
            raise self.failures.pop((what, step_id))


class WatchedHandle:
    def __init__(self, worker: WatchedWorker, handle: StepHandle) -> None:
        self.worker, self.handle, self.step_id = worker, handle, handle.step_id

    def get_output(self, timeout_s: float) -> ModelRunnerOutput:
        if self.worker.fails_reading:
            raise RuntimeError("the device is gone")
        self.worker._note("read", self.step_id)
        return self.handle.get_output(timeout_s)


class Counts(Part, frozen=True, kw_only=True):
    """Numbers of known output tokens, by request."""

    feature = "counts"
    known: dict[str, int]


class Counting(SchedulerFeature):
    """Follows requests, and sends the number of their tokens with each of their samplings.

    events, failures: as of `WatchedWorker`. followed: names of the requests that it follows. turns_to_wait: by request
    that it is not ready for at first.
    """

    events: list[Event]
    followed: Sequence[str]
    failures: dict[Event, Exception]
    turns_to_wait: dict[str, int]

    def __init__(self, services: SchedulerServices) -> None:
        self.scheduler, self.tell_ends = services.scheduler, services.tell_ends
        self.requests: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.given: list[Counts] = []
        self.fails_for: tuple[int, str] | None = None
        self.is_closed = False

    def request_added(self, request: Request) -> None:
        if request.req_id in self.followed:
            self.requests[request.req_id] = request
            request.awaits_parts = True
        if request.req_id in self.turns_to_wait:
            self.scheduler.wait_for(request.req_id, "its turn")

    def request_ended(self, request: Request) -> None:
        self.ended.add(request.req_id)

    def before_step(self) -> None:
        for req_id in self.turns_to_wait:
            self.turns_to_wait[req_id] -= 1
            if not self.turns_to_wait[req_id]:
                self.scheduler.ready(req_id, "its turn")

    def sampling_part(self, message: SchedulerOutput) -> Counts:
        event = ("part", message.step_id)
        self.events.append(event)
        if event in self.failures:
            raise self.failures.pop(event)
        if self.fails_for is not None and self.fails_for[0] == message.step_id:
            self.tell_ends(self.scheduler.finish_requests([self.fails_for[1]], FinishReason.ERROR))
        known = {req_id: self.requests[req_id].num_output_tokens for req_id in message.awaiting_req_ids}
        self.given.append(Counts(known=known))
        return self.given[-1]

    def close(self) -> None:
        self.is_closed = True

    def tokens(self, req_id: str) -> list[int]:
        request = self.requests[req_id]
        return request.all_token_ids[request.num_prompt_tokens :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[int]]:
    core = make_core(folder, fast_paths="auto")
    tokens = [result.tokens for result in run(core, PROMPTS, ALL_PARAMS)]
    core.close()
    return tokens


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Events of worker and feature, in order."""
    noted: list[Event] = []
    for name, value in {"events": noted, "samplings": [], "failures": {}, "fails_reading": False}.items():
        monkeypatch.setattr(WatchedWorker, name, value, raising=False)
    for name, value in {"events": noted, "followed": (), "failures": {}, "turns_to_wait": {}}.items():
        monkeypatch.setattr(Counting, name, value, raising=False)
    use_feature(monkeypatch, name="counts", parts=(Counts,), scheduler_side=Counting)
    return noted


@pytest.fixture(params=[False, True], ids=["sync", "async scheduling"])
def runs_ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def watched_core(folder: Path, *, followed: Sequence[str] = (), async_scheduling: bool) -> tuple[EngineCore, Counting]:
    Counting.followed = followed
    core = make_core(folder, worker_cls=f"{__name__}.WatchedWorker", async_scheduling=async_scheduling)
    return core, scheduler_side(core, Counting)


def assert_nothing_is_half_launched(core: EngineCore) -> None:
    """Every step was executed, sampled and read, and no request holds a block."""
    core.step()
    core.step()
    assert core.collective_rpc(RpcCall(lambda worker: worker.unsampled)) == [set()]
    assert core.scheduler.num_in_flight_steps == 0
    assert core.scheduler.kv_cache.num_used_blocks == 0


ALL = [f"r{index}" for index in range(len(PROMPTS))]


def test_one_after_another_a_feature_knows_every_token_before_the_next_step(folder: Path, events: list[Event]) -> None:
    core, _ = watched_core(folder, followed=["r0"], async_scheduling=False)
    run(core, [PROMPTS[0]], [sampled(0)])
    core.close()
    per_step = ("executed", "part", "sampled", "read")
    assert events == [(what, step_id) for step_id in range(NUM_TOKENS) for what in per_step]


def test_ahead_a_step_is_executed_then_the_one_before_read_then_its_tokens_are_chosen(
    folder: Path, events: list[Event]
) -> None:
    core, _ = watched_core(folder, followed=["r0"], async_scheduling=True)
    run(core, [PROMPTS[0]], [sampled(0)])
    core.close()
    expected: list[Event] = [("executed", 0), ("part", 0), ("sampled", 0)]
    for step_id in range(1, NUM_TOKENS):
        expected += [("executed", step_id), ("read", step_id - 1), ("part", step_id), ("sampled", step_id)]
    assert events == [*expected, ("read", NUM_TOKENS - 1)]


def test_parts_reach_the_worker_with_their_step_and_all_tokens_before_it(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    followed = ["r1", "r3", "r4"]
    core, feature = watched_core(folder, followed=followed, async_scheduling=runs_ahead)
    assert [result.tokens for result in run(core, PROMPTS, ALL_PARAMS)] == undisturbed
    core.close()
    assert [sampling.parts["counts"] for sampling in WatchedWorker.samplings if sampling.parts] == feature.given
    assert {req_id: feature.tokens(req_id) for req_id in followed} == {
        req_id: undisturbed[int(req_id[1:])] for req_id in followed
    }
    # Each part of a request says how many tokens there are before the one that is chosen: none is missing.
    for req_id in followed:
        counts = [part.known[req_id] for part in feature.given if req_id in part.known]
        assert counts == list(range(NUM_TOKENS))


def test_a_part_of_a_prompt_awaits_nothing(folder: Path, events: list[Event], runs_ahead: bool) -> None:
    core, feature = watched_core(folder, followed=["r0"], async_scheduling=runs_ahead)
    run(core, [PROMPTS[3] * 2], [sampled(0)])
    core.close()
    assert [what for what, _ in events].index("part") > 1
    assert len(feature.given) == NUM_TOKENS


def test_without_a_feature_a_step_hears_its_number_and_nothing_else(
    folder: Path, events: list[Event], runs_ahead: bool
) -> None:
    core, feature = watched_core(folder, async_scheduling=runs_ahead)
    run(core, PROMPTS[:2], ALL_PARAMS[:2])
    core.close()
    assert [SamplingInput(step_id=step_id) for what, step_id in events if what == "sampled"] == WatchedWorker.samplings
    assert not feature.given


def test_only_steps_whose_requests_await_no_parts_may_be_sampled_at_once(
    folder: Path, events: list[Event], runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[SchedulerOutput] = []
    execute = WatchedWorker.execute_model

    def note(worker: WatchedWorker, output: SchedulerOutput) -> None:
        steps.append(output)
        execute(worker, output)

    monkeypatch.setattr(WatchedWorker, "execute_model", note)
    core, _ = watched_core(folder, followed=["r1"], async_scheduling=runs_ahead)
    params = [sampled(0), SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)]
    run(core, PROMPTS[:2], params)
    core.close()
    assert [step.awaiting_req_ids for step in steps] == [
        ["r1"] if "r1" in step.num_scheduled_tokens else [] for step in steps
    ]
    assert len({bool(step.awaiting_req_ids) for step in steps}) == 2


@pytest.mark.parametrize("step_id", [0, 4, 5])
@pytest.mark.each_value_quick
def test_a_feature_may_end_a_request_before_a_choice_and_others_go_on(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool, step_id: int
) -> None:
    core, feature = watched_core(folder, followed=["r0", "r2"], async_scheduling=runs_ahead)
    feature.fails_for = (step_id, "r2")
    results = run(core, PROMPTS, ALL_PARAMS)
    assert_nothing_is_half_launched(core)
    core.close()
    assert results[2].finish_reason is FinishReason.ERROR
    assert results[2].tokens == undisturbed[2][: len(results[2].tokens)]
    assert len(results[2].tokens) < NUM_TOKENS
    others = [0, 1, 3, 4, 5]
    assert [results[index].tokens for index in others] == [undisturbed[index] for index in others]
    assert events.count(("executed", step_id)) == events.count(("sampled", step_id)) == 1
    assert feature.ended == set(ALL)


def test_a_failure_of_a_feature_is_raised_and_the_next_step_goes_on(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    core, _ = watched_core(folder, followed=["r1"], async_scheduling=runs_ahead)
    Counting.failures[("part", 4)] = ValueError("a defect")
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, ALL_PARAMS[index])
    results: dict[str, Result] = {}
    with pytest.raises(ValueError, match="a defect"):
        finish(core, results)
    finish(core, results)
    assert [results[req_id].tokens for req_id in ALL] == undisturbed
    assert_nothing_is_half_launched(core)
    core.close()


@pytest.mark.parametrize("step_id", [0, 1, 5])
@pytest.mark.parametrize("what", ["executed", "sampled", "read"])
@pytest.mark.one_case_quick
def test_a_worker_that_dies_in_any_phase_costs_no_token_and_repeats_none(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool, what: str, step_id: int
) -> None:
    core, feature = watched_core(folder, followed=ALL, async_scheduling=runs_ahead)
    WatchedWorker.failures[(what, step_id)] = RuntimeError("the device is gone")
    assert [result.tokens for result in run(core, PROMPTS, ALL_PARAMS)] == undisturbed
    assert not WatchedWorker.failures, "the worker never died"
    assert [feature.tokens(req_id) for req_id in ALL] == undisturbed
    assert_nothing_is_half_launched(core)
    core.close()


def test_a_worker_whose_results_can_never_be_read_ends_the_engine(
    folder: Path, events: list[Event], runs_ahead: bool
) -> None:
    core, _ = watched_core(folder, async_scheduling=runs_ahead)
    WatchedWorker.fails_reading = True
    # The first is taken for the cause.
    add(core, "r0", PROMPTS[0], sampled(0))
    add(core, "r1", PROMPTS[1], sampled(0))
    with pytest.raises(EngineDead, match="failed 4 times in a row.*get_output.*the device is gone"):
        finish(core, {}, max_steps=50)


@pytest.mark.parametrize("what", ["executed", "sampled", "read"])
@pytest.mark.each_value_quick
def test_ctrl_c_within_a_step_leaves_nothing_half_launched(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool, what: str
) -> None:
    core, _ = watched_core(folder, async_scheduling=runs_ahead)
    WatchedWorker.failures[(what, 5)] = KeyboardInterrupt()
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, ALL_PARAMS[index])
    results: dict[str, Result] = {}
    with pytest.raises(KeyboardInterrupt):
        finish(core, results)
    finish(core, results)
    assert [results[req_id].tokens for req_id in ALL] == undisturbed
    assert_nothing_is_half_launched(core)
    core.close()


def test_calls_between_steps_find_every_executed_step_sampled(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    core, feature = watched_core(folder, followed=ALL, async_scheduling=runs_ahead)
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, ALL_PARAMS[index])
    results: dict[str, Result] = {}
    num_steps = 0
    while core.has_unfinished_requests():
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        assert core.collective_rpc(RpcCall(lambda worker: worker.unsampled)) == [set()]
        num_steps += 1
        if num_steps % 4 == 0:
            assert core.reset_prefix_cache(reset_running_requests=True)
    assert [results[req_id].tokens for req_id in ALL] == undisturbed
    assert [feature.tokens(req_id) for req_id in ALL] == undisturbed
    core.close()


def test_a_feature_is_told_the_end_of_a_request_that_is_aborted_and_of_the_core(
    folder: Path, events: list[Event], runs_ahead: bool
) -> None:
    core, feature = watched_core(folder, followed=["r0"], async_scheduling=runs_ahead)
    add(core, "r0", PROMPTS[0], sampled(0))
    core.step()
    core.abort_requests(["r0"])
    assert feature.ended == {"r0"}
    assert not feature.is_closed
    core.close()
    assert feature.is_closed


def test_a_request_that_a_feature_is_not_ready_for_waits_and_others_go_on(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    core, _ = watched_core(folder, followed=["r1", "r2"], async_scheduling=runs_ahead)
    # The others have ended long before; then there is nothing to do but to wait.
    Counting.turns_to_wait = {"r1": 6, "r2": 60}
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, ALL_PARAMS[index])
    results: dict[str, Result] = {}
    first_seen: dict[str, int] = {}
    for turn in range(200):
        for output in core.step():
            first_seen.setdefault(output.req_id, turn)
            results.setdefault(output.req_id, Result()).take(output)
    assert [results[req_id].tokens for req_id in ALL] == undisturbed
    assert first_seen["r0"] < 5 <= first_seen["r1"] < 20 < 59 <= first_seen["r2"]
    assert_nothing_is_half_launched(core)
    core.close()

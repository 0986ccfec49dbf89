"""A step's forward pass is launched before the step before it is read, and its tokens are chosen after: a grammar that
needs those tokens has them by then. What fails in between leaves nothing half launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.contract import GrammarOutput, ModelRunnerOutput, RpcCall, SamplingParams, SchedulerOutput
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.errors import EngineDead, GrammarError
from penstock.executor import Executor, StepHandle
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.worker.worker import Worker
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import SMALL, Result, add, finish, make_core, random_prompts, run

PROMPTS = random_prompts((5, 21, 1, 40, 13, 8), VOCAB_SIZE, seed=3)
NUM_TOKENS = 12
# Of a row of a bitmask: 32 tokens in 4 bytes.
_ROW_BYTES = 4 * -(-VOCAB_SIZE // 32)

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
    grammars: list[GrammarOutput]
    failures: dict[Event, BaseException]
    fails_reading: bool

    def init_device(self) -> None:
        self.unsampled: set[int] = set()
        super().init_device()

    def execute_model(self, output: SchedulerOutput) -> None:
        super().execute_model(output)
        self.unsampled.add(output.step_id)
        self._note("executed", output.step_id)

    def sample_tokens(self, grammar: GrammarOutput) -> Any:
        result = super().sample_tokens(grammar)
        self.unsampled.remove(grammar.step_id)
        self._note("sampled", grammar.step_id)
        self.grammars.append(grammar)
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


class FakeGrammar:
    """Follows requests, and gives each row of a step its request's number of tokens as a word.

    constrained: the requests that it follows. failures: what the calls about a step raise, once. turns_to_compile: by
    request that it is not ready for at first.
    """

    def __init__(self, events: list[Event], constrained: Sequence[str]) -> None:
        self.events = events
        self.constrained = constrained
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.given: list[GrammarOutput] = []
        self.failures: dict[Event, Exception] = {}
        self.turns_to_compile: dict[str, int] = {}
        self._num_accepted = 0

    def on_ready(self, wake: Callable[[], None]) -> None: ...

    def add(self, request: EngineRequest) -> bool:
        if request.req_id in self.constrained:
            self.tokens[request.req_id] = list(request.output_token_ids)
        return request.req_id not in self.turns_to_compile

    def take_ready(self) -> Sequence[str]:
        self.turns_to_compile = {req_id: turns - 1 for req_id, turns in self.turns_to_compile.items() if turns >= 0}
        ready = [req_id for req_id, turns in self.turns_to_compile.items() if turns == 0]
        if self.failures and ready:
            raise self.failures.pop(("compiled", 0))
        return ready

    def constrains(self, req_id: str) -> bool:
        return req_id in self.tokens and req_id not in self.ended

    def constrains_any(self, req_ids: Set[str]) -> bool:
        return any(map(self.constrains, req_ids))

    def accept(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.req_id in self.tokens:
                self.tokens[output.req_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended.add(output.req_id)
        if outputs and outputs[0].new_token_ids:
            self._num_accepted += 1
            self._note("accepted", self._num_accepted)

    def bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        self._note("bitmask", output.step_id)
        req_ids = [req_id for req_id in output.num_scheduled_tokens if self.constrains(req_id)]
        rows = b"".join(len(self.tokens[req_id]).to_bytes(_ROW_BYTES, "little") for req_id in req_ids)
        answer = GrammarOutput(
            step_id=output.step_id,
            structured_output_request_ids=req_ids,
            grammar_bitmask=rows,
            num_words=_ROW_BYTES // 4 if req_ids else 0,
        )
        self.given.append(answer)
        return answer

    def close(self) -> None: ...

    def _note(self, what: str, number: int) -> None:
        self.events.append((what, number))
        if (what, number) in self.failures:
            raise self.failures.pop((what, number))


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
    """Events of worker and grammar, in order."""
    noted: list[Event] = []
    for name, value in {"events": noted, "grammars": [], "failures": {}, "fails_reading": False}.items():
        monkeypatch.setattr(WatchedWorker, name, value, raising=False)
    return noted


@pytest.fixture(params=[False, True], ids=["sync", "async scheduling"])
def runs_ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def watched_core(
    folder: Path, events: list[Event], *, constrained: Sequence[str] = (), async_scheduling: bool
) -> tuple[EngineCore, FakeGrammar]:
    options = {**SMALL, "worker_cls": f"{__name__}.WatchedWorker", "async_scheduling": async_scheduling}
    grammar = FakeGrammar(events, constrained)
    return EngineCore(EngineConfig.create(str(folder), **options), grammar), grammar


def assert_nothing_is_half_launched(core: EngineCore) -> None:
    """Every step was executed, sampled and read, and no request holds a block."""
    core.step()
    core.step()
    assert core.collective_rpc(RpcCall(lambda worker: worker.unsampled)) == [set()]
    assert core.scheduler.num_in_flight_steps == 0
    assert core.scheduler.kv_cache.num_used_blocks == 0


ALL = [f"r{index}" for index in range(len(PROMPTS))]


def test_one_after_another_a_grammar_sees_every_token_before_the_next_step(folder: Path, events: list[Event]) -> None:
    core, _ = watched_core(folder, events, constrained=["r0"], async_scheduling=False)
    run(core, [PROMPTS[0]], [sampled(0)])
    core.close()
    per_step = ("executed", "bitmask", "sampled", "read")
    expected: list[Event] = []
    for step_id in range(NUM_TOKENS):
        expected += [(what, step_id) for what in per_step]
        expected.append(("accepted", step_id + 1))
    assert events == expected


def test_ahead_a_step_is_executed_then_the_one_before_read_then_its_tokens_are_chosen(
    folder: Path, events: list[Event]
) -> None:
    core, _ = watched_core(folder, events, constrained=["r0"], async_scheduling=True)
    run(core, [PROMPTS[0]], [sampled(0)])
    core.close()
    expected: list[Event] = [("executed", 0), ("bitmask", 0), ("sampled", 0)]
    for step_id in range(1, NUM_TOKENS):
        expected += [("executed", step_id), ("read", step_id - 1), ("accepted", step_id)]
        expected += [("bitmask", step_id), ("sampled", step_id)]
    assert events == [*expected, ("read", NUM_TOKENS - 1), ("accepted", NUM_TOKENS)]


def test_a_request_whose_tokens_the_host_must_see_is_not_run_ahead(folder: Path, events: list[Event]) -> None:
    core, _ = watched_core(folder, events, constrained=["r0"], async_scheduling=True)
    add(core, "r0", PROMPTS[0], sampled(0), needs_tokens_on_host=True)
    finish(core, {})
    core.close()
    assert [what for what, _ in events if what in ("executed", "read")] == ["executed", "read"] * NUM_TOKENS


def test_a_bitmask_reaches_the_worker_with_its_step_and_rows(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    constrained = ["r1", "r3", "r4"]
    core, grammar = watched_core(folder, events, constrained=constrained, async_scheduling=runs_ahead)
    assert [result.tokens for result in run(core, PROMPTS, ALL_PARAMS)] == undisturbed
    core.close()
    assert WatchedWorker.grammars == grammar.given
    assert {req_id: grammar.tokens[req_id] for req_id in constrained} == {
        req_id: undisturbed[int(req_id[1:])] for req_id in constrained
    }
    # In steps of decodes, a row says how many tokens there are before the one that is chosen: none is missing.
    for answer in grammar.given[-3:]:
        counts = [
            int.from_bytes(answer.grammar_bitmask[start : start + _ROW_BYTES], "little")
            for start in range(0, len(answer.grammar_bitmask), _ROW_BYTES)
        ]
        assert len(counts) == len(answer.structured_output_request_ids)
        assert all(count >= NUM_TOKENS - 4 for count in counts)


def test_without_a_grammar_a_step_hears_its_number_and_nothing_else(
    folder: Path, events: list[Event], runs_ahead: bool
) -> None:
    core = make_core(folder, worker_cls=f"{__name__}.WatchedWorker", async_scheduling=runs_ahead)
    run(core, PROMPTS[:2], ALL_PARAMS[:2])
    core.close()
    assert [GrammarOutput(step_id=step_id) for what, step_id in events if what == "sampled"] == WatchedWorker.grammars


def test_only_steps_without_constrained_requests_may_be_sampled_before_their_grammar_is_asked(
    folder: Path, events: list[Event], runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[list[str]] = []
    execute = Executor.execute_unconstrained

    def note(executor: Executor, output: SchedulerOutput) -> None:
        free.append(sorted(output.num_scheduled_tokens))
        execute(executor, output)

    monkeypatch.setattr(Executor, "execute_unconstrained", note)
    core, _ = watched_core(folder, events, constrained=["r1"], async_scheduling=runs_ahead)
    params = [sampled(0), SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)]
    run(core, PROMPTS[:2], params)
    core.close()
    num_steps = sum(what == "executed" for what, _ in events)
    assert 0 < len(free) < num_steps
    assert all(req_ids in (["r0"], []) for req_ids in free)


@pytest.mark.parametrize("step_id", [0, 4, 5])
@pytest.mark.parametrize("names_requests", [True, False])
@pytest.mark.each_value_quick
def test_a_grammar_that_fails_before_a_choice_ends_its_requests_and_no_others(
    folder: Path,
    undisturbed: list[list[int]],
    events: list[Event],
    runs_ahead: bool,
    step_id: int,
    names_requests: bool,
) -> None:
    core, grammar = watched_core(folder, events, constrained=["r0", "r2"], async_scheduling=runs_ahead)
    error = GrammarError("no way on", req_ids=["r2"]) if names_requests else ValueError("no way on")
    grammar.failures[("bitmask", step_id)] = error
    failed = {2} if names_requests else {0, 2}
    results = run(core, PROMPTS, ALL_PARAMS)
    assert_nothing_is_half_launched(core)
    core.close()
    for index, result in enumerate(results):
        if index in failed:
            assert (result.finish_reason, result.error) == (FinishReason.ERROR, "Its grammar failed: no way on")
            assert result.tokens == undisturbed[index][: len(result.tokens)]
            assert len(result.tokens) < NUM_TOKENS
        else:
            assert result.tokens == undisturbed[index]
    assert events.count(("executed", step_id)) == events.count(("sampled", step_id)) == 1
    assert grammar.ended == {"r0", "r2"}


def test_a_grammar_that_cannot_take_a_token_ends_that_request_and_no_other(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    core, grammar = watched_core(folder, events, constrained=["r0", "r2"], async_scheduling=runs_ahead)
    grammar.failures[("accepted", 5)] = GrammarError("that was not allowed", req_ids=["r0"])
    results = run(core, PROMPTS, ALL_PARAMS)
    assert_nothing_is_half_launched(core)
    core.close()
    assert (results[0].finish_reason, results[0].error) == (
        FinishReason.ERROR,
        "Its grammar failed: that was not allowed",
    )
    assert results[0].tokens == undisturbed[0][:5]
    assert [result.tokens for result in results[1:]] == undisturbed[1:]


def test_a_failure_of_the_grammar_that_is_no_requests_is_raised_and_the_next_step_goes_on(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    core, grammar = watched_core(folder, events, async_scheduling=runs_ahead)
    grammar.failures[("bitmask", 4)] = ValueError("a defect")
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
    core, grammar = watched_core(folder, events, constrained=ALL, async_scheduling=runs_ahead)
    WatchedWorker.failures[(what, step_id)] = RuntimeError("the device is gone")
    assert [result.tokens for result in run(core, PROMPTS, ALL_PARAMS)] == undisturbed
    assert not WatchedWorker.failures, "the worker never died"
    assert [grammar.tokens[req_id] for req_id in ALL] == undisturbed
    assert_nothing_is_half_launched(core)
    core.close()


def test_a_worker_whose_results_can_never_be_read_ends_the_engine(
    folder: Path, events: list[Event], runs_ahead: bool
) -> None:
    core, _ = watched_core(folder, events, async_scheduling=runs_ahead)
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
    core, _ = watched_core(folder, events, async_scheduling=runs_ahead)
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
    core, grammar = watched_core(folder, events, constrained=ALL, async_scheduling=runs_ahead)
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
    assert [grammar.tokens[req_id] for req_id in ALL] == undisturbed
    core.close()


def test_a_request_that_is_aborted_is_forgotten_by_the_grammar(
    folder: Path, events: list[Event], runs_ahead: bool
) -> None:
    core, grammar = watched_core(folder, events, constrained=["r0"], async_scheduling=runs_ahead)
    add(core, "r0", PROMPTS[0], sampled(0))
    core.step()
    core.abort_requests(["r0"])
    assert grammar.ended == {"r0"}
    core.close()


def test_a_request_whose_grammar_is_being_compiled_waits_and_others_go_on(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    core, grammar = watched_core(folder, events, constrained=["r1", "r2"], async_scheduling=runs_ahead)
    # The others have ended long before; then there is nothing to do but to wait.
    grammar.turns_to_compile = {"r1": 6, "r2": 60}
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


def test_a_grammar_that_cannot_be_compiled_ends_its_request(
    folder: Path, undisturbed: list[list[int]], events: list[Event], runs_ahead: bool
) -> None:
    core, grammar = watched_core(folder, events, constrained=["r1"], async_scheduling=runs_ahead)
    grammar.turns_to_compile = {"r1": 3}
    grammar.failures[("compiled", 0)] = GrammarError("it says nothing", req_ids=["r1"])
    results = run(core, PROMPTS, ALL_PARAMS)
    assert (results[1].finish_reason, results[1].error) == (FinishReason.ERROR, "Its grammar failed: it says nothing")
    assert [result.tokens for result in results] == [undisturbed[0], [], *undisturbed[2:]]
    assert grammar.ended == {"r1"}
    core.close()

"""Executor with workers in other processes, independent of how messages get there."""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from penstock.config import EngineConfig
from penstock.config.parallel import BUSY_FACTOR
from penstock.contract import DraftTokenIds, ModelRunnerOutput, RpcCall, SamplingInput, SchedulerOutput
from penstock.errors import (
    KILLED,
    LifecycleError,
    PenstockError,
    WaitTimeout,
    WorkerError,
    error_from_data,
    same_error,
)
from penstock.executor.base import STEP_TIMEOUT_S, Executor, StepHandle, check_reply_rank
from penstock.executor.messages import (
    Answer,
    CallWorker,
    ExecuteStep,
    SampleStep,
    StepDone,
    WorkerFailed,
    WorkerStarted,
    pack_step,
)
from penstock.executor.progress import ProgressWatch
from penstock.executor.serialization import dumps, loads

# Timeout for the other ranks after one has failed in a call, and for all at shutdown.
GRACE_S = 10.0
_STEP_REMEDY = "Raise step_timeout_s if a step may take so long."
_Error = TypeVar("_Error", bound=PenstockError)


@dataclass(slots=True, kw_only=True)
class Rank:
    """A worker in another process. answers: by call id. has_started: `WorkerStarted` has come."""

    rank: int
    process_id: int = 0
    has_started: bool = False
    num_speculative_tokens: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)


class _Handle:
    """Handle of a step in flight."""

    def __init__(self, executor: RanksExecutor, step_id: int) -> None:
        self.step_id = step_id
        self._executor = executor

    def get_output(self, timeout_s: float = STEP_TIMEOUT_S) -> ModelRunnerOutput:
        return self._executor.output_of(self.step_id, timeout_s)


class RanksExecutor(Executor):
    """Sends every step to all workers, in order; they sample the same tokens, and one of them returns them.

    An exception of any worker ends the current call at once. After that, or after a call in which only some workers
    failed, no step runs: all workers must be replaced together.

    Timeouts of steps and of startup phases extend while workers compute (`ProgressWatch`).
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._failure: PenstockError | None = None
        self._is_closed = False
        self._num_calls = 0
        # Ranks that failed in the last call, in the order of their answers.
        self._failed: list[Rank] = []
        self._outputs: dict[int, ModelRunnerOutput] = {}
        # Steps that are sampled with `SampleStep`, until it is sent.
        self._awaiting: set[int] = set()
        # Timeout of a call that waits for a step first.
        self._step_limit_s: float | None = None

    @property
    @abstractmethod
    def _all_ranks(self) -> Sequence[Rank]: ...

    @abstractmethod
    def _send(self, message: ExecuteStep | SampleStep | CallWorker, name: str) -> None:
        """Send a message to all workers. name: the call, for errors."""

    @abstractmethod
    def _receive(self, name: str, timeout_s: float | None) -> bool:
        """Take in messages of workers; False if none came within the timeout."""

    @abstractmethod
    def _used_s(self) -> float:
        """Return the known CPU time of the workers' processes, in seconds."""

    @abstractmethod
    def _behind(self) -> Sequence[Rank]:
        """Return the ranks that the others wait for when no rank makes progress; empty if that is not known."""

    @abstractmethod
    def _described(self, ranks: Sequence[Rank]) -> str:
        """Describe ranks for errors."""

    def _wait(self, name: str, timeout_s: float | None, missing: Callable[[], Sequence[Rank]]) -> None:
        """Take in messages until no rank is missing. missing: ranks that have not answered yet. Raises WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while late := missing():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._receive(name, left_s):
                assert timeout_s is not None, "without a timeout only a message ends the wait"
                raise self._timed_out(name, timeout_s, late)

    def _wait_for_answers(self, name: str, timeout_s: float | None, missing: Callable[[], Sequence[Rank]]) -> None:
        """Wait for the answers of a call, with the timeout of the startup phase or the step it runs in."""
        if self.current_phase is not None:
            self._wait_in_phase(name, missing)
        elif self._step_limit_s is not None:
            self._wait_for_step(name, self._step_limit_s, missing)
        else:
            self._wait(name, timeout_s, missing)

    def _wait_for_step(self, name: str, timeout_s: float, missing: Callable[[], Sequence[Rank]]) -> None:
        """Wait for a step. timeout_s: timeout while no worker computes; `BUSY_FACTOR` times that while one does."""
        self._wait_while_busy(name, timeout_s, missing, _STEP_REMEDY)

    def _wait_in_phase(self, name: str, missing: Callable[[], Sequence[Rank]]) -> None:
        remedy = "Raise start_timeout_s if it may take so long; else see what its output says, and what it waits for."
        self._wait_while_busy(name, self._config.parallel.start_timeout_s, missing, remedy)

    def _wait_while_busy(self, name: str, limit_s: float, missing: Callable[[], Sequence[Rank]], remedy: str) -> None:
        """Wait for as long as workers compute. Hanging workers are killed without a further message."""
        watch = ProgressWatch(self._used_s, limit_s, limit_s * BUSY_FACTOR)
        while late := missing():
            if self._receive(name, watch.interval_s):
                continue
            if (what := watch.check()) is not None:
                # The rank without an answer may itself wait for a rank that hangs.
                late = self._behind() or late
                waits = f"Process {os.getpid()} waits in {name} for {self._described(late)}"
                others = [rank for rank in self._all_ranks if rank not in late]
                beside = f" (beside {self._described(others)})" if others else ""
                self._fail(self._located(WaitTimeout(f"{waits}{beside}. Workers {what}. {remedy}"), late[0]))

    def _timed_out(self, name: str, timeout_s: float, ranks: Sequence[Rank], what: str = "") -> WaitTimeout:
        waited = f"Process {os.getpid()} waited {timeout_s:g} s in {name} for {self._described(ranks)} {what}"
        return WaitTimeout(f"{waited.rstrip()}.")

    def _located(self, error: _Error, rank: Rank) -> _Error:
        """Add the startup phase and the rank to an error."""
        if self.current_phase is not None:
            error.args = (f"The start failed in phase {self.current_phase!r}, on rank {rank.rank}: {error}",)
        return error

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [rank.process_id for rank in self._all_ranks]

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        """Call every worker, and raise the exception of the first that failed; without a timeout wait for live workers.

        Raises WaitTimeout, with the ranks that have not answered; their late answers are dropped. After another
        interruption, such as Ctrl-C, the workers must be replaced, since some may have run the call and others not.
        """
        ranks = self._all_ranks
        check_reply_rank(call.unique_reply_rank, len(ranks))
        name = call.name
        self._check_usable()
        data = dumps(name, call)
        self._num_calls += 1
        call_id = self._num_calls
        self._failed = []
        try:
            self._send(CallWorker(call_id=call_id, call=data), name)
            self._wait_for_answers(name, call.timeout_s, lambda: [] if self._failed else self._without_answer(call_id))
        except PenstockError:
            raise
        except BaseException as error:  # such as Ctrl-C: some workers may run the call nevertheless
            self._failure = WorkerError(
                f"{type(error).__name__} came while workers were in {name}, so they must be replaced.",
                method=name,
                rank=self.slowest_rank,
                # Counts as a kill from outside: no request is quarantined for it.
                cause_type=KILLED,
            )
            raise
        if self._failed:
            self._raise_failed(name, call_id)
        replying = ranks if call.unique_reply_rank is None else [ranks[call.unique_reply_rank]]
        return [loads(rank.answers[call_id].result) for rank in replying]

    def take_draft_token_ids(self, timeout_s: float = STEP_TIMEOUT_S) -> DraftTokenIds | None:
        """Return the draft tokens, after the step in flight, with its timeouts."""
        self._step_limit_s = timeout_s
        try:
            return super().take_draft_token_ids()
        finally:
            self._step_limit_s = None

    @property
    def overlaps_with_host(self) -> bool:
        return True

    @property
    def num_speculative_tokens(self) -> int:
        return self._all_ranks[0].num_speculative_tokens

    def execute_model(self, output: SchedulerOutput) -> None:
        self._check_usable()
        self._send(ExecuteStep(output=pack_step(output)), "execute_model")
        if output.awaiting_req_ids:
            self._awaiting.add(output.step_id)

    def sample_tokens(self, sampling: SamplingInput) -> StepHandle:
        """Launch sampling, which `execute_model` did where no request awaits parts: workers do not wait for this
        process then.

        Raises LifecycleError for parts that no request of the step awaited.
        """
        self._check_usable()
        step_id = sampling.step_id
        if step_id in self._awaiting:
            self._awaiting.remove(step_id)
            self._send(SampleStep(sampling=sampling), "sample_tokens")
        elif sampling.parts:
            raise LifecycleError(
                f"Step {step_id} was sampled without parts, since no request of it awaited any, and has some now: "
                f"{', '.join(sampling.parts)}. Name the requests in awaiting_req_ids."
            )
        return _Handle(self, step_id)

    def output_of(self, step_id: int, timeout_s: float) -> ModelRunnerOutput:
        """Wait for the result of a launched step; each can be taken once."""
        self._check_usable()
        with_results = self._all_ranks[self._config.parallel.rank_with_results]
        self._wait_for_step(f"step {step_id}", timeout_s, lambda: [] if step_id in self._outputs else [with_results])
        return self._outputs.pop(step_id)

    def why_not_restart(self) -> str | None:
        return None

    def _take(self, rank: Rank, message: WorkerStarted | StepDone | Answer | WorkerFailed) -> None:
        """Take in a message of a worker."""
        if isinstance(message, WorkerFailed):
            self._fail(self._located(error_from_data(message.error), rank))
        if isinstance(message, StepDone):
            self._outputs[message.output.step_id] = message.output
        elif isinstance(message, Answer):
            # Late answers to earlier calls are dropped.
            if message.call_id == self._num_calls:
                rank.answers = {message.call_id: message}
                self.slowest_rank = rank.rank
                if message.error is not None:
                    self._failed.append(rank)
        else:
            self.slowest_rank = rank.rank
            rank.has_started, rank.process_id = True, message.process_id
            rank.num_speculative_tokens = message.num_speculative_tokens

    def _not_started(self) -> list[Rank]:
        return [rank for rank in self._all_ranks if not rank.has_started]

    def _without_answer(self, call_id: int) -> list[Rank]:
        return [rank for rank in self._all_ranks if call_id not in rank.answers]

    def _raise_failed(self, name: str, call_id: int) -> NoReturn:
        """Raise the first exception; if some ranks did not fail, states differ and all workers must be replaced."""
        first, num_ranks = self._failed[0], len(self._all_ranks)
        data = first.answers[call_id].error
        assert data is not None, "the rank has failed"
        error = self._located(error_from_data(data), first)
        with contextlib.suppress(WaitTimeout):
            self._wait(name, GRACE_S, lambda: self._without_answer(call_id))
        num_failed = len(self._failed)
        if num_failed < num_ranks:
            self._failure = WorkerError(
                f"Rank {first.rank} failed in {name}, and {num_ranks - num_failed} of {num_ranks} ranks "
                f"did not, so they must be replaced: {error}",
                method=name,
                rank=first.rank,
                cause_type=type(error).__name__,
            )
        raise error

    def _fail(self, error: PenstockError) -> NoReturn:
        self._failure = error
        raise same_error(error)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise LifecycleError("These workers were shut down.")
        if self._failure is not None:
            raise same_error(self._failure)

"""What an executor says to workers in other processes, and takes from them, however the messages get there."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from penstock.config import EngineConfig
from penstock.config.parallel import BUSY_FACTOR
from penstock.contract import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
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
from penstock.executor.program import pickled
from penstock.executor.progress import ProgressWatch

# How long the others are waited for after one has failed in a call, and all when they are to end.
GRACE_S = 10.0
_STEP_REMEDY = "Raise step_timeout_s if a step may take so long."
_Error = TypeVar("_Error", bound=PenstockError)


@dataclass(slots=True, kw_only=True)
class Rank:
    """A worker in another process. answers: by call. has_started: its worker exists."""

    rank: int
    process_id: int = 0
    has_started: bool = False
    num_speculative_tokens: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)


class _Handle:
    """A step whose tokens some worker sends."""

    def __init__(self, executor: RanksExecutor, step_id: int) -> None:
        self.step_id = step_id
        self._executor = executor

    def get_output(self, timeout_s: float = STEP_TIMEOUT_S) -> ModelRunnerOutput:
        return self._executor.output_of(self.step_id, timeout_s)


class RanksExecutor(Executor):
    """Gives all workers every step, in order; they make the same choice of tokens, and one of them sends it.

    What any worker raises ends the wait of whoever waits for a worker, at once. After that, or after a call that some
    workers made and others failed in, no step runs: all workers are to be replaced together.

    Steps, and the phases of the start, may take long while workers compute (`ProgressWatch`).
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._failure: PenstockError | None = None
        self._is_closed = False
        self._num_calls = 0
        # Ranks that failed in the last call, the first one first.
        self._failed: list[Rank] = []
        self._outputs: dict[int, ModelRunnerOutput] = {}
        # Steps whose sampling is under way, and that `sample_tokens` has not been called for.
        self._unconstrained: set[int] = set()
        # While a call waits for a step.
        self._step_limit_s: float | None = None

    @property
    @abstractmethod
    def _all_ranks(self) -> Sequence[Rank]: ...

    @abstractmethod
    def _send(self, message: ExecuteStep | SampleStep | CallWorker, name: str) -> None:
        """To all of them. name: of the call, for errors."""

    @abstractmethod
    def _receive(self, name: str, timeout_s: float | None) -> bool:
        """Take in what workers have said by then, at least something unless the time is over: then False."""

    @abstractmethod
    def _used_s(self) -> float:
        """Processor time that the workers' processes have taken, as far as they show it."""

    @abstractmethod
    def _behind(self) -> Sequence[Rank]:
        """Ranks that others wait for, if all that is known is that nobody gets on; none if that is not known."""

    @abstractmethod
    def _described(self, ranks: Sequence[Rank]) -> str:
        """For errors."""

    def _wait(self, name: str, timeout_s: float | None, missing: Callable[[], Sequence[Rank]]) -> None:
        """Take in what comes until nothing is missing. missing: from which ranks there is. Raises WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while late := missing():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._receive(name, left_s):
                assert timeout_s is not None, "without a limit nothing but a message ends the wait"
                raise self._timed_out(name, timeout_s, late)

    def _wait_for_answers(self, name: str, timeout_s: float | None, missing: Callable[[], Sequence[Rank]]) -> None:
        """The same for a call."""
        if self.current_phase is not None:
            self._wait_in_stage(name, missing)
        elif self._step_limit_s is not None:
            self._wait_for_step(name, self._step_limit_s, missing)
        else:
            self._wait(name, timeout_s, missing)

    def _wait_for_step(self, name: str, timeout_s: float, missing: Callable[[], Sequence[Rank]]) -> None:
        """timeout_s: how long no worker may compute; while one does, it is `BUSY_FACTOR` times that."""
        self._wait_while_busy(name, timeout_s, missing, _STEP_REMEDY)

    def _wait_in_stage(self, name: str, missing: Callable[[], Sequence[Rank]]) -> None:
        remedy = "Raise start_timeout_s if it may take so long; else see what its output says, and what it waits for."
        self._wait_while_busy(name, self._config.parallel.start_timeout_s, missing, remedy)

    def _wait_while_busy(self, name: str, limit_s: float, missing: Callable[[], Sequence[Rank]], remedy: str) -> None:
        """Wait for as long as workers compute. Those that hang are neither asked again nor told to end."""
        watch = ProgressWatch(self._used_s, limit_s, limit_s * BUSY_FACTOR)
        while late := missing():
            if self._receive(name, watch.interval_s):
                continue
            if (what := watch.look()) is not None:
                # Who waits for a result need not wait for the one that hangs.
                late = self._behind() or late
                waits = f"Process {os.getpid()} waits in {name} for {self._described(late)}"
                others = [rank for rank in self._all_ranks if rank not in late]
                beside = f" (beside {self._described(others)})" if others else ""
                self._fail(self._located(WaitTimeout(f"{waits}{beside}. Workers {what}. {remedy}"), late[0]))

    def _timed_out(self, name: str, timeout_s: float, ranks: Sequence[Rank], what: str = "") -> WaitTimeout:
        waited = f"Process {os.getpid()} waited {timeout_s:g} s in {name} for {self._described(ranks)} {what}"
        return WaitTimeout(f"{waited.rstrip()}.")

    def _located(self, error: _Error, rank: Rank) -> _Error:
        """The same error, with the phase of the start, and on which rank."""
        if self.current_phase is not None:
            error.args = (f"The start failed in phase {self.current_phase!r}, on rank {rank.rank}: {error}",)
        return error

    @property
    def process_ids(self) -> list[int]:
        """Of the workers' processes, by rank."""
        return [rank.process_id for rank in self._all_ranks]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """As `Executor` says. What one worker raises is raised here; None waits as long as all of them live.

        Raises WaitTimeout, with the ranks that have not answered. Their late answers go nowhere. After whatever else
        breaks it off, such as Ctrl-C, the workers are to be replaced, since nobody knows which of them have done it.
        """
        ranks = self._all_ranks
        check_reply_rank(unique_reply_rank, len(ranks))
        name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        self._check_usable()
        call = pickled(name, (method, tuple(args), kwargs or {}))
        self._num_calls += 1
        call_id = self._num_calls
        self._failed = []
        try:
            self._send(CallWorker(call_id=call_id, call=call, unique_reply_rank=unique_reply_rank), name)
            self._wait_for_answers(name, timeout_s, lambda: [] if self._failed else self._without_answer(call_id))
        except PenstockError:
            raise
        except BaseException as error:  # such as Ctrl-C: some have heard of it, or a part of it, and do it nevertheless
            self._failure = WorkerError(
                f"{type(error).__name__} came while workers were in {name}, so they must be replaced.",
                method=name,
                rank=self.slowest_rank,
                # No request is to blame.
                cause_type=KILLED,
            )
            raise
        if self._failed:
            self._raise_failed(name, call_id)
        replying = ranks if unique_reply_rank is None else [ranks[unique_reply_rank]]
        return [pickle.loads(rank.answers[call_id].result) for rank in replying]

    def take_draft_token_ids(self, timeout_s: float = STEP_TIMEOUT_S) -> DraftTokenIds | None:
        """As `Executor` says; a step that runs is waited for first, with its limits."""
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

    def execute_unconstrained(self, output: SchedulerOutput) -> None:
        """One message, so that workers go on without waiting for this process."""
        self._check_usable()
        self._send(ExecuteStep(output=pack_step(output), is_unconstrained=True), "execute_model")
        self._unconstrained.add(output.step_id)

    def sample_tokens(self, grammar: GrammarOutput) -> StepHandle:
        """As `Executor` says. Raises LifecycleError for a grammar's limits on a step that was to have none."""
        self._check_usable()
        step_id = grammar.step_id
        if step_id not in self._unconstrained:
            self._send(SampleStep(grammar=grammar), "sample_tokens")
        elif grammar.structured_output_request_ids:
            raise LifecycleError(f"Step {step_id} was executed as one that no grammar limits, and one does now.")
        self._unconstrained.discard(step_id)
        return _Handle(self, step_id)

    def output_of(self, step_id: int, timeout_s: float) -> ModelRunnerOutput:
        """The result of a step that was launched; each can be had once."""
        self._check_usable()
        with_results = self._all_ranks[self._config.parallel.rank_with_results]
        self._wait_for_step(f"step {step_id}", timeout_s, lambda: [] if step_id in self._outputs else [with_results])
        return self._outputs.pop(step_id)

    def why_not_restart(self) -> str | None:
        return None

    def _take(self, rank: Rank, message: WorkerStarted | StepDone | Answer | WorkerFailed) -> None:
        """Take in what a worker says."""
        if isinstance(message, WorkerFailed):
            self._fail(self._located(error_from_data(message.error), rank))
        if isinstance(message, StepDone):
            self._outputs[message.output.step_id] = message.output
        elif isinstance(message, Answer):
            # Answers to earlier calls come late, when nobody waits for them any more.
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
        """Raise what a worker raised first; if others did not, the workers are no longer alike."""
        first, num_ranks = self._failed[0], len(self._all_ranks)
        data = first.answers[call_id].error
        assert data is not None, "it has failed"
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

"""Supervisor of one engine core's process: heartbeat, restart with exponential backoff, and requests that continue."""

from __future__ import annotations

import enum
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from penstock.config import EngineConfig
from penstock.contract import RpcCall, encode
from penstock.engine.core.restarts import FailureCount, Quarantine, restart_backoff_s
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    CloseCore,
    CoreBusy,
    CoreEnded,
    CoreMessage,
    CoreStarted,
    EngineRequest,
    StepOutputs,
    ToCore,
    UtilityCall,
)
from penstock.engine.processes.child_process import CoreHandle
from penstock.engine.processes.heartbeat import Heartbeat
from penstock.engine.processes.resumable_request import ResumableRequest
from penstock.engine.statistics.metric_totals import StepTotals
from penstock.engine.statistics.step_log import StepRecord
from penstock.errors import (
    EngineDead,
    InvalidRequest,
    NeedsNewProcess,
    PenstockError,
    ProcessLost,
    WaitTimeout,
    error_from_data,
)
from penstock.executor.processes import describe_end, was_killed, where_to_look
from penstock.executor.serialization import dumps
from penstock.features.deployment import DeploymentFeatures
from penstock.scheduler.outputs import NO_STATS, RUNNING, EngineCoreOutput, FinishReason

logger = logging.getLogger(__name__)
# Longest wait of `add_request` for the core's refusal.
REFUSAL_TIMEOUT_S = 1.0
# Start phases of workers in processes of their own, each of which has a timeout.
_NUM_START_PHASES = 6


# Starts a process with the core of a configuration; the number is the timeout of sending to it, in seconds.
StartCore: TypeAlias = Callable[[EngineConfig, float], CoreHandle]


class _State(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    BACKING_OFF = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True, eq=False)
class Call:
    """A call of a core.

    answer: None until it has arrived. lost: why no answer arrives, or did not in time. is_awaited: whether a caller
        still waits for it.
    req_id: id of the request that it adds, if any. aborted: ids of the requests that it aborts.
    on_admission: called once with the error when the core refuses that request, which has ended then, or with None.
    """

    name: str
    answer: Answer | None = None
    lost: ProcessLost | WaitTimeout | None = None
    is_awaited: bool = True
    req_id: str | None = None
    aborted: frozenset[str] = frozenset()
    on_admission: Callable[[PenstockError | None], None] | None = None

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.lost is not None

    @property
    def error(self) -> PenstockError | None:
        """Error of the call, instead of a result."""
        data = None if self.answer is None else self.answer.error
        return self.lost if data is None else error_from_data(data)


class EngineSupervisor:
    """Supervisor of one engine's core process; not thread-safe.

    It keeps what a replacement process needs: the requests with their tokens, and the changes of the weights. Requests
    that repeatedly run when cores are lost are quarantined (`Quarantine`).

    stats: counts of the core's scheduler after its last step; zeros while there is no core. is_recovering: whether its
    workers are being replaced. steps: of all its processes so far.
    num_restarts: replaced processes so far. num_worker_restarts: replacements of the workers by all its processes.
    name: name of the core in errors and logs.
    start: starts a process with the core of a configuration; the process delivers its messages in a reader thread.
    blames_requests: whether a request may be the cause of a loss. deployment: deployment sides of
        features, if this process owns them.

    Methods raise EngineDead, or the start error of the first core, when restarts are exhausted.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        start: StartCore,
        *,
        blames_requests: bool = True,
        deployment: DeploymentFeatures | None = None,
        start_timeout_s: float,
    ) -> None:
        self.name = name
        self.config = config
        self.weight_calls: list[RpcCall] = []
        self._deployment = deployment
        self.requests: dict[str, ResumableRequest] = {}
        self._start_core = start
        self._blames_requests = blames_requests
        self.stats = NO_STATS
        self.is_recovering = False
        self.steps = StepTotals()
        self._recent_steps: list[StepRecord] = []
        self.num_restarts = 0
        self.num_worker_restarts = 0
        self._last_progress = time.monotonic()
        parallel = config.parallel
        self._start_timeout_s = start_timeout_s
        # A core with workers in other processes has a timeout of its own for their steps.
        its_own_s = 0.0 if parallel.executor == "uni" else parallel.longest_step_s
        self._step_timeout_s = its_own_s + parallel.step_timeout_s
        num_phases = 1 if parallel.executor == "uni" else _NUM_START_PHASES
        self._replacement_timeout_s = min(start_timeout_s, num_phases * parallel.longest_start_phase_s)
        self._heartbeat = Heartbeat(start_timeout_s)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        # Requests whose abort the core has not confirmed; their outputs are dropped.
        self._aborting: dict[str, int] = {}
        self._quarantine = Quarantine(self)
        # Requests that are not submitted to the core for now.
        self._quarantined: set[str] = set()
        self._failures = FailureCount()
        # Why the process was killed, or the error that it reported at its end.
        self._exit_error: PenstockError | None = None
        self._restart_requested = False
        self.started: CoreStarted | None = None
        self._restart_at = 0.0
        self.process = self._start()

    @property
    def is_running(self) -> bool:
        return self._state is _State.RUNNING

    @property
    def stalled_s(self) -> float:
        """Seconds since the core has computed a token; 0 without requests, and while it is being replaced."""
        return time.monotonic() - self._last_progress if self.requests and self.is_running else 0.0

    @property
    def is_responsive(self) -> bool:
        """Whether the core runs, and its last message is recent."""
        return self.is_running and self._heartbeat.silent_s < REFUSAL_TIMEOUT_S

    @property
    def pid(self) -> int:
        """Id of the current or last process."""
        return self.process.pid

    def add(self, request: EngineRequest) -> Call | None:
        """Keep a request and submit it. Returns the call; None while the core is being replaced.

        A refusal without a waiting caller ends the request with an error.

        Raises InvalidRequest for a request that cannot be encoded.
        """
        if not self.requests:
            self._failures.note_idle()
            self._last_progress = time.monotonic()
        try:
            # A request that waits for the replacement core is encoded once as a check.
            call = self._submit(request) if self.is_running else None
            if call is None:
                _encoded(AddRequest(call_id=0, request=request))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"Request {request.req_id!r} cannot be sent to {self.name}: {error}.") from error
        self.requests[request.req_id] = ResumableRequest(request)
        return call

    def abort(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Abort those of the requests that this engine has. Returns their last outputs."""
        names = [req_id for req_id in dict.fromkeys(req_ids) if req_id in self.requests]
        if not names:
            return []
        outputs = [self._end_request(req_id, FinishReason.ABORT) for req_id in names]
        if self.is_running:
            call = Call("abort_requests", is_awaited=False, aborted=frozenset(names))
            call_id = self._send_call(call, lambda call_id: AbortRequests(call_id=call_id, req_ids=names))
            self._aborting.update(dict.fromkeys(names, call_id))
        return outputs

    def call(self, method: str, *args: Any) -> Call:
        """Call another method of the core, which must be running."""
        call, sent = Call(method), dumps(method, args)
        self._send_call(call, lambda call_id: UtilityCall(call_id=call_id, method=method, arguments=sent))
        return call

    def take_recent_steps(self) -> list[StepRecord]:
        """Return the steps that the core has sent for a live view since the last call."""
        taken, self._recent_steps = self._recent_steps, []
        return taken

    def restart(self, why: str) -> None:
        """Replace a core that has not failed."""
        # A core that backs off is restarted anyway.
        self._restart_requested = self._state is not _State.BACKING_OFF
        self._kill(ProcessLost(f"{self._label} {why}."))

    def handle(self, message: CoreMessage | None) -> list[EngineCoreOutput] | None:
        """Handle a message of the process, or its end (None). Returns the outputs of a step, if the message has any."""
        self._heartbeat.reset()
        self.is_recovering = isinstance(message, CoreBusy) and message.is_recovering
        if message is None:
            return self._handle_exit()
        if isinstance(message, StepOutputs):
            self.num_worker_restarts += message.num_worker_restarts
            if message.stats is not None and message.stats != self.stats:
                num_tokens = message.stats.num_computed_tokens - self.stats.num_computed_tokens
                if num_tokens:
                    self._last_progress = time.monotonic()
                    self.steps.note(message.step_s, num_tokens, message.phase_s)
                self.stats = message.stats
            if message.stats is not None and message.stats.state != RUNNING:
                # A core that rests does not hang.
                self._last_progress = time.monotonic()
            self._recent_steps += message.recent_steps
            return self._handle_outputs(message.outputs)
        if isinstance(message, Answer):
            return self._handle_answer(message)
        if isinstance(message, CoreStarted):
            self._handle_started(message)
        elif isinstance(message, CoreEnded):
            self._exit_error = error_from_data(message.error)
        return None

    def handle_timers(self, waited_s: float) -> None:
        """Handle timers after a wait without a message: restart after the backoff, kill a core that is overdue."""
        if self._state is _State.BACKING_OFF:
            if time.monotonic() >= self._restart_at:
                try:
                    self.process = self._start()
                except OSError as error:
                    self._schedule_restart(ProcessLost(f"{self._label} could not be replaced: {error}."))
        elif self._state is _State.STARTING or self._calls or self.requests:
            if self._heartbeat.add_silence(waited_s):
                self._heartbeat.reset()
                what = "step" if self.is_running else "start"
                self._kill(self.timed_out(next((call.name for call in self._calls.values()), what)))
        else:
            self._heartbeat.reset()

    def timed_out(self, name: str, timeout_s: float | None = None) -> WaitTimeout:
        """Error of a call that waited `timeout_s`; None takes the heartbeat timeout."""
        limit_s = self._heartbeat.limit_s if timeout_s is None else timeout_s
        process = f" in process {self.pid}" if self.pid else ""
        return WaitTimeout(
            f"Process {os.getpid()} waited {limit_s:g} s in {name} for {self.name}{process}, which hangs or is "
            "overloaded."
        )

    def request_shutdown(self) -> None:
        """Ask a running core to close and exit; kill any other."""
        if self.is_running:
            try:
                self.process.send(_encoded(CloseCore()))
            except BlockingIOError:
                self.process.kill()
        else:
            self.process.kill()
        self._state = _State.CLOSED

    # Interface of `RequestHolder`, for the quarantine.

    def wait_for(self, req_id: str, reason: str) -> None:
        self._quarantined.add(req_id)

    def ready(self, req_id: str, reason: str) -> None:
        self._quarantined.discard(req_id)
        if self.is_running and req_id in self.requests:
            self._resume(self.requests[req_id])

    def holds(self, req_id: str) -> bool:
        return req_id in self.requests

    @property
    def _label(self) -> str:
        process = f" process {self.pid}," if self.pid else ""
        return f"{self.name[0].upper()}{self.name[1:]},{process}"

    def _start(self) -> CoreHandle:
        """Start a process; `CoreStarted` arrives when its core is ready."""
        self._state = _State.STARTING
        self._heartbeat = Heartbeat(self._start_timeout_s if self.started is None else self._replacement_timeout_s)
        self._exit_error = None
        config = self.config
        if self.started is not None:
            # The same size as before, whatever memory is free now.
            cache = replace(config.cache, kv_cache_memory_bytes=self.started.kv_cache_bytes or None)
            config = replace(config, cache=cache, replaces_lost_core=True)
        return self._start_core(config, self._step_timeout_s)

    def _handle_started(self, started: CoreStarted) -> None:
        """Submit the kept requests and weight changes to a core that has started."""
        self._state = _State.RUNNING
        self._last_progress = time.monotonic()
        self.stats = started.stats
        self._failures.note_start()
        self._heartbeat = Heartbeat(self._step_timeout_s)
        if self.started is None:
            # Its owner may have the state of an earlier one.
            self.started = started
        else:
            self.num_restarts += 1
            logger.info("%s goes on with %d requests", self._label, len(self.requests))
        calls_of_features = () if self._deployment is None else self._deployment.calls_of_new_core()
        for call in (*self.weight_calls, *calls_of_features):
            self.call("collective_rpc", call).is_awaited = False
        for req_id, kept in self.requests.items():
            if req_id not in self._quarantined:
                self._resume(kept)

    def _resume(self, kept: ResumableRequest) -> None:
        """Submit a request of a lost core, with its present parts."""
        request = kept.resume()
        self._submit(request if self._deployment is None else self._deployment.resolve(request)).is_awaited = False

    def _submit(self, request: EngineRequest) -> Call:
        call = Call("add_request", req_id=request.req_id)
        self._send_call(call, lambda call_id: AddRequest(call_id=call_id, request=request))
        return call

    def _send_call(self, call: Call, make: Callable[[int], AddRequest | AbortRequests | UtilityCall]) -> int:
        call_id = next(self._call_ids)
        data = _encoded(make(call_id))
        self._calls[call_id] = call
        try:
            self.process.send(data)
        except BlockingIOError:
            self._kill(self.timed_out(call.name))
        return call_id

    def _handle_outputs(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        taken = []
        for output in outputs:
            req_id = output.req_id
            kept = self.requests.get(req_id)
            if kept is None or req_id in self._aborting:
                continue
            taken.append(kept.take(output))
            if output.finish_reason is not None:
                del self.requests[req_id]
        if taken:
            self._failures.note_result()
        self._quarantine.note_results([output.req_id for output in taken])
        return taken

    def _handle_answer(self, answer: Answer) -> list[EngineCoreOutput] | None:
        call = self._calls.pop(answer.call_id)
        call.answer = answer
        for req_id in call.aborted:
            if self._aborting.get(req_id) == answer.call_id:
                del self._aborting[req_id]
        error = call.error
        if error is None and call.on_admission is not None:
            call.on_admission(None)
        if error is None or call.is_awaited:
            return None
        if call.req_id is None:
            logger.error("%s: %s of %s failed", error, call.name, self.name)
        # A request that was aborted meanwhile has ended, and its id may be reused.
        elif call.req_id in self.requests and call.req_id not in self._aborting:
            ended = self._end_request(call.req_id, FinishReason.ERROR, str(error))
            if call.on_admission is None:
                return [ended]
            call.on_admission(error)
            return []
        return None

    def _end_request(self, req_id: str, reason: FinishReason, error: str | None = None) -> EngineCoreOutput:
        kept = self.requests.pop(req_id)
        self._quarantined.discard(req_id)
        self._quarantine.note_results([req_id])
        return kept.take(EngineCoreOutput(req_id=req_id, finish_reason=reason, error=error))

    def _kill(self, why: PenstockError) -> None:
        if self._state is not _State.BACKING_OFF:
            self._exit_error = why
            self.process.kill()

    def _handle_exit(self) -> list[EngineCoreOutput]:
        """Restart after the end of the process or of its connection; raise when restarts are exhausted."""
        error = self._exit_error
        is_from_outside = isinstance(error, WaitTimeout)
        if error is None:
            exit_code = self.process.exit_code()
            is_from_outside = was_killed(exit_code)
            doing = "served" if self.is_running else "started"
            end = f"{describe_end(exit_code)} while it {doing}"
            error = ProcessLost(f"{self._label} {end}. {where_to_look(exit_code)}")
        self.process.close()
        if self.started is None:
            raise error if self._exit_error is not None else EngineDead(*error.args)
        if isinstance(error, EngineDead) and not isinstance(error, NeedsNewProcess):
            # The core has exhausted its own restarts of workers.
            raise error
        return self._schedule_restart(error, is_from_outside=is_from_outside)

    def _schedule_restart(self, error: PenstockError, *, is_from_outside: bool = False) -> list[EngineCoreOutput]:
        """Begin the backoff before a restart. is_from_outside: whether the loss may have an external cause."""
        limit, is_wanted, self._restart_requested = self.config.parallel.max_restarts, self._restart_requested, False
        ended: list[EngineCoreOutput] = []
        if not is_wanted:
            if not self.requests:
                self._failures.note_idle()
            self._failures.note(error)
            if self.is_running and self._blames_requests:
                ended = self._end_culprit(error, is_from_outside=is_from_outside)
            # The trial of a suspect takes one failure more when it may have an external cause.
            limit += bool(ended) and is_from_outside
            if (num_losses := self._failures.number) > limit:
                times = f"{num_losses} times in a row" if num_losses > 1 else "once"
                raise EngineDead(f"{self.name} was lost {times}, without a result; the last time: {error}") from error
        for call in self._calls.values():
            # One that has timed out has its error.
            call.lost = call.lost or ProcessLost(f"{call.name} was not answered: {error}")
        self._calls.clear()
        self._aborting.clear()
        self._state = _State.BACKING_OFF
        self.stats = NO_STATS
        logger.warning(
            "%s It is replaced, and %d requests go on (lost %d of %d times)",
            error,
            len(self.requests),
            self._failures.number,
            limit,
        )
        self._restart_at = time.monotonic() + restart_backoff_s(self._failures.number)
        self.handle_timers(0.0)
        return ended

    def _end_culprit(self, error: PenstockError, *, is_from_outside: bool) -> list[EngineCoreOutput]:
        """End the request that makes cores fail, once the quarantine has identified it."""
        culprit = self._quarantine.note_failure(self._may_have_run(), is_from_outside=is_from_outside)
        if culprit is None:
            return []
        why = f"Cores were lost again and again while they ran this request, the last time by itself: {error}"
        logger.error("Request %s ends. %s", culprit, why)
        return [self._end_request(culprit, FinishReason.ERROR, why)]

    def _may_have_run(self) -> list[str]:
        """Ids of the requests that may have run: the first `max_num_seqs` of the submitted ones, by priority."""
        given = [req_id for req_id in self.requests if req_id not in self._quarantined]
        given.sort(key=lambda req_id: self.requests[req_id].priority)
        return given[: self.config.scheduler.max_num_seqs]


def _encoded(message: AddRequest | AbortRequests | UtilityCall | CloseCore) -> bytearray:
    return encode(ToCore(message))

"""A core in a process of its own that is replaced when it is lost, by one that goes on with its requests."""

from __future__ import annotations

import enum
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import encode
from penstock.engine.core_process import CoreProcess
from penstock.engine.core_server import ServedCore
from penstock.engine.heartbeat import Heartbeat
from penstock.engine.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    CloseCore,
    CoreEnded,
    CoreStarted,
    EngineRequest,
    SaidByCore,
    StepOutputs,
    ToCore,
    UtilityCall,
)
from penstock.engine.quarantine import Quarantine
from penstock.engine.restarts import FailuresInARow, pause_before_restart
from penstock.engine.resumable_request import ResumableRequest
from penstock.errors import (
    EngineDead,
    InvalidRequest,
    NeedsNewProcess,
    PenstockError,
    ProcessLost,
    WaitTimeout,
    error_from_data,
)
from penstock.executor.processes import ProcessStarter, describe_end, was_killed, where_to_look
from penstock.executor.program import pickled
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason

logger = logging.getLogger(__name__)
# How long whoever brings a request waits to hear that it is refused.
REFUSAL_TIMEOUT_S = 1.0
# Those of workers in processes of their own, each of which has a limit.
_NUM_START_PHASES = 6


class _State(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    PAUSING = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True, eq=False)
class Call:
    """Something that a core was asked for.

    answer: None until it came. lost: why none will come, or came in time. is_awaited: whether somebody looks at it
        still.
    req_id: of the request that it brings, if any. aborted: ids of those that it ends.
    on_refused: hears why the core does not take that request, which has ended then.
    """

    name: str
    answer: Answer | None = None
    lost: ProcessLost | WaitTimeout | None = None
    is_awaited: bool = True
    req_id: str | None = None
    aborted: frozenset[str] = frozenset()
    on_refused: Callable[[PenstockError], None] | None = None

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.lost is not None

    @property
    def error(self) -> PenstockError | None:
        """What came instead of a result."""
        data = None if self.answer is None else self.answer.error
        return self.lost if data is None else error_from_data(data)


class EngineSupervisor:
    """One engine of several, or the only one; not for several threads at once.

    It has a process that can die, and keeps what a process after that one needs: the requests with their tokens, and
    what was changed about the weights. A request that is there whenever cores are lost is found out (`Quarantine`).

    name: what errors and logs call the core.
    deliver: gets the process with each of its messages, in a thread of its own.

    Methods raise EngineDead, or what kept the first core from starting, when it gives up.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        load_core: Callable[[EngineConfig], ServedCore],
        starter: ProcessStarter,
        deliver: Callable[[CoreProcess, SaidByCore | None], None],
        *,
        start_timeout_s: float,
    ) -> None:
        self.name = name
        self.config = config
        self.config_updates: list[Any] = []
        self.kept: dict[str, ResumableRequest] = {}
        self._load_core = load_core
        self._starter = starter
        self._deliver = deliver
        parallel = config.parallel
        self._start_timeout_s = start_timeout_s
        # A core that drives workers finds out by itself which of them hangs.
        its_own_s = 0.0 if parallel.executor == "uni" else parallel.longest_step_s
        self._step_timeout_s = its_own_s + parallel.step_timeout_s
        num_stages = 1 if parallel.executor == "uni" else _NUM_START_PHASES
        self._replacement_timeout_s = min(start_timeout_s, num_stages * parallel.longest_start_phase_s)
        self._heartbeat = Heartbeat(start_timeout_s)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        # Requests whose end the core has not confirmed: what it still tells of them is dropped.
        self._aborting: dict[str, int] = {}
        self._quarantine = Quarantine(self)
        # Those of `kept` that are not given to the core for now.
        self._held_back: set[str] = set()
        self._losses = FailuresInARow()
        # What this process was killed for, or said at its end.
        self._end: PenstockError | None = None
        self._is_to_restart = False
        self.started: CoreStarted | None = None
        self._restart_at = 0.0
        self.process = self._start()

    @property
    def is_running(self) -> bool:
        return self._state is _State.RUNNING

    @property
    def is_prompt(self) -> bool:
        """Whether it runs, and answers as soon as a step allows, as far as is known."""
        return self.is_running and self._heartbeat.lasts_s < REFUSAL_TIMEOUT_S

    @property
    def pid(self) -> int:
        """Of the process that there is, or was last."""
        return self.process.pid

    def add(self, request: EngineRequest) -> Call | None:
        """Take a request. Returns the call that brings it to the core; None where that has to wait.

        A refusal that nobody awaits ends the request, with an error.

        Raises InvalidRequest for what no message can hold.
        """
        if not self.kept:
            self._losses.note_idle()
        try:
            # Where it has to wait, it is tried for the core that will get it.
            call = self._submit(request) if self.is_running else None
            if call is None:
                _encoded(AddRequest(call_id=0, request=request))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"Request {request.req_id!r} cannot be sent to {self.name}: {error}.") from error
        self.kept[request.req_id] = ResumableRequest(request)
        return call

    def abort(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End those requests that are here, at once."""
        names = [req_id for req_id in dict.fromkeys(req_ids) if req_id in self.kept]
        if not names:
            return []
        outputs = [self._end_request(req_id, FinishReason.ABORT) for req_id in names]
        if self.is_running:
            call = Call("abort_requests", is_awaited=False, aborted=frozenset(names))
            call_id = self._ask(call, lambda call_id: AbortRequests(call_id=call_id, req_ids=names))
            self._aborting.update(dict.fromkeys(names, call_id))
        return outputs

    def call(self, method: str, *args: Any) -> Call:
        """Ask the core, which must run, for something else."""
        call, sent = Call(method), pickled(method, args)
        self._ask(call, lambda call_id: UtilityCall(call_id=call_id, method=method, arguments=sent))
        return call

    def restart(self, why: str) -> None:
        """Replace the core, though nothing has happened to it."""
        # One that pauses is about to be.
        self._is_to_restart = self._state is not _State.PAUSING
        self._kill(ProcessLost(f"{self._who} {why}."))

    def take(self, message: SaidByCore | None) -> list[EngineCoreOutput] | None:
        """Take in what its process has said, or its end (None). Returns what a step brought, if it was that."""
        self._heartbeat.end()
        if message is None:
            return self._lose()
        if isinstance(message, StepOutputs):
            return self._take_outputs(message.outputs)
        if isinstance(message, Answer):
            return self._take_answer(message)
        if isinstance(message, CoreStarted):
            self._take_over(message)
        elif isinstance(message, CoreEnded):
            self._end = error_from_data(message.error)
        return None

    def tend(self, waited_s: float) -> None:
        """Do what is due after one more wait in which this one has said nothing."""
        if self._state is _State.PAUSING:
            if time.monotonic() >= self._restart_at:
                try:
                    self.process = self._start()
                except OSError as error:
                    self._begin_anew(ProcessLost(f"{self._who} could not be replaced: {error}."))
        elif self._state is _State.STARTING or self._calls or self.kept:
            if self._heartbeat.go_on(waited_s):
                self._heartbeat.end()
                what = "step" if self.is_running else "start"
                self._kill(self.timed_out(next((call.name for call in self._calls.values()), what)))
        else:
            self._heartbeat.end()

    def timed_out(self, name: str, timeout_s: float | None = None) -> WaitTimeout:
        """The error for a wait of that long; None for as long as a core is waited for."""
        limit_s = self._heartbeat.limit_s if timeout_s is None else timeout_s
        return WaitTimeout(
            f"Process {os.getpid()} waited {limit_s:g} s in {name} for {self.name} in process {self.pid}, which hangs "
            "or is overloaded."
        )

    def tell_to_end(self) -> None:
        """The core gives everything back and ends, if it is one that can be asked."""
        if self.is_running:
            try:
                self.process.send(_encoded(CloseCore()))
            except BlockingIOError:
                self.process.kill()
        else:
            self.process.kill()
        self._state = _State.CLOSED

    # For the quarantine.

    def wait_for(self, req_id: str, reason: str) -> None:
        self._held_back.add(req_id)

    def ready(self, req_id: str, reason: str) -> None:
        self._held_back.discard(req_id)
        if self.is_running and req_id in self.kept:
            self._submit(self.kept[req_id].resume()).is_awaited = False

    def holds(self, req_id: str) -> bool:
        return req_id in self.kept

    @property
    def _who(self) -> str:
        return f"{self.name[0].upper()}{self.name[1:]}, process {self.pid},"

    def _start(self) -> CoreProcess:
        """Begin to start a process, which says when its core has started."""
        self._state = _State.STARTING
        self._heartbeat = Heartbeat(self._start_timeout_s if self.started is None else self._replacement_timeout_s)
        self._end = None
        config = self.config
        if self.started is not None:
            # As large as it was, whatever else takes memory by now.
            cache = replace(config.cache, kv_cache_memory_bytes=self.started.kv_cache_bytes or None)
            config = replace(config, cache=cache, replaces_lost_core=True)
        return CoreProcess(config, self._load_core, self._starter, self._deliver, send_timeout_s=self._step_timeout_s)

    def _take_over(self, started: CoreStarted) -> None:
        """Give a core that has started what there is to go on with."""
        self._state = _State.RUNNING
        self._losses.note_start()
        self._heartbeat = Heartbeat(self._step_timeout_s)
        if self.started is None:
            self.started = started
            return
        logger.info("%s goes on with %d requests", self._who, len(self.kept))
        for update in self.config_updates:
            self.call("collective_rpc", "update_config", None, (update,), None).is_awaited = False
        for req_id, kept in self.kept.items():
            if req_id not in self._held_back:
                self._submit(kept.resume()).is_awaited = False

    def _submit(self, request: EngineRequest) -> Call:
        call = Call("add_request", req_id=request.req_id)
        self._ask(call, lambda call_id: AddRequest(call_id=call_id, request=request))
        return call

    def _ask(self, call: Call, make: Callable[[int], AddRequest | AbortRequests | UtilityCall]) -> int:
        call_id = next(self._call_ids)
        data = _encoded(make(call_id))
        self._calls[call_id] = call
        try:
            self.process.send(data)
        except BlockingIOError:
            self._kill(self.timed_out(call.name))
        return call_id

    def _take_outputs(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        taken = []
        for output in outputs:
            req_id = output.req_id
            kept = self.kept.get(req_id)
            if kept is None or req_id in self._aborting:
                continue
            taken.append(kept.take(output))
            if output.finish_reason is not None:
                del self.kept[req_id]
        if taken:
            self._losses.note_result()
        self._quarantine.note_results([output.req_id for output in taken])
        return taken

    def _take_answer(self, answer: Answer) -> list[EngineCoreOutput] | None:
        call = self._calls.pop(answer.call_id)
        call.answer = answer
        for req_id in call.aborted:
            if self._aborting.get(req_id) == answer.call_id:
                del self._aborting[req_id]
        error = call.error
        if error is None or call.is_awaited:
            return None
        if call.req_id is None:
            logger.error("%s: %s of %s failed", error, call.name, self.name)
        # One that was aborted meanwhile has ended, and its id may be another's.
        elif call.req_id in self.kept and call.req_id not in self._aborting:
            ended = self._end_request(call.req_id, FinishReason.ERROR, str(error))
            if call.on_refused is None:
                return [ended]
            call.on_refused(error)
            return []
        return None

    def _end_request(self, req_id: str, reason: FinishReason, error: str | None = None) -> EngineCoreOutput:
        kept = self.kept.pop(req_id)
        self._held_back.discard(req_id)
        self._quarantine.note_results([req_id])
        return kept.take(EngineCoreOutput(req_id=req_id, finish_reason=reason, error=error))

    def _kill(self, why: PenstockError) -> None:
        if self._state is not _State.PAUSING:
            self._end = why
            self.process.kill()

    def _lose(self) -> list[EngineCoreOutput]:
        """Its process has ended, or let go: replace it, or give up."""
        error = self._end
        is_from_outside = isinstance(error, WaitTimeout)
        if error is None:
            exit_code = self.process.exit_code()
            is_from_outside = was_killed(exit_code)
            doing = "served" if self.is_running else "started"
            end = f"{describe_end(exit_code)} while it {doing}"
            error = ProcessLost(f"{self._who} {end}. {where_to_look(exit_code)}")
        self.process.close()
        if self.started is None:
            raise error if self._end is not None else EngineDead(*error.args)
        if isinstance(error, EngineDead) and not isinstance(error, NeedsNewProcess):
            # It has tried by itself whether restarts help.
            raise error
        return self._begin_anew(error, is_from_outside=is_from_outside)

    def _begin_anew(self, error: PenstockError, *, is_from_outside: bool = False) -> list[EngineCoreOutput]:
        """is_from_outside: whether somebody else may have brought the loss about."""
        limit, is_wanted, self._is_to_restart = self.config.parallel.max_restarts, self._is_to_restart, False
        ended: list[EngineCoreOutput] = []
        if not is_wanted:
            if not self.kept:
                self._losses.note_idle()
            self._losses.note(error)
            if self.is_running:
                ended = self._blame(error, is_from_outside=is_from_outside)
            # A trial takes one more where others may have brought it about.
            limit += bool(ended) and is_from_outside
            if (num_losses := self._losses.number) > limit:
                times = f"{num_losses} times in a row" if num_losses > 1 else "once"
                raise EngineDead(f"{self.name} was lost {times}, without a result; the last time: {error}") from error
        for call in self._calls.values():
            call.lost = ProcessLost(f"{call.name} was not answered: {error}")
        self._calls.clear()
        self._aborting.clear()
        self._state = _State.PAUSING
        logger.warning(
            "%s It is replaced, and %d requests go on (lost %d of %d times)",
            error,
            len(self.kept),
            self._losses.number,
            limit,
        )
        self._restart_at = time.monotonic() + pause_before_restart(self._losses.number)
        self.tend(0.0)
        return ended

    def _blame(self, error: PenstockError, *, is_from_outside: bool) -> list[EngineCoreOutput]:
        """End the request that makes cores fail, once it is known which that is."""
        culprit = self._quarantine.note_failure(self._may_have_run(), is_from_outside=is_from_outside)
        if culprit is None:
            return []
        why = f"Cores were lost again and again while they ran this request, the last time by itself: {error}"
        logger.error("Request %s ends. %s", culprit, why)
        return [self._end_request(culprit, FinishReason.ERROR, why)]

    def _may_have_run(self) -> list[str]:
        """Those that the core had no reason to let wait: of a queue, none that its place kept from running."""
        given = [req_id for req_id in self.kept if req_id not in self._held_back]
        given.sort(key=lambda req_id: self.kept[req_id].priority)
        return given[: self.config.scheduler.max_num_seqs]


def _encoded(message: AddRequest | AbortRequests | UtilityCall | CloseCore) -> bytes:
    return encode(ToCore(message))

"""Client of one or several engine cores, each in a process of its own."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.engine.core.core_client import START_TIMEOUT_S
from penstock.engine.core.weight_changes import keep_weight_change
from penstock.engine.guards import OwningProcess
from penstock.engine.messages import BrokerStatus, CoreMessage, EngineRequest
from penstock.engine.processes.child_process import CoreHandle, deliver_to, start_core
from penstock.engine.processes.core_answers import result_of, results_of, status_of
from penstock.engine.processes.core_server import ServedCore
from penstock.engine.processes.heartbeat import LONGEST_WAIT_S
from penstock.engine.processes.routing import Router
from penstock.engine.processes.supervisor import REFUSAL_TIMEOUT_S, Call, EngineSupervisor, StartCore
from penstock.engine.statistics.step_log import StepRecord
from penstock.errors import EngineDead, InvalidRequest, LifecycleError, PenstockError, WaitTimeout, same_error
from penstock.executor.base import check_reply_rank
from penstock.executor.processes import ProcessStarter
from penstock.features.deployment import DeploymentFeatures
from penstock.observability.standard_streams import occupy_standard_descriptors
from penstock.scheduler.outputs import NO_STATS, EngineCoreOutput, SchedulerStats, summed_stats

# Grace period of cores that were asked to shut down.
_END_TIMEOUT_S = 30.0


def load_engine_core(config: EngineConfig) -> ServedCore:
    """Load the engine core of this configuration; raises what loading the model raises."""
    from penstock.engine.core.engine_core import EngineCore

    return EngineCore(config, owns_deployment=False)


# Callback for a core's messages, and the end of its connection (None).
Deliver: TypeAlias = Callable[[CoreHandle, CoreMessage | None], None]


class CoreGroup:
    """`CoreClient` of the cores of a configuration, whose processes it starts.

    A core that dies, or misses its heartbeat timeout with work pending, is replaced, and its requests continue
    (`EngineSupervisor`); other cores are not affected. When restarts do not help, all calls raise EngineDead.

    load_core: creates a core in its process; it is pickled by its name. start_timeout_s: timeout of `load_core`.
    connect: connects to one core, or a broker of several, instead of starting processes; gets the callback for its
        messages.
    meanwhile: called while the cores start; an exception of it aborts the start.
    while_waiting: called several times a second while the cores start, or a call waits for its answer.
    features: states of the deployment sides of an earlier client, whose place this one takes, by feature. on_features:
        called after each change of them. A client that connects to a broker leaves them to it.

    Raises what `load_core` raises; EngineDead when a process dies during its start, WaitTimeout when it times out.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_core: Callable[[EngineConfig], ServedCore] = load_engine_core,
        *,
        connect: Callable[[Deliver], CoreHandle] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        meanwhile: Callable[[], object] = lambda: None,
        while_waiting: Callable[[], None] = lambda: None,
        features: Mapping[str, Any] | None = None,
        on_features: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        occupy_standard_descriptors()
        self._owner = OwningProcess()
        # Held while messages are handled: by callers, and by the reader thread of a core that died between calls.
        self._lock = threading.RLock()
        self._inbox: queue.SimpleQueue[tuple[CoreHandle, CoreMessage | None] | None] = queue.SimpleQueue()
        self._turns: deque[list[EngineCoreOutput]] = deque()
        self._is_woken = False
        self._admission_callback: Callable[[str, PenstockError | None], None] | None = None
        self._answered: list[tuple[str, PenstockError | None]] = []
        self._ended_by: PenstockError | None = None
        self._loss_callback: Callable[[], None] = lambda: None
        self._waiting_callback = while_waiting
        self._deployment: DeploymentFeatures | None = None
        if connect is None:
            self._deployment = DeploymentFeatures(config, _call_cores_of(weakref.ref(self)), features, on_features)
        parallel, cache = config.parallel, config.cache
        num_engines = parallel.num_engines_here if connect is None else 1
        block_size = cache.block_size * parallel.decode_context_parallel_size
        self._router = Router(num_engines, block_size if cache.enable_prefix_caching and num_engines > 1 else None)
        self._starter = ProcessStarter()
        self._engines: list[EngineSupervisor] = []
        deliver = deliver_to(weakref.ref(self), self._inbox)
        starter = self._starter

        def start(config: EngineConfig, send_timeout_s: float) -> CoreHandle:
            if connect is not None:
                return connect(deliver)
            return start_core(config, load_core, starter, deliver, send_timeout_s=send_timeout_s)

        try:
            with self._listening():
                self._start_engines(config, num_engines, start, start_timeout_s, is_broker=connect is not None)
                meanwhile()
                self._wait_until(self._are_running)
        except BaseException as error:
            self._ended_by = self._ended_by or LifecycleError(f"This engine did not start: {error}")
            self._end_processes()
            raise
        started = [engine.started for engine in self._engines if engine.started is not None]
        self.max_model_len = min(one.max_model_len for one in started)
        self.vocab_size = started[0].vocab_size
        # Seconds by stage of the core that took longest to start.
        self.slowest_start_s = max((one.stage_s for one in started), key=lambda stage_s: sum(stage_s.values()))

    @property
    def engines(self) -> Sequence[EngineSupervisor]:
        """Supervisors of the cores, by engine."""
        return self._engines

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the cores, by engine."""
        return [engine.pid for engine in self._engines]

    def add_request(self, request: EngineRequest) -> None:
        """As `CoreClient`, unless refusals go to a callback (`on_admission`).

        A late refusal, as from a core that is being replaced, ends the request with an error.
        """
        with self._listening():
            self._check_running()
            if any(request.req_id in engine.requests for engine in self._engines):
                raise InvalidRequest(
                    f"There is a request {request.req_id!r} already, and it has not ended. Give each request its own "
                    "id."
                )
            if self._deployment is not None:
                request = self._deployment.resolve(request)
            engine = self._choose(request)
            call = engine.add(request)
            if call is None:
                # A core that is being replaced admits it.
                self._answered.append((request.req_id, None))
                self.wake()
                return
            if self._admission_callback is not None:
                call.is_awaited = False
                call.on_admission = lambda error: self._answered.append((request.req_id, error))
                return
            self._wait_for(lambda: call.is_over, REFUSAL_TIMEOUT_S)
            call.is_awaited = False
            if call.answer is not None and call.error is not None:
                del engine.requests[request.req_id]
                raise call.error

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        with self._listening():
            # Requests of dead cores have ended already.
            if self._ended_by is not None:
                return []
            names = list(req_ids)
            ended = [output for engine in self._engines for output in engine.abort(names)]
            # Their ids may be reused, so outputs that are queued for them are dropped.
            gone = {output.req_id for output in ended}
            for outputs in self._turns:
                outputs[:] = [output for output in outputs if output.req_id not in gone]
            return ended

    def has_unfinished_requests(self) -> bool:
        """As `CoreClient`; also true while a core is being replaced, and once that has failed for good."""
        if self._ended_by is not None:
            return isinstance(self._ended_by, EngineDead)
        return bool(self._turns) or any(engine.requests or not engine.is_running for engine in self._engines)

    def step(self) -> list[EngineCoreOutput]:
        """Outputs that the cores have sent; empty after `LONGEST_WAIT_S`, so that other callers get the lock."""
        with self._listening():
            self._is_woken = False
            self._wait_for(lambda: bool(self._turns or self._answered) or self._is_woken, LONGEST_WAIT_S)
            while not self._inbox.empty():
                self._receive(0.0)
            outputs = self.take_outputs()
            answered, self._answered = self._answered, []
        if self._admission_callback is not None:
            for req_id, error in answered:
                self._admission_callback(req_id, error)
        return outputs

    def wait_for_work(self) -> None:
        """Do nothing: the cores wait in their processes."""

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return the outputs that have arrived, without waiting."""
        outputs = [output for turn in self._turns for output in turn]
        self._turns.clear()
        return outputs

    def wake(self) -> None:
        """End `step`, which then returns no outputs."""
        self._inbox.put(None)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As `CoreClient`, on all cores; the cache of a core that is being replaced is empty.

        False where requests hold blocks of any core; the caches of the other cores are cleared nevertheless.
        """
        with self._listening():
            self._check_running()
            calls = self._call_running("reset_prefix_cache", reset_running_requests, reset_connector)
            are_reset = True
            for index, call in calls:
                is_reset = call.lost is not None or result_of(call)
                are_reset = are_reset and is_reset
                if is_reset:
                    self._router.forget(index)
            return are_reset

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        """As `CoreClient`, on all cores: the results of engine 0's workers, then of engine 1's, and so on. On engine 0
        only where the others would write the same files.

        `unique_reply_rank` is an index in that order.

        Changes of the weights are kept for replacement cores. A core in which such a call failed or timed out while it
        succeeded in others is restarted with the weights of the others; after a timeout of all, with the previous ones.

        Raises ProcessLost when a core is lost during the call; its requests continue. WaitTimeout on a timeout.
        """
        effects = call.effects
        asked = self._engines[:1] if effects.on_first_engine else self._engines
        num_ranks = sum(engine.config.parallel.world_size for engine in asked)
        check_reply_rank(call.unique_reply_rank, num_ranks)
        with self._listening():
            feature = None if self._deployment is None else self._deployment.side_of(call)
            if feature is not None:
                self._check_running()
                return feature.call(call)
            if self._deployment is not None:
                self._deployment.call_begins(call)
            calls = self._call_workers(call, asked)
            done = [index for index, of_core in enumerate(calls) if of_core.error is None]
            # A core may complete the call after its timeout.
            is_late = any(isinstance(of_core.error, WaitTimeout) for of_core in calls)
            if done:
                keep_weight_change(call, self._engines, lambda: self._config_of(self._engines[done[0]]))
            if (done or is_late) and effects.weights is not None:
                for index, engine in enumerate(self._engines):
                    if index not in done:
                        why = "others have done {}, and it has not" if done else "{} took it too long"
                        engine.restart(f"is replaced, since {why.format(call.name)}")
            if self._deployment is not None:
                # One that goes on after its timeout answers nothing else meanwhile.
                goes_on = is_late and effects.weights is None
                self._deployment.call_ends(call, is_done=bool(done) and not goes_on)
            answers = results_of(calls)
        return answers if call.unique_reply_rank is None else [answers[call.unique_reply_rank]]

    def on_admission(self, callback: Callable[[str, PenstockError | None], None]) -> None:
        self._admission_callback = callback

    def on_loss(self, callback: Callable[[], None]) -> None:
        """As `CoreClient`, for lost cores; cores replace their lost workers themselves."""
        self._loss_callback = callback

    def stats(self) -> SchedulerStats:
        """As `CoreClient`; a core that is being replaced has no requests and no blocks."""
        with self._listening():
            self._check_running()
            calls = self._call_running("stats")
            known: list[SchedulerStats] = [result_of(call) for _, call in calls if call.lost is None]
        return summed_stats([NO_STATS, *known])

    def watch_steps(self, seconds: float) -> None:
        """As `CoreClient`; a core that is being replaced is left out."""
        with self._listening():
            self._check_running()
            for engine in self._engines:
                if engine.is_running:
                    engine.call("watch_steps", seconds).is_awaited = False

    def take_recent_steps(self) -> list[list[StepRecord]]:
        """As `CoreClient`: the steps that the cores have sent."""
        return [engine.take_recent_steps() for engine in self._engines]

    def status(self) -> BrokerStatus:
        """As `CoreClient`, by the cores' last messages."""
        return status_of(self._engines, len(self._engines))

    def check_health(self) -> None:
        """As `CoreClient`, after replacement cores have started."""
        with self._listening():
            calls = self._call_all("check_health", None)
            while any(call.lost is not None for call in calls):
                calls = self._call_all("check_health", None)
            for call in calls:
                result_of(call)

    def close(self) -> None:
        if not self._owner.is_here():
            return
        with self._lock:
            self._ended_by = self._ended_by or LifecycleError("This engine was closed. Create a new one.")
            self._turns.clear()
        self._end_processes()

    def _start_engines(
        self, config: EngineConfig, num_engines: int, start: StartCore, start_timeout_s: float, *, is_broker: bool
    ) -> None:
        for index in range(num_engines):
            name = "the broker" if is_broker else "the core"
            name = name if num_engines == 1 else f"{name} of engine {index}"
            own = replace(config, parallel=config.parallel.of_engine(index))
            # A broker runs no requests itself.
            engine = EngineSupervisor(
                name,
                own,
                start,
                blames_requests=not is_broker,
                deployment=self._deployment,
                start_timeout_s=start_timeout_s,
            )
            self._engines.append(engine)

    def _choose(self, request: EngineRequest) -> EngineSupervisor:
        responsive = [index for index, engine in enumerate(self._engines) if engine.is_responsive]
        loads = {index: len(self._engines[index].requests) for index in responsive or range(len(self._engines))}
        return self._engines[self._router.choose(loads, request.prompt_token_ids, request.cache_salt)]

    def _are_running(self) -> bool:
        return all(engine.is_running for engine in self._engines)

    def _config_of(self, engine: EngineSupervisor) -> EngineConfig:
        """Configuration with which an engine has loaded its weights."""
        call = engine.call("collective_rpc", RpcCall("get_config"))
        self._wait_until(lambda: call.is_over)
        config: EngineConfig = result_of(call)[0]
        return config

    def _call_workers(self, call: RpcCall, asked: Sequence[EngineSupervisor]) -> list[Call]:
        """Call the workers of cores, as `_call_all`."""
        return self._call_all("collective_rpc", call.timeout_s, replace(call, unique_reply_rank=None), asked=asked)

    def _call_running(self, method: str, *args: Any) -> list[tuple[int, Call]]:
        """Call a method of all running cores and wait for the results. Returns pairs of engine index and call."""
        calls = [(index, engine.call(method, *args)) for index, engine in enumerate(self._engines) if engine.is_running]
        self._wait_until(lambda: all(call.is_over for _, call in calls))
        return calls

    def _call_all(
        self, method: str, timeout_s: float | None, *args: Any, asked: Sequence[EngineSupervisor] | None = None
    ) -> list[Call]:
        """Call a method of all cores (or of `asked`) once all run, and wait for the results.

        A call that exceeds the timeout ends with WaitTimeout.
        """
        asked = self._engines if asked is None else asked
        self._wait_until(self._are_running)
        calls = [engine.call(method, *args) for engine in asked]
        self._wait_for(lambda: all(call.is_over for call in calls), timeout_s, self._waiting_callback)
        for engine, call in zip(asked, calls, strict=True):
            if not call.is_over:
                call.is_awaited = False
                call.lost = engine.timed_out(method, timeout_s)
        return calls

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        """Handle messages until a condition holds, for as long as the cores send heartbeats."""
        self._wait_for(is_over, None, self._waiting_callback)

    def _wait_for(
        self, is_over: Callable[[], bool], timeout_s: float | None, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Handle messages until a condition holds or the timeout passes. Raises the error of dead cores.

        meanwhile: called after each wait for a message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_over():
            self._check_running()
            left_s = LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0.0:
                return
            self._receive(min(left_s, LONGEST_WAIT_S))
            meanwhile()

    def _receive(self, timeout_s: float) -> None:
        """Handle one message, if one arrives in time, and the timers of the cores that sent none."""
        begin = time.monotonic()
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            message = None
        else:
            self._is_woken = self._is_woken or message is None
        waited_s = time.monotonic() - begin
        try:
            for index, engine in enumerate(self._engines):
                if message is not None and engine.process is message[0]:
                    self._handle(index, message[1])
                else:
                    engine.handle_timers(waited_s)
        except PenstockError as error:
            self._ended_by = self._ended_by or error

    def _handle(self, index: int, message: CoreMessage | None) -> None:
        if message is None:
            self._router.forget(index)
        outputs = self._engines[index].handle(message)
        if outputs is not None:
            self._turns.append(outputs)

    def handle_exit(self) -> None:
        """Handle the end of a core's process between calls, in the process's reader thread."""
        with self._lock:
            while self._ended_by is None and not self._inbox.empty():
                self._receive(0.0)
        self._loss_callback()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Hold the lock for handling messages, in the process that created this client."""
        self._owner.check()
        with self._lock:
            yield

    def _check_running(self) -> None:
        if self._ended_by is not None:
            raise same_error(self._ended_by)

    def _end_processes(self) -> None:
        deadline = time.monotonic() + _END_TIMEOUT_S
        for engine in self._engines:
            engine.request_shutdown()
        for engine in self._engines:
            engine.process.close(max(0.0, deadline - time.monotonic()))
        self._starter.close()


def _call_cores_of(group: weakref.ref[CoreGroup]) -> Callable[[RpcCall], list[Any]]:
    """Return the function by which a group's deployment sides call its cores, as `_deliver_to`."""

    def call_cores(call: RpcCall) -> list[Any]:
        owner = group()
        assert owner is not None, "the group calls its features"
        return results_of(owner._call_workers(call, owner._engines))

    return call_cores

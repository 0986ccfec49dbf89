"""One client of several cores, each in a process of its own; or of one."""

from __future__ import annotations

import pickle
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.config import EngineConfig
from penstock.engine.core_client import CHANGE_WEIGHTS, START_TIMEOUT_S
from penstock.engine.core_process import CoreProcess
from penstock.engine.core_server import ServedCore
from penstock.engine.heartbeat import LONGEST_WAIT_S
from penstock.engine.messages import EngineRequest, SaidByCore
from penstock.engine.owning_process import OwningProcess
from penstock.engine.routing import Router
from penstock.engine.supervisor import REFUSAL_TIMEOUT_S, Call, EngineSupervisor
from penstock.errors import EngineDead, InvalidRequest, LifecycleError, PenstockError, WaitTimeout, same_error
from penstock.executor.base import check_reply_rank
from penstock.executor.processes import ProcessStarter
from penstock.executor.program import refuse_in_program
from penstock.observability.standard_streams import occupy_standard_descriptors
from penstock.scheduler.outputs import EngineCoreOutput, SchedulerStats

# How long cores that were told to end are given to do so.
_END_TIMEOUT_S = 30.0


def load_engine_core(config: EngineConfig) -> ServedCore:
    """The engine core of this configuration; raises what loading the model raises."""
    from penstock.engine.core import EngineCore

    return EngineCore(config)


class CoreGroup:
    """The client (`CoreClient`) of the cores that a configuration asks for, which it starts.

    A core that dies, or says nothing for too long while it owes something, is replaced, and its requests go on
    (`EngineSupervisor`); those of other cores go on meanwhile. `EngineDead` comes when that does not help, for all.

    load_core: makes a core in its process; it is pickled by its name. start_timeout_s: how long a core may take for it.
    meanwhile: called while they start; what it raises ends that.

    Raises what `load_core` raises; EngineDead when a process dies before it has started, WaitTimeout when it says
    nothing for too long.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_core: Callable[[EngineConfig], ServedCore] = load_engine_core,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        refuse_in_program()
        occupy_standard_descriptors()
        self._owner = OwningProcess()
        # Held by whoever takes in messages: callers, and, for a core that died while nobody called, its reader.
        self._lock = threading.RLock()
        self._inbox: queue.SimpleQueue[tuple[CoreProcess, SaidByCore | None] | None] = queue.SimpleQueue()
        self._turns: deque[list[EngineCoreOutput]] = deque()
        self._is_woken = False
        self._tell_refused: Callable[[str, PenstockError], None] | None = None
        self._refused: list[tuple[str, PenstockError]] = []
        self._ended_by: PenstockError | None = None
        self._tell_of_loss: Callable[[], None] = lambda: None
        parallel, cache = config.parallel, config.cache
        num_engines = parallel.num_engines_here
        block_size = cache.block_size * parallel.decode_context_parallel_size
        has_choice = cache.enable_prefix_caching and num_engines > 1
        self._router = Router(num_engines, block_size if has_choice else None)
        self._starter = ProcessStarter()
        self._engines: list[EngineSupervisor] = []
        deliver = _deliver_to(weakref.ref(self), self._inbox)
        try:
            with self._listening():
                for index in range(num_engines):
                    name = "the core" if num_engines == 1 else f"the core of engine {index}"
                    own = replace(config, parallel=parallel.of_engine(index))
                    self._engines.append(
                        EngineSupervisor(name, own, load_core, self._starter, deliver, start_timeout_s=start_timeout_s)
                    )
                meanwhile()
                self._wait_until(self._are_running)
        except BaseException as error:
            self._ended_by = self._ended_by or LifecycleError(f"This engine did not start: {error}")
            self._end_processes()
            raise
        started = [engine.started for engine in self._engines if engine.started is not None]
        self.max_model_len = min(one.max_model_len for one in started)
        self.vocab_size = started[0].vocab_size

    @property
    def process_ids(self) -> list[int]:
        """Of the cores' processes, by engine."""
        return [engine.pid for engine in self._engines]

    def add_request(self, request: EngineRequest) -> None:
        """As `CoreClient`, unless somebody hears of refusals (`on_refused`), who is told then.

        One that comes late, as from a core that is being replaced, ends the request.
        """
        with self._listening():
            self._check_running()
            if any(request.req_id in engine.kept for engine in self._engines):
                raise InvalidRequest(
                    f"There is a request {request.req_id!r} already, and it has not ended. Give each request its own "
                    "id."
                )
            engine = self._choose(request)
            call = engine.add(request)
            if call is None:
                return
            if self._tell_refused is not None:
                call.is_awaited = False
                call.on_refused = lambda error: self._refused.append((request.req_id, error))
                return
            self._wait_for(lambda: call.is_over, REFUSAL_TIMEOUT_S)
            call.is_awaited = False
            if call.answer is not None and call.error is not None:
                del engine.kept[request.req_id]
                raise call.error

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        with self._listening():
            # Those of cores that have ended have ended with them.
            if self._ended_by is not None:
                return []
            names = list(req_ids)
            ended = [output for engine in self._engines for output in engine.abort(names)]
            # Their ids may be used again, so what steps brought them meanwhile is dropped.
            gone = {output.req_id for output in ended}
            for outputs in self._turns:
                outputs[:] = [output for output in outputs if output.req_id not in gone]
            return ended

    def has_unfinished_requests(self) -> bool:
        """Also while a core is being replaced, and once that has failed for good."""
        if self._ended_by is not None:
            return isinstance(self._ended_by, EngineDead)
        return bool(self._turns) or any(engine.kept or not engine.is_running for engine in self._engines)

    def step(self) -> list[EngineCoreOutput]:
        """What steps of any cores brought. Nothing where they take long, so that others have their turn."""
        with self._listening():
            self._is_woken = False
            self._wait_for(lambda: bool(self._turns) or self._is_woken, LONGEST_WAIT_S)
            while not self._inbox.empty():
                self._receive(0.0)
            outputs = [output for turn in self._turns for output in turn]
            self._turns.clear()
            refused, self._refused = self._refused, []
        for req_id, error in refused:
            assert self._tell_refused is not None, "nobody else is told"
            self._tell_refused(req_id, error)
        return outputs

    def wait_for_work(self) -> None:
        """The cores themselves wait, before they say what their next steps brought."""

    def wake(self) -> None:
        """End `step`: it seems to have brought nothing."""
        self._inbox.put(None)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As `CoreClient`, of all cores; the cache of one that is being replaced is empty.

        False where requests hold blocks of any; the others' caches are empty nevertheless.
        """
        with self._listening():
            self._check_running()
            calls = self._call_running("reset_prefix_cache", reset_running_requests)
            are_reset = True
            for index, call in calls:
                is_reset = call.lost is not None or _result_of(call)
                are_reset = are_reset and is_reset
                if is_reset:
                    self._router.forget(index)
            return are_reset

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """As `CoreClient`, of all cores: the answers of the first one's workers, then of the next one's. Of the first
        one alone where the others would write the same files.

        unique_reply_rank: counts in that order.

        What changes the weights is remembered for cores that replace lost ones. A core that did not do it while others
        did, or not in time, is replaced by one that has the weights of the others, or those before.

        Raises ProcessLost when a core is lost meanwhile; requests go on. WaitTimeout when one takes too long.
        """
        asked = self._engines[:1] if method == "save_sharded_state" else self._engines
        num_ranks = sum(engine.config.parallel.world_size for engine in asked)
        check_reply_rank(unique_reply_rank, num_ranks)
        with self._listening():
            calls = self._call_all("collective_rpc", timeout_s, method, timeout_s, args, kwargs, asked=asked)
            done = [index for index, call in enumerate(calls) if call.error is None]
            # These may do it still, when nobody knows any more.
            is_late = any(isinstance(call.error, WaitTimeout) for call in calls)
            if done and method == "update_config":
                for engine in self._engines:
                    engine.config_updates += [*args, *(kwargs or {}).values()]
            if done and method == "reload_weights":
                self._keep_config_of(self._engines[done[0]])
            if (done or is_late) and method in CHANGE_WEIGHTS:
                for index, engine in enumerate(self._engines):
                    if index not in done:
                        why = f"others have done {method}, and it has not" if done else f"{method} took it too long"
                        engine.restart(f"is replaced, since {why}")
            answers = [answer for call in calls for answer in _result_of(call)]
        return answers if unique_reply_rank is None else [answers[unique_reply_rank]]

    def on_refused(self, tell: Callable[[str, PenstockError], None]) -> None:
        self._tell_refused = tell

    def on_loss(self, tell: Callable[[], None]) -> None:
        """Of a core, if that is to be replaced; cores replace by themselves what they lose."""
        self._tell_of_loss = tell

    def stats(self) -> SchedulerStats:
        """As `CoreClient`; a core that is being replaced has no requests and no blocks."""
        with self._listening():
            self._check_running()
            calls = self._call_running("stats")
            known: list[SchedulerStats] = [_result_of(call) for _, call in calls if call.lost is None]
        return SchedulerStats(
            num_running_reqs=sum(stats.num_running_reqs for stats in known),
            num_waiting_reqs=sum(stats.num_waiting_reqs for stats in known),
            num_blocks=sum(stats.num_blocks for stats in known),
            num_used_blocks=sum(stats.num_used_blocks for stats in known),
        )

    def check_health(self) -> None:
        """As `CoreClient`, once cores that are being replaced have started."""
        with self._listening():
            calls = self._call_all("check_health", None)
            while any(call.lost is not None for call in calls):
                calls = self._call_all("check_health", None)
            for call in calls:
                _result_of(call)

    def close(self) -> None:
        if not self._owner.is_here():
            return
        with self._lock:
            self._ended_by = self._ended_by or LifecycleError("This engine was closed. Create a new one.")
            self._turns.clear()
        self._end_processes()

    def _choose(self, request: EngineRequest) -> EngineSupervisor:
        prompt = [index for index, engine in enumerate(self._engines) if engine.is_prompt]
        loads = {index: len(self._engines[index].kept) for index in prompt or range(len(self._engines))}
        return self._engines[self._router.choose(loads, request.prompt_token_ids, request.cache_salt)]

    def _are_running(self) -> bool:
        return all(engine.is_running for engine in self._engines)

    def _keep_config_of(self, engine: EngineSupervisor) -> None:
        """Let cores that are started from now on load the weights that this one has by now."""
        call = engine.call("collective_rpc", "get_config")
        self._wait_until(lambda: call.is_over)
        config: EngineConfig = _result_of(call)[0]
        for other in self._engines:
            other.config = replace(config, parallel=other.config.parallel)
            other.config_updates.clear()

    def _call_running(self, method: str, *args: Any) -> list[tuple[int, Call]]:
        """Ask those cores that run for the same; the calls are over then. Each comes with its core's number."""
        calls = [(index, engine.call(method, *args)) for index, engine in enumerate(self._engines) if engine.is_running]
        self._wait_until(lambda: all(call.is_over for _, call in calls))
        return calls

    def _call_all(
        self, method: str, timeout_s: float | None, *args: Any, asked: Sequence[EngineSupervisor] | None = None
    ) -> list[Call]:
        """Ask all cores, or those, for the same, once they all run.

        The calls are over then, if with an error for being late.
        """
        asked = self._engines if asked is None else asked
        self._wait_until(self._are_running)
        calls = [engine.call(method, *args) for engine in asked]
        self._wait_for(lambda: all(call.is_over for call in calls), timeout_s)
        for engine, call in zip(asked, calls, strict=True):
            if not call.is_over:
                call.is_awaited = False
                call.lost = engine.timed_out(method, timeout_s)
        return calls

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        """Take in messages until something is over, which takes as long as cores that get on need for it."""
        self._wait_for(is_over, None)

    def _wait_for(self, is_over: Callable[[], bool], timeout_s: float | None) -> None:
        """The same, for that long at most. Raises why there is nothing to wait for any more."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_over():
            self._check_running()
            left_s = LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0.0:
                return
            self._receive(min(left_s, LONGEST_WAIT_S))

    def _receive(self, timeout_s: float) -> None:
        """Take in one message, if there is one by then, and see to what is due for each core."""
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
                    self._take(index, message[1])
                else:
                    engine.tend(waited_s)
        except PenstockError as error:
            self._ended_by = self._ended_by or error

    def _take(self, index: int, message: SaidByCore | None) -> None:
        if message is None:
            self._router.forget(index)
        outputs = self._engines[index].take(message)
        if outputs is not None:
            self._turns.append(outputs)

    def see_to_loss(self) -> None:
        """Take in the end of a process, even if nobody listens."""
        with self._lock:
            while self._ended_by is None and not self._inbox.empty():
                self._receive(0.0)
        self._tell_of_loss()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """For a `with` block that takes in messages, in this process."""
        self._owner.check()
        with self._lock:
            yield

    def _check_running(self) -> None:
        if self._ended_by is not None:
            raise same_error(self._ended_by)

    def _end_processes(self) -> None:
        deadline = time.monotonic() + _END_TIMEOUT_S
        for engine in self._engines:
            engine.tell_to_end()
        for engine in self._engines:
            engine.process.close(max(0.0, deadline - time.monotonic()))
        self._starter.close()


def _deliver_to(
    group: weakref.ref[CoreGroup], inbox: queue.SimpleQueue[tuple[CoreProcess, SaidByCore | None] | None]
) -> Callable[[CoreProcess, SaidByCore | None], None]:
    """What puts a core's messages where whoever listens finds them. It does not keep a group alive that was dropped:
    the end of its starter is that of its processes.
    """

    def deliver(process: CoreProcess, message: SaidByCore | None) -> None:
        inbox.put((process, message))
        if message is not None:
            return
        owner = group()
        if owner is None:
            process.close()
        else:
            owner.see_to_loss()

    return deliver


def _result_of(call: Call) -> Any:
    if call.error is not None:
        raise call.error
    assert call.answer is not None, "it is over"
    return pickle.loads(call.answer.result)

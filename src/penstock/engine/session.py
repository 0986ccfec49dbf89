"""Synchronous session with an engine, for the offline API and the command line."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import PoolingParams, RpcCall, SamplingParams
from penstock.engine.core.core_client import CoreClient
from penstock.engine.dispatcher import Dispatcher, input_processor_for, output_processor_for, start_core
from penstock.engine.guards import LimitedLock
from penstock.engine.inputs.default_sampling import default_sampling_params
from penstock.engine.inputs.input_processor import AcceptedRequest, PooledPrompt, located
from penstock.engine.inputs.prompts import Prompt
from penstock.engine.interrupts import InterruptAfterwards, InterruptsBetweenSteps
from penstock.engine.live.live_session import live_session
from penstock.engine.output.outputs import RequestOutput
from penstock.engine.output.progress import Progress
from penstock.engine.statistics.metrics import Metric
from penstock.errors import ConfigError, EngineDead, InvalidRequest, LifecycleError, WaitTimeout
from penstock.executor.processes import refuse_at_exit
from penstock.observability.progress_bar import progress_bar
from penstock.scheduler.outputs import CoreState
from penstock.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# Longest wait at exit for a step in a daemon thread.
_EXIT_TIMEOUT_S = 30.0


class Session:
    """An engine core with its tokenizer, in this process unless `load_core` returns the client of another one.

    Each `run` steps the core for all requests: several may be active at once, nested or in several threads.

    default_sampling_params: parameters of requests without any. config: of the engine. model_config: of the
        model, with its context.

    Raises what loading the tokenizer and the model raises.
    """

    def __init__(self, config: EngineConfig, load_core: Callable[[EngineConfig], CoreClient] = start_core) -> None:
        refuse_at_exit()
        _check_idle_sleep(config)
        # The tokenizer first: a damaged one is found before the weights are loaded.
        self.tokenizer: Tokenizer = load_tokenizer(config.model.tokenizer_folder)
        self.default_sampling_params = default_sampling_params(config.model)
        self._live_view = live_session(config)
        weakref.finalize(self, self._live_view.close)
        try:
            self._core = load_core(config)
        except BaseException:
            self._live_view.close()
            raise
        self.config = config
        self.model_config = replace(config.model, max_model_len=self._core.max_model_len)
        self._input_processor = input_processor_for(config, self.tokenizer, self._core)
        self._dispatcher = Dispatcher(self._core, output_processor_for(config, self.tokenizer))
        self._dispatcher.count_media(self._input_processor.media_intake.cache_counts)
        self._live_view.start(self._dispatcher)
        self._lock = LimitedLock("finish its step")
        # Threads that have let the core rest since it last ran.
        self._pausing: set[threading.Thread] = set()
        self._is_closed = False
        # Called at exit.
        weakref.finalize(self, _hold, self._lock)

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, prompt and output together."""
        return self._core.max_model_len

    def accept(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams,
        where: str = "",
        *,
        request_id: str | None = None,
        priority: int = 0,
        number: int | None = None,
    ) -> AcceptedRequest:
        """Check a prompt and its parameters, and create the request for `run`.

        where: name in errors, such as "prompts[3]". request_id: None numbers the requests.
        priority: lower runs first, under the "priority" policy.
        number: input of the seed of a request without one; None takes the number of requests before it.
        Raises InvalidRequest, InvalidParameter or ContextTooLong; LifecycleError after `close`.
        """
        with located(where):
            # Before the lock, which other threads wait for: a download may take long.
            prompt = self._input_processor.media_intake.load(prompt)
        with self._lock:
            self._check_open()
            return self._input_processor.process(
                prompt, sampling_params, where, request_id=request_id, priority=priority, number=number
            )

    def accept_pooled(self, prompts: Sequence[PooledPrompt]) -> list[AcceptedRequest]:
        """Check and tokenise prompts of an engine that pools, in parallel, for `run`. Raises as `accept`."""
        with self._lock:
            self._check_open()
        return self._input_processor.process_pooled(prompts)

    def run(
        self,
        requests: Sequence[AcceptedRequest],
        on_refused: Callable[[AcceptedRequest, InvalidRequest], None] | None = None,
    ) -> Generator[Progress, None, None]:
        """Run requests to their end, yielding the progress of each after every step with an output of it.

        on_refused: called for a request that the core refuses, such as one that its KV cache cannot hold, while the
        others run; None raises the error.

        Raises LifecycleError where requests would wait for a call of this engine that nothing makes: while an update of
        the weights is open, once they are lost, and while this thread, or one that has ended, lets the engine rest.
        An exception, Ctrl-C included, or closing the generator aborts unfinished requests; other `run`s continue.
        Iterate within `contextlib.closing`, so that an error in your loop aborts at once.
        """
        inbox: deque[Progress] = deque()
        unfinished: set[str] = set()
        try:
            for accepted in requests:
                try:
                    self.admit(accepted, inbox, unfinished)
                except InvalidRequest as error:
                    if on_refused is None:
                        raise
                    on_refused(accepted, error)
            with InterruptsBetweenSteps() as interrupts:
                has_begun = False
                while unfinished:
                    if not inbox:
                        self._turn(inbox, interrupts)
                        if not inbox:
                            self._check_goes_on(has_begun=has_begun)
                    has_begun = has_begun or bool(inbox)
                    while inbox:
                        progress = inbox.popleft()
                        if progress.finished:
                            unfinished.discard(progress.req_id)
                        yield progress
        finally:
            if unfinished:
                self.abandon(unfinished)

    def finish(self, requests: Sequence[AcceptedRequest], *, shows_bar: bool = False) -> list[RequestOutput]:
        """Run requests to their end; return final outputs in order. shows_bar: in a terminal. Raises as `run`."""
        outputs: dict[str, RequestOutput] = {}
        with progress_bar(len(requests), is_wanted=shows_bar) as bar, closing(self.run(requests)) as steps:
            for progress in steps:
                if progress.finished:
                    outputs[progress.req_id] = progress.output()
                    bar.update()
        return [outputs[accepted.request.req_id] for accepted in requests]

    def admit(self, accepted: AcceptedRequest, inbox: deque[Progress], admitted: set[str]) -> None:
        """Submit a request, whose progress comes to the inbox with each step, and add its id to `admitted`.

        Raises InvalidRequest or ContextTooLong when the core refuses it.
        """
        request, prompt, where = accepted
        with self._lock, InterruptAfterwards(), located(where):
            self._check_open()
            self._dispatcher.admit(request, prompt, inbox)
            admitted.add(request.req_id)

    def step(self, inbox: deque[Progress]) -> None:
        """Run one step of the core for all requests. Raises EngineDead if there is none."""
        with InterruptsBetweenSteps() as interrupts:
            self._turn(inbox, interrupts)

    def abandon(self, req_ids: set[str]) -> None:
        """Abort requests, without an output."""
        if not self._lock.owner.is_here():
            return
        with self._lock:
            if self._is_closed:
                return
            try:
                with InterruptAfterwards():
                    self._dispatcher.abandon(req_ids)
            except Exception:
                # Logged and not raised, since it would hide the original error.
                logger.exception("Could not abort %d requests", len(req_ids))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache; False, and nothing is done, while requests hold blocks.

        reset_running_requests: preempt running requests first; their KV cache is recomputed.
        reset_connector: forget blocks that are kept elsewhere, too: those of a KV connector, and this engine's in
            kv_offload_dir; False if that fails.
        """
        with self._lock:
            self._check_open()
            with InterruptAfterwards():
                return self._core.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Forget what was made of the media of earlier prompts."""
        self._input_processor.reset_mm_cache()

    def metrics(self) -> list[Metric]:
        """Current metrics of the engine and its requests."""
        with self._lock:
            self._check_open()
            return self._dispatcher.metrics()

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        """Call every worker between two steps; one result per rank, or that of `unique_reply_rank` only."""
        with self._lock:
            self._check_open()
            return self._core.collective_rpc(call)

    def let_rest(self, rests: Callable[[], bool]) -> None:
        """Run steps for all requests until the core rests, which is asked for between them.

        Requests of other threads wait from then on until this thread lets the core go on, or has ended.
        """
        with self._lock:
            self._check_open()
            if not self._core.stats().state.is_pause:
                self._pausing.clear()
            self._pausing.add(threading.current_thread())
        while not rests():
            with self._lock, InterruptAfterwards():
                self._check_open()
                if self._core.has_unfinished_requests():
                    self._dispatcher.step()
            self._core.wait_for_work()

    def close(self) -> None:
        """Free the model, its memory and its threads. A second call does nothing, nor does one in a fork."""
        if not self._lock.owner.is_here():
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._live_view.close()
                self.tokenizer.close()
                self._core.close()

    def _turn(self, inbox: deque[Progress], interrupts: InterruptsBetweenSteps) -> None:
        """Run one step of the core, and deliver its outputs to the inboxes of all runs."""
        with self._lock:
            if self._is_closed:
                self._check_open()
            interrupts.begin_step()
            try:
                self._live_view.begin_step()
                self._dispatcher.step()
            finally:
                self._live_view.end_step()
                interrupts.end_step()
            if not inbox and not self._core.has_unfinished_requests():
                raise EngineDead("The engine has nothing left to do, but a request has not ended. This is a defect.")
        if not inbox:
            # Without the lock, so that other threads can use the core.
            self._core.wait_for_work()

    def _check_goes_on(self, *, has_begun: bool) -> None:
        """Raise LifecycleError while requests wait for the caller. has_begun: whether some had outputs: an update is
        another thread's then.
        """
        if not self._is_stuck(self._core.status().stats.state, has_begun=has_begun):
            return
        with self._lock:
            self._check_open()
            state = self._core.stats().state  # calls may be newer than the last message
        if self._is_stuck(state, has_begun=has_begun):
            raise LifecycleError(state.why_stuck)

    def _is_stuck(self, state: CoreState, *, has_begun: bool) -> bool:
        """Whether requests of this thread wait for a call that no other thread will make."""
        if state.is_pause:
            return not any(thread.is_alive() for thread in self._pausing - {threading.current_thread()})
        return bool(state.why_stuck) and not (has_begun and state.is_update)

    def _check_open(self) -> None:
        if self._is_closed:
            raise LifecycleError("This engine is closed. Create another one.")


def _hold(lock: LimitedLock) -> None:
    """Keep daemon threads from running steps while the interpreter is finalised.

    Python before 3.14 ends a thread that returns from a torch operator during finalisation, and unwinding its C++
    frames aborts the process ("terminate called without an active exception").
    """
    if not lock.owner.is_here():
        return
    try:
        lock.hold(_EXIT_TIMEOUT_S)
    except WaitTimeout as error:
        logger.error("%s", error)


def _check_idle_sleep(config: EngineConfig) -> None:
    """Raise ConfigError for an idle sleep of a core that runs nothing between calls."""
    seconds = config.sleep.sleep_idle_seconds
    if seconds is not None and not config.parallel.has_core_process:
        raise ConfigError(
            f"sleep_idle_seconds={seconds:g} needs a core that runs between calls, and this engine's core is in the "
            "caller's process. Set enable_multiprocessing=True, or leave the option out and call sleep() and wake_up()."
        )

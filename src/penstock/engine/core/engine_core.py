"""Engine core: the loop of scheduling, forward pass, sampling and output. Works on tokens, not text."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import KVCacheConfig, RpcCall, SamplingInput, SchedulerOutput
from penstock.contract.rpc import WeightChange
from penstock.engine.core.make_scheduler import make_scheduler
from penstock.engine.core.recovery import Recovery
from penstock.engine.core.startup import StartedEngine, start_engine
from penstock.engine.core.step_trace import StepTrace
from penstock.engine.core.weight_changes import keep_weight_change
from penstock.engine.messages import BrokerStatus, EngineRequest
from penstock.engine.statistics.metrics import SpecDecodeLog
from penstock.engine.statistics.step_log import StepLog, StepRecord
from penstock.engine.statistics.step_phases import PhaseTimer, StepPhase
from penstock.errors import EngineDead, LifecycleError, PenstockError, WaitTimeout, WorkerError
from penstock.executor import Executor, StepHandle
from penstock.features.deployment import DeploymentFeatures
from penstock.scheduler.feature import methods_of
from penstock.scheduler.outputs import RUNNING, EngineCoreOutput, SchedulerStats
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices
from penstock.worker.memory_plan import MemoryPlan
from penstock.worker.plugins import load_plugins

logger = logging.getLogger(__name__)
# Poll interval of a core whose requests all wait, in case a wake-up is missed.
_LONGEST_WAIT_S = 0.1
# Poll interval while a feature waits for something without a wake-up, such as the loading of an adapter.
_POLL_S = 0.002


class EngineCore:
    """Core of an engine: scheduler with its features, and executor.

    Failed workers are replaced and running requests continue (`Recovery`). When restarts do not help, `step` raises
    EngineDead with the cause.

    owns_deployment: False where the core's client owns the deployment sides of features.
    """

    def __init__(self, config: EngineConfig, *, owns_deployment: bool = True) -> None:
        # Plugins register features, so the core's process loads them as well.
        load_plugins()
        self.config = config
        self._engine: StartedEngine | None = start_engine(config)
        engine = self._engine
        self.max_model_len = engine.max_model_len
        self.vocab_size = config.model.vocab_size
        wants_async = config.scheduler.async_scheduling
        # Asynchronous scheduling: step N+1 is executed before the result of step N is read.
        self._runs_ahead = engine.executor.overlaps_with_host if wants_async is None else wants_async
        self._max_in_flight = config.max_concurrent_batches
        self._step_timeout_s = config.parallel.step_timeout_s
        # Times of the steps since they were last taken.
        self._trace = StepTrace(config)
        self.phases = PhaseTimer(self._trace.phases)
        self.step_log = StepLog()
        # Set by `wake`, which ends `wait_for_work`.
        self._woken = threading.Event()
        self._has_to_wait = False
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        # Outputs that are read and not returned yet; a failure later in the turn must not lose them.
        self._outputs: list[EngineCoreOutput] = []
        # The step whose forward pass is launched and whose tokens are not sampled yet.
        self._launched: SchedulerOutput | None = None
        # Why the state of the workers is unknown: a turn or a call was interrupted by something other than a worker.
        self._interrupted: str | None = None
        self._cause_of_death: str | None = None
        # Notifies the driver of the core that workers were lost.
        self._loss_callback: Callable[[], None] = lambda: None
        self._admission_callback: Callable[[str, PenstockError | None], None] | None = None
        # Calls of features before the next step, from any thread.
        self._calls: deque[Callable[[], None]] = deque()
        made = make_scheduler(
            engine,
            lambda scheduler: SchedulerServices(
                config,
                scheduler,
                lambda call: self._executor.collective_rpc(call),
                self._take_ends,
                self._call_soon,
                lambda: self._are_workers_lost,
                self._replace_lost,
            ),
            runs_ahead=self._runs_ahead,
        )
        self.scheduler, self._features_by_method = made
        self._before_step = methods_of(self.scheduler.features, "before_step")
        self._after_step = methods_of(self.scheduler.features, "after_step")
        self._before_call = methods_of(self.scheduler.features, "before_call")
        self._after_call = methods_of(self.scheduler.features, "after_call")
        self._deployment = DeploymentFeatures(config, made.call_feature) if owns_deployment else None
        self._recovery = Recovery(self.scheduler, config.parallel.max_restarts, self._take_ends)
        # With asynchronous scheduling draft tokens stay on the device, unless the parts of a step's sampling need them.
        self._takes_drafts = engine.executor.num_speculative_tokens > 0 and not self._runs_ahead
        self._spec_decode_log = SpecDecodeLog(self.scheduler.spec_decode_metrics)
        engine.executor.on_loss(self._note_loss)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ContextTooLong when it can never fit, InvalidRequest when its id is in use.
        """
        self._require_alive()
        if self._deployment is not None:
            request = self._deployment.resolve(request)
        self._recovery.note_request()
        self.scheduler.add_request(
            Request(
                req_id=request.req_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                eos_token_ids=request.eos_token_ids,
                arrival_time=request.arrival_time,
                priority=request.priority,
                cache_salt=request.cache_salt,
                parts=request.parts,
                pooling_params=request.pooling_params,
                output_token_ids=request.output_token_ids,
                pools=self.config.model.pools,
            )
        )
        self.wake()
        if self._admission_callback is not None:
            self._admission_callback(request.req_id, None)

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Abort requests, waiting or running; unknown ids are ignored."""
        ended = self.scheduler.finish_requests(list(req_ids))
        self._recovery.note_ends([output.req_id for output in ended])
        self.wake()
        return ended

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Layout of the KV cache."""
        return self._require_alive().kv_cache_config

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of KV cache per worker, as in `kv_cache_memory_bytes`; of the largest stage with pipeline parallel."""
        return self._require_alive().kv_cache_bytes

    @property
    def start_stage_s(self) -> dict[str, float]:
        """Seconds of the start of the current workers, by stage."""
        return {stage.phase: stage.seconds for stage in self._require_alive().startup_times}

    @property
    def memory_plan(self) -> MemoryPlan:
        """Memory plan that gave the KV cache its size."""
        return self._require_alive().memory_plan

    @property
    def is_recovering(self) -> bool:
        """Whether workers are being replaced, which takes as long as starting them."""
        return self._recovery.is_recovering

    @property
    def num_worker_restarts(self) -> int:
        """Replacements of the workers so far."""
        return self._recovery.num_restarts

    def has_unfinished_requests(self) -> bool:
        """Whether the next step has work: an output is due, or lost workers are to be replaced."""
        is_due = bool(self._outputs or self._calls)
        return is_due or self.scheduler.has_unfinished_requests() or self._has_lost_workers

    def on_admission(self, callback: Callable[[str, PenstockError | None], None]) -> None:
        self._admission_callback = callback

    def on_loss(self, callback: Callable[[], None]) -> None:
        self._loss_callback = callback
        if self._has_lost_workers:
            callback()

    def step(self) -> list[EngineCoreOutput]:
        """Run one turn of the loop: launch the next step and read the oldest in flight. Empty if none was read.

        Raises EngineDead when workers keep failing; the requests are lost then.
        """
        if self._engine is None or self._has_lost_workers:
            self._recover_lost()
        try:
            self._turn()
            for after_step in self._after_step:
                after_step()
        except (WorkerError, WaitTimeout) as error:
            self._recovery.note_failure(error)
            self._recover(error)
        except BaseException as error:
            self._interrupted = f"A step was broken off by {type(error).__name__}: {error}"
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def wait_for_work(self) -> None:
        """Wait for `wake` if the last step had nothing to run, 0.1 s at most; otherwise return at once."""
        if not self._has_to_wait:
            return
        # An earlier `wake` is handled by the next step.
        is_polled = any(feature.is_polled for feature in self.scheduler.features)
        if self._woken.wait(_POLL_S if is_polled else _LONGEST_WAIT_S):
            self._woken.clear()

    def wake(self) -> None:
        """End `wait_for_work`, from any thread: a request is ready, blocks are free, or a call is queued."""
        self._woken.set()

    def _call_soon(self, function: Callable[[], None]) -> None:
        """As `SchedulerServices.call_soon`."""
        self._calls.append(function)
        self.wake()
        if not self.scheduler.has_unfinished_requests():
            # The driver of a core without requests waits for that.
            self._loss_callback()

    def _turn(self) -> None:
        """Execute step N+1, read step N, then sample the tokens of N+1: features' parts for it need the tokens of N.

        With pipeline parallelism up to `_max_in_flight` steps stay in flight.
        """
        begin = time.perf_counter()
        self.phases.begin()
        executed = self._execute_next()
        # With no step in flight either, all requests wait for an external event.
        self._has_to_wait = executed is None and not self._in_flight and self.has_unfinished_requests()
        if self._in_flight and (executed is None or len(self._in_flight) >= self._max_in_flight):
            self._read_oldest()
        if executed is not None:
            sampling = self._sampling_input(executed)
            self.phases.end(StepPhase.GRAMMAR)
            self._sample(executed, sampling)
            self.phases.end(StepPhase.SAMPLE)
            if not self._runs_ahead and len(self._in_flight) >= self._max_in_flight:
                self._read_oldest()
                if self._takes_drafts:
                    if executed.num_drafts_wanted:
                        self._take_drafts()
                    self.scheduler.note_time(executed, time.perf_counter() - begin)

    def _execute_next(self) -> SchedulerOutput | None:
        """Launch the forward pass of the next step and return it, if it has tokens to run or requests to remove."""
        while self._calls:
            self._calls.popleft()()
        for before_step in self._before_step:
            before_step()
        if self.scheduler.rest is not RUNNING:
            for feature in self.scheduler.features:
                feature.resting()
            if self.scheduler.rest is not RUNNING:
                return None
        if not self.scheduler.has_work():
            return None
        output = self.scheduler.schedule()
        self.phases.end(StepPhase.SCHEDULE)
        if not output.num_scheduled_tokens and output.is_empty:
            return None
        self._launched = output
        self.step_log.launched = output
        try:
            self._executor.execute_model(output)
            self.phases.end(StepPhase.EXECUTE)
        except WorkerError:
            logger.error("The failed step was %s", output.anon_repr())
            raise
        return output

    def _read_steps_of(self, req_ids: Sequence[str]) -> None:
        """Read the steps in flight up to the last one that has one of these requests."""
        while any(not step.num_scheduled_tokens.keys().isdisjoint(req_ids) for step, _ in self._in_flight):
            self._read_oldest()

    def _read_oldest(self) -> None:
        """Read the result of the oldest step in flight and update the scheduler."""
        output, handle = self._in_flight.popleft()
        result = handle.get_output(self._step_timeout_s)
        self.phases.end(StepPhase.WAIT)
        outputs = self.scheduler.update_from_output(output, result)
        if self._recovery.has_failures:
            self._recovery.note_results(output.num_scheduled_tokens)
        self._outputs += outputs
        if output.scheduled_spec_decode_tokens:
            self._spec_decode_log.note_step()
        self.phases.end(StepPhase.UPDATE)

    def _take_drafts(self) -> None:
        """Pass the workers' draft tokens to the scheduler, for the next step to verify."""
        drafts = self._executor.take_draft_token_ids(self._step_timeout_s)
        if drafts is not None:
            self.scheduler.update_draft_token_ids(dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True)))

    def _sampling_input(self, output: SchedulerOutput) -> SamplingInput:
        """Message for the sampling of an executed step; features make its parts while the forward pass runs."""
        if not output.awaiting_req_ids:
            return SamplingInput(step_id=output.step_id)
        self._read_steps_of(output.awaiting_req_ids)
        return self.scheduler.sampling_input(self._with_drafts(output))

    def _with_drafts(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return an executed step with draft tokens copied from the device, where requests that await parts have some.

        They were drafted after the previous step, which has been read. -1 stays where there is no draft.
        """
        scheduled = output.scheduled_spec_decode_tokens
        drafted = [req_id for req_id in output.awaiting_req_ids if req_id in scheduled]
        if not self._runs_ahead or not drafted:
            return output
        drafts = self._executor.take_draft_token_ids(self._step_timeout_s)
        if drafts is None:
            return output
        return output.with_drafts(dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True)))

    def _sample(self, output: SchedulerOutput, sampling: SamplingInput) -> None:
        """Launch the sampling of an executed step."""
        try:
            handle = self._executor.sample_tokens(sampling)
        except WorkerError:
            logger.error("The failed step was %s", output.anon_repr())
            raise
        self._in_flight.append((output, handle))
        self._launched = None

    def collective_rpc(self, call: RpcCall) -> list[Any]:
        """Call every worker between two steps; one result per rank, or that of `unique_reply_rank` only.

        Effects of the method beyond the workers are those of `call.effects`. Changes of the weights are kept for
        replacement workers. After a reload running requests are preempted and the prefix cache is cleared. Workers that
        time out in such a call are replaced, with the previous weights.
        """
        if self._has_lost_workers:
            self._recover_lost()
        engine = self._require_alive()
        effects, by_method = call.effects, self._features_by_method
        feature = by_method.get(call.method_name) if self._deployment is None else self._deployment.side_of(call)
        for before_call in self._before_call:
            before_call(call)
        if feature is not None:
            if self.scheduler.has_work() and not self.scheduler.has_unfinished_requests():
                # Workers hold the state of requests until a step tells them that these have ended.
                # `step` returns the list itself, so it must not be extended in place.
                self._outputs = [*self.step(), *self._outputs]
            return feature.call(call)
        if self._are_workers_lost:
            self._recover_lost()
        if self._deployment is not None:
            self._deployment.call_begins(call)
        try:
            answers = engine.executor.collective_rpc(call)
        except PenstockError as error:
            if isinstance(error, WaitTimeout) and effects.weights is not None:
                self._interrupted = f"Some workers may still be running {call.name} after its timeout: {error}"
            for after_call in self._after_call:
                after_call(call, is_done=False)
            raise
        if effects.is_profile:
            answers = self._trace.after_call(answers)
        keep_weight_change(call, [engine], lambda: engine.executor.collective_rpc(RpcCall("get_config"))[0])
        if effects.weights is WeightChange.NOW:
            self.reset_prefix_cache(reset_running_requests=True)
        for after_call in self._after_call:
            after_call(call, is_done=True)
        if self._deployment is not None:
            self._deployment.call_ends(call, is_done=True)
        return answers

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache; False, and nothing is done, while requests hold blocks.

        reset_running_requests: preempt the running requests first, which frees their blocks. reset_connector: forget
            blocks that are kept elsewhere, too; False if that fails.
        """
        self._require_alive()
        return self.scheduler.reset_prefix_cache(
            reset_running_requests=reset_running_requests, reset_connector=reset_connector
        )

    def stats(self) -> SchedulerStats:
        """Current numbers of requests and KV-cache blocks."""
        return self.scheduler.stats

    def watch_steps(self, seconds: float) -> None:
        """Record the steps of the next seconds in `step_log`."""
        self.step_log.watch(seconds)

    def take_recent_steps(self) -> list[list[StepRecord]]:
        """As `CoreClient`, for a driver in this process."""
        step_s = sum(self.phases.take().values())
        return [self.step_log.take(step_s, is_last=not self.has_unfinished_requests())]

    def status(self) -> BrokerStatus:
        """As `CoreClient`."""
        return BrokerStatus(
            stats=self.stats(),
            num_engines=1,
            num_recovering=int(self.is_recovering),
            num_worker_restarts=self.num_worker_restarts,
            num_requests=self.scheduler.num_running + self.scheduler.num_waiting,
        )

    def check_health(self) -> None:
        """Return if the engine can serve; raise EngineDead or what the worker reports if it cannot."""
        self._require_alive().executor.check_health()

    def close(self) -> None:
        """Free the workers and their memory; a second call does nothing."""
        self._in_flight.clear()
        for feature in self.scheduler.features:
            feature.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._spec_decode_log.close()
            engine.executor.shutdown()

    def _take_ends(self, ended: list[EngineCoreOutput]) -> None:
        """Queue the outputs of requests that ended without the result of a step."""
        self._outputs += ended
        self._recovery.note_ends([output.req_id for output in ended])

    def _recover_lost(self) -> None:
        """Replace the workers if some were lost since the last step, or if a turn was interrupted.

        An interrupted turn may have left a step half launched. Its caller got the exception, so it counts as no failure
        of the workers.
        """
        executor = self._require_alive().executor
        why, self._interrupted = self._interrupted, None
        if why is not None:
            self._recover(PenstockError(why))
            return
        try:
            executor.check_health()
        except PenstockError as error:
            self._recovery.note_failure(error)
            self._recover(error)

    def _note_loss(self) -> None:
        """Wake the core and notify its driver of lost workers, from any thread."""
        self.wake()
        self._loss_callback()

    def _replace_lost(self, why: str | None) -> None:
        """As `SchedulerServices.replace_lost_workers`."""
        self._interrupted = self._interrupted or why
        if self._are_workers_lost:
            self._recover_lost()

    @property
    def _has_lost_workers(self) -> bool:
        """Whether the next step replaces workers: a core that rests does so afterwards."""
        return self.scheduler.rest is RUNNING and self._are_workers_lost

    @property
    def _are_workers_lost(self) -> bool:
        """Whether workers were lost, or must be replaced after an interrupted turn."""
        engine = self._engine
        return engine is not None and (self._interrupted is not None or engine.executor.has_lost_workers)

    def _recover(self, error: Exception) -> None:
        """Replace the workers and preempt all requests; close the core when restarts do not help."""
        steps = [*(output for output, _ in self._in_flight), *([self._launched] if self._launched else [])]
        self._in_flight.clear()
        self._launched = None
        engine = self._require_alive()
        ran = list({req_id: None for step in steps for req_id in step.num_scheduled_tokens})
        try:
            self._recovery.replace_workers(engine, error, ran)
        except EngineDead as end:
            self._cause_of_death = str(end)
            self.close()
            raise
        engine.executor.on_loss(self._note_loss)
        for feature in self.scheduler.features:
            feature.workers_ready()

    @property
    def _executor(self) -> Executor:
        return (self._engine or self._require_alive()).executor

    def _require_alive(self) -> StartedEngine:
        if self._cause_of_death is not None:
            raise EngineDead(self._cause_of_death)
        if self._engine is None:
            raise LifecycleError("This engine was closed. Create a new one.")
        return self._engine

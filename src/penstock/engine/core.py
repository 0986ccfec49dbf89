"""The core loop: schedule, run, take in the results. Knows tokens, not text."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.config import EngineConfig
from penstock.contract import GrammarOutput, KVCacheConfig, SchedulerOutput
from penstock.engine.messages import EngineRequest
from penstock.engine.startup import StartedEngine, start_engine
from penstock.errors import EngineDead, LifecycleError, PenstockError, WaitTimeout, WorkerError
from penstock.executor import StepHandle
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.scheduler.request import Request
from penstock.scheduler.scheduler import Scheduler
from penstock.worker.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)


class EngineCore:
    """One scheduler over one executor.

    A worker that fails is replaced: what was running is treated as preempted and generation goes on from its tokens.
    After `max_restarts` failures without a step in between the core gives up and says why.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._engine: StartedEngine | None = start_engine(config)
        engine = self._engine
        self.max_model_len = engine.max_model_len
        self.vocab_size = config.model.vocab_size
        wants_async = config.scheduler.async_scheduling
        is_async = engine.executor.overlaps_with_host if wants_async is None else wants_async
        # A step is launched before the result of the one before it is read.
        self._max_steps_in_flight = 2 if is_async else 1
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._failures_in_a_row = 0
        self._cause_of_death: str | None = None
        self.scheduler = Scheduler(
            config.scheduler,
            engine.kv_cache_config,
            max_model_len=engine.max_model_len,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            async_scheduling=is_async,
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ContextTooLong when it can never fit, InvalidRequest when its id is in use.
        """
        self._require_alive()
        self.scheduler.add_request(_scheduled(request))

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests, wherever they are; unknown ones are ignored."""
        return self.scheduler.finish_requests(list(req_ids))

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """How the KV cache is laid out."""
        return self._require_alive().kv_cache_config

    @property
    def memory_plan(self) -> MemoryPlan:
        """The arithmetic behind the KV cache's size."""
        return self._require_alive().memory_plan

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Launch what can be launched, then take in the oldest result. Empty when nothing came of it yet.

        Raises EngineDead when workers keep failing; the requests are lost then.
        """
        if self._engine is None:
            self._require_alive()
        try:
            outputs = self._turn()
        except (WorkerError, WaitTimeout) as error:
            self._recover(error)
            return []
        self._failures_in_a_row = 0
        return outputs

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, between two steps; one answer each.

        What changes the weights is remembered for workers that replace failed ones. Requests that run go on from their
        tokens, and what the old weights left in the KV cache is forgotten.
        """
        engine = self._require_alive()
        answers = engine.executor.collective_rpc(method, timeout_s, args, kwargs)
        if method == "update_config":
            engine.config_updates += [*args, *(kwargs or {}).values()]
        if method == "reload_weights":
            (engine.config, *_) = engine.executor.collective_rpc("get_config")
            engine.config_updates.clear()
            self.reset_prefix_cache(reset_running_requests=True)
        return answers

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while requests hold blocks.

        reset_running_requests: preempt the running requests first, so that none holds any.
        """
        self._require_alive()
        if reset_running_requests:
            self.scheduler.preempt_all()
        is_reset = self.scheduler.reset_prefix_cache()
        if not is_reset:
            logger.warning("The prefix cache was not reset, since requests hold blocks")
        return is_reset

    def check_health(self) -> None:
        """Return if the engine can serve; raise EngineDead or what the worker reports if it cannot."""
        self._require_alive().executor.check_health()

    def close(self) -> None:
        """Give everything back; harmless when called twice."""
        self._in_flight.clear()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.executor.shutdown()

    def _turn(self) -> list[EngineCoreOutput]:
        has_launched = self._launch_next()
        has_room = len(self._in_flight) < self._max_steps_in_flight
        if not self._in_flight or (has_launched and has_room and self.scheduler.has_unfinished_requests()):
            return []
        output, handle = self._in_flight.popleft()
        return self.scheduler.update_from_output(output, handle.get_output())

    def _launch_next(self) -> bool:
        """Launch a step if there is room for one and anything to run or to forget."""
        if len(self._in_flight) >= self._max_steps_in_flight or not self.scheduler.has_work():
            return False
        output = self.scheduler.schedule()
        if not output.num_scheduled_tokens and output.is_empty:
            return False
        executor = (self._engine or self._require_alive()).executor
        try:
            executor.execute_model(output)
            handle = executor.sample_tokens(GrammarOutput(step_id=output.step_id))
        except WorkerError:
            logger.error("The failed step was %s", output.anonymous())
            raise
        self._in_flight.append((output, handle))
        return True

    def _recover(self, error: PenstockError) -> None:
        """Replace the workers and go on; give up when that does not help."""
        self._failures_in_a_row += 1
        limit = self.config.parallel.max_restarts
        self._in_flight.clear()
        engine = self._require_alive()
        if self._failures_in_a_row > limit:
            self._die(f"Workers failed {self._failures_in_a_row} times in a row; the last time: {error}", error)
        logger.warning("%s. Restarting the worker (%d of %d)", error, self._failures_in_a_row, limit)
        self.scheduler.reset_for_recovery()
        try:
            engine.restart_workers()
        except PenstockError as cause:
            self._die(f"The worker could not be restarted: {cause}. It had failed with: {error}", cause)

    def _die(self, why: str, cause: Exception) -> None:
        self._cause_of_death = why
        self.close()
        raise EngineDead(why) from cause

    def _require_alive(self) -> StartedEngine:
        if self._cause_of_death is not None:
            raise EngineDead(self._cause_of_death)
        if self._engine is None:
            raise LifecycleError("This engine was closed. Create a new one.")
        return self._engine


def _scheduled(request: EngineRequest) -> Request:
    """The request as the scheduler sees it, with what another core generated for it."""
    scheduled = Request(
        req_id=request.req_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        eos_token_ids=request.eos_token_ids,
        arrival_time=request.arrival_time,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    scheduled.all_token_ids += request.output_token_ids
    return scheduled

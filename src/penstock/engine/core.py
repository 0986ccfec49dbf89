"""The core loop: schedule, run, take in the results. Knows tokens, not text."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.contract import GrammarOutput, KVCacheConfig, SchedulerOutput
from penstock.engine.core_client import CHANGE_WEIGHTS
from penstock.engine.draft_log import DraftLog
from penstock.engine.grammar import Grammar
from penstock.engine.messages import EngineRequest
from penstock.engine.recovery import Recovery
from penstock.engine.startup import StartedEngine, start_engine
from penstock.engine.structured_grammar import StructuredGrammar
from penstock.errors import (
    EngineDead,
    GrammarError,
    LifecycleError,
    PenstockError,
    WaitTimeout,
    WorkerError,
)
from penstock.executor import Executor, StepHandle
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason, SchedulerStats
from penstock.scheduler.request import Request
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step_features import registered_step_features
from penstock.scheduler.step_times import StepTimes
from penstock.worker.memory_plan import MemoryPlan
from penstock.worker.plugins import load_plugins

logger = logging.getLogger(__name__)
# How long a core whose requests all wait does nothing, unless it is woken: in case somebody forgets to.
_LONGEST_WAIT_S = 0.1
# What a request waits for whose grammar is being compiled.
_GRAMMAR = "its grammar"


class EngineCore:
    """One scheduler over one executor, and perhaps a grammar.

    Workers that fail are replaced, and what was running goes on (`Recovery`). When that does not help, the core gives
    up and says why.
    """

    def __init__(self, config: EngineConfig, grammar: Grammar | None = None) -> None:
        # In this process too: parts of messages and features of the scheduler are registered by plugins.
        load_plugins()
        self.config = config
        self._engine: StartedEngine | None = start_engine(config)
        engine = self._engine
        self.max_model_len = engine.max_model_len
        self.vocab_size = config.model.vocab_size
        wants_async = config.scheduler.async_scheduling
        # Whether a step is executed before the result of the one before it is read.
        self._runs_ahead = engine.executor.overlaps_with_host if wants_async is None else wants_async
        self._max_in_flight = config.max_concurrent_batches
        self._step_timeout_s = config.parallel.step_timeout_s
        self._pools = config.model.pools
        # Set by whoever gives the core something to do while it waits.
        self._woken = threading.Event()
        self._has_to_wait = False
        self._grammar = grammar or StructuredGrammar(
            config.model,
            config.structured,
            config.constraints_wait_for,
            compiles_beside=not config.parallel.must_agree_on_time,
        )
        self._grammar.on_ready(self.wake)
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        # What was read and not returned yet: a failure later in the turn must not take it along.
        self._outputs: list[EngineCoreOutput] = []
        # The step that is launched and not in flight yet.
        self._launched: SchedulerOutput | None = None
        # Why nobody knows what the workers have done: a turn or a call was broken off, other than by a worker.
        self._broken_off: str | None = None
        self._cause_of_death: str | None = None
        # Tells whoever drives the core that there is something to mend.
        self._tell_of_loss: Callable[[], None] = lambda: None
        self.scheduler = Scheduler(
            config.scheduler,
            engine.kv_cache_config,
            max_model_len=engine.max_model_len,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            async_scheduling=self._runs_ahead,
            num_lookahead_tokens=config.speculative.num_lookahead_tokens,
            blocks_need_next_token=config.speculative.reads_next_token,
            num_speculative_tokens=engine.executor.num_speculative_tokens,
            step_times=None if engine.step_costs is None else StepTimes(engine.step_costs),
            max_concurrent_steps=self._max_in_flight,
            tell_ends=self._take_ends,
            features=registered_step_features(),
        )
        self._recovery = Recovery(self.scheduler, config.parallel.max_restarts, self._take_ends)
        # Where steps run ahead, drafts stay on the device, but for what a grammar has to know.
        self._takes_drafts = engine.executor.num_speculative_tokens > 0 and not self._runs_ahead
        self._draft_log = DraftLog(self.scheduler.spec_decode_metrics)
        engine.executor.on_loss(self._note_loss)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ContextTooLong when it can never fit, InvalidRequest when its id is in use.
        """
        self._require_alive()
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
                output_token_ids=request.output_token_ids,
                needs_tokens_on_host=request.needs_tokens_on_host,
                pools=self._pools,
            )
        )
        try:
            is_ready = self._grammar.add(request)
        except Exception:
            # The caller hears that the request was refused, so nothing of it may run.
            self.abort_requests([request.req_id])
            raise
        if not is_ready:
            self.scheduler.wait_for(request.req_id, _GRAMMAR)
        self.wake()

    def abort_requests(self, req_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests, wherever they are; unknown ones are ignored."""
        ended = self.scheduler.finish_requests(list(req_ids))
        self._grammar.accept(ended)
        self._recovery.note_ends([output.req_id for output in ended])
        self.wake()
        return ended

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """How the KV cache is laid out."""
        return self._require_alive().kv_cache_config

    @property
    def kv_cache_bytes(self) -> int:
        """What the KV cache takes on a worker, as `kv_cache_memory_bytes` says it; with stages, on the largest."""
        tensors, parallel = self.kv_cache_config.tensors, self.config.parallel
        layers = parallel.pipeline_layers or [1] * parallel.pipeline_parallel_size
        num_largest = -(-len(tensors) * max(layers) // sum(layers))
        return self.kv_cache_config.size_bytes * num_largest // max(1, len(tensors))

    @property
    def memory_plan(self) -> MemoryPlan:
        """The arithmetic behind the KV cache's size."""
        return self._require_alive().memory_plan

    @property
    def is_recovering(self) -> bool:
        """Whether workers are being replaced, which takes as long as starting them."""
        return self._recovery.is_going_on

    def has_unfinished_requests(self) -> bool:
        """Whether the next step has anything to do: an output is still to come, or lost workers are to be replaced."""
        return self.scheduler.has_unfinished_requests() or self._has_lost_workers

    def on_refused(self, tell: Callable[[str, PenstockError], None]) -> None:
        """Nobody is told: `add_request` raises at once here."""

    def on_loss(self, tell: Callable[[], None]) -> None:
        self._tell_of_loss = tell
        if self._has_lost_workers:
            tell()

    def step(self) -> list[EngineCoreOutput]:
        """One turn: launch what can be launched, take in the oldest result. Empty when nothing came of it yet.

        Raises EngineDead when workers keep failing; the requests are lost then.
        """
        if self._engine is None or self._has_lost_workers:
            self._mend()
        try:
            self._turn()
        except (WorkerError, WaitTimeout) as error:
            self._recovery.note_failure(error)
            self._recover(error)
        except BaseException as error:
            self._broken_off = f"A step was broken off by {type(error).__name__}: {error}"
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def wait_for_work(self) -> None:
        """Return at once, unless nothing could be run in the last step: then when there may be something, or soon."""
        # Whatever set it before is looked at in the next step.
        if self._has_to_wait and self._woken.wait(_LONGEST_WAIT_S):
            self._woken.clear()

    def wake(self) -> None:
        """End `wait_for_work`, from any thread: a request is ready, blocks are free, or there is something to do."""
        self._woken.set()

    def _turn(self) -> None:
        """Execute step N+1, read step N, and only then choose the tokens of N+1: its grammar goes by those of N.

        Where workers have use for several steps at once, as many may stay in flight.
        """
        begin = time.perf_counter()
        executed = self._execute_next()
        # Where nothing is in flight either, all wait for something that is made elsewhere.
        self._has_to_wait = executed is None and not self._in_flight and self.has_unfinished_requests()
        if self._in_flight and (executed is None or len(self._in_flight) >= self._max_in_flight):
            self._read_oldest()
        if executed is not None:
            self._read_what_constrains(executed)
            self._sample(executed, self._bitmask(self._with_drafts(executed)))
            if not self._runs_ahead and len(self._in_flight) >= self._max_in_flight:
                self._read_oldest()
                if self._takes_drafts:
                    if executed.num_drafts_wanted:
                        self._take_drafts()
                    self.scheduler.note_time(executed, time.perf_counter() - begin)

    def _execute_next(self) -> SchedulerOutput | None:
        """Launch the forward pass of a step, if there is anything to run or to forget."""
        try:
            for req_id in self._grammar.take_ready():
                self.scheduler.ready(req_id, _GRAMMAR)
        except GrammarError as error:
            self._end_constrained(error, ())
        if not self.scheduler.has_work():
            return None
        output = self.scheduler.schedule()
        if not output.num_scheduled_tokens and output.is_empty:
            return None
        self._launched = output
        try:
            is_constrained = any(map(self._grammar.constrains, output.num_scheduled_tokens))
            executor = self._executor
            (executor.execute_model if is_constrained else executor.execute_unconstrained)(output)
        except WorkerError:
            logger.error("The failed step was %s", output.anonymous())
            raise
        return output

    def _read_what_constrains(self, executed: SchedulerOutput) -> None:
        """Take in all steps in flight that a constrained request of an executed step was in."""
        if self._max_in_flight == 1:
            return
        constrained = [req_id for req_id in executed.num_scheduled_tokens if self._grammar.constrains(req_id)]
        while any(not step.num_scheduled_tokens.keys().isdisjoint(constrained) for step, _ in self._in_flight):
            self._read_oldest()

    def _read_oldest(self) -> None:
        """Take in the result of the oldest step in flight."""
        output, handle = self._in_flight.popleft()
        outputs = self.scheduler.update_from_output(output, handle.get_output(self._step_timeout_s))
        self._recovery.note_results(output.num_scheduled_tokens)
        self._outputs += outputs
        if output.scheduled_spec_decode_tokens:
            self._draft_log.note_step()
        try:
            self._grammar.accept(outputs)
        except Exception as error:
            self._end_constrained(error, [output.req_id for output in outputs])

    def _take_drafts(self) -> None:
        """Let the next step verify what the workers have drafted."""
        drafts = self._executor.take_draft_token_ids(self._step_timeout_s)
        if drafts is not None:
            self.scheduler.update_draft_token_ids(dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True)))

    def _with_drafts(self, output: SchedulerOutput) -> SchedulerOutput:
        """An executed step whose constrained requests have their drafts told, which only the device knew before.

        They were made after the step before it, which has been read, so that what the grammar allows after each can
        be said. -1 stays where there is none.
        """
        scheduled = output.scheduled_spec_decode_tokens
        if not self._runs_ahead or not any(map(self._grammar.constrains, scheduled)):
            return output
        drafts = self._executor.take_draft_token_ids(self._step_timeout_s)
        if drafts is None:
            return output
        known = {
            req_id: [*token_ids, *scheduled[req_id]][: len(scheduled[req_id])]
            for req_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
            if req_id in scheduled
        }
        return msgspec.structs.replace(output, scheduled_spec_decode_tokens={**scheduled, **known})

    def _bitmask(self, output: SchedulerOutput) -> GrammarOutput:
        """What an executed step may choose from, which it must, for those whose grammar does not fail."""
        while True:
            try:
                return self._grammar.bitmask(output)
            except Exception as error:
                self._end_constrained(error, output.num_scheduled_tokens)

    def _sample(self, output: SchedulerOutput, grammar: GrammarOutput) -> None:
        """Launch the choice of an executed step's tokens."""
        try:
            handle = self._executor.sample_tokens(grammar)
        except WorkerError:
            logger.error("The failed step was %s", output.anonymous())
            raise
        self._in_flight.append((output, handle))
        self._launched = None

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a method of every worker, between two steps; one answer each, or that of `unique_reply_rank` alone.

        What changes the weights is remembered for workers that replace failed ones. Requests that run go on from their
        tokens, and what the old weights left in the KV cache is forgotten. Workers that are late with it are replaced,
        by some with the weights from before.
        """
        if self._has_lost_workers:
            self._mend()
        engine = self._require_alive()
        try:
            answers = engine.executor.collective_rpc(method, timeout_s, args, kwargs, unique_reply_rank)
        except WaitTimeout as error:
            if method in CHANGE_WEIGHTS:
                self._broken_off = f"Some workers may do it still, when nobody waits for it: {error}"
            raise
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

    def stats(self) -> SchedulerStats:
        """Requests and KV-cache blocks at present."""
        return self.scheduler.stats

    def check_health(self) -> None:
        """Return if the engine can serve; raise EngineDead or what the worker reports if it cannot."""
        self._require_alive().executor.check_health()

    def close(self) -> None:
        """Give everything back; harmless when called twice."""
        self._in_flight.clear()
        self._grammar.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._draft_log.close()
            engine.executor.shutdown()

    def _end_constrained(self, error: Exception, req_ids: Iterable[str]) -> None:
        """End the requests that a grammar failed for, or all that it constrains of these where it does not say which.

        Raises the error again when that is nobody.
        """
        failed = error.req_ids if isinstance(error, GrammarError) else filter(self._grammar.constrains, req_ids)
        ended = self.scheduler.finish_requests(failed, FinishReason.ERROR)
        if not ended:
            raise error
        logger.error("The grammar of %d requests failed", len(ended), exc_info=error)
        self._take_ends([msgspec.structs.replace(output, error=f"Its grammar failed: {error}") for output in ended])

    def _take_ends(self, ended: list[EngineCoreOutput]) -> None:
        """Of requests that have ended without a step's result."""
        self._outputs += ended
        self._grammar.accept(ended)
        self._recovery.note_ends([output.req_id for output in ended])

    def _mend(self) -> None:
        """Start over with new workers where some were lost since the last step, or after a turn that was broken off.

        That may have left a step half launched. Whoever broke it off has been told, and decides how often it happens.
        """
        executor = self._require_alive().executor
        why, self._broken_off = self._broken_off, None
        if why is not None:
            self._recover(PenstockError(why))
            return
        try:
            executor.check_health()
        except PenstockError as error:
            self._recovery.note_failure(error)
            self._recover(error)

    def _note_loss(self) -> None:
        """In some thread: workers were lost."""
        self.wake()
        self._tell_of_loss()

    @property
    def _has_lost_workers(self) -> bool:
        """Or they are to be replaced."""
        is_broken_off = self._broken_off is not None
        return self._engine is not None and (is_broken_off or self._engine.executor.has_lost_workers)

    def _recover(self, error: Exception) -> None:
        """Replace the workers and go on; give up when that does not help."""
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

    @property
    def _executor(self) -> Executor:
        return (self._engine or self._require_alive()).executor

    def _require_alive(self) -> StartedEngine:
        if self._cause_of_death is not None:
            raise EngineDead(self._cause_of_death)
        if self._engine is None:
            raise LifecycleError("This engine was closed. Create a new one.")
        return self._engine

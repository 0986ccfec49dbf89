"""Scheduler side of sleep: a core that is paused, asleep, or has no weights runs no steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.contract.feature import features_of
from penstock.contract.memory_tags import KV_CACHE, MEMORY_TAGS, WEIGHTS
from penstock.errors import EngineAsleep, OutOfMemory, WaitTimeout, WorkerError
from penstock.features.sleep.idle import IdleWatch
from penstock.features.sleep.state import EngineState, PauseMode
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import RUNNING, CoreState, FinishReason
from penstock.scheduler.request import Request, RequestStatus
from penstock.scheduler.services import SchedulerServices

logger = logging.getLogger(__name__)
# Reason for which a request waits while others finish.
_PAUSE = "the end of a pause"
_OF_THREADS = " Requests of other threads than the one that has let it rest may wait for that."
# State of a core that sleeps by itself.
_IDLE = EngineState(sleeping=PauseMode.KEEP, tags=MEMORY_TAGS, is_idle=True)


class SleepScheduling(SchedulerFeature):
    """Keeps one core's state, which the deployment's side gives it, and that of its workers.

    Workers that are lost meanwhile are replaced when the core runs again, or memory is woken.
    """

    def __init__(self, services: SchedulerServices) -> None:
        self._services, self._scheduler, self._call = services, services.scheduler, services.call_workers
        self._state = EngineState()
        # Tags of memory that the workers have given back.
        self._asleep: tuple[str, ...] = ()
        self._tags_of_methods = _tags_of_methods(services.config)
        seconds = services.config.sleep.sleep_idle_seconds
        self._idle = None if seconds is None else IdleWatch(seconds, lambda: services.call_soon(self._sleep_if_idle))

    def request_added(self, request: Request) -> None:
        """Wake an idle core. Raises EngineAsleep where requests do not wait for the core."""
        if self._idle is not None:
            self._idle.note_use()
        if self._state.is_idle:
            self._services.call_soon(self._serve_again)
        elif not self._runs_again() and self._state.mode is PauseMode.ABORT:
            raise EngineAsleep(f"The engine takes no requests now ({self._state.name}). {self._state.how_to_run}")

    def request_ended(self, request: Request) -> None:
        if self._idle is not None:
            self._idle.note_use()

    def skips(self, request: Request) -> str | None:
        # Preempted requests have begun.
        is_new = request.status is not RequestStatus.PREEMPTED
        return _PAUSE if is_new and not self._state.is_running else None

    def before_call(self, call: RpcCall) -> None:
        """Wake an idle core for a call that uses memory. Raises EngineAsleep where that is not there."""
        uses = self._tags_of_methods.get(call.method_name, call.effects.uses)
        if uses and self._idle is not None:
            self._idle.note_use()
        if uses or not call.method_name:
            self._end_idling()
        missing = [tag for tag in uses if tag in self._state.tags]
        if missing:
            raise EngineAsleep(
                f"{call.name} needs {' and '.join(missing)} in memory, and the engine is {self._state.name}. Wake it "
                f"up first: wake_up(tags={missing})."
            )

    def resting(self) -> None:
        self._runs_again()

    def workers_ready(self) -> None:
        """Let workers that replace lost ones sleep as those did, or have no weights as those had none."""
        tags, is_undefined = self._asleep, bool(self._state.undefined)
        if is_undefined and WEIGHTS not in tags:
            tags = (WEIGHTS, *tags)
        if tags:
            level = 2 if is_undefined else self._state.level
            texts = self._call(RpcCall("reserve_sleep", (level, tags)))
            if any(texts):
                logger.warning("The workers that replace lost ones stay awake: %s", _first(texts))
                if level == 2:
                    self._call(RpcCall("undefine_weights"))
            else:
                self._call(RpcCall("sleep", (level,)))
                self._call(RpcCall("wake_up", ([tag for tag in tags if tag not in self._asleep],)))

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()

    # Calls of the deployment's side.

    def pause(self, state: EngineState) -> list[bool]:
        """Take over a state in which no step begins; returns whether those that have begun are over.

        Called again until they are.
        """
        self._change(state)
        if state.mode is PauseMode.ABORT:
            unfinished = [request.req_id for request in self._scheduler.unfinished_requests()]
            self._services.tell_ends(self._scheduler.finish_requests(unfinished))
        has_drained = self._has_drained
        if has_drained:
            self._rest()
        return [has_drained]

    def clear_cache(self) -> list[bool]:
        """Clear the prefix cache of a core that rests."""
        return [self._scheduler.reset_prefix_cache(reset_running_requests=True)]

    def reserve_sleep(self, state: EngineState) -> list[str | None]:
        """Back up what a sleep keeps, and give nothing back yet. Returns why that fails, of each rank."""
        self._services.replace_lost_workers(None)
        if KV_CACHE in state.tags:
            for feature in self._scheduler.features:
                feature.before_caches_are_dropped()
        if KV_CACHE in state.tags and not self._scheduler.reset_prefix_cache(reset_running_requests=True):
            return ["Blocks of the KV cache are being transferred. Let the engine sleep once that is done."]
        tags = [tag for tag in state.tags if tag not in self._asleep]
        call = RpcCall("reserve_sleep", (state.level, tags))
        texts = self._with_replaced_workers(call)
        return self._call(call) if texts is None else texts

    def cancel_sleep(self) -> list[None]:
        """Drop what was backed up."""
        if not self._services.has_lost_workers():
            self._with_replaced_workers(RpcCall("cancel_sleep"))
        return [None]

    def sleep(self, state: EngineState) -> list[Any]:
        """Give memory back that `reserve_sleep` has backed up, where it keeps any."""
        too_many = [tag for tag in self._asleep if tag not in state.tags]
        if too_many:
            # An idle core has slept deeper.
            self._with_replaced_workers(RpcCall("wake_up", (too_many,)))
        self._asleep = state.tags
        self._change(state)
        if KV_CACHE in state.tags:
            for feature in self._scheduler.features:
                feature.caches_dropped()
        return self._with_replaced_workers(RpcCall("sleep", (state.level,))) or []

    def why_not_wake_up(self, tags: Sequence[str]) -> list[str | None]:
        """Why memory of these tags cannot come again now, of each rank."""
        if self._services.has_lost_workers():
            return []
        return self._call(RpcCall("why_not_wake_up", ([tag for tag in tags if tag in self._asleep],)))

    def wake_up(self, state: EngineState) -> list[None]:
        """Let memory come again that is there in this state. Workers whose backups cannot be read are replaced."""
        tags = [tag for tag in self._asleep if tag not in state.tags]
        self._asleep = state.tags
        self._change(state)
        if self._services.has_lost_workers():
            self._services.replace_lost_workers(None)
        else:
            texts = self._with_replaced_workers(RpcCall("wake_up", (tags,))) or []
            if any(texts):
                self._services.replace_lost_workers(_first(texts))
        return [None]

    def resume(self, state: EngineState, *, is_new_core: bool = False) -> list[None]:
        """Take over a state. is_new_core: also for the workers, which are all awake."""
        if is_new_core:
            self._asleep = state.tags
            self._change(state)
            self.workers_ready()
            return [None]
        if state.is_running and self._given_back_by_itself(state):
            # It was idle before.
            state = _IDLE
            if self._scheduler.has_unfinished_requests():
                self._services.call_soon(self._serve_again)
        self._change(state)
        return [None]

    def engine_state(self) -> list[EngineState]:
        """The state of this core, whatever has made its weights undefined, with the memory that it has given back."""
        self._runs_again()
        state = self._state
        if self._given_back_by_itself(state):
            state = replace(state, tags=self._asleep, is_idle=True)
        if WEIGHTS in self._asleep or self._services.has_lost_workers():
            return [state]
        texts = self._call(RpcCall("why_weights_undefined"))
        return [replace(state, undefined=_first(texts) or "")]

    @property
    def _has_drained(self) -> bool:
        """Whether no step runs, and none of a request that has begun is to come."""
        if self._scheduler.num_in_flight_steps:
            return False
        if self._state.mode is not PauseMode.WAIT:
            return True
        waiting = self._scheduler.unfinished_requests()
        return not any(request.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED) for request in waiting)

    def _runs_again(self) -> bool:
        """Whether the core runs, also since the weights that it lacked have come."""
        state = self._state
        if state.undefined and WEIGHTS not in self._asleep and not self._services.has_lost_workers():
            texts = self._call(RpcCall("why_weights_undefined"))
            if not any(texts):
                self._change(state.with_weights())
        return self._state.is_running

    def _change(self, state: EngineState) -> None:
        """Take over a state. Where running requests finish first, the core rests afterwards only (`pause`)."""
        self._state = state
        if state.is_running:
            if self._idle is not None:
                self._idle.note_use()
            self._scheduler.let_rest(self, RUNNING)
            for request in self._scheduler.waiting_for(_PAUSE):
                self._scheduler.ready(request.req_id, _PAUSE)
        elif state.mode is not PauseMode.WAIT or state.tags or state.undefined or self._has_drained:
            self._rest()
        else:
            # A pause before this one may have let it rest.
            self._scheduler.let_rest(self, RUNNING)

    def _rest(self) -> None:
        state = self._state
        is_pause = not state.is_idle and not state.undefined
        why = f"Requests wait: the engine is {state.name}. {state.how_to_run}{_OF_THREADS}" if is_pause else ""
        self._scheduler.let_rest(self, CoreState(state.name, state.is_idle, why, is_pause=is_pause))

    def _with_replaced_workers(self, call: RpcCall) -> list[Any] | None:
        """Call the workers; None if some are lost, which are replaced then."""
        try:
            return self._call(call)
        except (WorkerError, WaitTimeout):
            if not self._services.has_lost_workers():
                raise
            self._services.replace_lost_workers(None)
            return None

    def _sleep_if_idle(self) -> None:
        """Sleep until the next request, unless one has come."""
        assert self._idle is not None, "its watch calls it"
        busy = self._scheduler.has_unfinished_requests() or self._scheduler.num_in_flight_steps
        if busy or not self._idle.is_due or not self._state.is_running:
            return
        texts = self.reserve_sleep(_IDLE)
        if any(texts):
            self.cancel_sleep()
            logger.warning("The idle engine stays awake: %s", _first(texts))
        else:
            self.sleep(_IDLE)

    def _serve_again(self) -> None:
        """Wake an idle core for its requests, which end with the error where that fails."""
        try:
            if self._state.is_idle:
                self._end_idling()
        except OutOfMemory as error:
            waiting = [request.req_id for request in self._scheduler.unfinished_requests()]
            ended = self._scheduler.finish_requests(waiting, FinishReason.ERROR)
            self._services.tell_ends([replace(output, error=str(error)) for output in ended])

    def _end_idling(self) -> None:
        """Let memory come again that the core has given back by itself; it may be paused since then.

        Raises OutOfMemory, and leaves it away, without the memory.
        """
        state = EngineState() if self._state.is_idle else self._state
        tags = self._given_back_by_itself(state)
        if not tags:
            return
        texts = self.why_not_wake_up(tags)
        if any(texts):
            raise OutOfMemory(str(_first(texts)))
        self.wake_up(state)

    def _given_back_by_itself(self, state: EngineState) -> list[str]:
        """Tags of memory that is not there, and that is in this state of the deployment's side."""
        return [tag for tag in self._asleep if tag not in state.tags]


def _first(texts: Sequence[str | None]) -> str | None:
    return next((text for text in texts if text), None)


def _tags_of_methods(config: EngineConfig) -> dict[str, Sequence[str]]:
    """Tags of the memory that methods of features use."""
    return {name: tags for one in features_of(config) for name, tags in one.memory_of_methods.items()}

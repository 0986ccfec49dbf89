"""Deployment side of sleep: the state of all cores, which outlives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.contract import RpcCall
from penstock.contract.memory_tags import MEMORY_TAGS, WEIGHTS
from penstock.errors import EngineAsleep, OutOfMemory, ProcessLost
from penstock.features.deployment import DeploymentFeature, DeploymentServices
from penstock.features.sleep.state import EngineState, PauseMode, checked_level, checked_mode, checked_tags


class SleepDeployment(DeploymentFeature):
    """Owner of the state. Its calls may be repeated, and are where cores are lost.

    `sleep` and `pause` return whether they are done: their caller repeats them while requests finish, so that nothing
    else waits for that.
    """

    def __init__(self, services: DeploymentServices) -> None:
        self._call_cores, self._on_change = services.call_cores, services.on_change
        self._state: EngineState = services.state or EngineState()

    def calls_of_new_core(self) -> Iterable[RpcCall]:
        return () if self._state.is_running else (RpcCall("resume", (self._state,), {"is_new_core": True}),)

    def call_ends(self, call: RpcCall, *, is_done: bool) -> None:
        """Find out whether a call has brought the weights that were missing."""
        if is_done and self._state.undefined and WEIGHTS not in self._state.tags:
            self._refresh()

    def sleep(self, level: int = 1, mode: str = PauseMode.ABORT, tags: Sequence[str] | None = None) -> list[bool]:
        """Give memory back. Raises EngineAsleep for a level that is not possible in this state, OutOfMemory without
        room for a backup: the engine runs on then, without the requests that `mode` has ended.
        """
        level, mode, wanted = checked_level(level), checked_mode(mode), checked_tags(tags)
        before = self._state
        if before.tags and level != before.level and WEIGHTS in {*before.tags} & {*wanted}:
            raise EngineAsleep(
                f"sleep(level={level}) is not possible: the engine is {before.name}. Wake it up first (wake_up)."
            )
        if before.undefined and level == 1 and WEIGHTS in wanted and WEIGHTS not in before.tags:
            raise EngineAsleep(
                f"sleep(level=1) would keep weights that are undefined: {before.undefined}. Use level=2, or send all "
                "of them first (reload_weights, load_weights)."
            )
        if set(wanted) <= set(before.tags):
            return [True]
        self._change(replace(before, sleeping=PauseMode(mode)))
        if not all(self._call("pause", self._state)):
            return [False]
        asleep = tuple(tag for tag in MEMORY_TAGS if tag in wanted or tag in before.tags)
        level_of_weights = level if WEIGHTS in wanted else before.level
        state = replace(self._state, tags=asleep, level=level_of_weights)
        try:
            _raise_first(self._call("reserve_sleep", state))
        except BaseException:
            self._call("cancel_sleep")
            self._adopt(replace(before, sleeping=before.sleeping if before.tags or before.undefined else None))
            raise
        self._change(state)
        self._call("sleep", state)
        return [True]

    def wake_up(self, tags: Sequence[str] | None = None) -> list[None]:
        """Let memory come again; the rest stays away. Raises OutOfMemory without enough, and all sleeps on then."""
        wanted = checked_tags(tags)
        _raise_first(self._call("why_not_wake_up", wanted))
        state = self._state.without(wanted)
        self._change(state)
        self._call("wake_up", state)
        return [None]

    def is_sleeping(self) -> list[bool]:
        return [any(state.tags for state in self._states())]

    def pause(self, mode: str = PauseMode.ABORT, clear_cache: bool = True) -> list[bool]:
        self._change(replace(self._state, paused=checked_mode(mode)))
        has_drained = all(self._call("pause", self._state))
        if has_drained and clear_cache:
            self._call("clear_cache")
        return [has_drained]

    def resume(self) -> list[None]:
        self._adopt(replace(self._state, paused=None))
        return [None]

    def is_paused(self) -> list[bool]:
        return [self._state.paused is not None or (self._state.sleeping is not None and not self._state.is_idle)]

    def engine_state(self) -> list[EngineState]:
        """The state; of an idle core that sleeps by itself, if the engine runs."""
        states = self._states()
        return [next((state for state in states if not state.is_running), states[0])]

    def _states(self) -> list[EngineState]:
        if self._state.undefined:
            self._refresh()
        states: list[EngineState] = self._call("engine_state")
        return states

    def _refresh(self) -> None:
        """Note that weights have come, where all cores have them."""
        if not any(state.undefined for state in self._call("engine_state")):
            self._change(self._state.with_weights())

    def _adopt(self, state: EngineState) -> None:
        self._change(state)
        self._call("resume", state)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call all cores, again where one is lost: the core that replaces it has the present state."""
        while True:
            try:
                return self._call_cores(RpcCall(method, args))
            except ProcessLost:
                continue

    def _change(self, state: EngineState) -> None:
        if state != self._state:
            self._state = state
            self._on_change(state)


def _raise_first(texts: Iterable[str | None]) -> None:
    for text in texts:
        if text:
            raise OutOfMemory(text)

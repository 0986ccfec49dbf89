"""Scheduler side of weight transfers: requests wait while weights are undefined, and go on with the new ones."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.weight_transfer import KEEP
from penstock.contract import RpcCall
from penstock.contract.parts import OutputPart
from penstock.contract.rpc import LOAD_WEIGHTS
from penstock.errors import PenstockError, WeightTransferFailed
from penstock.features.weight_transfer.messages import WeightVersion
from penstock.features.weight_transfer.state import RankStatus, WeightsState, may_change_weights, state_of
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import RUNNING, CoreState, EngineCoreOutput
from penstock.scheduler.services import SchedulerServices

logger = logging.getLogger(__name__)
# Interval at which workers are asked whether their weights are defined again.
_POLL_S = 0.05


class WeightTransferScheduling(SchedulerFeature):
    """Calls the workers of one core, and follows the state of their weights."""

    def __init__(self, services: SchedulerServices) -> None:
        self._services, self._scheduler = services, services.scheduler
        self._config = services.config.weight_transfer
        self._state = WeightsState()
        # Another start may have other weights by the same number.
        self._run = uuid.uuid4().hex
        self._why_undefined: str | None = None
        self._asked_at = 0.0
        # Whether a call may have changed the weights since the workers were asked, and whether an update was going on.
        self._are_unknown = self._is_updating = False
        # Why the next tensors of `load_weights` are not those of an update that was going on.
        self._why_begin_again: str | None = None
        if self._config.backend is not None:
            then = (
                f"written to {self._config.recovery_dir} (two copies at most), and loaded again"
                if self._config.recovery == KEEP
                else "lost, and requests wait for the next update"
            )
            logger.info(
                "Weight transfer: %s; after a crash the weights of a trainer are %s", self._config.backend, then
            )

    def resting(self) -> None:
        if self._why_undefined is not None and time.monotonic() >= self._asked_at + _POLL_S:
            self._ask("weight_update_status")

    def before_call(self, call: RpcCall) -> None:
        """Raises WeightTransferFailed for tensors of an update whose earlier tensors are lost."""
        if may_change_weights(call, self._services.config.parallel):
            why, self._why_begin_again = self._why_begin_again, None
            if why is not None and call.method_name == LOAD_WEIGHTS:
                raise WeightTransferFailed(why)
            self._are_unknown = self._are_unknown or self._is_updating or call.method_name == LOAD_WEIGHTS

    def after_call(self, call: RpcCall, *, is_done: bool) -> None:
        if not may_change_weights(call, self._services.config.parallel):
            return
        self._are_unknown = self._are_unknown or is_done
        if is_done:
            self._look()
        else:
            # Workers may still run it after its timeout.
            self._services.call_soon(self._look)

    def parts_of_outputs(self, outputs: Sequence[EngineCoreOutput]) -> Mapping[str, OutputPart]:
        version = self._state.version
        if not version:
            return {}
        part = WeightVersion(version=version)
        return {output.req_id: part for output in outputs if output.finish_reason is not None}

    def counts(self) -> Mapping[str, int]:
        return {"weight_version": self._state.version}

    def workers_ready(self) -> None:
        state = self._state
        if self._are_unknown:
            # Lost workers may have had newer weights.
            self._state = WeightsState(state.version + 1, state.num_updates + 1, is_pushed=True)
        elif self._is_updating:
            self._why_begin_again = (
                f"Workers were lost while weights arrived, and have those of version {state.version} again. Send all "
                "tensors again, from the first one on."
            )
        self._is_updating = False
        if self._state.num_updates:
            self._note(self._call_workers("restore_weights_after_loss", self._state))
        elif self._why_undefined is not None:
            # The checkpoint's weights, after an update that was not complete.
            self._note(self._call_workers("weight_update_status"))

    # Calls of the deployment's side.

    def call(self, call: RpcCall) -> list[Any]:
        if call.method_name == "restore_weights":
            return self.restore_weights(*call.args)
        return self._ask(call.method_name, *call.args)

    def restore_weights(self, state: WeightsState) -> list[RankStatus]:
        """Give workers that lack it the newest complete weights; without them requests wait for the next update."""
        if state.num_updates == self._state.num_updates:
            return self._ask("weight_update_status")
        self._state = state
        self._scheduler.begin_weights(f"{self._run}:{state.num_updates}")
        return self._ask("restore_weights_after_loss", state)

    def _look(self) -> None:
        """Ask the workers for the state of their weights, which a call may have changed."""
        if not self._services.has_lost_workers():
            self._ask("weight_update_status")

    def _ask(self, method: str, *args: Any) -> list[RankStatus]:
        """Call the workers, and note the state of their weights."""
        if method == "start_weight_update":
            self._why_begin_again = None
        self._asked_at = time.monotonic()
        if self._services.has_lost_workers():
            # A core that rests replaces none by itself.
            self._services.replace_lost_workers(None)
        try:
            statuses = self._call_workers(method, *args)
        except PenstockError:
            if method != "weight_update_status" and not self._services.has_lost_workers():
                self._note(self._call_workers("weight_update_status"))
            raise
        self._note(statuses)
        return statuses

    def _call_workers(self, method: str, *args: Any) -> list[RankStatus]:
        statuses: list[RankStatus] = self._services.call_workers(RpcCall(method, args))
        return statuses

    def _note(self, statuses: Sequence[RankStatus]) -> None:
        self._are_unknown = False
        self._is_updating = any(status.is_updating for status in statuses)
        why = next((status.why_undefined for status in statuses if status.why_undefined is not None), None)
        state = state_of(statuses)
        is_new = why is None and state.num_updates != self._state.num_updates
        if (why is not None and self._why_undefined is None) or is_new:
            # Running requests go on from their tokens, with the new weights.
            self._scheduler.begin_weights(f"{self._run}:{state.num_updates}")
        if is_new:
            self._state = state
        if self._state.version:
            self._scheduler.call_for_all_outputs(self.parts_of_outputs)
        self._why_undefined = why
        if why is None:
            self._scheduler.let_rest(self, RUNNING)
            return
        why = why.rstrip(".")
        text = f"The weights are undefined: {why}. Send all weights, or reload them (load_weights, reload_weights)."
        rest = CoreState("weights undefined", is_ready=False, why_stuck=text, is_update=self._is_updating)
        self._scheduler.let_rest(self, rest)

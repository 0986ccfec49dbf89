"""Scheduler side of weight transfers: requests wait while weights are undefined, and go on with the new ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.weight_transfer import KEEP
from penstock.contract import RpcCall
from penstock.contract.parts import OutputPart
from penstock.contract.rpc import LOAD_WEIGHTS, WeightChange
from penstock.errors import PenstockError
from penstock.features.weight_transfer.messages import WeightVersion
from penstock.features.weight_transfer.state import RankStatus, WeightsState
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import RUNNING, CoreState, EngineCoreOutput
from penstock.scheduler.services import SchedulerServices

logger = logging.getLogger(__name__)
_UNDEFINED = CoreState("weights undefined", is_ready=False)
# Interval at which workers are asked whether their weights are defined again.
_POLL_S = 0.05


class WeightTransferScheduling(SchedulerFeature):
    """Calls the workers of one core, and follows the state of their weights."""

    def __init__(self, services: SchedulerServices) -> None:
        self._services, self._scheduler = services, services.scheduler
        self._config = services.config.weight_transfer
        self._state = WeightsState()
        self._why_undefined: str | None = None
        self._asked_at = 0.0
        # Whether a call of `load_weights` may have changed the weights since the workers were asked.
        self._are_unknown = False
        self.has_own_parts = self._config.backend is not None
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
        if call.effects.weights is WeightChange.NOW:
            self._are_unknown = self._are_unknown or call.method_name == LOAD_WEIGHTS
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
        if self._are_unknown and not self._state.is_pushed:
            # Lost workers may have had newer weights.
            self._state = WeightsState(self._state.version + 1, is_pushed=True)
        if self._state.is_pushed:
            self._note(self._restore(self._state))
        elif self._why_undefined is not None:
            # The checkpoint's weights, after an update that was not complete.
            self._note(self._services.call_workers(RpcCall("weight_update_status")))

    # Calls of the deployment's side.

    def call(self, call: RpcCall) -> list[Any]:
        if call.method_name == "restore_weights":
            return self.restore_weights(*call.args)
        return self._ask(call.method_name, *call.args)

    def restore_weights(self, state: WeightsState) -> list[RankStatus]:
        """Give new workers the newest complete weights; without them requests wait for the next update."""
        self._state = state
        return self._ask("restore_weights_after_loss", state.version, state.folder)

    def _restore(self, state: WeightsState) -> list[RankStatus]:
        folder = None if self._are_unknown else state.folder
        statuses: list[RankStatus] = self._services.call_workers(
            RpcCall("restore_weights_after_loss", (state.version, folder))
        )
        return statuses

    def _look(self) -> None:
        """Ask the workers for the state of their weights, which a call may have changed."""
        if not self._services.has_lost_workers():
            self._ask("weight_update_status")

    def _ask(self, method: str, *args: Any) -> list[RankStatus]:
        """Call the workers, and note the state of their weights."""
        self._asked_at = time.monotonic()
        if self._services.has_lost_workers():
            # A core that rests replaces none by itself.
            self._services.replace_lost_workers(None)
        try:
            statuses: list[RankStatus] = self._services.call_workers(RpcCall(method, args))
        except PenstockError:
            if method != "weight_update_status":
                self._note(self._services.call_workers(RpcCall("weight_update_status")))
            raise
        self._note(statuses, is_finished=method == "finish_weight_update")
        return statuses

    def _note(self, statuses: Sequence[RankStatus], *, is_finished: bool = False) -> None:
        """is_finished: whether an update has ended, maybe with the version of the one before."""
        self._are_unknown = False
        why = next((status.why_undefined for status in statuses if status.why_undefined is not None), None)
        version = min(status.version for status in statuses)
        is_new = why is None and (is_finished or version != self._state.version)
        if (why is not None and self._why_undefined is None) or is_new:
            # Running requests go on from their tokens, with the new weights.
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
        if is_new:
            self._state = WeightsState(version, is_pushed=statuses[0].is_pushed, folder=statuses[0].folder)
        self._why_undefined = why
        self._scheduler.let_rest(self, RUNNING if why is None else _UNDEFINED)

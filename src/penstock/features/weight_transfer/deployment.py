"""Deployment side of weight transfers: calls of all cores, and the state that outlives them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.contract import RpcCall
from penstock.contract.rpc import WeightChange
from penstock.features.deployment import DeploymentFeature, DeploymentServices
from penstock.features.weight_transfer.state import RankStatus, WeightsState

_POLL_S = 0.005


class WeightTransferDeployment(DeploymentFeature):
    """Keeps the newest complete weights' version, and tells it to cores that replace lost ones.

    Calls that wait for a trainer return at once with `wait=False`; `weight_update_status` says when they are done.
    """

    def __init__(self, services: DeploymentServices) -> None:
        self._call_cores, self._on_change = services.call_cores, services.on_change
        self._state: WeightsState = services.state or WeightsState()

    def calls_of_new_core(self) -> Iterable[RpcCall]:
        return (RpcCall("restore_weights", (self._state,)),) if self._state.is_pushed else ()

    def call_done(self, call: RpcCall) -> None:
        """Note the weights that a call has loaded in another way."""
        if call.effects.weights is WeightChange.NOW:
            self._call("weight_update_status", False)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any], *, wait: bool = True) -> list[RankStatus]:
        return self._call("init_weight_transfer_engine", wait, init_info)

    def start_weight_update(self, is_checkpoint_format: bool = True, atomic: bool | None = None) -> list[RankStatus]:
        return self._call("start_weight_update", False, is_checkpoint_format, atomic)

    def update_weights(self, update_info: Mapping[str, Any], *, wait: bool = True) -> list[RankStatus]:
        return self._call("update_weights", wait, update_info)

    def finish_weight_update(self, weight_version: int | None = None) -> list[RankStatus]:
        return self._call("finish_weight_update", False, weight_version)

    def weight_update_status(self) -> list[RankStatus]:
        return self._call("weight_update_status", False)

    def get_weight_version(self) -> list[int]:
        return [status.version for status in self.weight_update_status()]

    def _call(self, method: str, wait: bool, *args: Any) -> list[RankStatus]:
        answers: list[RankStatus] = self._call_cores(RpcCall(method, args))
        while wait and any(status.is_waiting for status in answers):
            time.sleep(_POLL_S)
            answers = self._call_cores(RpcCall("weight_update_status"))
        if wait:
            raise_first(answers)
        newest = min((status.version for status in answers), default=0)
        # A core that replaces a lost one gets what the first rank has kept.
        state = WeightsState(newest, is_pushed=answers[0].is_pushed, folder=answers[0].folder)
        if state != self._state:
            self._state = state
            self._on_change(self._state)
        return answers


def raise_first(statuses: Iterable[RankStatus]) -> None:
    """Raise the first error of ranks."""
    for status in statuses:
        if status.error is not None:
            raise status.error

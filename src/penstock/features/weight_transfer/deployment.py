"""Deployment side of weight transfers: calls of all cores, and the state that outlives them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.contract import RpcCall
from penstock.contract.rpc import LOAD_WEIGHTS
from penstock.errors import PenstockError, ProcessLost, WeightTransferFailed
from penstock.features.deployment import DeploymentFeature, DeploymentServices
from penstock.features.weight_transfer.state import RankStatus, WeightsState, may_change_weights, state_of

_POLL_S = 0.005
_LOST = (
    "A core was lost while weights arrived, and those that it had with it. Send all tensors again, from the first one "
    "on (start_weight_update, or load_weights)."
)


class WeightTransferDeployment(DeploymentFeature):
    """Keeps the state of the newest complete weights, and tells it to cores that replace lost ones.

    While a call may change the weights, a core that is replaced has none: after the call it gets the newest ones that
    any core has. An update that some cores lack is ended in all.
    Calls that wait for a trainer return at once with `wait=False`; `weight_update_status` says when they are done.
    """

    def __init__(self, services: DeploymentServices) -> None:
        self._call_cores, self._on_change = services.call_cores, services.on_change
        self._parallel = services.config.parallel
        self._state: WeightsState = services.state or WeightsState()
        self._is_changing = False
        # Whether a core waits for the end of a call.
        self._has_waiting_core = False
        # Whether an update was ended, of which the caller may send more tensors.
        self._is_update_ended = False

    def calls_of_new_core(self) -> Iterable[RpcCall]:
        if self._is_changing:
            self._has_waiting_core = True
            return (RpcCall("restore_weights", (WeightsState(self._state.version, num_updates=-1, is_pushed=True),)),)
        return (RpcCall("restore_weights", (self._state,)),) if self._state.num_updates else ()

    def call_begins(self, call: RpcCall) -> None:
        """Raises WeightTransferFailed for more tensors of an update that has ended."""
        if call.method_name == LOAD_WEIGHTS:
            self._check_not_ended()
        self._is_changing = may_change_weights(call, self._parallel)

    def call_ends(self, call: RpcCall, *, is_done: bool) -> None:
        """Note the weights that a call has loaded. Raises WeightTransferFailed for an update that has ended."""
        if self._is_changing and (is_done or self._has_waiting_core):
            before = self._state.num_updates
            statuses = self.weight_update_status()
            self._is_changing = False
            if is_done and call.method_name == LOAD_WEIGHTS:
                self._check_all_have_them(before, statuses)
        self._is_changing = False

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any], *, wait: bool = True) -> list[RankStatus]:
        return self._call("init_weight_transfer_engine", wait, init_info)

    def start_weight_update(self, is_checkpoint_format: bool = True, atomic: bool | None = None) -> list[RankStatus]:
        self.weight_update_status()
        self._is_update_ended = False
        return self._call("start_weight_update", False, is_checkpoint_format, atomic)

    def update_weights(self, update_info: Mapping[str, Any], *, wait: bool = True) -> list[RankStatus]:
        self.weight_update_status()
        self._check_not_ended()
        return self._call("update_weights", wait, update_info)

    def finish_weight_update(self, weight_version: int | None = None) -> list[RankStatus]:
        self.weight_update_status()
        self._check_not_ended()
        return self._call("finish_weight_update", False, weight_version)

    def weight_update_status(self) -> list[RankStatus]:
        """State of the weights of all ranks, after an update that some cores lack has ended in the others."""
        return self._settle(self._ask("weight_update_status"))

    def get_weight_version(self) -> list[int]:
        return [status.version for status in self.weight_update_status()]

    def _call(self, method: str, wait: bool, *args: Any) -> list[RankStatus]:
        self._is_changing = True
        before = self._state.num_updates
        try:
            answers: list[RankStatus] = self._call_cores(RpcCall(method, args))
            while wait and any(status.is_waiting for status in answers):
                time.sleep(_POLL_S)
                answers = self._ask("weight_update_status")
        except PenstockError:
            self.weight_update_status()
            raise
        finally:
            self._is_changing = False
        answers = self._settle(answers)
        if wait:
            raise_first(answers)
        self._check_all_have_them(before, answers)
        return answers

    def _check_all_have_them(self, before: int, statuses: Iterable[RankStatus]) -> None:
        """Raise WeightTransferFailed unless all cores have what a call has brought.

        before: number of complete updates before it.
        """
        self._check_not_ended()
        if self._state.num_updates > before and any(status.why_undefined is not None for status in statuses):
            raise WeightTransferFailed(_LOST)

    def _check_not_ended(self) -> None:
        """Raise WeightTransferFailed once after an update was ended that some cores lacked."""
        is_ended, self._is_update_ended = self._is_update_ended, False
        if is_ended:
            raise WeightTransferFailed(_LOST)

    def _ask(self, method: str, *args: Any) -> list[RankStatus]:
        """Call all cores, again where one is lost."""
        while True:
            try:
                answers: list[RankStatus] = self._call_cores(RpcCall(method, args))
                return answers
            except ProcessLost:
                continue

    def _settle(self, statuses: list[RankStatus]) -> list[RankStatus]:
        """Let all cores have the newest weights, and no update that others lack. Returns the state of all ranks."""
        cores = self._by_core(statuses)
        newest = max(map(state_of, cores), key=lambda state: state.num_updates)
        if self._state.num_updates > newest.num_updates:
            newest = self._state
        if any(state_of(core).num_updates != newest.num_updates for core in cores):
            statuses = self._ask("restore_weights", newest)
        self._has_waiting_core = False
        if not any(status.is_waiting for status in statuses):
            # Loaders that have had no tensor may not know yet what is missing.
            has_begun = not any(status.is_updating and status.num_missing is None for status in statuses)
            first, *others = (
                [(status.is_updating, has_begun and status.num_missing) for status in core]
                for core in self._by_core(statuses)
            )
            if any(one != first for one in others):
                self._is_update_ended = True
                statuses = self._ask("abandon_weight_update")
        # A core that replaces a lost one gets what the first rank has kept.
        state = state_of(self._by_core(statuses)[0])
        if state != self._state:
            self._state = state
            self._on_change(state)
        return statuses

    def _by_core(self, statuses: Sequence[RankStatus]) -> list[Sequence[RankStatus]]:
        size = self._parallel.world_size
        return [statuses[begin : begin + size] for begin in range(0, len(statuses), size)]


def raise_first(statuses: Iterable[RankStatus]) -> None:
    """Raise the first error of ranks."""
    for status in statuses:
        if status.error is not None:
            raise status.error

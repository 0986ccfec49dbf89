"""Deployment sides of features: what all cores and front ends share, in the one process that owns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.config import EngineConfig
from penstock.contract import Parts, RpcCall
from penstock.contract.feature import features_of, make_side, why_no_method, why_refused
from penstock.errors import InvalidRequest


class DeploymentServices(NamedTuple):
    """Services of a deployment's owner, the client of its cores or the one core, for a feature.

    call_cores: calls the feature's scheduler side in every core (`SchedulerFeature.call`). state: of the owner before;
    None for the first one. on_change: called with the state after each change, before the change is answered.
    """

    config: EngineConfig
    call_cores: Callable[[RpcCall], list[Any]]
    state: Any
    on_change: Callable[[Any], None]


_Request = TypeVar("_Request", bound=msgspec.Struct)


class DeploymentFeature:
    """Deployment side of a feature."""

    def resolve(self, parts: Parts, *, is_admitted: bool) -> Parts:
        """Return the parts with which a request runs. is_admitted: the request continues one of a lost core.

        Raises InvalidRequest for a request that cannot have them.
        """
        return parts

    def call(self, call: RpcCall) -> list[Any]:
        """Answer a call of one of the feature's `deployment_methods`, by the method of its name.

        Raises InvalidRequest for one that the scheduler's side alone has.
        """
        method = getattr(self, call.name, None)
        if method is None:
            raise InvalidRequest(f"{call.name} is a call between parts of the engine.")
        answers: list[Any] = method(*call.args, **call.kwargs)
        return answers

    def calls_of_new_core(self) -> Iterable[RpcCall]:
        """Calls of the feature's scheduler side in a core that replaces a lost one."""
        return ()

    def call_begins(self, call: RpcCall) -> None:
        """Note a call of the workers of all cores."""

    def call_ends(self, call: RpcCall, *, is_done: bool) -> None:
        """Note the end of a call of the workers. is_done: whether those of some core have done it."""


class DeploymentFeatures:
    """Deployment sides of all features.

    states: of the owner before, by feature. on_change: called with all states after each change.
    """

    def __init__(
        self,
        config: EngineConfig,
        call_cores: Callable[[RpcCall], list[Any]],
        states: Mapping[str, Any] | None = None,
        on_change: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self._states = dict(states or {})
        self._on_change = on_change
        self._by_part: dict[str, DeploymentFeature] = {}
        self._by_method: dict[str, DeploymentFeature] = {}
        features = features_of(config)
        self._on = {feature.name for feature in features}
        for feature in features:
            if feature.deployment_side is None:
                continue
            services = DeploymentServices(
                config, call_cores, self._states.get(feature.name), self._keeper_of(feature.name)
            )
            side: DeploymentFeature = make_side(feature.deployment_side, services)
            self._by_part.update({part.feature: side for part in feature.parts})
            self._by_method.update(dict.fromkeys(feature.deployment_methods, side))

    def resolve(self, request: _Request) -> _Request:
        """Return a request with the parts that it runs with.

        Raises InvalidRequest for a part of a feature that is off.
        """
        given: Parts | None = request.parts  # type: ignore[attr-defined]
        parts = given
        why = why_refused(given or (), self._on)
        if why is not None:
            raise InvalidRequest(why)
        for name in list(given or ()):
            if name in self._by_part and parts is not None:
                parts = self._by_part[name].resolve(parts, is_admitted=request.is_admitted)  # type: ignore[attr-defined]
        return request if parts is given else msgspec.structs.replace(request, parts=parts)

    def side_of(self, call: RpcCall) -> DeploymentFeature | None:
        """The side that answers a call; None where the workers do.

        Raises InvalidRequest for a method of a feature that is off.
        """
        side = self._by_method.get(call.method_name)
        if side is None and (why := why_no_method(call.method_name, of_deployment=True)) is not None:
            raise InvalidRequest(why)
        return side

    def calls_of_new_core(self) -> Iterable[RpcCall]:
        """As `DeploymentFeature`, of all features."""
        return [call for side in dict.fromkeys(self._by_method.values()) for call in side.calls_of_new_core()]

    def call_begins(self, call: RpcCall) -> None:
        """As `DeploymentFeature`, of all features."""
        for side in dict.fromkeys(self._by_method.values()):
            side.call_begins(call)

    def call_ends(self, call: RpcCall, *, is_done: bool) -> None:
        """As `DeploymentFeature`, of all features."""
        for side in dict.fromkeys(self._by_method.values()):
            side.call_ends(call, is_done=is_done)

    def _keeper_of(self, name: str) -> Callable[[Any], None]:
        def keep(state: Any) -> None:
            self._states[name] = state
            self._on_change(self._states)

        return keep

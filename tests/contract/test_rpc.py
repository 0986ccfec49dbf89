"""Calls of the workers: their effects by name."""

from __future__ import annotations

import pytest

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.contract.rpc import EFFECTS, RpcEffects, WeightChange
from penstock.errors import ConfigError
from penstock.features.deployment import DeploymentFeatures
from penstock.features.lora import FEATURE
from penstock.features.lora.adapter_list import AdapterList
from penstock.features.lora.worker import LoRAWorker
from penstock.worker.worker import Worker


def test_each_method_with_effects_is_one_of_the_worker_or_of_a_feature() -> None:
    of_feature = {*FEATURE.worker_methods, *FEATURE.deployment_methods}
    for name in EFFECTS:
        assert name in of_feature or callable(getattr(Worker, name)), name


def test_methods_of_features_are_those_of_their_sides() -> None:
    for name in FEATURE.worker_methods:
        assert callable(getattr(LoRAWorker, name)), name
    for name in FEATURE.deployment_methods:
        assert callable(getattr(AdapterList, name)), name


def test_a_function_is_called_on_the_workers_whatever_its_name() -> None:
    def known_loras(worker: object) -> None: ...

    features = DeploymentFeatures(EngineConfig.create("demo", enable_lora=True), lambda call: [])
    assert features.side_of(RpcCall("known_loras")) is not None
    assert features.side_of(RpcCall(known_loras)) is None


def test_a_function_has_no_effects_whatever_its_name() -> None:
    def reload_weights(worker: object) -> None: ...

    assert RpcCall("reload_weights").effects.weights is WeightChange.NOW
    assert RpcCall(reload_weights).effects == RpcCall("check_health").effects == RpcEffects()
    assert RpcCall(reload_weights).name == "reload_weights"


@pytest.mark.parametrize("timeout", [0, -1.5, float("nan")])
def test_a_timeout_is_positive(timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"timeout=.* is not valid. Allowed: a positive number of seconds, or None"):
        RpcCall("check_health", timeout_s=timeout)

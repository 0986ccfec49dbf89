"""Calls of the workers: their effects by name."""

from __future__ import annotations

import pytest

from penstock.contract import RpcCall
from penstock.contract.rpc import EFFECTS, RpcEffects, WeightChange
from penstock.engine.core.adapter_list import AdapterList
from penstock.errors import ConfigError
from penstock.worker.worker import Worker


def test_each_method_with_effects_is_one_of_the_worker_or_of_the_list_of_adapters() -> None:
    adapters = AdapterList(lambda call: [True], is_enabled=True)
    for name, effects in EFFECTS.items():
        if effects.feature is None:
            assert callable(getattr(Worker, name)), name
        else:
            # A method that the list does not know would be a KeyError.
            with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
                adapters.call(RpcCall(name, kwargs={"nonsense": 1}))


def test_a_function_has_no_effects_whatever_its_name() -> None:
    def reload_weights(worker: object) -> None: ...

    assert RpcCall("reload_weights").effects.weights is WeightChange.NOW
    assert RpcCall(reload_weights).effects == RpcCall("check_health").effects == RpcEffects()
    assert RpcCall(reload_weights).name == "reload_weights"


@pytest.mark.parametrize("timeout", [0, -1.5, float("nan")])
def test_a_timeout_is_positive(timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"timeout=.* is not valid. Allowed: a positive number of seconds, or None"):
        RpcCall("check_health", timeout_s=timeout)

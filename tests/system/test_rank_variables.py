"""Environment variables of ranks."""

from __future__ import annotations

import os

import pytest

from penstock.errors import ConfigError
from penstock.system import env
from penstock.system.rank_variables import LauncherPlace, for_another_machine, place_from_launcher


def test_what_another_machine_takes_over() -> None:
    variables = {
        "PENSTOCK_LOG_LEVEL": "debug",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "7",
        "NCCL_SOCKET_IFNAME": "eth7",
        "HF_TOKEN": "secret",
        "HF_HOME": "/home/one",
        "PATH": "/bin",
    }
    taken = ["PENSTOCK_LOG_LEVEL", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "NCCL_DEBUG"]
    assert list(for_another_machine(variables)) == taken


def test_what_breaks_exchanges_is_gone_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "KEPT": "1"})
    env.prepare_rank({"OMP_NUM_THREADS": "3"})
    assert env.with_changes({}) == {
        "KEPT": "1",
        "OMP_NUM_THREADS": "3",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def test_what_torchrun_says_is_understood() -> None:
    said = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    assert place_from_launcher(said) == LauncherPlace(5, 8, 1, 8, "10.0.0.7", 29500)
    more = {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert place_from_launcher({**said, **more}) == LauncherPlace(5, 8, 1, 4, "10.0.0.7", 29500, True, 2)
    with pytest.raises(ConfigError, match="RANK='-1' is not valid"):
        place_from_launcher({**said, "RANK": "-1"})
    with pytest.raises(ConfigError, match="LOCAL_RANK=4 is not valid. Allowed: less than 4"):
        place_from_launcher({**said, **more, "LOCAL_RANK": "4"})

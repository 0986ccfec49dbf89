"""The one place that reads environment variables.

| variable | meaning |
| --- | --- |
| PENSTOCK_LOG_LEVEL | level of Penstock's log: debug, info (default), warning, error |
| PENSTOCK_PLUGINS | comma-separated names of the entry points to load as plugins; unset loads all, empty none |
| PENSTOCK_CPU_KERNELS | kernels on the CPU: auto (default), torch, or an instruction set: avx512, avx2, generic |
| PENSTOCK_CPU_PRODUCTS | matrix products on the CPU: auto (default), or torch for its own beside our other kernels |
| GLOO_SOCKET_IFNAME | network interface by which ranks of several machines talk; unset takes the one to the first |
| RAY_ADDRESS | Ray cluster to connect to; unset takes the one that runs on this machine, or starts one |
| RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and others | set by torchrun for external_launcher |
| HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE | 1 forbids the network: models come from the local cache only |
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from penstock.config.rank_variables import SET_BEFORE_TORCH, LauncherPlace, for_another_machine, place_from_launcher
from penstock.errors import ConfigError

# What tells people how an engine was run, and cannot be a secret.
_REPORTED = (
    "PENSTOCK_LOG_LEVEL",
    "PENSTOCK_PLUGINS",
    "PENSTOCK_CPU_KERNELS",
    "PENSTOCK_CPU_PRODUCTS",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
)


def log_level() -> str:
    return os.environ.get("PENSTOCK_LOG_LEVEL", "info").upper()


def cpu_kernels() -> str:
    return os.environ.get("PENSTOCK_CPU_KERNELS", "auto").lower()


def uses_torch_products() -> bool:
    """Raises ConfigError for a value that means nothing."""
    value = os.environ.get("PENSTOCK_CPU_PRODUCTS", "auto").lower()
    if value not in ("auto", "torch"):
        raise ConfigError(f"PENSTOCK_CPU_PRODUCTS={value!r} is not valid. Allowed: auto, torch.")
    return value == "torch"


def allowed_plugins() -> list[str] | None:
    """Names of the plugins to load; None means all."""
    value = os.environ.get("PENSTOCK_PLUGINS")
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


def hub_is_offline() -> bool:
    return any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def variables_of_vllm() -> list[str]:
    """Names of the variables that are set for vLLM; nothing here reads them."""
    return sorted(name for name in os.environ if name.startswith("VLLM_"))


def with_changes(changes: Mapping[str, str]) -> dict[str, str]:
    """The whole environment, for a process that is to have it with these changes."""
    return {**os.environ, **changes}


def launcher_place() -> LauncherPlace:
    """What torchrun has told this process. Raises ConfigError where it has not."""
    return place_from_launcher(os.environ)


def variables_for_another_machine() -> dict[str, str]:
    """What a rank takes over that this process starts there."""
    return for_another_machine(os.environ)


def prepare_rank(variables: Mapping[str, str]) -> None:
    """Set these, and what every rank needs; to be called before torch is imported."""
    wanted = {**variables, **SET_BEFORE_TORCH}
    for name in wanted:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in wanted.items() if value is not None})


def gloo_interface() -> str | None:
    """Name of the network interface by which ranks are to talk, where the user has said one."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def ray_address() -> str | None:
    """Address of the Ray cluster to connect to, where the user has named one."""
    return os.environ.get("RAY_ADDRESS")


def reported_variables() -> dict[str, str]:
    """The variables that a report of a bug should show, as far as they are set."""
    return {name: os.environ[name] for name in _REPORTED if name in os.environ}

"""The one place that reads environment variables.

| variable | meaning |
| --- | --- |
| PENSTOCK_LOG_LEVEL | level of Penstock's log: debug, info (default), warning, error |
| PENSTOCK_API_KEY | API key of `penstock serve`; several are separated by commas |
| PENSTOCK_PLUGINS | comma-separated names of the entry points to load as plugins; unset loads all, empty none |
| PENSTOCK_CPU_KERNELS | kernels on the CPU: auto (default), torch, or an instruction set: amx, avx512, avx2, generic |
| | and +bfloat16 or +float32 behind it: as on a CPU that is, or is not, faster in bfloat16 arithmetic |
| PENSTOCK_CPU_PRODUCTS | matrix products on the CPU: auto (default), or torch, with Penstock's other kernels |
| TRITON_INTERPRET | 1 runs the GPU's Triton kernels on the CPU, in Triton's interpreter: for their tests |
| GLOO_SOCKET_IFNAME | network interface of ranks on several machines; unset takes the one that reaches rank 0 |
| RAY_ADDRESS | Ray cluster to connect to; unset takes the one that runs on this machine, or starts one |
| RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and others | set by torchrun for external_launcher |
| PENSTOCK_CACHE | folder of files that can be made or fetched again; unset takes penstock in the user's cache folder |
| OPENAI_API_KEY | API key that `penstock bench serve` sends to the server that it measures |
| HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE | 1 forbids the network: models come from the local cache only |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError
from penstock.system.rank_variables import SET_BEFORE_TORCH, LauncherPlace, for_another_machine, place_from_launcher

# Variables in bug reports: they say how an engine was run, and cannot be secrets.
_REPORTED = (
    "PENSTOCK_LOG_LEVEL",
    "PENSTOCK_PLUGINS",
    "PENSTOCK_CPU_KERNELS",
    "PENSTOCK_CPU_PRODUCTS",
    "TRITON_INTERPRET",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
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


def api_keys() -> list[str]:
    return [key for key in os.environ.get("PENSTOCK_API_KEY", "").split(",") if key]


def cpu_kernels() -> str:
    return os.environ.get("PENSTOCK_CPU_KERNELS", "auto").lower()


def uses_torch_products() -> bool:
    """Whether PENSTOCK_CPU_PRODUCTS chooses torch. Raises ConfigError for an invalid value."""
    value = os.environ.get("PENSTOCK_CPU_PRODUCTS", "auto").lower()
    if value not in ("auto", "torch"):
        raise ConfigError(f"PENSTOCK_CPU_PRODUCTS={value!r} is not valid. Allowed: auto, torch.")
    return value == "torch"


def interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def allowed_plugins() -> list[str] | None:
    """Names of the plugins to load; None means all."""
    value = os.environ.get("PENSTOCK_PLUGINS")
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


def openai_api_key() -> str | None:
    """API key of clients; None if it is not set, or empty."""
    return os.environ.get("OPENAI_API_KEY") or None


def cache_folder() -> Path:
    """Folder of files that can be made or fetched again; it need not exist."""
    own = os.environ.get("PENSTOCK_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def hub_is_offline() -> bool:
    return any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def variables_of_vllm() -> list[str]:
    """Names of vLLM's variables that are set; none is read."""
    return sorted(name for name in os.environ if name.startswith("VLLM_"))


def with_changes(changes: Mapping[str, str]) -> dict[str, str]:
    """Environment of this process with changes, for a child process."""
    return {**os.environ, **changes}


def launcher_place() -> LauncherPlace:
    """Rank and rendezvous of this process, from torchrun's variables. Raises ConfigError."""
    return place_from_launcher(os.environ)


def variables_for_another_machine() -> dict[str, str]:
    """Variables that a rank on another machine inherits from this process."""
    return for_another_machine(os.environ)


def prepare_rank(variables: Mapping[str, str]) -> None:
    """Set these variables, and those of every rank; to be called before torch is imported."""
    wanted = {**variables, **SET_BEFORE_TORCH}
    for name in wanted:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in wanted.items() if value is not None})


def limit_spinning() -> None:
    """Let idle threads of torch's OpenMP runtime sleep after some 30 microseconds, unless the environment says else.

    By default they spin for a millisecond, on a busy machine instead of the threads that they wait for. To be called
    before torch is imported; child processes inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def gloo_interface() -> str | None:
    """Network interface for Gloo; None if unset."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def ray_address() -> str | None:
    """Address of the Ray cluster; None if unset."""
    return os.environ.get("RAY_ADDRESS")


def reported_variables() -> dict[str, str]:
    """Variables of a bug report that are set."""
    return {name: os.environ[name] for name in _REPORTED if name in os.environ}

"""Environment variables of ranks, as dictionaries; `system/env.py` reads and sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError

# Variables that torch and NCCL must find before torch is imported; None unsets one.
SET_BEFORE_TORCH: dict[str, str | None] = {
    # Ray sets the first. Torch's watchdog threads would end the process after a failure, and break CUDA graph capture;
    # the step timeout finds failures as well.
    "NCCL_ASYNC_ERROR_HANDLING": None,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The host would wait for every collective.
    "NCCL_BLOCKING_WAIT": None,
    "TORCH_NCCL_BLOCKING_WAIT": None,
    # record_stream() cannot be captured in CUDA graphs.
    "TORCH_NCCL_AVOID_RECORD_STREAMS": None,
}

_COPIED_PREFIXES = ("PENSTOCK_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_")
_COPIED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")
# Copied by prefix otherwise, but valid on one machine only.
_NODE_LOCAL = (
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_TOPO_FILE",
    "GLOO_SOCKET_IFNAME",
)


def for_another_machine(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that a rank on another machine inherits: how to compute, not where."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _NODE_LOCAL and (name in _COPIED or name.startswith(_COPIED_PREFIXES))
    }


@dataclass(frozen=True, slots=True)
class LauncherPlace:
    """Rank and rendezvous of a process that `torchrun` started. host, port: address of the rendezvous store.

    has_store: whether torchrun serves the store itself. attempt: restarts of the group so far.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    has_store: bool = False
    attempt: int = 0


def place_from_launcher(variables: Mapping[str, str]) -> LauncherPlace:
    """Read torchrun's variables. Raises ConfigError for missing and invalid ones."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        raise ConfigError(
            f"distributed_executor_backend='external_launcher' needs the environment variables {', '.join(needed)}, of "
            f"which {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Start the program by "
            "torchrun, such as: torchrun --nproc-per-node 2 program.py"
        )

    def number(name: str, default: str = "") -> int:
        value = variables.get(name, default)
        if not value.isdecimal():
            raise ConfigError(f"The environment variable {name}={value!r} is not valid. Allowed: a number from 0 on.")
        return int(value)

    world_size = number("WORLD_SIZE")
    place = LauncherPlace(
        rank=number("RANK"),
        world_size=world_size,
        local_rank=number("LOCAL_RANK"),
        local_world_size=number("LOCAL_WORLD_SIZE", str(world_size)),
        host=variables["MASTER_ADDR"],
        port=number("MASTER_PORT"),
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=number("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    for name, value, limit in (
        ("RANK", place.rank, world_size),
        ("LOCAL_RANK", place.local_rank, place.local_world_size),
    ):
        if value >= limit:
            raise ConfigError(f"The environment variable {name}={value} is not valid. Allowed: less than {limit}.")
    return place

"""Environment variables of processes that are ranks: what they must have or must not have, and take from elsewhere.

Everything here is about dictionaries; `config/env.py` reads and sets the variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigError

# What torch and NCCL must find before torch is imported; None is nothing at all.
SET_BEFORE_TORCH: dict[str, str | None] = {
    # Ray sets the first. Threads of torch's then end the process after a failure, and break the recording of graphs;
    # whoever waits for a step finds out as well.
    "NCCL_ASYNC_ERROR_HANDLING": None,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The host would wait for every exchange.
    "NCCL_BLOCKING_WAIT": None,
    "TORCH_NCCL_BLOCKING_WAIT": None,
    # Tensors of recorded graphs would be noted down for other streams, which cannot be recorded.
    "TORCH_NCCL_AVOID_RECORD_STREAMS": None,
}

_COPIED_PREFIXES = ("PENSTOCK_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_")
_COPIED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")
# Of these, what is true of one machine only.
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
    """What a rank on another machine takes over from the process that starts it: how to compute, not where."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _NODE_LOCAL and (name in _COPIED or name.startswith(_COPIED_PREFIXES))
    }


@dataclass(frozen=True, slots=True)
class LauncherPlace:
    """What `torchrun` tells each process. host, port: of the store by which they find each other.

    has_store: whether torchrun keeps that store itself. attempt: how often it has started them all again.
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
    """Raises ConfigError, with the variables that are missing, or are no numbers that fit."""
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

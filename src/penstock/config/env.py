"""The one place that reads environment variables.

| variable | meaning |
| --- | --- |
| PENSTOCK_LOG_LEVEL | level of Penstock's log: debug, info (default), warning, error |
| PENSTOCK_PLUGINS | comma-separated names of the entry points to load as plugins; unset loads all, empty none |
| PENSTOCK_CPU_KERNELS | kernels on the CPU: auto (default), torch, or an instruction set: avx512, avx2, generic |
| HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE | 1 forbids the network: models come from the local cache only |
"""

from __future__ import annotations

import os


def log_level() -> str:
    return os.environ.get("PENSTOCK_LOG_LEVEL", "info").upper()


def cpu_kernels() -> str:
    return os.environ.get("PENSTOCK_CPU_KERNELS", "auto").lower()


def allowed_plugins() -> list[str] | None:
    """Names of the plugins to load; None means all."""
    value = os.environ.get("PENSTOCK_PLUGINS")
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


def hub_is_offline() -> bool:
    return any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )

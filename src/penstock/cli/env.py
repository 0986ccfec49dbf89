"""`penstock env`: versions, machine and limits for a bug report. Works where torch is missing or broken."""

from __future__ import annotations

import json as json_module
import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from penstock.cli.failures import readable_errors
from penstock.cli.output import standard_output, write
from penstock.system.env import reported_variables
from penstock.version import __version__

# Facts by section and name.
Sections: TypeAlias = dict[str, dict[str, str]]
_PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "msgspec",
    "psutil",
    "typer",
    "rich",
)
# CPU features that choose the kernels.
_CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
)


def env(
    json: Annotated[bool, typer.Option("--json", help="Write JSON instead of text")] = False,
    capabilities: Annotated[
        bool, typer.Option("--capabilities", help="Show refused combinations of options instead")
    ] = False,
) -> None:
    """Show versions, machine and limits, to paste into a report.

    It names no files, users or hosts, and of the environment only variables that cannot be secrets.
    """
    with readable_errors():
        text = _capabilities(as_json=json) if capabilities else _report(as_json=json)
        write(standard_output(as_json=json), f"{text}\n")


def _report(*, as_json: bool) -> str:
    sections = collect()
    return json_module.dumps(sections, indent=2) if as_json else as_text(sections)


def _capabilities(*, as_json: bool) -> str:
    from penstock.cli.capabilities import as_text, rows

    return json_module.dumps(rows(), indent=2) if as_json else as_text()


def collect() -> Sections:
    """Collect all facts. A section that fails holds the error instead."""
    return {
        "Penstock": _guarded(_penstock),
        "Machine": _guarded(_machine),
        "Kernels": _guarded(_kernels),
        "torch": _guarded(_torch),
        "GPUs": _guarded(_gpus),
        "Packages": _guarded(_packages),
        "Extras": _guarded(_extras),
        "Environment": _guarded(reported_variables) or {"(nothing set)": ""},
    }


def as_text(sections: Sections) -> str:
    """Format the report as text."""
    width = max(len(name) for facts in sections.values() for name in facts) + 2
    lines = []
    for title, facts in sections.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<{width}}{value}".rstrip() for name, value in facts.items()]
    return "\n".join(lines)


def _guarded(facts: Callable[[], dict[str, str]]) -> dict[str, str]:
    try:
        return facts()
    except Exception as error:  # the report must work with a broken installation
        return {"unknown": _one_line(error)}


def _penstock() -> dict[str, str]:
    bits = sys.maxsize.bit_length() + 1
    return {
        "version": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()}, {bits} bits)",
        "virtual environment": "yes" if sys.prefix != sys.base_prefix else "no",
    }


def _machine() -> dict[str, str]:
    import os

    import psutil

    from penstock.device.limits import cpu_quota, memory_limit, memory_nodes, usable_cores, usable_cpus
    from penstock.device.threads import plan_threads
    from penstock.observability.units import format_bytes

    limit = memory_limit()
    total, free, host = map(format_bytes, (limit.total_bytes, limit.free_bytes, psutil.virtual_memory().total))
    model, flags = _cpu()
    cpus = usable_cpus()
    threads = plan_threads(None, cpus=cpus, quota=cpu_quota())
    return {
        "system": f"{platform.system()} {platform.release()}",
        "distribution": _distribution(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "CPU": f"{model} ({platform.machine()})",
        "CPU features": ", ".join(flags) or "unknown",
        "cores": f"{usable_cores()} that this process may use, {os.cpu_count()} logical CPUs in the machine",
        "NUMA nodes": f"{len(memory_nodes(cpus)) or 1} that these are on",
        "threads": f"{threads.num_threads} by default ({threads.reason})",
        "memory": f"{total} that this process may use, {free} free, {host} in the machine",
        "shared memory": format_bytes(psutil.disk_usage("/dev/shm").total) if Path("/dev/shm").is_dir() else "none",
    }


def _kernels() -> dict[str, str]:
    from penstock.kernels.native import describe_bfloat16_products, describe_kernels, why_no_tiles
    from penstock.kernels.native.quantized import native_quantized_products

    quantized = native_quantized_products()
    kernels = {
        "in use": describe_kernels(),
        "bfloat16 arithmetic": f"products and attention {describe_bfloat16_products()}",
        "quantized products": "torch's" if quantized is None else f"by {quantized.name} kernels",
    }
    reason = why_no_tiles()
    return kernels if reason is None else kernels | {"AMX tiles": f"not used: {reason}"}


def _torch() -> dict[str, str]:
    try:
        import torch
    except Exception as error:
        return {"cannot be imported": _one_line(error)}
    backends = torch.backends
    return {
        "version": torch.__version__,
        "built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "oneDNN, MKL": f"{_yes(backends.mkldnn.is_available())}, {_yes(backends.mkl.is_available())}",
        "threads": str(torch.get_num_threads()),
    }


def _gpus() -> dict[str, str]:
    try:
        import torch
    except Exception:
        return {"unknown": "torch cannot be imported"}
    if not torch.cuda.is_available():
        return {"none": "that torch can use"}
    from penstock.observability.units import format_bytes

    facts = {"cuDNN": str(torch.backends.cudnn.version()), "driver": _driver()}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = f"{gpu.name}, {format_bytes(gpu.total_memory)}, capability {gpu.major}.{gpu.minor}"
    return facts


def _packages() -> dict[str, str]:
    return {name: _version(name) for name in _PACKAGES}


def _extras() -> dict[str, str]:
    """Installed packages of each extra."""
    try:
        requirements = metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return {"unknown": "Penstock runs from a source folder and was not installed"}
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"](.+?)['\"]", requirement)
        if name and extra:
            extras.setdefault(extra[1], []).append(f"{name[0]} {_version(name[0])}")
    return {extra: ", ".join(packages) for extra, packages in sorted(extras.items())}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _cpu() -> tuple[str, list[str]]:
    """CPU model, and its features that choose kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", platform.processor() or "unknown"), [flag for flag in _CPU_FLAGS if flag in flags]


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _driver() -> str:
    try:
        version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        version = None
    return version[1] if version else "unknown"


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _one_line(error: Exception) -> str:
    """First line of an error, without paths of this machine."""
    text = re.sub(r"(/[\w.+-]+)+/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"

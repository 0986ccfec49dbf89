"""`penstock env`: facts for a report of a bug, and nothing private."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import numpy
import psutil
import pytest

import penstock


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "penstock.cli", "env", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = json.loads(run("--json", OMP_NUM_THREADS="3"))
    return sections


def test_versions_are_those_that_are_used(report: dict[str, dict[str, str]]) -> None:
    import torch

    assert report["Penstock"]["version"] == penstock.__version__
    assert report["Penstock"]["Python"].startswith(platform.python_version())
    assert report["torch"]["version"] == torch.__version__
    assert report["Packages"]["numpy"] == numpy.__version__
    assert report["Environment"]["OMP_NUM_THREADS"] == "3"


def test_the_limits_are_those_that_the_engine_keeps_to(report: dict[str, dict[str, str]]) -> None:
    from penstock.device.limits import memory_limit, usable_cores
    from penstock.observability.units import format_bytes

    machine = report["Machine"]
    assert machine["cores"].startswith(f"{usable_cores()} that this process may use")
    assert machine["memory"].startswith(format_bytes(memory_limit().total_bytes))
    assert machine["memory"].endswith(f"{format_bytes(psutil.virtual_memory().total)} in the machine")


def test_the_kernels_of_each_kind_of_product_are_named(report: dict[str, dict[str, str]]) -> None:
    from penstock.kernels.native import describe_bfloat16_products, describe_kernels
    from penstock.kernels.native.quantized import native_quantized_products

    kernels, quantized = report["Kernels"], native_quantized_products()
    assert kernels["in use"] == describe_kernels()
    assert kernels["bfloat16 arithmetic"] == f"products and attention {describe_bfloat16_products()}"
    assert kernels["quantized products"] == ("torch's" if quantized is None else f"by {quantized.name} kernels")


def test_every_extra_is_listed(report: dict[str, dict[str, str]]) -> None:
    extras = report["Extras"]
    assert extras.keys() >= {"server", "distributed", "gpu"} or "unknown" in extras


def test_nothing_private_is_shown(tmp_path: Path) -> None:
    secrets = {
        "HF_TOKEN": "hf_abcdefgh",
        "PENSTOCK_API_KEY": "sk-12345",
        "OPENAI_API_KEY": "sk-67890",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    }
    text = run(HOME=str(tmp_path / "somebody"), USER="somebody", **secrets)
    for private in (*secrets.values(), "somebody", socket.gethostname(), str(Path(penstock.__file__).parent)):
        assert private not in text


def test_it_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('/home/somebody/lib/libtorch_cpu.so: undefined symbol')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    sections = json.loads(run("--json", PYTHONPATH=path))
    assert sections["torch"] == {"cannot be imported": "OSError: libtorch_cpu.so: undefined symbol"}
    assert sections["GPUs"] == {"unknown": "torch cannot be imported"}
    assert "cores" in sections["Machine"]
    assert sections["Packages"]["numpy"] == numpy.__version__


def test_the_text_fits_a_screen_and_says_the_same(report: dict[str, dict[str, str]]) -> None:
    text = run(OMP_NUM_THREADS="3")
    assert len(text.splitlines()) < 56
    for title, facts in report.items():
        assert f"{title}:" in text
        for name, value in facts.items():
            if name != "memory":
                assert f"{name} " in text
                assert value in text


def test_capabilities_are_shown_with_reasons() -> None:
    text = run("--capabilities")
    assert "TP + Transformers models: Its layers are those of Transformers" in text
    rows = json.loads(run("--capabilities", "--json"))
    (row,) = (row for row in rows if row["combination"] == "TP")
    assert (row["device"], row["instead"]) == ("cuda", "Use device='cpu', or tensor_parallel_size=1.")

"""Ray is imported when it is asked for, and only then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError, UnsupportedFeature
from penstock.executor import create_executor
from support.checkpoints import tiny_checkpoint


def test_a_missing_package_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig.create(str(tmp_path), device="cpu", distributed_executor_backend="ray")
    with pytest.raises(UnsupportedFeature, match=r"needs the package ray. Install it: pip install 'penstock\[distr"):
        create_executor(config)


def test_without_a_cluster_it_is_said_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")

    def init(address: str) -> None:
        raise ConnectionError(f"Could not find any running Ray instance at {address}.")

    monkeypatch.setattr(ray, "init", init)
    tiny_checkpoint(tmp_path)
    config = EngineConfig.create(str(tmp_path), device="cpu", distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match="found no Ray cluster from here. Start one: `ray start --head`"):
        create_executor(config)


def test_nothing_else_imports_it() -> None:
    code = "import sys, penstock.executor.select, penstock.executor.ray, penstock.llm; print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"

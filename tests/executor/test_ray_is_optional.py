"""Ray is imported when it is asked for, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError, UnsupportedFeature
from penstock.executor import create_executor
from support.checkpoints import tiny_checkpoint
from support.engines import SMALL
from support.fake_engine import byte_level_tokenizer, write_tokenizer


def test_a_missing_package_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig.create(str(tmp_path), device="cpu", distributed_executor_backend="ray")
    with pytest.raises(UnsupportedFeature, match=r"needs the package ray. Install it: pip install 'penstock\[distr"):
        create_executor(config)


def test_a_cluster_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    tiny_checkpoint(tmp_path)
    config = EngineConfig.create(str(tmp_path), device="cpu", distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match="found no Ray cluster at RAY_ADDRESS='127.0.0.1:1'. Start it there"):
        create_executor(config)


@pytest.mark.parametrize("options", [{}, {"enable_multiprocessing": True}])
def test_without_a_cluster_one_starts_on_this_machine(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    write_tokenizer(tmp_path, byte_level_tokenizer())
    tiny_checkpoint(tmp_path, vocab_size=400)
    program = f"""
from penstock import LLM, SamplingParams

if __name__ == "__main__":
    options = {dict(SMALL, max_model_len=64, distributed_executor_backend="ray", **options)!r}
    with LLM({str(tmp_path)!r}, **options) as llm:
        print("tokens", len(llm.generate("hello", SamplingParams(max_tokens=4))[0].outputs[0].token_ids))
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert "tokens 4" in done.stdout, done.stderr
    assert done.stderr.count("Ray: no cluster was found, so one was started on this machine") == 1


def test_nothing_else_imports_it() -> None:
    code = "import sys, penstock.executor.select, penstock.executor.ray, penstock.llm; print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"

"""Cost of imports, measured in processes of their own, since this one has imported everything."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

import penstock

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 200,
}
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "msgspec", "typer")


def run_python(code: str, **environment: str) -> str:
    command, given = [sys.executable, "-c", code], {**os.environ, **environment}
    result = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_importing_penstock_imports_nothing_heavy() -> None:
    code = f"import sys, penstock; print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(code) == "[]"


@pytest.mark.parametrize("name", ["LLM", "SamplingParams", "EngineConfig", "RequestOutput", "CompletionOutput"])
def test_no_public_name_imports_torch_or_transformers(name: str) -> None:
    code = (
        f"import sys; from penstock import {name}; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "server.processes.launcher",
        "server.processes.front_end",
        "engine.processes.broker",
        "engine.processes.child_main",
    ],
)
def test_only_the_core_of_a_server_imports_torch(module: str) -> None:
    code = f"import sys, penstock.{module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert run_python(code) == "[]"


@pytest.mark.slow
def test_an_asynchronous_engine_has_imported_transformers_by_its_first_request() -> None:
    """The import would block the event loop for seconds in the first `get_tokenizer`; it runs while the core starts."""
    code = """
import asyncio, sys
from penstock import AsyncEngine, SamplingParams, StructuredOutputsParams
async def main():
    async with AsyncEngine("demo", device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 24) as engine:
        ready = "transformers" in sys.modules
        params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
        async for output in engine.generate("ROMEO:", params):
            pass
    print(output.outputs[0].text in ("yes", "no"), ready)
asyncio.run(main())
"""
    assert run_python(code) == "True True"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.one_case_quick
def test_an_engine_starts_without_torchs_compiler(kernels: str, quantization: str | None, tmp_path: Path) -> None:
    """The compiler would import sympy: half a second, and 40 MiB."""
    LlamaConfig(**SMALL_LLAMA).save_pretrained(tmp_path)
    options = {"device": "cpu", "load_format": "dummy", "quantization": quantization, "num_threads": 1}
    code = (
        "import sys; from penstock.config import EngineConfig; "
        "from penstock.engine.core.engine_core import EngineCore; "
        f"core = EngineCore(EngineConfig.create({str(tmp_path)!r}, kv_cache_memory_bytes=1 << 24, **{options})); "
        "print([name for name in ('sympy', 'torch._inductor') if name in sys.modules])"
    )
    assert run_python(code, PENSTOCK_CPU_KERNELS=kernels) == "[]"


def test_every_public_name_exists_and_is_listed() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="AsyncLM"):
        _ = penstock.AsyncLM  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert importlib.metadata.version("penstock") == penstock.__version__

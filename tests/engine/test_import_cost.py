"""What importing costs. Measured in processes of their own, since this one has imported everything."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import penstock

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "msgspec", "typer")


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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


def test_every_public_name_exists_and_is_listed() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="AsyncLM"):
        _ = penstock.AsyncLM  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert importlib.metadata.version("penstock") == penstock.__version__

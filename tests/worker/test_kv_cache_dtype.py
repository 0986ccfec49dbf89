"""dtype of the KV cache that "auto" chooses, as planned and as in a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.planning.plan import plan_engine
from penstock.kernels.native import NATIVE
from support.checkpoints import tiny_config
from support.engines import SMALL, make_core

pytestmark = [pytest.mark.processor, pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")]
NARROW = {"dtype": "bfloat16", "cpu_arithmetic": "bfloat16"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_config("llama", architectures=["LlamaForCausalLM"], head_dim=32).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (NARROW, "bfloat16"),
        ({**NARROW, "kv_cache_dtype": "float32"}, "float32"),
        ({**NARROW, "kv_cache_dtype": "int8"}, "int8"),
        ({**NARROW, "attention_backend": "cpu_native"}, "bfloat16"),
        ({**NARROW, "attention_backend": "reference"}, "float32"),
        ({"dtype": "bfloat16", "cpu_arithmetic": "float32"}, "float32"),
        ({"dtype": "float32"}, "float32"),
    ],
)
def test_the_cache_follows_the_arithmetic_of_attention(folder: Path, options: dict[str, Any], expected: str) -> None:
    planned = plan_engine(str(folder), load_format="dummy", **options, **SMALL)
    assert planned.kv_cache_dtype == expected
    assert f" layers in {expected}" in planned.table()


@pytest.mark.parametrize(
    ("options", "is_narrow"), [({}, True), ({"quantization": "int8"}, False), ({"quantization": "int4"}, False)]
)
def test_a_running_engine_has_the_planned_cache_and_says_so(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    is_narrow: bool,
) -> None:
    monkeypatch.setattr("penstock.kernels.native.NativeKernels.prefers_bfloat16", True)
    options = {"load_format": "dummy", "dtype": "bfloat16", **options}
    planned = plan_engine(str(folder), **options, **SMALL)
    with caplog.at_level("INFO", logger="penstock"):
        core = make_core(folder, **options)
    spec = core.kv_cache_config.groups[0].spec
    core.close()
    assert spec == planned.layers[0]
    assert planned.kv_cache_dtype == ("bfloat16" if is_narrow else "float32")
    assert ("attention in it too, over the bfloat16 KV cache" in caplog.text) == is_narrow


def test_heads_without_pairs_have_a_float32_cache(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"], head_dim=8).save_pretrained(tmp_path)
    assert plan_engine(str(tmp_path), load_format="dummy", **NARROW, **SMALL).kv_cache_dtype == "float32"

"""A plan with quantised weights equals the memory use of the running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from penstock.engine.planning.plan import plan_engine
from penstock.kernels.native import NATIVE
from support.engines import make_core
from support.quantized_checkpoints import (
    W8A8,
    awq_layer,
    edit_tensors,
    gptq_layer,
    int8_layer,
    packed_layer,
    w4a16,
    write_quantized,
)

# Layers are padded to whole panels, which matters at the sizes that tests can afford.
PADDING = 0.06
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FORMS: dict[str, Any] = {
    "w4a16": (packed_layer(128, symmetric=True), w4a16(128)),
    "w8a8": (int8_layer, W8A8),
    "gptq": (gptq_layer(128, desc_act=False), GPTQ),
    "gptq-desc-act": (gptq_layer(128, desc_act=True), {**GPTQ, "desc_act": True}),
    "awq": (awq_layer(128), AWQ),
}
needs_kernels = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")


def compare(folder: Path | str, **options: Any) -> None:
    plan = plan_engine(str(folder), **options)
    core = make_core(folder, **options)
    held = core.memory_plan["weights"]
    core.close()
    assert plan.memory["weights"] == pytest.approx(held, rel=PADDING)


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.one_case_quick
def test_weights_that_are_rounded_at_loading(quantization: str) -> None:
    compare("demo", quantization=quantization)
    rounded, whole = plan_engine("demo", quantization=quantization), plan_engine("demo", dtype="float32")
    assert rounded.memory["weights"] < 0.3 * whole.memory["weights"]
    assert rounded.num_parameters == whole.num_parameters


@needs_kernels
def test_random_weights() -> None:
    compare("demo", quantization="int8", load_format="dummy")


def _halve(tensors: dict[str, Any]) -> None:
    tensors.update({name: tensor.astype(np.float16) for name, tensor in tensors.items() if tensor.dtype == np.float32})


@needs_kernels
def test_checkpoints_of_integers(tmp_path: Path) -> None:
    size = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    packed = write_quantized(tmp_path / "w4a16", packed_layer(128, symmetric=True), w4a16(128), **size)
    compare(packed.config.folder)
    whole = write_quantized(tmp_path / "w8a8", int8_layer, W8A8, **size)
    compare(whole.config.folder)
    halved = write_quantized(tmp_path / "halved", packed_layer(128, symmetric=True), w4a16(128), **size)
    edit_tensors(halved.config.folder, _halve)
    compare(halved.config.folder)
    plans = [plan_engine(str(written.config.folder)) for written in (packed, whole)]
    assert plans[0].num_parameters == plans[1].num_parameters == plan_engine(str(whole.float_folder)).num_parameters


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_headers_alone_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """For a model on the hub, the plan uses headers only, also for the tensors that describe the quantisation."""
    size = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    folder = write_quantized(tmp_path, *FORMS[form], **size).config.folder
    compare(folder)
    expected = plan_engine(str(folder))
    tensors = [
        (name, tensor.to("meta")) for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    ]
    for path in folder.glob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr("penstock.engine.planning.plan.resolve_metadata_folder", lambda *_: (folder, True))
    monkeypatch.setattr("penstock.engine.planning.plan.fetch_headers", lambda *_: tensors)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    plan = plan_engine("someone/model")
    assert (plan.memory["weights"], plan.num_parameters) == (expected.memory["weights"], expected.num_parameters)

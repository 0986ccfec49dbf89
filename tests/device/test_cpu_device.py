"""The CPU as a device."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from penstock.config import DeviceConfig
from penstock.device import CellWrites, Device, create_device
from penstock.device.limits import MemoryLimit
from penstock.errors import ConfigError, UnsupportedFeature

DEVICE = create_device(DeviceConfig(device="cpu"))


@pytest.mark.parametrize(("requested", "checkpoint"), [("auto", "bfloat16"), ("bfloat16", "float32")])
def test_half_precision_weights_are_kept_and_computed_in_float32_and_it_says_why(
    requested: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.device.dtypes.has_native_kernels", lambda: True)
    choice = DEVICE.choose_dtype(requested, checkpoint)
    assert (choice.torch_dtype, choice.weights_torch_dtype) == (torch.float32, torch.bfloat16)
    assert "bfloat16" in choice.reason
    assert DEVICE.choose_dtype("float32", "bfloat16").weights == "float32"


def test_without_the_kernels_that_widen_weights_are_in_what_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.device.dtypes.has_native_kernels", lambda: False)
    choice = DEVICE.choose_dtype("auto", "bfloat16")
    assert (choice.name, choice.weights) == ("float32", "float32")
    assert "bfloat16" in choice.reason
    asked = DEVICE.choose_dtype("bfloat16", "float32")
    assert (asked.name, asked.weights) == ("bfloat16", "bfloat16")


def test_a_checkpoint_of_a_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="float8_e4m3fn"):
        DEVICE.choose_dtype("auto", "float8_e4m3fn")


def test_measured_peak_counts_what_was_freed_again() -> None:
    kept = torch.ones(1000)
    with DEVICE.measure_peak() as peak:
        view = torch.ones(30, 1000)[10:]
        del view
        torch.ones(20, 1000).add_(kept)
        kept = torch.ones(1000)
        torch.ones(28, 1000).view(-1)
    assert peak.bytes_above_start == 4 * 30 * 1000


def test_a_download_copies_nothing() -> None:
    tensor = torch.zeros(3)
    copy = DEVICE.download([tensor])
    assert copy.is_done()
    assert copy.tensors[0] is tensor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scattered_values_arrive_as_on_any_device(dtype: torch.dtype) -> None:
    index = np.array([7, 0, 3])
    values = np.array([-5, 9, 2], dtype=torch.empty(0, dtype=dtype).numpy().dtype)
    here, anywhere = torch.arange(9, dtype=dtype), torch.arange(9, dtype=dtype)
    for cells, scatter in ((here, DEVICE.scatter), (anywhere, partial(Device.scatter, DEVICE))):
        others = torch.zeros(2, dtype=torch.int64)
        # An odd number of values, so that the next array's place is not next to it.
        scatter([CellWrites(cells, index, values), CellWrites(others, np.array([1]), np.array([1 << 40]))])
        assert cells.tolist() == [9, 1, 2, 2, 4, 5, 6, -5, 8]
        assert others.tolist() == [0, 1 << 40]


def test_a_missing_gpu_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UnsupportedFeature, match="device='cuda'"):
        create_device(DeviceConfig(device="cuda"))
    assert create_device(DeviceConfig(device="auto")).kind == "cpu"


def test_counting_tensors_does_not_import_the_compiler() -> None:
    """It would make every start seconds longer."""
    code = (
        "import sys, torch\nfrom penstock.device.tensor_memory import TensorMemory\n"
        "with TensorMemory() as memory:\n    torch.ones(8) + 1\n"
        "sys.exit(repr((memory.peak_bytes, 'torch._dynamo' in sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == "(64, False)"


def test_ranks_of_a_machine_have_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.device.cpu.memory_limit", lambda: MemoryLimit(total_bytes=900, free_bytes=600))
    device = create_device(DeviceConfig(device="cpu", num_threads=3), 1, 3)
    snapshot = device.memory_snapshot()
    device.close()
    assert (snapshot.total, snapshot.free) == (300, 200)


def test_the_precision_of_a_gpus_products_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32_matmul_precision='high' is for a GPU"):
        create_device(DeviceConfig(device="cpu", float32_matmul_precision="high"))

"""The CUDA device's copies: values of all layouts and dtypes, and no waiting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.config import DeviceConfig
from penstock.device import CellWrites, Device, create_device
from penstock.device.base import wait_until

pytestmark = pytest.mark.gpu
NUMBERS = np.arange(24, dtype=np.int64).reshape(4, 6)
ARRAYS = [
    pytest.param(NUMBERS, id="contiguous"),
    pytest.param(NUMBERS[:, ::2], id="strided"),
    pytest.param(NUMBERS[::-1], id="reversed"),
    pytest.param(NUMBERS.T, id="transposed"),
    pytest.param(NUMBERS[:0], id="empty"),
    pytest.param(np.array(7, dtype=np.int32), id="zero-dim"),
    pytest.param(NUMBERS % 3 == 0, id="bool"),
]


@pytest.fixture
def device() -> Iterator[Device]:
    """A device, in a test that must not wait for it."""
    device = create_device(DeviceConfig(device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    yield device
    torch.cuda.set_sync_debug_mode("default")
    device.close()


@pytest.mark.parametrize("array", ARRAYS)
def test_arrays_arrive_on_the_device_and_come_back(device: Device, array: np.ndarray) -> None:
    uploaded = device.upload(array)
    written = torch.empty_like(uploaded)
    device.write(written, array)
    copy = device.download([uploaded, written])
    wait_until(copy.is_done, 60.0, lambda: "The test waited for a copy.")
    for tensor in copy.tensors:
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


def test_scattered_cells_arrive_after_earlier_work(device: Device) -> None:
    numbers = torch.zeros(9, dtype=torch.int32, device=device.torch_device)
    others = torch.zeros(3, dtype=torch.int64, device=device.torch_device)
    numbers.fill_(1)
    values = np.array([-5, 9, 2], dtype=np.int32)
    device.scatter(
        [CellWrites(numbers, np.array([7, 0, 3]), values), CellWrites(others, np.array([1]), np.array([1 << 40]))]
    )
    values.fill(0)
    copy = device.download([numbers, others])
    wait_until(copy.is_done, 60.0, lambda: "The test waited for a copy.")
    assert copy.tensors[0].tolist() == [9, 1, 1, 2, 1, 1, 1, -5, 1]
    assert copy.tensors[1].tolist() == [0, 1 << 40, 0]


def test_a_download_is_of_the_moment_of_its_call(device: Device) -> None:
    """Later work on the tensor's memory, once it is freed, does not change the copy."""
    tensor = torch.full((1 << 24,), 3, dtype=torch.int32, device=device.torch_device)
    copy = device.download([tensor])
    del tensor
    torch.full((1 << 24,), 5, dtype=torch.int32, device=device.torch_device)
    wait_until(copy.is_done, 60.0, lambda: "The test waited for a copy.")
    assert bool((copy.tensors[0] == 3).all())


def test_the_precision_of_products_holds_until_the_device_is_closed() -> None:
    before = torch.get_float32_matmul_precision()
    device = create_device(DeviceConfig(device="cuda", float32_matmul_precision="high"))
    assert torch.get_float32_matmul_precision() == "high"
    device.close()
    assert torch.get_float32_matmul_precision() == before

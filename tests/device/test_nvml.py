"""The GPU's memory without torch: what the driver says, or None where it says nothing."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from penstock.device.limits import MemoryLimit
from penstock.device.nvml import gpu_memory

GIB = 1 << 30


class FakeLibrary:
    """NVML with one GPU, or with a call that fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.is_open = False

    def _result(self, name: str) -> int:
        return 999 if name == self.failing else 0

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's name
        self.is_open = not self._result("init")
        return self._result("init")

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802
        assert index == 0
        return self._result("handle")

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.free, memory._obj.used = 80 * GIB, 60 * GIB, 20 * GIB
        return self._result("memory")

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.is_open = False
        return 0


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.device.nvml.version", lambda name: "2.13.0+cu130")


def _install(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary) -> None:
    monkeypatch.setattr("penstock.device.nvml.ctypes.CDLL", lambda name: library)


@pytest.mark.usefixtures("cuda_build")
def test_total_and_free_are_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    _install(monkeypatch, library)
    assert gpu_memory() == MemoryLimit(total_bytes=80 * GIB, free_bytes=60 * GIB)
    assert not library.is_open


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize("failing", ["init", "handle", "memory"])
def test_a_driver_without_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    library = FakeLibrary(failing)
    _install(monkeypatch, library)
    assert gpu_memory() is None
    assert not library.is_open


@pytest.mark.usefixtures("cuda_build")
def test_a_machine_without_the_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> FakeLibrary:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("penstock.device.nvml.ctypes.CDLL", refuse)
    assert gpu_memory() is None


def test_a_torch_without_cuda_cannot_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.device.nvml.version", lambda name: "2.13.0+cpu")
    _install(monkeypatch, FakeLibrary())
    assert gpu_memory() is None


@pytest.mark.gpu
def test_it_is_what_torch_sees() -> None:
    import torch

    memory = gpu_memory()
    assert memory is not None
    # The driver keeps some for itself, which torch does not count.
    assert memory.total_bytes == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.03)

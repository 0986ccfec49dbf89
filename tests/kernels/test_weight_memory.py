"""Memory of packed weights."""

from __future__ import annotations

import gc
import mmap

import psutil
import pytest
import torch

from penstock.device import huge_pages
from penstock.device.huge_pages import weight_memory

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 2 * MEBIBYTE - 1, 2 * MEBIBYTE, 5 * MEBIBYTE + 3])
def test_there_are_as_many_bytes_as_asked_for_and_they_begin_on_a_cache_line(num_bytes: int) -> None:
    memory_B = weight_memory(num_bytes)
    assert (memory_B.shape, memory_B.dtype) == ((num_bytes,), torch.uint8)
    assert memory_B.data_ptr() % 64 == 0
    assert torch.equal(memory_B.fill_(7), torch.full((num_bytes,), 7, dtype=torch.uint8))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are asked for on Linux alone")
@pytest.mark.parametrize("num_bytes", [2 * MEBIBYTE, 7 * MEBIBYTE + 64])
def test_large_weights_begin_on_a_large_page(num_bytes: int) -> None:
    assert weight_memory(num_bytes).data_ptr() % (2 * MEBIBYTE) == 0


def test_weights_take_as_much_memory_as_they_have_bytes() -> None:
    num_bytes, count = 2 * MEBIBYTE + 5000, 16
    gc.collect()
    before = psutil.Process().memory_info().rss
    weights = [weight_memory(num_bytes).fill_(1) for _ in range(count)]
    taken = psutil.Process().memory_info().rss - before
    assert taken < 1.2 * sum(weight.nbytes for weight in weights)


def test_memory_stays_as_long_as_any_view_of_it() -> None:
    view = weight_memory(3 * MEBIBYTE).fill_(5).view(torch.float32)[-4:]
    gc.collect()
    others = [weight_memory(3 * MEBIBYTE).fill_(6) for _ in range(4)]
    assert torch.equal(view.view(torch.uint8), torch.full((16,), 5, dtype=torch.uint8))
    assert all(bool((other == 6).all()) for other in others)


def test_a_system_that_refuses_large_pages_gets_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("madvise is not there")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Refusing)
    memory_B = weight_memory(4 * MEBIBYTE)
    assert memory_B.fill_(1).sum(dtype=torch.int64) == 4 * MEBIBYTE

"""Streams in which one row reads its weights: they differ between processors, and change no bits."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.native import NativeKernels
from support.instruction_sets import needs_native_kernels

pytestmark = needs_native_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (33, 65), (640, 1000)])
def test_every_number_of_streams_and_prefetch_distance_gives_the_same_bits(
    kernels: NativeKernels, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    torch.manual_seed(inputs)
    x_TI, weight_OI = torch.randn(1, inputs), torch.randn(outputs, inputs).to(dtype)
    packed_OI = kernels.pack_weight(weight_OI)
    set_choices = kernels.module.set_stream_choices
    before = set_choices(4, 0)
    try:
        expected_TO = kernels.linear(x_TI, packed_OI, outputs, None)
        expected_ids = kernels.greedy(x_TI, packed_OI, outputs)[0]
        for choices in ((1, 0), (2, 0), (2, 4096), (3, 64), (4, 4096)):
            set_choices(*choices)
            assert torch.equal(kernels.linear(x_TI, packed_OI, outputs, None), expected_TO)
            assert torch.equal(kernels.greedy(x_TI, packed_OI, outputs)[0], expected_ids)
    finally:
        set_choices(*before)

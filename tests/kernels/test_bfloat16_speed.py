"""Default arithmetic of bfloat16 weights: that of the processor's faster products."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from penstock.kernels.native import NativeKernels
from penstock.kernels.native.bfloat16_layout import Bfloat16Layout
from penstock.kernels.native.bfloat16_speed import pairs_pay


class Processor:
    """The library, with products that take as long as is said. pairs, floats: seconds."""

    def __init__(self, module: Any, pairs: float, floats: float) -> None:
        self._module, self._pairs, self._floats = module, pairs, floats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def operation(self, *arguments: Any) -> int:
        time.sleep(self._pairs if arguments[-1] == Bfloat16Layout.PAIRS.value[0] else self._floats)
        return 0


@pytest.mark.parametrize(("pairs", "floats", "expected"), [(0.0005, 0.005, True), (0.005, 0.0005, False)])
def test_the_faster_products_are_preferred(kernels: NativeKernels, pairs: float, floats: float, expected: bool) -> None:
    assert pairs_pay(Processor(kernels.module, pairs, floats), kernels.instruction_set.index) is expected


@pytest.mark.parametrize(
    ("instructions", "given", "expected"),
    [
        ({"has_tiles": True, "has_bfloat16_products": True}, None, True),
        ({"has_tiles": False, "has_bfloat16_products": False}, None, False),
        ({"has_tiles": False, "has_bfloat16_products": False}, True, True),
        ({"has_tiles": True, "has_bfloat16_products": True}, False, False),
    ],
)
def test_tiles_and_what_is_asked_for_need_no_measurement(
    kernels: NativeKernels, instructions: dict[str, bool], given: bool | None, expected: bool
) -> None:
    instruction_set = replace(kernels.instruction_set, **instructions)
    found = NativeKernels(kernels.module, instruction_set, prefers_bfloat16=given)
    assert found.prefers_bfloat16 is expected

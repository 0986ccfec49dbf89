"""Kernels with which the tests run as on another processor."""

from __future__ import annotations

import pytest
from tools.other_processor import other_kernels

from penstock.kernels.native import InstructionSet, available_instruction_sets, load_native_kernels
from support.instruction_sets import needs_native_kernels


def instruction_sets(*names: str) -> list[InstructionSet]:
    return [InstructionSet(number, name, 8, False, name == "amx") for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "prefers_bfloat16", "other"),
    [
        (("avx512", "avx2", "generic"), True, "avx2+float32"),
        (("amx", "avx512", "avx2", "generic"), True, "avx512+float32"),
        (("avx512", "avx2", "generic"), False, "avx2+bfloat16"),
        (("avx2", "generic"), False, "generic+bfloat16"),
        (("generic",), False, "generic+bfloat16"),
    ],
)
def test_another_instruction_set_and_the_other_arithmetic(
    names: tuple[str, ...], prefers_bfloat16: bool, other: str
) -> None:
    assert other_kernels(instruction_sets(*names), prefers_bfloat16=prefers_bfloat16) == other


@needs_native_kernels
def test_this_processor_can_be_another_one() -> None:
    available, best = available_instruction_sets(), load_native_kernels("auto")
    assert best is not None
    kernels = load_native_kernels(other_kernels(available, prefers_bfloat16=best.prefers_bfloat16))
    assert kernels is not None
    assert kernels.prefers_bfloat16 != best.prefers_bfloat16
    assert kernels.instruction_set.name == available[min(1, len(available) - 1)].name

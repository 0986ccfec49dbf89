"""Kernels with which the tests run as on another processor."""

from __future__ import annotations

import pytest
from tools.other_processor import other_kernels

from penstock.kernels.native import InstructionSet, available_instruction_sets, load_native_kernels
from support.instruction_sets import needs_native_kernels


def instruction_sets(*names: str) -> list[InstructionSet]:
    """Of a processor whose best one has instructions for bfloat16 arithmetic if its name says so."""
    return [
        InstructionSet(number, name.removesuffix(" bf16"), 8, name.endswith("bf16"), name.startswith("amx"))
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "other"),
    [
        (("avx512 bf16", "avx2", "generic"), "avx2+float32"),
        (("amx bf16", "avx512 bf16", "avx2", "generic"), "avx512+float32"),
        (("avx512", "avx2", "generic"), "avx2+bfloat16"),
        (("avx2", "generic"), "generic+bfloat16"),
        (("generic",), "generic+bfloat16"),
    ],
)
def test_another_instruction_set_and_the_other_arithmetic(names: tuple[str, ...], other: str) -> None:
    assert other_kernels(instruction_sets(*names)) == other


@needs_native_kernels
def test_this_processor_can_be_another_one() -> None:
    available = available_instruction_sets()
    kernels = load_native_kernels(other_kernels(available))
    assert kernels is not None
    assert kernels.has_bfloat16_products != available[0].has_bfloat16_products
    assert kernels.instruction_set.name == available[min(1, len(available) - 1)].name

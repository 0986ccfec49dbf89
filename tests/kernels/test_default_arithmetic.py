"""Default arithmetic of bfloat16 weights, by the kind of processor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.kernels.native import NativeKernels


@pytest.mark.parametrize(
    ("has_tiles", "has_pairs", "has_fast_pairs", "given", "expected"),
    [
        (True, True, False, None, True),
        (False, True, True, None, True),
        (False, True, False, None, False),
        (False, False, True, None, False),
        (False, False, False, True, True),
        (True, True, True, False, False),
    ],
)
def test_bfloat16_arithmetic_is_the_default_where_its_instructions_are_the_fast_ones(
    kernels: NativeKernels, has_tiles: bool, has_pairs: bool, has_fast_pairs: bool, given: bool | None, expected: bool
) -> None:
    processor = replace(
        kernels.instruction_set,
        has_tiles=has_tiles,
        has_bfloat16_products=has_pairs,
        has_fast_pairs=has_fast_pairs,
    )
    assert NativeKernels(kernels.module, processor, prefers_bfloat16=given).prefers_bfloat16 is expected

"""Print kernels of another kind of processor than this one, as a value of PENSTOCK_CPU_KERNELS.

    PENSTOCK_CPU_KERNELS=$(python tools/other_processor.py) python -m pytest

They have another instruction set, where this processor has a second one, and the other default of `cpu_arithmetic`, and
so another dtype of the KV cache: float32 on a processor that prefers bfloat16 arithmetic, and else bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels.native import InstructionSet, available_instruction_sets, load_native_kernels


def other_kernels(available: Sequence[InstructionSet], *, prefers_bfloat16: bool) -> str:
    """available: best first, at least one. prefers_bfloat16: whether the best one does."""
    other = available[1] if len(available) > 1 else available[0]
    return f"{other.name}+{'float32' if prefers_bfloat16 else 'bfloat16'}"


if __name__ == "__main__":
    best = load_native_kernels("auto")
    assert best is not None, "the C++ kernels are not built"
    print(other_kernels(available_instruction_sets(), prefers_bfloat16=best.prefers_bfloat16))

"""Print kernels of another kind of processor than this one, as a value of PENSTOCK_CPU_KERNELS.

    PENSTOCK_CPU_KERNELS=$(python tools/other_processor.py) python -m pytest

They have another instruction set, where this processor has a second one, and the other default of `cpu_arithmetic`, and
so another dtype of the KV cache: float32 on a processor with instructions for bfloat16 arithmetic, and else bfloat16 by
emulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernels.native import InstructionSet, available_instruction_sets


def other_kernels(available: Sequence[InstructionSet]) -> str:
    """available: best first, at least one."""
    best = available[0]
    other = available[1] if len(available) > 1 else best
    return f"{other.name}+{'float32' if best.has_bfloat16_products else 'bfloat16'}"


if __name__ == "__main__":
    print(other_kernels(available_instruction_sets()))

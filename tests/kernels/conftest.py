"""Fixtures of the C++ kernels: `kernels` of each instruction set, and each `layout` of bfloat16 products."""

from support.instruction_sets import kernels as kernels
from support.instruction_sets import layout as layout

"""C++ kernels: build detection, choice of the instruction set, and calls with tensors.

They take float32 tensors in CPU memory. The build is optional: without a compiler `NATIVE` is None and the plain torch
kernels run instead. Suffixes are those of the modules that call these functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch  # before the kernels: they use the OpenMP runtime that it loads
import torch.nn.functional as F
from torch import Tensor

from penstock.device.huge_pages import weight_memory
from penstock.device.stand_in import is_on_cpu
from penstock.errors import ConfigError
from penstock.kernels.bound_step import LayoutTensors, SlotTensors, StepTensors
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.bfloat16_layout import Bfloat16Layout as Bfloat16Layout
from penstock.kernels.native.experts import NativeExperts
from penstock.kernels.native.latent_shape import LatentShape
from penstock.kernels.native.library import Library
from penstock.kernels.native.operation_types import operation_types
from penstock.kernels.native.operations import NativeOperation, row_width
from penstock.kernels.native.recurrence import NativeRecurrence
from penstock.kernels.native.step_state import NativeStep
from penstock.kernels.native.tracing import Trace
from penstock.system.env import cpu_kernels

try:
    _module: Any = import_module("penstock.kernels.native._kernels")
    _why_not = ""
except ImportError as error:
    _module = None
    _why_not = (
        "slower: the C++ kernels were not built with this installation; take a wheel that has them, or install a C++ "
        f"compiler and run pip install --force-reinstall --no-deps --no-cache-dir penstock again: {error}"
    )

# Type numbers of the library.
WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 5}
_CLAMPED_SWIGLU = 4
# Arithmetics that `PENSTOCK_CPU_KERNELS` makes the default: whether it is that of bfloat16.
_ARITHMETICS = {"bfloat16": True, "float32": False}

# Output and input features of a panel of tiles.
_TILE_PANEL, _TILE_INPUTS = 32, 32
_LAYOUTS = {layout.value[1]: layout for layout in Bfloat16Layout}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """index: the library's number. panel_width: output features that it packs and computes together.

    has_bfloat16_products: whether the CPU has instructions for bfloat16 arithmetic; without them the same bits take
    longer. has_tiles: whether it has those of AMX. has_fast_pairs: whether AVX512-BF16 is faster than float32, as on
    AMD's processors and not on Intel's.
    """

    index: int
    name: str
    panel_width: int
    has_bfloat16_products: bool
    has_tiles: bool
    has_fast_pairs: bool = False


class NativeKernels:
    """The library's functions for one instruction set. Results have the same bits for any number of threads.

    Operations of `operation_types` also take traced tensors, and record themselves then.
    prefers_bfloat16: as the property; None for the processor's own.
    """

    def __init__(self, module: Any, instruction_set: InstructionSet, *, prefers_bfloat16: bool | None = None) -> None:
        self.instruction_set = instruction_set
        self._prefers_bfloat16 = prefers_bfloat16
        self._index = instruction_set.index
        self.module = module
        self.types = operation_types(module)
        self.attention = NativeAttention(module, instruction_set.index, self.types)
        self.experts = NativeExperts(module, self.operation("experts"))
        # None where the library was built before these kernels were added.
        has_recurrence = NativeRecurrence.exists(self.types)
        self.recurrence = NativeRecurrence(module, self.types, self._index) if has_recurrence else None
        self._linear = self.operation("linear")
        self._greedy = self.operation("greedy")
        self._rows = self.operation("rows")
        self._lookup = self.operation("lookup")
        self._rms_norm = self.operation("rms_norm")
        self._gate_and_mul = self.operation("gate_and_mul")
        self._sum = self.operation("sum")
        self._layer_norm = self.operation("layer_norm")
        self._activate = self.operation("activate")
        self._concatenate = self.operation("concatenate")
        self._argmax = self.operation("argmax")
        self.adapters = self.operation("adapters")
        self._head_products = self.operation("head_products")
        self._absorb = self.operation("absorb")

    @property
    def prefers_bfloat16(self) -> bool:
        """Whether bfloat16 arithmetic is the default: by tiles, or on a processor whose pairs are faster than floats.

        It depends on the kind of processor alone, since it changes results.
        """
        if self._prefers_bfloat16 is not None:
            return self._prefers_bfloat16
        found = self.instruction_set
        return found.has_tiles or (found.has_bfloat16_products and found.has_fast_pairs)

    @property
    def bfloat16_layout(self) -> Bfloat16Layout:
        """The layout of weights for the fastest products in bfloat16 arithmetic."""
        return Bfloat16Layout.TILES if self.instruction_set.has_tiles else Bfloat16Layout.PAIRS

    def operation(self, name: str) -> NativeOperation:
        """The operation of this name (`csrc/operations.cpp`)."""
        return NativeOperation(_module.operation, self._index, self.types[name])

    def trace(self) -> Trace:
        """Start a trace of a forward pass with these kernels."""
        return Trace(self.types, self._index)

    def runs(self, tensor: Tensor) -> bool:
        """Whether the kernels support this tensor's device and dtype."""
        return tensor.dtype is torch.float32 and is_on_cpu(tensor)

    def pack_weight(
        self, weight_OI: Tensor, *, bfloat16: Bfloat16Layout | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Pack a weight into panels: [O rounded up to whole panels, I], opaque. float32, bfloat16 or float16.

        bfloat16: layout for products in bfloat16 arithmetic, of a bfloat16 weight with an even I: [.., I / 2]. out:
        memory of a packed weight of the same form.
        """
        weight_OI = weight_OI.contiguous()
        num_outputs, num_inputs = weight_OI.shape
        width, columns, dtype = self.instruction_set.panel_width, num_inputs, weight_OI.dtype
        if bfloat16 is not None:
            _, dtype = bfloat16.value
            columns //= 2
        stride = columns
        if bfloat16 is Bfloat16Layout.TILES:
            width, stride = _TILE_PANEL, -(-num_inputs // _TILE_INPUTS) * _TILE_INPUTS // 2
        num_rows = -(-num_outputs // width) * width
        if out is not None and out.dtype is dtype and (*out.shape, out.stride(0)) == (num_rows, columns, stride):
            packed = out
        else:
            memory = weight_memory(num_rows * stride * dtype.itemsize)
            packed = memory.view(dtype).view(num_rows, stride)[:, :columns]
        arguments = num_outputs, *_inputs_and_type(packed), torch.get_num_threads()
        self.module.pack_weight(self._index, weight_OI, packed, *arguments)
        return packed

    def panel_width(self, bfloat16: Bfloat16Layout | None) -> int | None:
        """Outputs of a panel, if panels of a weight can be packed one by one; tiles cannot."""
        return None if bfloat16 is Bfloat16Layout.TILES else self.instruction_set.panel_width

    def pack_head_weights(self, weight_HOI: Tensor) -> Tensor:
        """Pack a weight for each head, for `head_products` and `absorb`: [H * O rounded up to whole panels, I]."""
        width = self.instruction_set.panel_width
        padded = F.pad(weight_HOI, (0, 0, 0, -weight_HOI.shape[1] % width))
        return self.pack_weight(padded.flatten(0, 1))

    def unpack_head_weights(self, packed: Tensor, num_heads: int, num_outputs: int) -> Tensor:
        """Restore the weights of `pack_head_weights` bit for bit: [H, O, I]."""
        weight_XI = self.unpack_weight(packed, packed.shape[0])
        return weight_XI.view(num_heads, -1, weight_XI.shape[1])[:, :num_outputs]

    def unpack_weight(self, packed: Tensor, num_outputs: int) -> Tensor:
        """Restore the packed weight bit for bit: [O, I]."""
        num_inputs, weight_type = _inputs_and_type(packed)
        dtype = torch.bfloat16 if packed.dtype in _LAYOUTS else packed.dtype
        weight_OI = packed.new_empty(num_outputs, num_inputs, dtype=dtype)
        arguments = num_outputs, num_inputs, weight_type, torch.get_num_threads()
        self.module.unpack_weight(self._index, packed, weight_OI, *arguments)
        return weight_OI

    def linear(self, x_TI: Tensor, packed: Tensor, num_outputs: int, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias with a packed weight: float32 [T, O], or with the leading dimensions of x."""
        if x_TI.dim() != 2:
            flat_TI = x_TI.reshape(-1, x_TI.shape[-1])
            return self.linear(flat_TI, packed, num_outputs, bias_O).view(*x_TI.shape[:-1], num_outputs)
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        num_inputs, weight_type = _inputs_and_type(packed)
        return self._linear.rows(x_TI, num_outputs, packed, bias_O, num_inputs, num_outputs, weight_type)

    def greedy(
        self, x_LI: Tensor, packed: Tensor, num_outputs: int, *, with_largest: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`argmax` of `linear` without a bias, bit for bit, in less memory."""
        if x_LI.stride(1) != 1:
            x_LI = x_LI.contiguous()
        num_inputs, weight_type = _inputs_and_type(packed)
        arguments = packed, num_inputs, num_outputs, weight_type
        return self._greedy.choose(x_LI, *arguments, with_largest=with_largest)

    def rows(self, ids_T: Tensor, packed: Tensor) -> Tensor:
        """Look up rows of a packed weight, such as embeddings: float32 [T, I].

        Raises IndexError for a row out of range.
        """
        width, weight_type = _inputs_and_type(packed)
        return self._rows.look_up(as_ids(ids_T), width, packed, packed.shape[0], width, weight_type)

    def lookup(self, ids: Tensor, table_VD: Tensor) -> Tensor:
        """Look up rows of a contiguous table in float32, bfloat16 or float16: float32, [..., D] for ids of any shape.

        Raises IndexError for a row out of range.
        """
        num_rows, width = table_VD.shape
        rows_TD = self._lookup.look_up(as_ids(ids), width, table_VD, num_rows, width, WEIGHT_TYPES[table_VD.dtype])
        return rows_TD if ids.dim() == 1 else rows_TD.view(*ids.shape, width)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """`kernels.norm.rms_norm` for x [T, D] with weight [D], or x [T, H, D] with weight [D] or [H, D].

        With a residual, x becomes x + residual first, in place.
        """
        size = weight.shape[-1]
        if x.dim() == 2:
            return self._rms_norm.rows(x, size, weight, 1, 0, size, eps, second=residual)
        num_heads = x.shape[1]
        weight_stride = size if weight.dim() == 2 else 0
        width = num_heads * size
        return self._rms_norm.rows(x, width, weight, num_heads, weight_stride, size, eps, second=residual).view(x.shape)

    def grouped_rms_norm(self, x_TX: Tensor, weight_GD: Tensor, eps: float) -> Tensor:
        """`kernels.norm.grouped_rms_norm` for contiguous rows."""
        num_groups, size = weight_GD.shape
        return self._rms_norm.rows(x_TX, num_groups * size, weight_GD, num_groups, size, size, eps, second=None)

    def gate_and_mul(self, activation: str, gate_up_TI: Tensor) -> Tensor:
        """activation(gate) * up for a contiguous [T, 2 * I]. activation: a name in `ACTIVATIONS`."""
        size = row_width(gate_up_TI) // 2
        return self._gate_and_mul.rows(gate_up_TI, size, ACTIVATIONS[activation], size, 0.0, 0.0)

    def clamped_swiglu(self, gate_up_TI: Tensor, alpha: float, limit: float) -> Tensor:
        """`kernels.activation.ClampedSwiglu` for a contiguous [T, 2 * I]."""
        size = row_width(gate_up_TI) // 2
        return self._gate_and_mul.rows(gate_up_TI, size, _CLAMPED_SWIGLU, size, alpha, limit)

    def layer_norm(
        self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """`kernels.norm.layer_norm`. With a residual, x becomes x + residual first, in place."""
        size = weight_D.shape[0]
        return self._layer_norm.rows(x_TD, size, weight_D, bias_D, size, eps, second=residual)

    def activate(self, activation: str, x_TI: Tensor) -> Tensor:
        """activation(x) for a contiguous [T, I]. activation: a name in `ACTIVATIONS`."""
        size = row_width(x_TI)
        return self._activate.rows(x_TI, size, ACTIVATIONS[activation], size)

    def sum_rows(self, x_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
        """x + residual, or a copy of x without one: [T, D]. Both are contiguous."""
        return self._sum.rows(x_TD, row_width(x_TD), second=residual_TD)

    def concatenate_rows(self, first_TD: Tensor, second_TD: Tensor) -> Tensor:
        """Concatenate along the last dimension: [T, D of the first + D of the second]. Both are contiguous."""
        return self._concatenate.rows(first_TD, row_width(first_TD) + row_width(second_TD), second=second_TD)

    def columns(self, x_TX: Tensor, offset: int, width: int) -> Tensor:
        """Copy columns from `offset` on: [T, width]."""
        return self._columns.rows(x_TX, width, offset, width)

    @cached_property
    def _columns(self) -> NativeOperation:
        return self.operation("columns")

    def head_products(
        self, x_TX: Tensor, packed: Tensor, num_heads: int, num_outputs: int, bias_X: Tensor | None = None
    ) -> Tensor:
        """Product of each head, [T, H * I], with its weight, and its bias, [H * O]: [T, H * O]."""
        num_inputs, weight_type = _inputs_and_type(packed)
        arguments = packed, bias_X, weight_type, num_heads, num_inputs, num_outputs
        return self._head_products.rows(x_TX, num_heads * num_outputs, *arguments)

    def absorb(
        self, query_TX: Tensor, rows_TY: Tensor, packed: Tensor, norm_weight_C: Tensor, eps: float, shape: LatentShape
    ) -> Tensor:
        """`kernels.latent.absorb` with the packed [C, N] of each head; both have contiguous rows."""
        _, weight_type = _inputs_and_type(packed)
        offset = row_width(rows_TY) - shape.key_size
        sizes = shape.num_heads, shape.nope_size, shape.latent_size, shape.rotary_size
        arguments = packed, weight_type, *sizes, int(shape.is_interleaved), offset, norm_weight_C, eps
        return self._absorb.rows(query_TX, (shape.num_heads + 1) * shape.key_size, *arguments, second=rows_TY)

    def argmax(self, x_RV: Tensor, *, with_largest: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Argmax of each row, the first of ties, int64 [R], and whether the maximum is not finite, bool [R].

        NaN counts as largest. x is contiguous, with one column at least.
        with_largest: the maxima too, float32 [R]; else None.
        """
        return self._argmax.choose(x_RV, with_largest=with_largest)

    def apply_rotary(self, heads_THD: Tensor, table_PR: Tensor, positions_T: Tensor) -> None:
        """`kernels.rotary.apply_rotary` with the rows of the table at these positions (int64, contiguous)."""
        num_tokens, num_heads, _ = heads_THD.shape
        self.module.rotary(
            self._index,
            heads_THD,
            heads_THD.stride(0),
            heads_THD.stride(1),
            positions_T,
            table_PR,
            num_tokens,
            num_heads,
            table_PR.shape[1] // 2,
            torch.get_num_threads(),
        )

    def draw(self, x_RV: Tensor, seed_S: Tensor, slots_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """`kernels.sampling.draw_tokens` with `kernels.random`: int64 [R], and failures, bool [R].

        x is contiguous, with one column at least; the others are int64.
        """
        num_rows, size = x_RV.shape
        index_R, failed_R = _room_for_choices(num_rows)
        self.module.draw(
            self._index,
            x_RV,
            seed_S,
            slots_R,
            positions_R,
            index_R,
            failed_R,
            num_rows,
            size,
            torch.get_num_threads(),
        )
        return index_R, failed_R

    def allow_by_bits(self, logits_RV: Tensor, rows_N: Tensor | None, words_NW: Tensor) -> Tensor:
        """`kernels.logits_shaping.allow_by_bits`, in place; all are contiguous."""
        num_rows, num_words = words_NW.shape
        self.module.allow_by_bits(
            self._index,
            logits_RV,
            rows_N,
            words_NW,
            num_rows,
            logits_RV.shape[1],
            num_words,
            torch.get_num_threads(),
        )
        return logits_RV


def _inputs_and_type(packed: Tensor) -> tuple[int, int]:
    """Input features of a packed weight, and its type number."""
    if layout := _LAYOUTS.get(packed.dtype):
        return 2 * packed.shape[1], layout.value[0]
    return packed.shape[1], WEIGHT_TYPES[packed.dtype]


def as_ids(ids_T: Tensor) -> Tensor:
    """Convert to contiguous int32 ids for lookups."""
    # The check is several times as fast as operators that do nothing.
    return ids_T if ids_T.dtype is torch.int32 and ids_T.is_contiguous() else ids_T.to(torch.int32).contiguous()


def _room_for_choices(num_rows: int) -> tuple[Tensor, Tensor]:
    """Allocate a token per row, and a failure flag per row."""
    return torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)


def available_instruction_sets() -> list[InstructionSet]:
    """Built instruction sets that this CPU supports, best first; empty without a build."""
    return (
        []
        if _module is None
        else [
            InstructionSet(index, name, width, bool(has_pairs), bool(has_tiles), _module.has_fast_pairs())
            for index, name, width, has_pairs, has_tiles in _module.instruction_sets()
        ]
    )


def load_native_kernels(requested: str) -> NativeKernels | None:
    """Load the kernels of an instruction set by name; "auto" takes the best, "torch" none.

    With "+bfloat16" or "+float32" behind it, that is the default arithmetic of bfloat16 weights; bfloat16 is emulated
    where there are no instructions for it.
    Raises ConfigError for one that is unknown, was not built, or is not supported by this CPU.
    """
    available = available_instruction_sets()
    if requested == "torch" or (requested == "auto" and not available):
        return None
    name, _, arithmetic = requested.partition("+")
    for found in available:
        if name in ("auto", found.name) and requested in (name, *(f"{name}+{one}" for one in _ARITHMETICS)):
            return NativeKernels(Library(_module), found, prefers_bfloat16=_ARITHMETICS.get(arithmetic))
    allowed = ", ".join(["auto", "torch", *(found.name for found in available)])
    raise ConfigError(
        f"PENSTOCK_CPU_KERNELS={requested!r} is not valid here. Allowed: {allowed}; all but torch also with "
        f"+bfloat16 or +float32 behind it. {_why_not}".strip()
    )


def describe_kernels() -> str:
    """Describe the CPU kernels in use for the log, with the reason if they are torch's."""
    if NATIVE is not None:
        return f"{NATIVE.instruction_set.name} kernels"
    return f"torch's kernels only ({_why_not or 'as asked for'})"


def describe_bfloat16_products() -> str:
    """Describe the instructions of bfloat16 arithmetic for the log."""
    if NATIVE is None:
        return "not available without the C++ kernels"
    found = NATIVE.instruction_set
    if not found.has_bfloat16_products:
        return "emulated, since this CPU has no instructions for them"
    by = "by AMX tiles" if found.has_tiles else "by AVX512-BF16"
    return by if NATIVE.prefers_bfloat16 else f"{by}, which is no faster here than float32"


def library_path() -> Path | None:
    """File of the C++ kernels; None without a build."""
    return None if _module is None else Path(_module.__file__)


def why_no_tiles() -> str | None:
    """Reason why the tiles of a CPU with AMX are not used; None if they are, or the CPU has none."""
    reason: str | None = None if _module is None else _module.why_no_tiles()
    return reason


def collectives_library() -> Library | None:
    """The library with the collectives between processes of this machine; None without a build."""
    return None if _module is None else Library(_module)


def bind_native_step(state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> NativeStep | None:
    """Bind a step's bookkeeping in C++; None without a build, or if turned off."""
    return None if _module is None or NATIVE is None else NativeStep(_module, state, layout, buffers)


NATIVE = load_native_kernels(cpu_kernels())

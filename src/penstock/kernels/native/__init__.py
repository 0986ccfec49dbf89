"""The kernels written in C++: what was built, what this processor can run, and how to call it with tensors.

They work on float32 tensors in the CPU's memory. The build is optional: where no compiler was there, `NATIVE` is None
and the plain torch kernels run instead. Suffixes are those of the modules that call these functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch  # before the kernels: they run on the threads of the OpenMP runtime that it loads
from torch import Tensor

from penstock.config.env import cpu_kernels
from penstock.device.stand_in import is_on_cpu
from penstock.errors import ConfigError
from penstock.kernels.bound_step import LayoutTensors, SlotTensors, StepTensors
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.library import Library
from penstock.kernels.native.memory import weight_memory
from penstock.kernels.native.step_state import NativeStep
from penstock.kernels.native.tracing import Kernel, Trace, TracedTensor, Untraceable, floats

try:
    _module: Any = import_module("penstock.kernels.native._kernels")
    _why_not = ""
except ImportError as error:
    _module = None
    _why_not = (
        "slower: the C++ kernels were not built with this installation; take a wheel that has them, or install a C++ "
        f"compiler and run pip install --force-reinstall --no-deps --no-cache-dir penstock again: {error}"
    )

# How the library knows them.
WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """index: how the library knows it. panel_width: output features that it packs and computes together."""

    index: int
    name: str
    panel_width: int


class NativeKernels:
    """The library's functions for one instruction set. Every result has the same bits for any number of threads.

    Those that a program may consist of take a trace's stand-ins too, and then note what they would do.
    """

    def __init__(self, module: Any, instruction_set: InstructionSet) -> None:
        self.instruction_set = instruction_set
        self._index = instruction_set.index
        self.module = module
        self.attention = NativeAttention(module, instruction_set.index)

    def runs(self, tensor: Tensor) -> bool:
        """Whether the kernels take this tensor, as far as its place and dtype go."""
        return tensor.dtype is torch.float32 and is_on_cpu(tensor)

    def pack_weight(self, weight_OI: Tensor) -> Tensor:
        """The weight in panels: [O rounded up to whole panels, I], an opaque layout. float32, bfloat16 or float16."""
        weight_OI = weight_OI.contiguous()
        num_outputs, num_inputs = weight_OI.shape
        width = self.instruction_set.panel_width
        shape = (-(-num_outputs // width) * width, num_inputs)
        packed = weight_memory(shape[0] * shape[1] * weight_OI.element_size()).view(weight_OI.dtype).view(shape)
        self.module.pack_weight(
            self._index,
            weight_OI.data_ptr(),
            num_outputs,
            num_inputs,
            WEIGHT_TYPES[weight_OI.dtype],
            packed.data_ptr(),
        )
        return packed

    def unpack_weight(self, packed: Tensor, num_outputs: int) -> Tensor:
        """The weight that was packed, bit for bit: [O, I]."""
        weight_OI = packed.new_empty(num_outputs, packed.shape[1])
        self.module.unpack_weight(
            self._index,
            packed.data_ptr(),
            num_outputs,
            packed.shape[1],
            WEIGHT_TYPES[packed.dtype],
            weight_OI.data_ptr(),
        )
        return weight_OI

    def linear(self, x_TI: Tensor, packed: Tensor, num_outputs: int, bias_O: Tensor | None) -> Tensor:
        """x @ weight^T + bias with a weight of `pack_weight`: float32 [T, O], or as many dimensions as x has."""
        if isinstance(x_TI, TracedTensor):
            arguments = packed.shape[1], num_outputs, WEIGHT_TYPES[packed.dtype]
            return self._trace(x_TI).add(Kernel.LINEAR, x_TI, num_outputs, packed, floats(bias_O), *arguments)
        if x_TI.dim() != 2:
            flat_TI = x_TI.reshape(-1, x_TI.shape[-1])
            return self.linear(flat_TI, packed, num_outputs, bias_O).view(*x_TI.shape[:-1], num_outputs)
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        num_rows, num_inputs = x_TI.shape
        out_TO = torch.empty(num_rows, num_outputs)
        self.module.linear(
            self._index,
            x_TI.data_ptr(),
            x_TI.stride(0),
            packed.data_ptr(),
            0 if bias_O is None else bias_O.data_ptr(),
            out_TO.data_ptr(),
            num_outputs,
            num_rows,
            num_inputs,
            num_outputs,
            WEIGHT_TYPES[packed.dtype],
            torch.get_num_threads(),
        )
        return out_TO

    def greedy(
        self, x_LI: Tensor, packed: Tensor, num_outputs: int, largest_L: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`argmax` of `linear` without a bias, bit for bit, in less memory: int64 [L], and bool [L] where it failed."""
        if isinstance(x_LI, TracedTensor):
            arguments = packed.shape[1], num_outputs, WEIGHT_TYPES[packed.dtype]
            return self._trace(x_LI).choose(Kernel.GREEDY, x_LI, packed, None, *arguments, largest=largest_L)
        if x_LI.stride(1) != 1:
            x_LI = x_LI.contiguous()
        num_rows, num_inputs = x_LI.shape
        index_L, failed_L = _room_for_choices(num_rows)
        self.module.greedy(
            self._index,
            x_LI.data_ptr(),
            x_LI.stride(0),
            packed.data_ptr(),
            index_L.data_ptr(),
            failed_L.data_ptr(),
            0 if largest_L is None else largest_L.data_ptr(),
            num_rows,
            num_inputs,
            num_outputs,
            WEIGHT_TYPES[packed.dtype],
            torch.get_num_threads(),
        )
        return index_L, failed_L

    def rows(self, ids_T: Tensor, packed: Tensor) -> Tensor:
        """Rows of the weight that was packed, such as tokens' embeddings: float32 [T, I]. Ids are within the weight."""
        if isinstance(ids_T, TracedTensor):
            arguments = *packed.shape, WEIGHT_TYPES[packed.dtype]
            return self._trace(ids_T).look_up(Kernel.ROWS, ids_T, packed.shape[1], packed, *arguments)
        ids_T = _as_ids(ids_T)
        out_TI = torch.empty(ids_T.shape[0], packed.shape[1])
        self.module.rows(
            self._index,
            packed.data_ptr(),
            ids_T.data_ptr(),
            out_TI.data_ptr(),
            out_TI.shape[0],
            out_TI.shape[1],
            WEIGHT_TYPES[packed.dtype],
            torch.get_num_threads(),
        )
        return out_TI

    def lookup(self, ids: Tensor, table_VD: Tensor) -> Tensor:
        """Rows of a contiguous table in float32, bfloat16 or float16: float32, [..., D] for ids of any shape.

        Raises IndexError for a row that is not there.
        """
        num_rows, width = table_VD.shape
        if isinstance(ids, TracedTensor):
            arguments = num_rows, width, WEIGHT_TYPES[table_VD.dtype]
            return self._trace(ids).look_up(Kernel.LOOKUP, ids, width, table_VD, *arguments)
        ids = _as_ids(ids)
        out = torch.empty(*ids.shape, width)
        self.module.lookup(
            self._index,
            table_VD.data_ptr(),
            ids.data_ptr(),
            out.data_ptr(),
            ids.numel(),
            num_rows,
            width,
            WEIGHT_TYPES[table_VD.dtype],
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """`kernels.norm.rms_norm` for x [T, D] with weight [D], or x [T, H, D] with weight [D] or [H, D].

        With a residual, x becomes x + residual first, in place.
        """
        if isinstance(x, TracedTensor):
            size = weight.shape[0]
            return self._trace(x).add(Kernel.NORM, x, size, floats(weight), size, eps, residual=residual)
        num_heads = x.shape[1] if x.dim() == 3 else 1
        size = x.shape[-1]
        out = torch.empty(x.shape)
        self.module.rms_norm(
            self._index,
            x.data_ptr(),
            x.stride(0),
            0 if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            size if weight.dim() == 2 else 0,
            out.data_ptr(),
            x.shape[0],
            num_heads,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def gate_and_mul(self, activation: str, gate_up_TI: Tensor) -> Tensor:
        """activation(gate) * up for a contiguous [T, 2 * I]. activation: a name in `ACTIVATIONS`."""
        if isinstance(gate_up_TI, TracedTensor):
            size = gate_up_TI.stride(0) // 2
            return self._trace(gate_up_TI).add(Kernel.GATE, gate_up_TI, size, ACTIVATIONS[activation], size)
        num_rows, width = gate_up_TI.shape
        out_TI = torch.empty(num_rows, width // 2)
        self.module.gate_and_mul(
            self._index,
            ACTIVATIONS[activation],
            gate_up_TI.data_ptr(),
            out_TI.data_ptr(),
            num_rows,
            width // 2,
            torch.get_num_threads(),
        )
        return out_TI

    def apply_rotary(self, heads_THD: Tensor, table_PR: Tensor, positions_T: Tensor) -> None:
        """`kernels.rotary.apply_rotary` with the rows of the table at these positions (int64, contiguous)."""
        num_tokens, num_heads, _ = heads_THD.shape
        self.module.rotary(
            self._index,
            heads_THD.data_ptr(),
            heads_THD.stride(0),
            heads_THD.stride(1),
            positions_T.data_ptr(),
            table_PR.data_ptr(),
            num_tokens,
            num_heads,
            table_PR.shape[1] // 2,
            torch.get_num_threads(),
        )

    def argmax(self, x_RV: Tensor, largest_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first of each row's largest values, int64 [R], and where that is not finite, bool [R].

        What is not a number counts as largest. x is contiguous, with one column at least.
        largest_R: float32, where those values are written, if it is given; contiguous.
        """
        if isinstance(x_RV, TracedTensor):
            return self._trace(x_RV).choose(Kernel.ARGMAX, x_RV, largest=largest_R)
        num_rows, size = x_RV.shape
        index_R, failed_R = _room_for_choices(num_rows)
        self.module.argmax(
            self._index,
            x_RV.data_ptr(),
            index_R.data_ptr(),
            failed_R.data_ptr(),
            0 if largest_R is None else largest_R.data_ptr(),
            num_rows,
            size,
            torch.get_num_threads(),
        )
        return index_R, failed_R

    def draw(self, x_RV: Tensor, seed_S: Tensor, slots_R: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """`kernels.sampling.draw_tokens` with the numbers of `kernels.random`: int64 [R], and what failed, bool [R].

        x is contiguous, with one column at least; the others are int64.
        """
        num_rows, size = x_RV.shape
        index_R, failed_R = _room_for_choices(num_rows)
        self.module.draw(
            self._index,
            x_RV.data_ptr(),
            seed_S.data_ptr(),
            slots_R.data_ptr(),
            positions_R.data_ptr(),
            index_R.data_ptr(),
            failed_R.data_ptr(),
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
            logits_RV.data_ptr(),
            0 if rows_N is None else rows_N.data_ptr(),
            words_NW.data_ptr(),
            num_rows,
            logits_RV.shape[1],
            num_words,
            torch.get_num_threads(),
        )
        return logits_RV

    def _trace(self, tensor: TracedTensor) -> Trace:
        if tensor.origin.instruction_set != self._index:
            raise Untraceable("a weight is packed for other kernels")
        return tensor.origin


def _as_ids(ids: Tensor) -> Tensor:
    # Asking first is several times as fast as an operator that finds nothing to do.
    return ids if ids.dtype is torch.int32 and ids.is_contiguous() else ids.to(torch.int32).contiguous()


def _room_for_choices(num_rows: int) -> tuple[Tensor, Tensor]:
    """A token per row, and whether the row failed."""
    return torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)


def available_instruction_sets() -> list[InstructionSet]:
    """What was built and this processor can run, best first; empty when nothing was built."""
    return [] if _module is None else [InstructionSet(*entry) for entry in _module.instruction_sets()]


def load_native_kernels(requested: str) -> NativeKernels | None:
    """The kernels for an instruction set by name; "auto" takes the best, "torch" none.

    Raises ConfigError for one that is unknown, was not built, or cannot run here.
    """
    available = available_instruction_sets()
    if requested == "torch" or (requested == "auto" and not available):
        return None
    for instruction_set in available:
        if requested in ("auto", instruction_set.name):
            return NativeKernels(Library(_module), instruction_set)
    allowed = ", ".join(["auto", "torch", *(found.name for found in available)])
    raise ConfigError(f"PENSTOCK_CPU_KERNELS={requested!r} is not valid here. Allowed: {allowed}. {_why_not}".strip())


def describe_kernels() -> str:
    """One phrase for the log: which kernels run on the CPU, and why none of ours if so."""
    if NATIVE is not None:
        return f"{NATIVE.instruction_set.name} kernels"
    return f"torch's kernels only ({_why_not or 'as asked for'})"


def meetings_library() -> Library | None:
    """The functions that processes of this machine meet by; None where nothing was built."""
    return None if _module is None else Library(_module)


def bind_native_step(state: SlotTensors, layout: LayoutTensors, buffers: StepTensors) -> NativeStep | None:
    """A step's bookkeeping in C++; None where it was not built or is not wanted."""
    return None if _module is None or NATIVE is None else NativeStep(_module, state, layout, buffers)


NATIVE = load_native_kernels(cpu_kernels())

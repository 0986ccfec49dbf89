"""Kernels recorded once and run one after the other in one C++ call, as a step's forward pass.

Suffixes: T tokens of the step, D hidden size, O output features, I input features, H query heads, K KV heads, R rotary
dimensions, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config.program import PROGRAM_ROWS
from penstock.kernels.native import ACTIVATIONS, WEIGHT_TYPES, NativeKernels
from penstock.kernels.native.attention import CACHE_TYPES, HeadShape, StepRequests
from penstock.kernels.native.quantized import NativeQuantizedProducts
from penstock.kernels.quantized import QuantizedShape

# Kinds of buffers, as the library knows them.
_WHOLE, _PART = 0, 1


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of `width` floats."""

    number: int
    width: int


@dataclass(frozen=True, slots=True)
class LastRows:
    """The last token of every request. rows, positions: int64 [R], rising rows. query_start_loc: int32, 0 to R."""

    rows: Tensor
    positions: Tensor
    query_start_loc: Tensor

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """As the library takes it."""
        addresses = self.rows.data_ptr(), self.positions.data_ptr(), self.query_start_loc.data_ptr()
        return *addresses, self.rows.shape[0]


# What `LastRows.arguments` are where the hidden states of all tokens are asked for.
_ALL_ROWS = (0, 0, 0, 0)


@dataclass(slots=True)
class _Stack:
    """Where buffers of a kind lie in a row of the workspace: taken up to `top` now, and to `size` at most."""

    kind: int
    top: int = 0
    size: int = 0


class NativeProgram:
    """Takes hidden states to hidden states. Holds the weights and caches that it was recorded with.

    Every kernel is the one that the same call would run by itself, so the results have the same bits.
    """

    def __init__(self, hidden_size: int, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self._module = kernels.module
        self._program = self._module.program_new(kernels.instruction_set.index, PROGRAM_ROWS)
        self._keeps_alive: list[Tensor] = []
        self._whole, self._part = _Stack(_WHOLE), _Stack(_PART)
        self._hidden_size = hidden_size
        self.input = self._buffer(_WHOLE, hidden_size, 0)
        self.output = self._buffer(_WHOLE, hidden_size, 0)

    def buffers(self, *widths: int) -> AbstractContextManager[list[Buffer]]:
        """Room for intermediate results of all rows; others may have the same room afterwards."""
        return self._room(self._whole, widths)

    def buffers_of_part(self, *widths: int) -> AbstractContextManager[list[Buffer]]:
        """Room for results that are not kept over an attention: of no more than PROGRAM_ROWS rows at once."""
        return self._room(self._part, widths)

    def rms_norm(self, x: Buffer, weight_D: Tensor, eps: float, out: Buffer, residual: Buffer | None = None) -> None:
        """`kernels.norm.rms_norm`; with a residual, x becomes x + residual first, in place."""
        self._module.program_norm(
            self._program,
            x.number,
            -1 if residual is None else residual.number,
            out.number,
            self._address(weight_D),
            weight_D.shape[0],
            eps,
        )

    def gate_and_mul(self, activation: str, gate_up: Buffer, out: Buffer) -> None:
        """activation: a name in `ACTIVATIONS`."""
        self._module.program_gate(self._program, gate_up.number, out.number, ACTIVATIONS[activation], out.width)

    def linear(self, x: Buffer, packed: Tensor, bias_O: Tensor | None, out: Buffer) -> None:
        """The product with a weight of `NativeKernels.pack_weight`."""
        self._module.program_linear(
            self._program,
            x.number,
            out.number,
            self._address(packed),
            self._address(bias_O),
            packed.shape[1],
            out.width,
            WEIGHT_TYPES[packed.dtype],
        )

    def quantized_linear(
        self,
        products: NativeQuantizedProducts,
        x: Buffer,
        packed: Tensor,
        shape: QuantizedShape,
        bias_O: Tensor | None,
        out: Buffer,
    ) -> None:
        """The product with a weight that these `products` packed."""
        self._module.program_quantized_linear(
            self._program,
            x.number,
            out.number,
            products.index,
            self._address(packed),
            self._address(bias_O),
            *shape.kernel_sizes,
        )

    def attention(
        self,
        qkv: Buffer,
        kv_cache: Tensor,
        group: int,
        shape: HeadShape,
        out: Buffer,
        *,
        norm: tuple[Tensor, float] | None,
        table_PR: Tensor,
        residual: Buffer | None = None,
    ) -> None:
        """`NativeAttention.from_projection`. group: the KV-cache group of the layer. table_PR: `rotary_table`.

        residual: beside the last attention, the other rows that a step goes on with; where only last tokens are asked
        for, it goes on with theirs.
        """
        cache = self._address(kv_cache)
        self._module.program_attention(
            self._program,
            qkv.number,
            -1 if residual is None else residual.number,
            out.number,
            group,
            cache,
            cache + kv_cache.stride(0) * kv_cache.element_size(),
            CACHE_TYPES[kv_cache.dtype],
            *shape.arguments,
            self._address(None if norm is None else norm[0]),
            0.0 if norm is None else norm[1],
            self._address(table_PR),
            table_PR.shape[1] // 2,
        )

    def bytes_spared(self, num_tokens: int) -> int:
        """By buffers that hold a part of the rows."""
        return max(0, num_tokens - PROGRAM_ROWS) * self._part.size * torch.float32.itemsize

    def __call__(
        self,
        input_TD: Tensor,
        positions_T: Tensor,
        num_tokens: int,
        groups: Sequence[StepRequests],
        last: LastRows | None = None,
    ) -> Tensor:
        """The output, float32 [T, D], or that of the rows of `last`; the input is overwritten.

        positions_T: int64, contiguous. num_tokens: those that are no padding, which come first.
        """
        num_rows = input_TD.shape[0]
        output_TD = torch.empty(num_rows, self._hidden_size)
        workspace = torch.empty(num_rows * self._whole.size + min(num_rows, PROGRAM_ROWS) * self._part.size)
        self._module.program_run(
            self._program,
            input_TD.data_ptr(),
            output_TD.data_ptr(),
            workspace.data_ptr(),
            positions_T.data_ptr(),
            num_rows,
            num_tokens,
            torch.get_num_threads(),
            *(_ALL_ROWS if last is None else last.arguments),
            *[argument for requests in groups for argument in requests.arguments],
        )
        return output_TD if last is None else output_TD[: last.rows.shape[0]]

    @contextmanager
    def _room(self, stack: _Stack, widths: Sequence[int]) -> Iterator[list[Buffer]]:
        top = stack.top
        made = []
        for width in widths:
            made.append(self._buffer(stack.kind, width, stack.top))
            stack.top += width
        stack.size = max(stack.size, stack.top)
        yield made
        stack.top = top

    def _buffer(self, kind: int, width: int, offset: int) -> Buffer:
        return Buffer(self._module.program_buffer(self._program, kind, width, offset), width)

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._keeps_alive.append(tensor)
        return tensor.data_ptr()

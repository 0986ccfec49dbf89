"""Kernels recorded once and run one after the other in one C++ call, as a step's forward pass.

Suffixes: T tokens of the step, D hidden size, O output features, I input features, H query heads, K KV heads, R rotary
dimensions, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.config.program import PROGRAM_ROWS
from penstock.kernels.native import ACTIVATIONS, WEIGHT_TYPES, NativeKernels
from penstock.kernels.native.attention import HeadShape, cache_arguments
from penstock.kernels.native.program_step import BoundChoices, StepTokens
from penstock.kernels.native.quantized import NativeQuantizedProducts
from penstock.kernels.native.stored import StoredArguments
from penstock.kernels.quantized import QuantizedShape

# Kinds of buffers, as the library knows them.
_WHOLE, _PART = 0, 1


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of `width` floats."""

    number: int
    width: int


@dataclass(slots=True)
class _Stack:
    """Where buffers of a kind lie in a row of the workspace: taken up to `top` now, and to `size` at most."""

    kind: int
    top: int = 0
    size: int = 0


class NativeProgram:
    """Takes hidden states to hidden states; or tokens to tokens, where a lookup was recorded first and a choice last.

    Holds the weights and caches that it was recorded with. Every kernel is the one that the same call would run by
    itself, so the results have the same bits.
    """

    def __init__(self, hidden_size: int, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self._module = kernels.module
        self._program = self._module.program_new(kernels.instruction_set.index, PROGRAM_ROWS)
        # Takes the address of what `_arguments` makes.
        self._run: Callable[[int], None] = partial(self._module.program_run, self._program)
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
        self._keeps_alive.append(kv_cache)
        self._module.program_attention(
            self._program,
            qkv.number,
            -1 if residual is None else residual.number,
            out.number,
            group,
            *cache_arguments(kv_cache),
            *shape.arguments,
            self._address(None if norm is None else norm[0]),
            0.0 if norm is None else norm[1],
            self._address(table_PR),
            table_PR.shape[1] // 2,
        )

    def lookup(self, table_VD: Tensor, out: Buffer) -> None:
        """`NativeKernels.lookup` of the step's tokens."""
        self._module.program_lookup(
            self._program, out.number, self._address(table_VD), *table_VD.shape, WEIGHT_TYPES[table_VD.dtype]
        )

    def rows(self, packed: Tensor, out: Buffer) -> None:
        """`NativeKernels.rows` of the step's tokens."""
        self._module.program_rows(
            self._program, out.number, self._address(packed), *packed.shape, WEIGHT_TYPES[packed.dtype]
        )

    def quantized_rows(
        self,
        products: NativeQuantizedProducts,
        packed: Tensor,
        shape: QuantizedShape,
        out: Buffer,
        rest: Tensor | None = None,
    ) -> None:
        """`NativeQuantizedProducts.rows` of the step's tokens."""
        self._module.program_quantized_rows(
            self._program,
            out.number,
            products.index,
            self._address(packed),
            self._address(rest),
            *shape.kernel_sizes,
        )

    def greedy(self, x: Buffer, packed: Tensor, num_outputs: int) -> None:
        """The step's choices are those of `NativeKernels.greedy`."""
        self._module.program_greedy(
            self._program, x.number, self._address(packed), packed.shape[1], num_outputs, WEIGHT_TYPES[packed.dtype]
        )

    def argmax(self, logits: Buffer) -> None:
        """The step's choices are those of `NativeKernels.argmax`."""
        self._module.program_argmax(self._program, logits.number, logits.width)

    def bytes_spared(self, num_tokens: int) -> int:
        """By buffers that hold a part of the rows."""
        return max(0, num_tokens - PROGRAM_ROWS) * self._part.size * torch.float32.itemsize

    def __call__(self, input_TD: Tensor, step: StepTokens) -> Tensor:
        """The output, float32 [T, D], or that of the last rows; the input is overwritten."""
        output_TD = torch.empty(input_TD.shape[0], self._hidden_size)
        workspace = self._workspace(input_TD.shape[0])
        arguments = self._arguments(step, (input_TD, output_TD, workspace))
        self._run(arguments.address)  # they stay until it is done
        return output_TD if step.last is None else output_TD[: step.last.rows.shape[0]]

    def bind(self, ids_T: Tensor, step: StepTokens) -> BoundChoices:
        """Steps from these tokens (int32, contiguous); all tensors stay where they are."""
        num_rows = ids_T.shape[0]
        hidden_2TD = torch.empty(2, num_rows, self._hidden_size)
        workspace = self._workspace(num_rows)
        index_T, failed_T = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        arguments = self._arguments(step, (*hidden_2TD, workspace), (ids_T, index_T, failed_T))
        return BoundChoices(self._run, arguments, index_T, failed_T, (ids_T, step, hidden_2TD, workspace))

    def _workspace(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows * self._whole.size + min(num_rows, PROGRAM_ROWS) * self._part.size)

    def _arguments(
        self, step: StepTokens, hidden_states: Sequence[Tensor], tokens: Sequence[Tensor] = ()
    ) -> StoredArguments:
        """hidden_states: input, output, workspace. tokens: ids, index and failed of a program that has them."""
        tokens_at = [tensor.data_ptr() for tensor in tokens] or [0, 0, 0]
        return StoredArguments(
            [*[tensor.data_ptr() for tensor in hidden_states], *tokens_at, *step.arguments(torch.get_num_threads())]
        )

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

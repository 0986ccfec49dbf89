"""LoRA adapters of layers, applied to the rows of their own requests.

Suffixes: T rows (tokens), I input features, D hidden size, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.adapters import AdapterTable
from penstock.kernels.embedding import embedding

# Names of step inputs: adapter slot of each token, for all layers and for the LM head, int32 (-1 for none); and row of
# each token in the table of the embedding's adapters, int32.
ADAPTER_SLOTS, HEAD_SLOTS, ADAPTER_TOKENS = "adapter_slots", "adapter_slots_of_head", "adapter_tokens"


class LinearAdapters:
    """Adapters of a linear layer. input_name: of the step input with the adapter slots of its rows."""

    def __init__(self, table: AdapterTable, input_name: str = ADAPTER_SLOTS) -> None:
        self.table = table
        self._input_name = input_name

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all slots."""
        return self.table.tensors

    def apply_in(self, context: ForwardContext) -> bool:
        """Whether a row may have an adapter of this layer."""
        return context.input(self._input_name) is not None

    def add_to(self, out: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        """Add the adapters' products to the layer's output, in place: [T, X], or with the leading dimensions of x."""
        slots_T = context.input(self._input_name)
        if slots_T is None:
            return out
        if x.dim() != 2:
            flat = out.view(-1, out.shape[-1])
            return self.add_to(flat, x.reshape(-1, x.shape[-1]), context).view(out.shape)
        return self.table.add_to(out, x if x.stride(-1) == 1 else x.contiguous(), slots_T)


class EmbeddingAdapters:
    """Adapters of an embedding. rows_XR: A^T of all slots, [slots * vocabulary, R]; table: the products with B."""

    def __init__(self, rows_XR: Tensor, table: AdapterTable) -> None:
        self.table, self.rows_XR = table, rows_XR

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all slots."""
        return self.rows_XR, *self.table.tensors

    def add_to(self, rows: Tensor, context: ForwardContext) -> Tensor:
        """Add the adapters' rows of the tokens to their embeddings, in place: [T, D], or with leading dimensions."""
        tokens_T, slots_T = context.input(ADAPTER_TOKENS), context.input(ADAPTER_SLOTS)
        if tokens_T is None or slots_T is None:
            return rows
        if rows.dim() != 2:
            return self.add_to(rows.view(-1, rows.shape[-1]), context).view(rows.shape)
        return self.table.add_to(rows, self._shrunk(tokens_T, rows.dtype), slots_T)

    def _shrunk(self, tokens_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of A^T; the row after the last one, for tokens without an adapter, is never used."""
        return embedding(tokens_T, self.rows_XR, dtype)

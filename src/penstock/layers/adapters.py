"""LoRA adapters of layers, applied to the rows of their own requests.

Suffixes: T rows (tokens), I input features, D hidden size, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from penstock.kernels.adapters import AdapterTable
from penstock.kernels.embedding import embedding
from penstock.kernels.native.tracing import TracedTensor

# Names of step inputs: adapter slot of each token, for all layers and for the LM head, int32 (-1 for none); and row of
# each token in the table of the embedding's adapters, int32.
ADAPTER_SLOTS, HEAD_SLOTS, ADAPTER_TOKENS = "adapter_slots", "adapter_slots_of_head", "adapter_tokens"


class AdapterRouting:
    """Step inputs of the forward pass in progress, for the layers of one model that have adapters."""

    def __init__(self) -> None:
        self._named: Mapping[str, Tensor] = {}
        self._last_rows: Tensor | None = None
        self._narrowed: dict[str, Tensor] = {}

    @contextmanager
    def of_rows(self, named: Mapping[str, Tensor], last_rows: Tensor | None = None) -> Iterator[None]:
        """Route rows by these step inputs. last_rows: the rows to which the pass narrows after its last attention."""
        before = self._named, self._last_rows, self._narrowed
        self._named, self._last_rows, self._narrowed = named, last_rows, {}
        try:
            yield
        finally:
            self._named, self._last_rows, self._narrowed = before

    def of_chosen(self, rows: Tensor, chosen_N: Tensor) -> AbstractContextManager[None]:
        """Route the rows of these indices among `rows`, in their order, by the step inputs of `rows`."""
        slots = self.input_of(ADAPTER_SLOTS, rows)
        return nullcontext() if slots is None else self.of_rows({ADAPTER_SLOTS: slots.index_select(0, chosen_N)})

    def is_routed(self, name: str) -> bool:
        """Whether the pass in progress has this input."""
        return name in self._named

    def input_of(self, name: str, rows: Tensor) -> Tensor | None:
        """The input's elements for `rows`, [rows, ...]; None where the pass has none, as no request has an adapter."""
        per_token = self._named.get(name)
        if per_token is None or self._is_of(rows, per_token):
            return per_token
        if name not in self._narrowed:
            assert self._last_rows is not None, f"{len(rows)} rows, and {len(per_token)} adapter slots"
            self._narrowed[name] = per_token.index_select(0, self._last_rows)
        return self._narrowed[name]

    def _is_of(self, rows: Tensor, per_token: Tensor) -> bool:
        if isinstance(rows, TracedTensor) and isinstance(per_token, TracedTensor):
            return rows.is_last is per_token.is_last
        return rows.shape[0] == per_token.shape[0]


class LinearAdapters:
    """Adapters of a linear layer. input_name: of its step input."""

    def __init__(self, routing: AdapterRouting, table: AdapterTable, input_name: str = ADAPTER_SLOTS) -> None:
        self.table = table
        self._routing = routing
        self._input_name = input_name

    @property
    def are_routed(self) -> bool:
        """Whether a request of the pass in progress may have an adapter of this layer."""
        return self._routing.is_routed(self._input_name)

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the adapters' products to the layer's output, in place: [T, X], or with the leading dimensions of x."""
        if not self.are_routed:
            return out
        if x.dim() != 2:
            flat = out.view(-1, out.shape[-1])
            return self.add_to(flat, x.reshape(-1, x.shape[-1])).view(out.shape)
        slots_T = self._routing.input_of(self._input_name, x)
        assert slots_T is not None, "they are routed"
        return self.table.add_to(out, x if x.stride(-1) == 1 else x.contiguous(), slots_T)


class EmbeddingAdapters:
    """Adapters of an embedding. rows_XR: A^T of all slots, [slots * vocabulary, R]; table: the products with B."""

    def __init__(self, routing: AdapterRouting, rows_XR: Tensor, table: AdapterTable) -> None:
        self.table, self.rows_XR = table, rows_XR
        self._routing = routing

    def add_to(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Add the adapters' rows of these ids to the embeddings, in place."""
        if not self._routing.is_routed(ADAPTER_TOKENS):
            return rows
        if rows.dim() != 2:
            flat = rows.view(-1, rows.shape[-1])
            return self.add_to(flat, ids.flatten()).view(rows.shape)
        tokens_T = self._routing.input_of(ADAPTER_TOKENS, ids)
        slots_T = self._routing.input_of(ADAPTER_SLOTS, ids)
        assert tokens_T is not None, "they are routed"
        assert slots_T is not None, "both inputs are there"
        return self.table.add_to(rows, self._shrunk(tokens_T, rows.dtype), slots_T)

    def _shrunk(self, tokens_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of A^T; the row after the last one, for tokens without an adapter, is never used."""
        return embedding(tokens_T, self.rows_XR, dtype)

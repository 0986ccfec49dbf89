"""State of a recurrent layer between steps, in pages of the KV cache.

Suffixes: B pages, Y bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.attention import AttentionMetadata, CacheBackend, ForwardContext, StepGeometry
from penstock.contract import RecurrentStateSpec
from penstock.device.base import TORCH_DTYPES
from penstock.kernels.native.attention import StepRequests
from penstock.kernels.native.recurrence import StateRequests
from penstock.kernels.recurrent_state import StateStep

# Alignment of the parts of a page, in bytes.
_ALIGNMENT = 64


class RecurrentBackend(CacheBackend):
    """Backend of recurrent layers, whose metadata has the step's tensors only. Each layer views its pages itself."""

    name = "recurrent"
    keeps_metadata = True
    is_capturable = True

    def __init__(self) -> None:
        self._spec: RecurrentStateSpec | None = None

    def view_pages(self, pages_NX: Tensor, spec: RecurrentStateSpec) -> Tensor:
        self._spec = spec
        return pages_NX

    def make_metadata(self, geometry: StepGeometry) -> StateStep:
        tensors = geometry.query_start_loc, geometry.seq_lens, geometry.block_table
        return StateStep(
            geometry.block_table,
            geometry.query_start_loc,
            geometry.seq_lens,
            geometry.slot_mapping,
            num_own_blocks=geometry.num_own_blocks,
            block_size=geometry.block_size,
            max_query_len=geometry.max_query_len,
            requests=StepRequests.of(*tensors, geometry.num_actual_reqs),
            num_tokens=geometry.num_actual_tokens,
        )

    def of_every_step(self, traced: AttentionMetadata) -> StateRequests:
        """Requests of a program, from its traced metadata."""
        assert self._spec is not None, "the backend's layers have pages"
        return StateRequests(traced.requests, self._spec.num_own_blocks, self._spec.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """State of a layer on this rank: a `CacheLayer`.

    convolution: taps without the current one, and channels, [K - 1, C], of the inputs that a convolution keeps; None
        for none.
    scan: heads, keys' size and values' size of a recurrence, [H, N, P]; None for none.
    convolution_dtype, scan_dtype: of either on a page, by name: float32 or bfloat16.
    """

    name: str
    convolution: tuple[int, int] | None = None
    scan: tuple[int, int, int] | None = None
    convolution_dtype: str = "float32"
    scan_dtype: str = "float32"

    def make_backend(self, device: torch.device) -> CacheBackend:
        return RecurrentBackend()

    def spec(self, block_size: int) -> RecurrentStateSpec:
        """KV cache spec. block_size: positions between borders."""
        state_bytes = self._convolution_bytes + _size_bytes(self.scan, TORCH_DTYPES[self.scan_dtype])
        return RecurrentStateSpec(state_bytes=state_bytes, block_size=block_size, rolls_back=True)

    def convolution_pages(self, pages_BY: Tensor) -> Tensor:
        """View the last inputs of the convolution: [B, K - 1, C]."""
        assert self.convolution is not None, "the layer has a convolution"
        return _view(pages_BY, 0, self.convolution, TORCH_DTYPES[self.convolution_dtype])

    def scan_pages(self, pages_BY: Tensor) -> Tensor:
        """View the states of the recurrence: [B, H, N, P]."""
        assert self.scan is not None, "the layer has a recurrence"
        return _view(pages_BY, self._convolution_bytes, self.scan, TORCH_DTYPES[self.scan_dtype])

    @property
    def _convolution_bytes(self) -> int:
        return _size_bytes(self.convolution, TORCH_DTYPES[self.convolution_dtype])


class RecurrentMixer(nn.Module):
    """A layer that mixes tokens by a recurrent state. layer: the state's description; made by the subclass."""

    layer: RecurrentState

    def get_kv_cache_spec(self, block_size: int, dtype: str) -> RecurrentStateSpec:
        """KV cache spec of this layer. block_size: positions between borders. dtype: of attention's cache, unused."""
        return self.layer.spec(block_size)


def output_rows(rows_TX: Tensor, context: ForwardContext) -> Tensor:
    """Narrow rows of all tokens to the last ones, where the context is narrowed to them.

    A mixer computes all tokens' rows, and narrows them before its output projection.
    """
    return rows_TX if context.last is None else context.last.select(rows_TX)


def _size_bytes(shape: tuple[int, ...] | None, dtype: torch.dtype) -> int:
    size = 0 if shape is None else math.prod(shape) * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(pages_BY: Tensor, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    end = begin + math.prod(shape) * dtype.itemsize
    view: Tensor = pages_BY[:, begin:end].view(dtype).unflatten(1, shape)
    return view

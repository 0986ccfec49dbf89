"""Forward passes as CUDA graphs in pieces: attention and opaque operations run between them, with each step's metadata.

A piece depends on the number of tokens alone, so that steps that mix prefills and decodes are replays too. Queries,
keys and values are copied to buffers that all layers and sizes share, and so is attention's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from penstock.attention import AttentionMetadata, AttentionRows, ForwardContext, Heads, LayerAttention, Projection

# Runs a call between two pieces, in every replay.
Between = Callable[[Callable[[], object]], None]


class PieceBuffers:
    """Buffers between pieces, by name and width, for up to `num_rows` tokens."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def room(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised rows of this shape, [T, ...], with the dtype and device of a tensor."""
        key = name, shape[1:], like.dtype
        if key not in self._buffers:
            self._buffers[key] = like.new_empty((self._num_rows, *shape[1:]))
        return self._buffers[key][: shape[0]]

    def keep(self, name: str, rows: Tensor) -> Tensor:
        """Copy rows."""
        return self.room(name, rows, *rows.shape).copy_(rows)


class Pieces:
    """State of a forward pass in pieces: the buffers, and the context of the step that runs.

    between: set while the pass is captured.
    """

    def __init__(self, buffers: PieceBuffers) -> None:
        self.buffers = buffers
        self.between: Between | None = None
        self.step: ForwardContext | None = None

    def run(self, operation: Callable[[ForwardContext], Sequence[Tensor]], outputs: Sequence[Tensor]) -> None:
        """End a piece; an operation with the context of the step fills the outputs before the next piece."""
        assert self.between is not None, "an operation outside of a capture"

        def call() -> None:
            assert self.step is not None, "a replay has a step"
            for output, result in zip(outputs, operation(self.step), strict=True):
                output.copy_(result)

        self.between(call)


@dataclass(frozen=True, slots=True)
class PieceContext(ForwardContext):
    """Forward context of a capture in pieces, whose attention and opaque operations are left out of the graphs."""

    pieces: Pieces = field(kw_only=True)

    @classmethod
    def of(cls, context: ForwardContext, pieces: Pieces) -> PieceContext:
        """Context of a capture, of all tokens of another one."""
        whole = context.of_all_tokens()
        return cls(**{one.name: getattr(whole, one.name) for one in fields(ForwardContext)}, pieces=pieces)

    def cache_of(self, name: str) -> tuple[Tensor, AttentionMetadata]:
        """Raise RuntimeError, which ends the capture: the layer would read this step's metadata in every replay."""
        raise RuntimeError(f"layer {name} reads its cache itself, and only attention runs between graphs")

    def attend(self, layer: LayerAttention, rows: AttentionRows) -> Tensor:
        keep, room = self.pieces.buffers.keep, self.pieces.buffers.room
        kept: AttentionRows
        if isinstance(rows, Projection):
            kept = rows._replace(qkv_TX=keep("projection", rows.qkv_TX))
            output = room("output", rows.qkv_TX, len(rows.qkv_TX), layer.num_heads * layer.value_size)
        else:
            kept = Heads(keep("query", rows.query_THD), keep("key", rows.key_TKD), keep("value", rows.value_TKD))
            output = room("output", rows.query_THD, *rows.query_THD.shape[:2], layer.value_size)
        self.pieces.run(lambda context: [context.attend(layer, kept)], [output])
        return output

    def call_opaque(
        self,
        call: Callable[..., Sequence[Tensor]],
        rows: Sequence[Tensor],
        widths: Sequence[int],
        by_library: Callable[..., Sequence[Tensor] | None] | None,
    ) -> Sequence[Tensor]:
        """Leave a declared opaque operation, such as that of a recurrent layer, out of the graphs."""
        keep, room = self.pieces.buffers.keep, self.pieces.buffers.room
        kept = [keep(f"rows {index}", one) for index, one in enumerate(rows)]
        num_tokens = len(rows[0])
        outputs = [room(f"results {index}", rows[0], num_tokens, width) for index, width in enumerate(widths)]
        self.pieces.run(lambda context: call(context, *kept), outputs)
        # Later operations have the same buffers, while a layer may still read these results.
        return [output.clone() for output in outputs]


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Addresses of tensors that graphs read."""
    return tuple(tensor.data_ptr() for tensor in tensors)

"""A model's layers as one call into the C++ kernels. Suffixes: T tokens of the step, D hidden size."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.attention import BoundLayer, ForwardContext
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import LastRows, NativeProgram
from penstock.layers.recording import Recorder, Unrecordable

logger = logging.getLogger(__name__)


class ModelProgram:
    """Hidden states from embedded tokens."""

    def __init__(self, program: NativeProgram) -> None:
        self._program = program

    @staticmethod
    def takes(hidden_TD: Tensor) -> bool:
        """Whether these embedded tokens can go through."""
        return hidden_TD.dtype is torch.float32 and hidden_TD.is_contiguous()

    def bytes_spared(self, num_tokens: int) -> int:
        """How much less a step takes than if all its tokens had room for everything at once."""
        return self._program.bytes_spared(num_tokens)

    def __call__(self, hidden_TD: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """[T, D], or the rows that the context asks for; overwrites its input."""
        metadata, last = context.metadata, context.last
        return self._program(
            hidden_TD,
            positions_T if positions_T.dtype is torch.int64 else positions_T.to(torch.int64),
            metadata[0].num_tokens,
            [group.requests for group in metadata],
            None if last is None else LastRows(last.rows, last.positions, last.query_start_loc),
        )


def record_model(model: nn.Module, hidden_size: int, layers: Mapping[str, BoundLayer]) -> ModelProgram | None:
    """The program of a model that can be recorded; None for any other, which then runs layer by layer.

    model: its `record` takes a recorder alone.
    """
    if NATIVE is None:
        return None
    program = NativeProgram(hidden_size, NATIVE)
    try:
        Recorder(program, layers).record(model)
    except Unrecordable as reason:
        logger.debug("The model runs layer by layer: %s", reason)
        return None
    return ModelProgram(program)

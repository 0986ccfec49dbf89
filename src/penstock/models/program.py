"""A model's layers as one call into the C++ kernels. Suffixes: T tokens of the step, D hidden size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from penstock.attention import BoundLayer, ForwardContext
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import NativeProgram
from penstock.kernels.native.program_step import BoundChoices, LastRows, StepTokens
from penstock.kernels.sampling import ChosenTokens
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
        return self._program(hidden_TD, _step_tokens(positions_T, context))


class GreedyProgram:
    """The next tokens from the last ones: embedding, layers and the output projection's choice."""

    def __init__(self, program: NativeProgram) -> None:
        self._program = program

    def bytes_spared(self, num_tokens: int) -> int:
        """None: the steps that take the most memory do not go through here."""
        return 0

    def bind(self, input_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> GreedyStep | None:
        """Steps from these tensors, as long as they and the context stay; None where they cannot be read in place."""
        tensors = (input_ids_T, torch.int32), (positions_T, torch.int64)
        if not all(tensor.dtype is dtype and tensor.is_contiguous() for tensor, dtype in tensors):
            return None
        return GreedyStep(self._program.bind(input_ids_T, _step_tokens(positions_T, context)))


class GreedyStep:
    """A step of one token of each request, over and over."""

    def __init__(self, bound: BoundChoices) -> None:
        self._run = bound.run
        self._chosen = ChosenTokens(bound.index_T, bound.failed_T)

    def run(self) -> ChosenTokens:
        """The model's `compute_greedy` of what its tensors now hold. The next run overwrites the result."""
        self._run()
        return self._chosen


def _step_tokens(positions_T: Tensor, context: ForwardContext) -> StepTokens:
    metadata, last = context.metadata, context.last
    return StepTokens(
        positions_T if positions_T.dtype is torch.int64 else positions_T.to(torch.int64),
        metadata[0].num_tokens,
        [group.requests for group in metadata],
        None if last is None else LastRows(last.rows, last.positions, last.query_start_loc),
    )


def record_model(model: nn.Module, hidden_size: int, layers: Mapping[str, BoundLayer]) -> ModelProgram | None:
    """The program of a model that can be recorded; None for any other, which then runs layer by layer.

    model: its `record` takes a recorder alone.
    """
    program = _record(hidden_size, layers, lambda recorder: recorder.record(model))
    return None if program is None else ModelProgram(program)


def record_greedy(model: nn.Module, hidden_size: int, layers: Mapping[str, BoundLayer]) -> GreedyProgram | None:
    """The same with what comes before the layers, and the choice after them. model: has a `record_greedy`."""
    program = _record(hidden_size, layers, lambda recorder: recorder.record_greedy(model))
    return None if program is None else GreedyProgram(program)


def _record(
    hidden_size: int, layers: Mapping[str, BoundLayer], record: Callable[[Recorder], None]
) -> NativeProgram | None:
    if NATIVE is None:
        return None
    program = NativeProgram(hidden_size, NATIVE)
    try:
        record(Recorder(program, layers))
    except Unrecordable as reason:
        logger.debug("The model runs piece by piece: %s", reason)
        return None
    return program

"""Execution by recorded programs, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels.native.program import BoundChoices
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.runner.execute.execution import Description, Execution, run_forward
from penstock.runner.execute.recorded_programs import RecordedPrograms
from penstock.step.frame import Frame, RowOutput


class ProgramExecution(Execution):
    """Runs recorded programs, and layer by layer what is not recorded."""

    def __init__(self, programs: RecordedPrograms) -> None:
        self.programs = programs

    def run(self, frame: Frame) -> str:
        way = frame.way
        if way is None:
            way = frame.way = self._choose(frame)
        return way(frame)

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return self.programs.run(model, inputs, context)

    def describe(self) -> Description:
        return Description(self.programs.describe())

    def forget(self) -> None:
        self.programs.forget()

    def _choose(self, frame: Frame) -> Callable[[Frame], str]:
        """Choose the frame's way: one call from token ids to greedy tokens for a repeated frame that wants no more."""
        wants = frame.wants
        if not (frame.is_repeated and wants.row_output is RowOutput.GREEDY and frame.batch.layout.has_one_token_each):
            return self._run_forward
        states_before = tuple(wants.aux_layers) if wants.all_rows else None
        bound = self.programs.bind_greedy(frame.model, frame.inputs, frame.context, states_before)
        return self._run_forward if bound is None else _BoundProgram(bound, wants.aux_layers)

    def _run_forward(self, frame: Frame) -> str:
        run_forward(frame, self.forward)
        return "program" if self.programs.has_run_program else "eager"


class _BoundProgram:
    """A recorded program bound to one frame's tensors, from token ids to greedy tokens.

    aux_layers: layers whose inputs it gives, too.
    """

    def __init__(self, bound: BoundChoices, aux_layers: Sequence[int]) -> None:
        self._bound = bound
        self._hidden = bound.states[0] if bound.states else None
        self._aux = dict(zip(aux_layers, bound.states[1:], strict=True)) if bound.states else {}

    def __call__(self, frame: Frame) -> str:
        frame.chosen = self._bound.run()
        if self._hidden is not None:
            frame.all_hidden, frame.aux = self._hidden, {**frame.aux_received, **self._aux}
        return "greedy program"

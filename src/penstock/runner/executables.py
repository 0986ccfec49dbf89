"""Executables: ways to run a frame's forward pass, with identical tokens and bits.

The choice depends on the frame and on what is fixed at start, so that all ranks choose alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from penstock.attention import AuxHiddenStates, ForwardContext
from penstock.kernels.native.program_step import BoundChoices
from penstock.models.interface import LanguageModel, ModelInputs, routed
from penstock.models.program import ModelPrograms
from penstock.runner.batch_layout import BatchPlan
from penstock.runner.frame import Frame

T = TypeVar("T")

# Kinds of runs that are counted where steps can be CUDA graphs.
UNIFORM, MIXED, PIECES = "uniform steps as graphs", "mixed steps as graphs", "mixed steps in pieces"
DRAFTS, DRAFTER_PREFILL = "draft steps as graphs", "prefill passes of a drafter, layer by layer"
FIRST_OF_SIZE, LAYERS = "first runs of a graph's size, layer by layer", "steps that fit no graph, layer by layer"


class Executable(ABC):
    """Computes the outputs that a frame wants."""

    @property
    def kind(self) -> str:
        """Name of the way that the last forward pass ran, for traces."""
        return "eager"

    @abstractmethod
    def run(self, frame: Frame) -> None:
        """Run the forward pass, and put the outputs that `frame.wants` names into the frame."""


class ForwardExecutable(Executable):
    """Runs any frame: the forward pass, and the argmax where the frame wants nothing else of its logits.

    whole_block_tables: whether steps need all columns of the block tables, used or not. sizes: padded numbers of
    requests that run as CUDA graphs, ascending. num_runs: runs by kind, where steps can be CUDA graphs.
    """

    whole_block_tables = False
    sizes: Sequence[int] = ()
    num_runs: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """Return hidden states of these inputs, or of the tokens that the context is narrowed to."""

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Choose the padded sizes of a step."""
        return BatchPlan.without_padding(num_scheduled_tokens)

    def choose(self, frame: Frame) -> Executable:
        """Return the fastest executable for a frame."""
        return self

    def padded_size(self, num_reqs: int) -> int | None:
        """Return the number of requests that work for so many is padded to, if it runs as a CUDA graph; else None."""
        return None

    def repeat(self, key: Hashable, work: Callable[[], T], kind: str = UNIFORM) -> T:
        """Run work on the device that depends on persistent tensors and `key` alone, or replay its CUDA graph."""
        return work()

    def note_run(self, kind: str) -> None:
        """Count a run, where steps can be CUDA graphs."""

    def describe(self) -> list[str]:
        """Log lines about graphs; none where steps cannot be CUDA graphs."""
        return []

    def forget(self) -> None:
        """Drop everything that depends on the model or its weights: they have changed."""

    def run(self, frame: Frame) -> None:
        wants, context, model = frame.wants, frame.context, frame.model
        aux = None
        if wants.aux_layers:
            aux = AuxHiddenStates(wants.aux_layers)
            context = replace(context, aux=aux)
        hidden = self.forward(model, frame.inputs, context)
        self.take_outputs(frame, hidden, () if aux is None else aux.states, is_narrowed=context.last is not None)

    def take_outputs(self, frame: Frame, hidden: Tensor, aux: Sequence[Tensor], *, is_narrowed: bool = False) -> None:
        """Put a forward pass's hidden states into the frame, and the argmax where it wants nothing else.

        aux: auxiliary hidden states. is_narrowed: there are hidden states of the last tokens only.
        """
        wants, model = frame.wants, frame.model
        frame.aux = [*frame.aux_received, *aux] if aux else frame.aux_received
        frame.all_hidden = hidden if wants.all_rows else None
        frame.hidden = frame.chosen = None
        if wants.logits_rows:
            rows = hidden if is_narrowed else frame.batch.layout.of_logits_rows(hidden)
            if wants.greedy:
                with routed(model, frame.logits_inputs):
                    frame.chosen = model.compute_greedy(rows)
            if frame.chosen is None:
                frame.hidden = rows


class EagerExecutable(ForwardExecutable):
    """Calls the model layer by layer."""

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return inputs.run(model, context)


class ProgramExecutable(ForwardExecutable):
    """Runs recorded programs, and layer by layer what is not recorded."""

    def __init__(self, programs: ModelPrograms) -> None:
        self._programs = programs

    @property
    def kind(self) -> str:
        return "program" if self._programs.has_run_program else "eager"

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return self._programs.run(model, inputs, context)

    def choose(self, frame: Frame) -> Executable:
        """One call from token ids to greedy tokens, for a repeated frame that wants no more of its logits."""
        wants = frame.wants
        if not (frame.is_repeated and wants.greedy and frame.batch.layout.has_one_token_each):
            return self
        states_before = wants.aux_layers if wants.all_rows else None
        bound = self._programs.bind_greedy(frame.model, frame.inputs, frame.context, states_before)
        return self if bound is None else GreedyProgram(bound)

    def forget(self) -> None:
        self._programs.forget()


class GreedyProgram(Executable):
    """A recorded program bound to one frame's tensors, from token ids to greedy tokens."""

    kind = "greedy program"

    def __init__(self, bound: BoundChoices) -> None:
        self._bound = bound

    def run(self, frame: Frame) -> None:
        bound = self._bound
        frame.chosen, states = bound.run(), bound.states
        if states:
            frame.all_hidden, frame.aux = states[0], [*frame.aux_received, *states[1:]]

"""Executions: ways to run frames and other work of models, with identical tokens and bits.

Padding, programs and captures stay behind the execution. The choice of a way depends on the frame and on what is fixed
at start, so that all ranks choose alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from penstock.attention import AuxHiddenStates, ForwardContext
from penstock.models.interface import LanguageModel, ModelInputs, choose_greedy
from penstock.step.frame import Frame, RowOutput

T = TypeVar("T")

# Kinds of runs that are counted where steps can be CUDA graphs.
UNIFORM, MIXED, PIECES = "uniform steps as graphs", "mixed steps as graphs", "mixed steps in pieces"
PROMPT_LOGITS, POOLING = "logits of prompts, layer by layer", "pooling, layer by layer"
DRAFTS, DRAFTER_PREFILL = "draft steps as graphs", "prefill passes of a drafter, layer by layer"
FIRST_OF_SIZE, LAYERS = "first runs of a graph's size, layer by layer", "steps that fit no graph, layer by layer"


@dataclass(frozen=True, slots=True)
class Description:
    """Description of an execution. lines: for logs. num_runs: runs by kind, where steps can be CUDA graphs."""

    lines: Sequence[str] = ()
    num_runs: Mapping[str, int] = field(default_factory=Counter)


class Execution(ABC):
    """Runs the frames of one runner, with the LM head, and all other work of its models."""

    @abstractmethod
    def run(self, frame: Frame) -> str:
        """Run a frame in its way, which is chosen at its first run, and put the outputs that it wants into it.

        Returns the way's name, for traces.
        """

    @abstractmethod
    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """Return hidden states of these inputs, or of the tokens that the context is narrowed to."""

    def compute(self, work: Callable[[], T], kind: str | None = None, key: Hashable = None) -> T:
        """Run other work of a model: drafts, pooling, logits of prompts.

        kind: under which runs are counted; None for dummies and parts of other work. key: of work that depends on
        persistent tensors and the key alone, and may become a CUDA graph; None for work that depends on more.
        """
        return work()

    def describe(self) -> Description:
        """Describe what was recorded or captured."""
        return Description()

    def forget(self) -> None:  # noqa: B027
        """Drop everything that depends on a model or its weights: they have changed."""


class EagerExecution(Execution):
    """Calls the model layer by layer."""

    def run(self, frame: Frame) -> str:
        run_forward(frame, self.forward)
        return "eager"

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return inputs.run(model, context)


def run_forward(frame: Frame, forward: Callable[[LanguageModel, ModelInputs, ForwardContext], Tensor]) -> None:
    """Run a frame's forward pass by this function, and take its outputs."""
    context, aux = frame.context, None
    if frame.wants.aux_layers:
        aux = AuxHiddenStates(frame.wants.aux_layers)
        context = replace(context, aux=aux)
    hidden = forward(frame.model, frame.inputs, context)
    take_outputs(frame, hidden, {} if aux is None else aux.states, is_narrowed=context.last is not None)


def take_outputs(frame: Frame, hidden: Tensor, aux: Mapping[int, Tensor], *, is_narrowed: bool = False) -> None:
    """Put a forward pass's hidden states into the frame, and the output of the logits rows that it wants.

    aux: auxiliary hidden states. is_narrowed: there are hidden states of the last tokens only.
    """
    wants = frame.wants
    frame.aux = {**frame.aux_received, **aux} if aux else frame.aux_received
    frame.all_hidden = hidden if wants.all_rows else None
    if wants.row_output is not None:
        take_rows(frame, hidden if is_narrowed else frame.batch.layout.of_logits_rows(hidden))


def take_rows(frame: Frame, hidden_LD: Tensor) -> None:
    """Put the wanted output of the logits rows into the frame, given their hidden states: the LM head runs here."""
    frame.hidden = frame.logits = frame.chosen = None
    match frame.wants.row_output:
        case RowOutput.GREEDY:
            frame.chosen = choose_greedy(frame.model, hidden_LD, frame.logits_context)
        case RowOutput.LOGITS:
            frame.logits = frame.model.compute_logits(hidden_LD, frame.logits_context)
        case RowOutput.HIDDEN:
            frame.hidden = hidden_LD

"""Frame of a step, and the outputs that it wants of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.contract import SamplingInput, SchedulerOutput
from penstock.kernels.sampling import ChosenTokens
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.step.batch import InputBatch
from penstock.step.logits_rows import PromptRows


class RowOutput(Enum):
    """Output of each logits row: its hidden state, its logits, or their argmax alone."""

    HIDDEN = auto()
    LOGITS = auto()
    GREEDY = auto()


class WantedOutputs(NamedTuple):
    """Outputs that a frame wants of its execution.

    row_output: of the logits rows; None for none. all_rows: hidden states of all tokens. aux_layers: the layers whose
    inputs are wanted too, as auxiliary hidden states, ascending.
    prompt_rows: token indices, among all, whose logits give prompt log-probabilities.
    """

    row_output: RowOutput | None = None
    all_rows: bool = False
    aux_layers: Sequence[int] = ()
    prompt_rows: PromptRows | None = None


@dataclass(slots=True, eq=False)
class Frame:
    """Frame of a step as plain data: message, inputs, wanted outputs and outputs.

    output: the step's message. sampling: the message that asks for its sampling. errors: reason by request that cannot
    run. is_repeated: the frame was kept and runs again. buffer_set: number of the set of input buffers that it uses;
    None without tokens.

    Set when the frame is built, and kept with it: has_tokens: the step runs tokens; the fields up to `wants` are set
    then. way: runs the frame and returns the name of this way; None until the execution has chosen one.

    Set by the execution: aux_received: auxiliary hidden states of earlier stages. hidden, logits, chosen: of the logits
    rows, whichever is wanted: hidden states, float32 logits, or greedy tokens. all_hidden: hidden states of all tokens.
    aux: inputs of `wants.aux_layers` by layer, in their order, after those of earlier stages.

    readers: slot owners that read hidden states, of those that are set when the frame is built. parts: theirs of the
    step's results, until these are returned.
    """

    output: SchedulerOutput
    model: LanguageModel
    buffer_set: int | None = None
    errors: dict[str, str] = field(default_factory=dict)
    is_repeated: bool = False
    sampling: SamplingInput | None = None
    has_tokens: bool = False
    batch: InputBatch = field(init=False)
    context: ForwardContext = field(init=False)
    inputs: ModelInputs = field(init=False)
    wants: WantedOutputs = field(init=False)
    way: Callable[[Frame], str] | None = None
    aux_received: Mapping[int, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    logits: Tensor | None = None
    all_hidden: Tensor | None = None
    aux: Mapping[int, Tensor] = field(default_factory=dict)
    chosen: ChosenTokens | None = None
    readers: Sequence[Any] = ()
    parts: Sequence[Any] = ()

    @property
    def step_id(self) -> int:
        return self.output.step_id

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of each request that the next step wants."""
        return self.output.num_drafts_wanted

    @property
    def req_ids(self) -> list[str]:
        """Request ids in batch order."""
        return self.batch.layout.req_ids if self.has_tokens else []

    @property
    def logits_context(self) -> ForwardContext:
        """Context of the logits rows, for the LM head."""
        return self.inputs.head_context.of_rows(self.batch.layout.of_logits_rows)

    def drop_outputs(self) -> None:
        """Drop the references to the execution's outputs."""
        self.hidden = self.logits = self.all_hidden = None
        self.aux = {}

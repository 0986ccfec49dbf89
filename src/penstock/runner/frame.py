"""Frames: inputs and outputs of one step, in reused sets of input buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.contract import SchedulerOutput
from penstock.kernels.sampling import ChosenTokens
from penstock.layers.adapters import HEAD_SLOTS
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.runner.batch_layout import BatchPlan, Planner
from penstock.runner.input_batch import BatchBuilder, InputBatch
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.model_states import ModelState
from penstock.runner.sampling.prompt_logprobs import PromptRows
from penstock.runner.slot_owners import SlotOwner, SlotOwners
from penstock.runner.stage import Stage

if TYPE_CHECKING:
    from penstock.runner.executables import Executable, ForwardExecutable
    from penstock.runner.output_heads import OutputHead


class WantedOutputs(NamedTuple):
    """Outputs that a frame wants of the forward pass.

    logits_rows: hidden states of the logits rows. all_rows: hidden states of all tokens. aux_layers: the layers whose
    inputs are wanted too, as auxiliary hidden states.
    greedy: the argmax of each logits row is enough.
    prompt_rows: token indices, among all, whose logits give prompt log-probabilities.
    """

    logits_rows: bool = False
    all_rows: bool = False
    aux_layers: Sequence[int] = ()
    greedy: bool = False
    prompt_rows: PromptRows | None = None


class BufferSet:
    """Input buffers of one step in flight. The next step that takes the set overwrites them.

    named: tensor of each declared step input by name, of the largest size. kept: a decode frame, for the step that
    repeats it.
    """

    __slots__ = ("batcher", "kept", "named")

    def __init__(self, batcher: BatchBuilder, named: Mapping[str, Tensor]) -> None:
        self.batcher = batcher
        self.named = named
        self.kept: Frame | None = None


@dataclass(slots=True, eq=False)
class Frame:
    """One step, from its message to its hidden states.

    errors: reason by request that cannot run. is_repeated: the frame was kept and runs again. has_tokens: the step runs
    tokens; the fields up to `executable` are set then, and stay while the frame is kept.
    owners: slot owners with step inputs in the frame. aux_received: auxiliary hidden states of earlier stages.
    After the forward pass: hidden: of each logits row; None where the tokens are `chosen` already. all_hidden: of all
    tokens. aux: inputs of `wants.aux_layers`, in the order of the layers.
    """

    output: SchedulerOutput
    model: LanguageModel
    errors: dict[str, str] = field(default_factory=dict)
    is_repeated: bool = False
    has_tokens: bool = False
    buffers: BufferSet = field(init=False)
    batch: InputBatch = field(init=False)
    context: ForwardContext = field(init=False)
    inputs: ModelInputs = field(init=False)
    owners: Sequence[SlotOwner] = ()
    wants: WantedOutputs = field(init=False)
    executable: Executable | None = None
    aux_received: Sequence[Tensor] = ()
    hidden: Tensor | None = None
    all_hidden: Tensor | None = None
    aux: Sequence[Tensor] = ()
    chosen: ChosenTokens | None = None

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
    def logits_inputs(self) -> Mapping[str, Tensor]:
        """Step inputs of the logits rows, for the LM head."""
        slots = self.inputs.named.get(HEAD_SLOTS)
        return {} if slots is None else {HEAD_SLOTS: self.batch.layout.of_logits_rows(slots)}

    def run(self) -> None:
        """Run the forward pass."""
        assert self.executable is not None, "a filled frame has its executable"
        self.executable.run(self)

    @property
    def kind_of_executable(self) -> str:
        """Name of the executable's kind, for traces."""
        return "" if self.executable is None else self.executable.kind

    def drop_outputs(self) -> None:
        """Drop the references to the forward pass's outputs."""
        self.hidden = self.all_hidden = None
        self.aux = ()


class Frames:
    """Builds the frame of each step, in one buffer set per step in flight.

    A decode frame is kept in its buffer set, with everything that a repeated step shares with it. The scheduler
    announces a repeated step by `SchedulerOutput.repeats_step_id`; the frame is reused if that step was the last one in
    its buffer set and served all its requests.
    keeps_frames: False builds every step anew. executable: runs frames that are not repeated.
    """

    def __init__(
        self,
        model: LanguageModel,
        buffer_sets: Sequence[BufferSet],
        owners: SlotOwners,
        kv_cache: PagedKVCache,
        model_state: ModelState,
        stage: Stage,
        head: OutputHead,
        executable: ForwardExecutable,
        planner: Planner,
        *,
        keeps_frames: bool,
    ) -> None:
        self.model = model
        # Least recently used first.
        self._buffer_sets = list(buffer_sets)
        self._owners = owners
        self._kv_cache = kv_cache
        self._model_state = model_state
        self._stage = stage
        self._head = head
        self._executable = executable
        self._planner = planner
        self._keeps_frames = keeps_frames
        self._keeps_tensors = kv_cache.keeps_metadata and model_state.keeps_inputs

    def begin(self, output: SchedulerOutput, *, may_repeat: bool = True) -> Frame:
        """Return the kept frame that the step repeats, or a new one in the least recently used buffer set.

        may_repeat: whether the step has the requests of the one that it names, and changes nothing else.

        Waits for the outcomes of steps that this one depends on. A step without tokens takes no buffer set; it may
        begin before the last step is sampled.
        """
        if not output.num_scheduled_tokens:
            self._head.settle(output, None)
            return Frame(output, self.model)
        buffers = self._take_buffers(output)
        self._head.settle(output, buffers)
        frame = buffers.kept
        if may_repeat and frame is not None and frame.output.step_id == output.repeats_step_id:
            frame.output = output
            if not frame.is_repeated:
                # From the first repetition on it pays to bind an executable to this frame alone.
                frame.is_repeated, frame.executable = True, None
            return frame
        return self._new_frame(output, buffers)

    def fill(self, frame: Frame) -> bool:
        """Build the step's inputs and choose its executable; False where the step runs no token."""
        if frame.is_repeated:
            assert not frame.errors, "a repeated frame's requests ran in the step before"
            batch = frame.buffers.batcher.build_again()
            if batch is not frame.batch or not self._keeps_tensors:
                frame.batch = batch
                self._complete(frame)
        else:
            output = frame.output
            scheduled = _without(output.num_scheduled_tokens, frame.errors)
            if not scheduled:
                return False
            plan = self._planner(scheduled)
            self._stage.expect_hidden(plan.num_tokens_padded)
            frame.batch = frame.buffers.batcher.build(scheduled, plan, output.scheduled_spec_decode_tokens)
            self._complete(frame)
            is_whole = not frame.errors and frame.wants.prompt_rows is None
            if self._keeps_frames and is_whole and frame.batch.layout.is_all_decodes:
                frame.buffers.kept = frame
        for owner in frame.owners:
            owner.fill(frame)
        if frame.executable is None:
            frame.executable = self._executable.choose(frame)
        return True

    def dummy(self, num_tokens: int, num_reqs: int) -> Frame:
        """Build a frame of padding only, which wants all rows and the head's auxiliary hidden states."""
        message = SchedulerOutput(step_id=-1)
        frame = self._new_frame(message, self._take_buffers(message))
        plan = BatchPlan(num_tokens=0, num_reqs=0, num_tokens_padded=num_tokens, num_reqs_padded=num_reqs)
        frame.batch = frame.buffers.batcher.build({}, plan)
        frame.has_tokens = True
        frame.context = self._kv_cache.make_context(frame.batch)
        frame.inputs = self._model_state.inputs(frame.batch)
        # The wanted outputs of real steps, so that a program recorded now fits them.
        frame.wants = WantedOutputs(all_rows=True, aux_layers=self._head.wants(frame).aux_layers)
        frame.executable = self._executable
        return frame

    def replace_model(self, model: LanguageModel) -> None:
        """Run another model from the next step on."""
        self.model = model
        self.forget_kept()

    def forget_kept(self) -> None:
        """Build the next step's frame anew."""
        for buffers in self._buffer_sets:
            buffers.kept = None

    def forget_executables(self) -> None:
        """Drop the executables of kept frames: the model or its weights have changed."""
        for buffers in self._buffer_sets:
            if buffers.kept is not None:
                buffers.kept.executable = None

    def _take_buffers(self, output: SchedulerOutput) -> BufferSet:
        buffer_sets = self._buffer_sets
        if len(buffer_sets) > 1:
            found = next((one for one in buffer_sets if _has_kept(one, output.repeats_step_id)), buffer_sets[0])
            buffer_sets.remove(found)
            buffer_sets.append(found)
        return buffer_sets[-1]

    def _new_frame(self, output: SchedulerOutput, buffers: BufferSet) -> Frame:
        frame = Frame(output, self.model)
        frame.buffers, buffers.kept = buffers, None
        return frame

    def _complete(self, frame: Frame) -> None:
        """Build the model's inputs and the forward context from the batch."""
        layout = frame.batch.layout
        frame.has_tokens = True
        frame.owners = [owner for owner in self._owners.with_inputs if owner.has_work(layout.slots_np)]
        inputs = self._stage.place_hidden(self._model_state.inputs(frame.batch))
        if frame.owners:
            inputs = inputs._replace(named={**inputs.named, **_named_inputs(frame)})
        frame.inputs = inputs
        frame.wants = wants = self._head.wants(frame)
        frame.context = self._kv_cache.make_context(frame.batch)
        if wants.logits_rows and not wants.all_rows and layout.can_be_narrowed:
            frame.context = self._kv_cache.narrow_to_last_tokens(frame.context, frame.batch)
        frame.executable = None


def _named_inputs(frame: Frame) -> dict[str, Tensor]:
    """The frame's rows of the declared step inputs."""
    plan = frame.batch.layout.plan
    named = {}
    for owner in frame.owners:
        for step_input in owner.step_inputs:
            rows = named[step_input.name] = frame.buffers.named[step_input.name][: plan.num_tokens_padded]
            rows[plan.num_tokens :] = step_input.padding
    return named


def _has_kept(buffers: BufferSet, step_id: int | None) -> bool:
    return step_id is not None and buffers.kept is not None and buffers.kept.output.step_id == step_id


def _without(num_scheduled_tokens: dict[str, int], errors: Mapping[str, str]) -> dict[str, int]:
    if not errors:
        return num_scheduled_tokens
    return {req_id: count for req_id, count in num_scheduled_tokens.items() if req_id not in errors}

"""Builder of frames, in reused sets of input buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from penstock.contract import SchedulerOutput
from penstock.models.interface import LanguageModel
from penstock.runner.build.batch_builder import BatchBuilder
from penstock.runner.build.padding import Padding
from penstock.runner.kv_cache import PagedKVCache
from penstock.runner.model_states import ModelState
from penstock.runner.slot_owner import SlotOwner
from penstock.runner.slot_owners import SlotOwners
from penstock.runner.stage import Stage
from penstock.step.batch import BatchPlan
from penstock.step.frame import Frame, WantedOutputs


class BufferSet:
    """Input buffers of one step in flight. The next step that takes the set overwrites them.

    named: tensor of each declared step input by name, of the largest size. last: the last step's frame, for the step
    that repeats it. owners: slot owners with step inputs in that frame.
    """

    __slots__ = ("batcher", "last", "named", "owners")

    def __init__(self, batcher: BatchBuilder, named: Mapping[str, Tensor]) -> None:
        self.batcher = batcher
        self.named = named
        self.last: Frame | None = None
        self.owners: Sequence[SlotOwner] = ()


class Frames:
    """Builds the frame of each step, in one buffer set per step in flight.

    A step's frame stays in its buffer set, with everything that a repeated step shares with it. The scheduler
    announces a repeated step by `SchedulerOutput.repeats_step_id`; the frame is kept (`begin`) if that step was the
    last one in its buffer set and served all its requests.
    wants: outputs that a built frame wants, set by the runner's output head. keeps_frames: False builds every step
    anew.
    """

    def __init__(
        self,
        model: LanguageModel,
        buffer_sets: Sequence[BufferSet],
        owners: SlotOwners,
        kv_cache: PagedKVCache,
        model_state: ModelState,
        stage: Stage,
        wants: Callable[[Frame], WantedOutputs],
        padding: Padding,
        *,
        keeps_frames: bool,
    ) -> None:
        self.model = model
        self._buffer_sets = buffer_sets
        # Numbers of the buffer sets, least recently used first.
        self._order = list(range(len(buffer_sets)))
        self._owners = owners
        self._kv_cache = kv_cache
        self._model_state = model_state
        self._stage = stage
        self._wants = wants
        self._padding = padding
        self._keeps_frames = keeps_frames
        self._keeps_tensors = kv_cache.keeps_metadata and model_state.keeps_inputs

    def take_buffers(self, output: SchedulerOutput) -> int | None:
        """Take the buffer set of the step that this one repeats, or the least recently used one; returns its number.

        None for a step without tokens, which may begin before the last step is sampled.
        """
        if not output.num_scheduled_tokens:
            return None
        return self._take(next(self._places_of(output.repeats_step_id), 0))

    def begin(self, output: SchedulerOutput, buffer_set: int | None, *, may_repeat: bool = True) -> Frame:
        """Return the kept frame that the step repeats, or a new one, in these buffers.

        may_repeat: whether the step has the requests of the one that it names, and changes nothing else.
        """
        if buffer_set is None:
            return Frame(output, self.model)
        buffers = self._buffer_sets[buffer_set]
        frame = buffers.last
        may_repeat = may_repeat and self._keeps_frames
        if may_repeat and frame is not None and not frame.errors and frame.output.step_id == output.repeats_step_id:
            frame.output = output
            if not frame.is_repeated:
                # From the first repetition on it pays to bind a program to this frame alone.
                frame.is_repeated, frame.way = True, None
            return frame
        frame = buffers.last = Frame(output, self.model, buffer_set)
        return frame

    def fill(self, frame: Frame) -> bool:
        """Build the step's inputs; False where the step runs no token."""
        if frame.buffer_set is None:
            return False
        buffers = self._buffer_sets[frame.buffer_set]
        if frame.is_repeated:
            assert not frame.errors, "a repeated frame's requests ran in the step before"
            batch = buffers.batcher.build_again()
            if batch is not frame.batch or not self._keeps_tensors:
                frame.batch = batch
                self._complete(frame, buffers)
        else:
            output = frame.output
            scheduled = _without(output.num_scheduled_tokens, frame.errors)
            if not scheduled:
                return False
            plan = self._padding.plan(scheduled)
            self._stage.expect_hidden(plan.num_tokens_padded)
            frame.batch = buffers.batcher.build(scheduled, plan, output.scheduled_spec_decode_tokens)
            self._complete(frame, buffers)
        for owner in buffers.owners:
            owner.fill(frame)
        return True

    def dummy(self, num_tokens: int, num_reqs: int) -> Frame:
        """Build a frame of padding only, which wants all rows and the head's auxiliary hidden states."""
        number = self._take(0)
        buffers = self._buffer_sets[number]
        buffers.last = None
        frame = Frame(SchedulerOutput(step_id=-1), self.model, number)
        plan = BatchPlan(num_tokens=0, num_reqs=0, num_tokens_padded=num_tokens, num_reqs_padded=num_reqs)
        frame.batch = buffers.batcher.build({}, plan)
        frame.has_tokens = True
        frame.context = self._kv_cache.make_context(frame.batch)
        frame.inputs = self._model_state.inputs(frame.batch)
        # The wanted outputs of real steps, so that a program recorded now fits them.
        frame.wants = WantedOutputs(all_rows=True, aux_layers=self._wants(frame).aux_layers)
        return frame

    def replace_model(self, model: LanguageModel) -> None:
        """Run another model from the next step on."""
        self.model = model
        self.forget_frames()

    def forget_frames(self) -> None:
        """Build the next step's frame anew."""
        for buffers in self._buffer_sets:
            buffers.last = None

    def forget_ways(self) -> None:
        """Choose the ways of frames anew: the model or its weights have changed."""
        for buffers in self._buffer_sets:
            if buffers.last is not None:
                buffers.last.way = None

    def _take(self, place: int) -> int:
        """Make the buffer set at this place in the order the last one; returns its number."""
        self._order.append(self._order.pop(place))
        return self._order[-1]

    def _places_of(self, step_id: int | None) -> Iterator[int]:
        """Yield the place in the order of the buffer set that has this step's frame."""
        for place, number in enumerate(self._order):
            last = self._buffer_sets[number].last
            if last is not None and last.output.step_id == step_id:
                yield place

    def _complete(self, frame: Frame, buffers: BufferSet) -> None:
        """Build the model's inputs and the forward context from the batch."""
        layout = frame.batch.layout
        frame.has_tokens = True
        buffers.owners = [owner for owner in self._owners.with_inputs if owner.has_work(frame)]
        inputs = self._stage.place_hidden(self._model_state.inputs(frame.batch))
        if buffers.owners:
            inputs = inputs._replace(named={**inputs.named, **_named_inputs(layout.plan, buffers)})
        frame.inputs = inputs
        frame.wants = wants = self._owners.widen(self._wants(frame), frame)
        frame.context = self._kv_cache.make_context(frame.batch)
        if wants.row_output is not None and not wants.all_rows and layout.can_be_narrowed:
            frame.context = self._kv_cache.narrow_to_last_tokens(frame.context, frame.batch)
        frame.way = None


def _named_inputs(plan: BatchPlan, buffers: BufferSet) -> dict[str, Tensor]:
    """A step's rows of the declared step inputs."""
    named = {}
    for owner in buffers.owners:
        for step_input in owner.step_inputs:
            rows = named[step_input.name] = buffers.named[step_input.name][: plan.num_tokens_padded]
            rows[plan.num_tokens :] = step_input.padding
    return named


def _without(num_scheduled_tokens: dict[str, int], errors: Mapping[str, str]) -> dict[str, int]:
    if not errors:
        return num_scheduled_tokens
    return {req_id: count for req_id, count in num_scheduled_tokens.items() if req_id not in errors}

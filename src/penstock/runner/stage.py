"""Pipeline stages: hidden states go to the next stage, sampled tokens from the last stage to all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.device import Device
from penstock.errors import RanksDisagree
from penstock.kernels.bound_step import StepOutcome
from penstock.models.interface import ModelInputs
from penstock.observability.spans import STEPS, SpanLog
from penstock.parallel import Group, ParallelState
from penstock.parallel.scattered_rows import parts_between_stages, scattered_rows
from penstock.step.frame import Frame


class Stage(ABC):
    """A pipeline stage, which has some of the layers.

    is_last: it samples. has_others: there is more than one stage.
    """

    is_last: bool
    has_others: bool

    @abstractmethod
    def expect_hidden(self, num_tokens: int) -> None:
        """Post the receive of the next step's hidden states, which may arrive while the step is prepared."""

    @abstractmethod
    def place_hidden(self, inputs: ModelInputs) -> ModelInputs:
        """Replace the inputs' hidden states by the receive buffer, except on the first stage."""

    @abstractmethod
    def receive(self, frame: Frame) -> None:
        """Wait for the hidden states of the previous stage.

        Raises RanksDisagree where they belong to another step.
        """

    @abstractmethod
    def aux_here(self, layers: Sequence[int]) -> Sequence[int]:
        """The layers among a speculator's `aux_layers` whose inputs this stage records."""

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Send the step's hidden states to the next stage, if there is one."""

    @abstractmethod
    def send_outcome(self, step_id: int, outcome: StepOutcome) -> None:
        """Send the outcome from the last stage to all others, which have state of the same requests."""

    @abstractmethod
    def receive_outcome(self, step_id: int, outcome: StepOutcome) -> None:
        """Receive the outcome into its table. Raises RanksDisagree where it is another step's."""

    @abstractmethod
    def share_drafts(self, step_id: int, drafts_SK: Tensor, slots_R: Tensor) -> None:
        """Copy rows of the last stage's draft table to the other stages. Follows the outcome."""


class NoPipeline(Stage):
    """The only stage: no pipeline parallelism, nothing is received or sent."""

    is_last = True
    has_others = False

    def expect_hidden(self, num_tokens: int) -> None: ...

    def place_hidden(self, inputs: ModelInputs) -> ModelInputs:
        return inputs

    def receive(self, frame: Frame) -> None: ...

    def aux_here(self, layers: Sequence[int]) -> Sequence[int]:
        return layers

    def send(self, frame: Frame) -> None: ...

    def send_outcome(self, step_id: int, outcome: StepOutcome) -> None: ...

    def receive_outcome(self, step_id: int, outcome: StepOutcome) -> None: ...

    def share_drafts(self, step_id: int, drafts_SK: Tensor, slots_R: Tensor) -> None: ...


NO_PIPELINE = NoPipeline()


class PipelineStage(Stage):
    """Stage of a pipeline. max_num_tokens: tokens of a step. dtype, hidden_size: of the hidden states.

    aux_layers: target layers whose inputs a speculator on the last stage wants. layers: this stage's layers.

    Every message begins with its step id. The receive buffer has the same address in every step. Where ranks of a stage
    each send a part (`parts_between_stages`), the ranks of the next stage gather them.
    """

    has_others = True

    def __init__(
        self,
        device: Device,
        parallel: ParallelState,
        max_num_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        aux_layers: Sequence[int] = (),
        layers: range = range(0),
        spans: SpanLog | None = None,
    ) -> None:
        self._parallel = parallel
        self._spans = spans
        self._group = group = parallel.pipeline
        self._last = group.size - 1
        self.is_last = group.rank == self._last
        before = num_noted_before(aux_layers, layers)
        self._aux_before = aux_layers[:before]
        self._aux_here = [layer for layer in aux_layers[before:] if layer <= layers.stop]
        self._received = torch.empty(
            1 + before, _most_received(group, max_num_tokens), hidden_size, dtype=dtype, device=device.torch_device
        )
        self._sent_number = torch.empty(1, dtype=torch.int64, device=device.torch_device)
        # Waits for the posted receive.
        self._expected: Callable[[int], None] | None = None

    def expect_hidden(self, num_tokens: int) -> None:
        if self._group.rank > 0:
            rows = self._rows_sent(num_tokens)
            self._expected = self._start_receiving(self._group.rank - 1, *self._received[:, :rows])

    def place_hidden(self, inputs: ModelInputs) -> ModelInputs:
        if self._group.rank == 0:
            return inputs
        num_tokens = inputs.tokens.shape[0]
        has_parts = parts_between_stages(self._parallel, num_tokens) is not None
        return inputs._replace(hidden=self._received[0, : num_tokens if has_parts else self._rows_sent(num_tokens)])

    def receive(self, frame: Frame) -> None:
        if self._group.rank == 0:
            return
        num_tokens = frame.inputs.tokens.shape[0]
        if self._expected is None:
            self.expect_hidden(num_tokens)
        wait, self._expected = self._expected, None
        assert wait is not None, "expect_hidden posts a receive"
        wait(frame.step_id)
        parts = parts_between_stages(self._parallel, num_tokens)
        if parts is not None:
            rows = self._rows_sent(num_tokens)
            for received in self._received:
                received[:num_tokens] = parts.whole(received[:rows])
        frame.aux_received = dict(zip(self._aux_before, self._received[1:, :num_tokens], strict=True))
        if self._spans is not None:
            self._spans.end("receive", STEPS)

    def aux_here(self, layers: Sequence[int]) -> Sequence[int]:
        return self._aux_here

    def send(self, frame: Frame) -> None:
        if self.is_last:
            return
        assert frame.all_hidden is not None, "a stage before the last wants all rows"
        parts = parts_between_stages(self._parallel, frame.inputs.tokens.shape[0])
        states = (frame.all_hidden, *frame.aux.values())
        self._send(frame.step_id, self._group.rank + 1, *(states if parts is None else map(parts.own, states)))
        if self._spans is not None:
            self._spans.end("send", STEPS)

    def send_outcome(self, step_id: int, outcome: StepOutcome) -> None:
        for stage in range(self._last):
            self._send(step_id, stage, outcome.table_RX)

    def receive_outcome(self, step_id: int, outcome: StepOutcome) -> None:
        self._start_receiving(self._last, outcome.table_RX)(step_id)

    def share_drafts(self, step_id: int, drafts_SK: Tensor, slots_R: Tensor) -> None:
        drafts_RK = drafts_SK.index_select(0, slots_R)
        if self.is_last:
            for stage in range(self._last):
                self._send(step_id, stage, drafts_RK)
        else:
            self._start_receiving(self._last, drafts_RK)(step_id)
            drafts_SK.index_copy_(0, slots_R, drafts_RK)

    def _rows_sent(self, num_tokens: int) -> int:
        """Rows that this rank receives in a step of `num_tokens` tokens."""
        rows = parts_between_stages(self._parallel, num_tokens) or scattered_rows(self._parallel, num_tokens)
        return num_tokens if rows is None else rows.num_own

    def _send(self, step_id: int, stage: int, *tensors: Tensor) -> None:
        self._group.send(self._sent_number.fill_(step_id), stage)
        for tensor in tensors:
            self._group.send(tensor, stage)

    def _start_receiving(self, stage: int, *tensors: Tensor) -> Callable[[int], None]:
        """Post receives; the returned function waits for them and checks that they belong to the given step."""
        wait_for_number = self._group.start_receiving(torch.empty_like(self._sent_number), stage)
        waits = [self._group.start_receiving(tensor, stage) for tensor in tensors]

        def wait(step_id: int) -> None:
            sent = int(wait_for_number())
            if sent != step_id:
                raise RanksDisagree(
                    f"Stage {self._group.rank} is at step {step_id}, and stage {stage} sent data of step {sent}. "
                    "Every stage must be given every step, in the same order."
                )
            for wait_for_tensor in waits:
                wait_for_tensor()

        return wait


def num_noted_before(aux_layers: Sequence[int], layers: range) -> int:
    """The number of `aux_layers`, ascending, whose inputs are recorded on stages before the one that has `layers`.

    A stage records its own output, so the input of its first layer was recorded by the stage before.
    """
    return sum(layers.start > 0 and layer <= layers.start for layer in aux_layers)


def receive_buffer_bytes(
    group: Group, max_num_tokens: int, hidden_size: int, dtype: torch.dtype, num_aux: int = 0
) -> int:
    """Bytes of the receive buffer of a stage, for any number of steps in flight; 0 without pipeline parallelism.

    num_aux: number of auxiliary hidden states received with them.
    """
    return (1 + num_aux) * _most_received(group, max_num_tokens) * hidden_size * dtype.itemsize


def _most_received(group: Group, max_num_tokens: int) -> int:
    """Maximum number of received rows of hidden states; the first stage receives none."""
    return max_num_tokens if group.rank > 0 else 0

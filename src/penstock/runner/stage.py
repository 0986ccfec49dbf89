"""What a stage of a pipeline takes from the one before it, and what the last one tells the others."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.device import Device
from penstock.kernels.bound_step import StepOutcome
from penstock.models.interface import ModelInputs
from penstock.parallel import Group


class OneStage:
    """All layers are here."""

    is_last = True

    def receive_hidden(self, inputs: ModelInputs) -> ModelInputs:
        """The inputs with the hidden states that this stage's layers go on from, if others come before them."""
        return inputs

    def send_hidden(self, hidden_TD: Tensor) -> None:
        """To the next stage, which is there."""
        raise AssertionError("the last stage samples")

    def send_outcome(self, outcome: StepOutcome) -> None:
        """From the last stage to all others, which have the state of the same requests."""

    def receive_outcome(self, outcome: StepOutcome) -> None:
        """The same, into its table."""
        raise AssertionError("the last stage samples")


ONE_STAGE = OneStage()


class PipelineStage(OneStage):
    """A stage of several. max_num_tokens: of a step. dtype: of the hidden states, which are `hidden_size` wide."""

    def __init__(self, device: Device, group: Group, max_num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._group = group
        self._last = group.size - 1
        self.is_last = group.rank == self._last
        has_buffer = group.rank > 0
        self._received = torch.empty(
            max_num_tokens if has_buffer else 0, hidden_size, dtype=dtype, device=device.torch_device
        )

    def receive_hidden(self, inputs: ModelInputs) -> ModelInputs:
        if self._group.rank == 0:
            return inputs
        hidden_TD = self._received[: inputs.tokens.shape[0]]
        return inputs._replace(hidden=self._group.receive(hidden_TD, self._group.rank - 1))

    def send_hidden(self, hidden_TD: Tensor) -> None:
        self._group.send(hidden_TD, self._group.rank + 1)

    def send_outcome(self, outcome: StepOutcome) -> None:
        for stage in range(self._last):
            self._group.send(outcome.table_RX, stage)

    def receive_outcome(self, outcome: StepOutcome) -> None:
        self._group.receive(outcome.table_RX, self._last)

"""What goes from stage to stage belongs to a step, and another step's is refused."""

from __future__ import annotations

import pytest
import torch

from penstock.config import DeviceConfig
from penstock.device import create_device
from penstock.errors import RanksDisagree
from penstock.kernels.bound_step import StepOutcome
from penstock.models.interface import ModelInputs
from penstock.runner.stage import PipelineStage
from support.ranks import Meeting, ThreadGroup


def stages() -> list[PipelineStage]:
    meeting = Meeting(2)
    device = create_device(DeviceConfig(device="cpu", num_threads=1))
    return [PipelineStage(device, ThreadGroup(rank, meeting), 8, 4, torch.float32) for rank in range(2)]


def inputs(num_tokens: int) -> ModelInputs:
    return ModelInputs(torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64))


def test_hidden_states_and_outcomes_arrive_in_their_steps() -> None:
    first, last = stages()
    hidden = [torch.randn(size, 4) for size in (3, 5)]
    for step_id, sent in enumerate(hidden):
        first.begin(step_id)
        first.send_hidden(sent)
    for step_id, sent in enumerate(hidden):
        last.begin(step_id)
        received = last.receive_hidden(inputs(len(sent))).hidden
        assert received is not None
        assert torch.equal(received, sent)
        last.send_outcome(step_id, StepOutcome(torch.full((2, 4), step_id)))
    for step_id in range(2):
        outcome = StepOutcome(torch.empty(2, 4, dtype=torch.int64))
        first.receive_outcome(step_id, outcome)
        assert outcome.table_RX.eq(step_id).all()


def test_what_belongs_to_another_step_is_refused() -> None:
    first, last = stages()
    first.begin(3)
    first.send_hidden(torch.zeros(2, 4))
    last.begin(4)
    with pytest.raises(RanksDisagree, match="Stage 1 is at step 4, and stage 0 sent what belongs to step 3"):
        last.receive_hidden(inputs(2))
    last.send_outcome(4, StepOutcome(torch.zeros(1, 4, dtype=torch.int64)))
    with pytest.raises(RanksDisagree, match="Stage 0 is at step 3, and stage 1 sent what belongs to step 4"):
        first.receive_outcome(3, StepOutcome(torch.zeros(1, 4, dtype=torch.int64)))

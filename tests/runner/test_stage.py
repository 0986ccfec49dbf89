"""Pipeline stages: messages between stages carry their step id, and those of another step are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.config import DeviceConfig
from penstock.contract import SchedulerOutput
from penstock.device import create_device
from penstock.errors import RanksDisagree
from penstock.kernels.bound_step import StepOutcome
from penstock.models.interface import ModelInputs
from penstock.parallel import ParallelState
from penstock.parallel.scattered_rows import scattered_rows
from penstock.runner.stage import PipelineStage
from penstock.step.batch import InputBatch
from penstock.step.frame import Frame
from support.ranks import SharedGroup, ThreadGroup, run_ranks
from support.runners import ArithmeticModel, batcher_of, make_runner, new_request


def stages() -> list[PipelineStage]:
    shared = SharedGroup(2)
    return [stage(ParallelState(pipeline=ThreadGroup(rank, shared))) for rank in range(2)]


def stage(parallel: ParallelState, num_aux: int = 0) -> PipelineStage:
    """The second one has the layers from 5 on. num_aux: of earlier layers whose hidden states go with its own."""
    device = create_device(DeviceConfig(device="cpu", num_threads=1))
    layers = range(5) if parallel.pipeline.rank == 0 else range(5, 9)
    return PipelineStage(device, parallel, 8, 4, torch.float32, [*range(6 - num_aux, 8)], layers)


class GoingOn(ArithmeticModel):
    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, context: Any, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert given.any()
        return super().__call__(ids, positions, context)


def frame_of(step_id: int, num_tokens: int) -> Frame:
    frame = Frame(SchedulerOutput(step_id=step_id), ArithmeticModel())
    frame.inputs = ModelInputs(torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64))
    return frame


def send(stage: PipelineStage, step_id: int, hidden: torch.Tensor, num_tokens: int, aux: Any = ()) -> None:
    frame = frame_of(step_id, num_tokens)
    frame.all_hidden, frame.aux = hidden, dict(enumerate(aux))
    stage.send(frame)


def received(stage: PipelineStage, step_id: int, num_tokens: int) -> tuple[torch.Tensor, Any]:
    frame = frame_of(step_id, num_tokens)
    hidden = stage.place_hidden(frame.inputs).hidden
    assert hidden is not None
    stage.receive(frame)
    return hidden, list(frame.aux_received.values())


def test_hidden_states_and_outcomes_arrive_in_their_steps() -> None:
    first, last = stages()
    hidden = [torch.randn(size, 4) for size in (3, 5)]
    for step_id, sent in enumerate(hidden):
        send(first, step_id, sent, len(sent))
    for step_id, sent in enumerate(hidden):
        assert torch.equal(received(last, step_id, len(sent))[0], sent)
        last.send_outcome(step_id, StepOutcome(torch.full((2, 4), step_id)))
    for step_id in range(2):
        outcome = StepOutcome(torch.empty(2, 4, dtype=torch.int64))
        first.receive_outcome(step_id, outcome)
        assert outcome.table_RX.eq(step_id).all()


def test_hidden_states_are_asked_for_when_the_step_is_prepared_and_waited_for_when_it_runs() -> None:
    said: list[tuple[str, int]] = []

    class Asking(ThreadGroup):
        def start_receiving(self, tensor: torch.Tensor, source: int) -> Callable[[], torch.Tensor]:
            said.append(("ask", tensor.numel()))
            wait = super().start_receiving(tensor, source)

            def note() -> torch.Tensor:
                said.append(("wait", tensor.numel()))
                return wait()

            return note

    shared = SharedGroup(2)
    first, last = (stage(ParallelState(pipeline=Asking(rank, shared))) for rank in range(2))
    runner = make_runner(stage=last, model=GoingOn())
    batcher = batcher_of(runner)
    build = batcher.build

    def noted_build(*args: Any) -> InputBatch:
        said.append(("build", 0))
        return build(*args)

    batcher.build = noted_build  # type: ignore[method-assign]
    first.expect_hidden(3)
    send(first, 1, torch.ones(3, 4), 3)
    prompt = [5, 6, 7]
    message = SchedulerOutput(step_id=1, scheduled_new_reqs=[new_request("a", prompt)], num_scheduled_tokens={"a": 3})
    runner.execute_model(message)
    assert said == [("ask", 1), ("ask", 12), ("build", 0), ("wait", 1), ("wait", 12)]


def test_what_belongs_to_another_step_is_refused() -> None:
    first, last = stages()
    send(first, 3, torch.zeros(2, 4), 2)
    with pytest.raises(RanksDisagree, match="Stage 1 is at step 4, and stage 0 sent data of step 3"):
        received(last, 4, 2)
    last.send_outcome(4, StepOutcome(torch.zeros(1, 4, dtype=torch.int64)))
    with pytest.raises(RanksDisagree, match="Stage 0 is at step 3, and stage 1 sent data of step 4"):
        first.receive_outcome(3, StepOutcome(torch.zeros(1, 4, dtype=torch.int64)))


@pytest.mark.parametrize(("least", "num_aux"), [(None, 0), (None, 2), (6, 0)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_a_stage_send_a_part_each_and_those_of_the_next_have_all(
    ranks: int, least: int | None, num_aux: int
) -> None:
    """least: of tokens that are scattered between layers, and stay so: each rank's then are fewer than those.

    num_aux: hidden states of earlier layers that go with them.
    """
    hidden = [torch.randn(size, 4) for size in (1, 5, 6, 7)]
    in_stage, between = [SharedGroup(ranks) for _ in range(2)], [SharedGroup(2) for _ in range(ranks)]
    sent: list[list[int]] = [[] for _ in range(ranks)]

    class Between(ThreadGroup):
        sends_parts = True

        def __init__(self, rank: int, place: int) -> None:
            super().__init__(rank, between[place])
            self.place = place

        def send(self, tensor: torch.Tensor, destination: int) -> None:
            if tensor.is_floating_point():
                sent[self.place].append(len(tensor))
            super().send(tensor, destination)

    def run(rank: int) -> None:
        number, place = divmod(rank, ranks)
        tensor = ThreadGroup(place, in_stage[number])
        parallel = ParallelState(tensor=tensor, pipeline=Between(number, place), min_scattered_tokens=least)
        of_rank = stage(parallel, num_aux)
        assert len(of_rank.aux_here([])) == (num_aux if number == 0 else 2)
        for step_id, whole in enumerate(hidden):
            rows = scattered_rows(parallel, len(whole))
            own = whole if rows is None else rows.own(whole)
            if number == 0:
                send(of_rank, step_id, own, len(whole), [own * (2 + index) for index in range(num_aux)])
                continue
            hidden_TD, aux = received(of_rank, step_id, len(whole))
            assert torch.equal(hidden_TD, own)
            assert hidden_TD.data_ptr() == of_rank._received.data_ptr()
            for index, states in enumerate(aux):
                assert torch.equal(states, own * (2 + index))

    assert run_ranks(2 * ranks, run) == [None] * (2 * ranks)
    assert sent == [[-(-len(whole) // ranks) for whole in hidden for _ in range(1 + num_aux)]] * ranks

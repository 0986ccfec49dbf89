"""Owners of per-slot state that a plugin registers: every worker's runner has them, and the memory plan counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.contract import NewRequestData, RpcCall, feature
from penstock.contract.feature import Feature, register_feature
from penstock.device import Device
from penstock.errors import ConfigError
from penstock.kernels.bound_step import StepOutcome
from penstock.models.interface import ModelInputs
from penstock.runner.model_states import DecoderModelState
from penstock.runner.slot_owner import SlotOwner
from penstock.step.batch import InputBatch
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput
from penstock.worker.feature import WorkerServices
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import greedy, make_core, random_prompts, run

TABLE_BYTES = 1 << 20


class Noting(SlotOwner):
    step_inputs = (StepInput("notes", torch.float32, (4,)),)

    def __init__(self, device: Device) -> None:
        self.table = device.allocate(TABLE_BYTES)
        self.req_ids: list[str] = []
        self.num_commits = 0

    def add(self, slot: int, request: NewRequestData) -> None:
        self.req_ids.append(request.req_id)

    def commit(self, frame: Frame, outcome: StepOutcome) -> None:
        self.num_commits += 1


created: list[Noting] = []


def create(services: WorkerServices) -> Noting:
    created.append(Noting(services.device))
    return created[-1]


@pytest.fixture
def made() -> list[Noting]:
    created.clear()
    register_feature(Feature(name="noting", worker_side=create))
    return created


@pytest.mark.one_path(reason="counts an owner's steps, of which either path has as many")
def test_a_registered_owner_sees_requests_and_steps_and_changes_no_token(
    tmp_path: Path, made: list[Noting], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path)
    prompts = random_prompts((5, 21), VOCAB_SIZE)

    def serve() -> tuple[list[list[int]], int]:
        core = make_core(tmp_path, dtype="float32")
        (plan,) = core.collective_rpc(RpcCall("determine_available_memory"))
        results: list[Any] = run(core, prompts, greedy(6))
        core.close()
        return [result.tokens for result in results], plan["runner_state"]

    with_owner, planned = serve()
    serving = [owner for owner in made if owner.req_ids]
    assert [owner.req_ids for owner in serving] == [["r0", "r1"]]
    assert serving[0].num_commits >= 6
    monkeypatch.setattr(feature, "_registered", {})
    without, planned_without = serve()
    assert with_owner == without
    assert planned - planned_without >= TABLE_BYTES


class PlainInputs(DecoderModelState):
    """The inputs of a decoder, noted."""

    def __init__(self, services: WorkerServices) -> None:
        states.append(self)
        self.num_steps = 0

    def inputs(self, batch: InputBatch) -> ModelInputs:
        self.num_steps += 1
        return super().inputs(batch)


states: list[PlainInputs] = []


class OtherInputs(PlainInputs):
    """Another state."""


@pytest.mark.one_path(reason="counts calls, of which either path has some")
def test_a_feature_builds_the_inputs_of_the_model(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    states.clear()
    register_feature(Feature(name="inputs", model_state=PlainInputs))
    core = make_core(tmp_path, dtype="float32")
    run(core, random_prompts((5, 21), VOCAB_SIZE), greedy(6))
    core.close()
    assert any(state.num_steps > 1 for state in states)
    register_feature(Feature(name="other inputs", model_state=OtherInputs))
    with pytest.raises(ConfigError, match="inputs and other inputs both build the model's inputs"):
        make_core(tmp_path, dtype="float32")

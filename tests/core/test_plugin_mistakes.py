"""Mistakes in plugins raise errors that name them, and never change an answer or damage memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.plugins import connector, write_checkpoint
from core.plugins.connector import STORE
from penstock.attention import ForwardContext
from penstock.config import ModelConfig
from penstock.contract import feature
from penstock.contract.feature import Feature, register_feature
from penstock.errors import ConfigError, InvalidRequest, PenstockError
from penstock.kernels.norm import add_rms_norm
from penstock.kernels.rows import sum_rows
from penstock.models.config_fields import ConfigFields
from penstock.models.decoder import DecoderConfig, DecoderForCausalLM, DecoderLayer, DecoderModel, SelfAttention
from penstock.models.registry import register_model
from penstock.parallel import ParallelState
from penstock.runner.slot_owner import SlotOwner
from penstock.scheduler.feature import SchedulerFeature
from penstock.step.frame import Frame
from penstock.step.inputs import StepInput
from support.engines import Result, add, finish, greedy, make_core, run

RESULTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "one column": lambda hidden_TD: [hidden_TD[:, :1].clone()],
    "twice as wide": lambda hidden_TD: [torch.cat([hidden_TD, hidden_TD], 1)],
    "one row": lambda hidden_TD: [torch.cat([hidden_TD, hidden_TD])[: len(hidden_TD) + 1]],
    "float64": lambda hidden_TD: [hidden_TD.double()],
    "one too many": lambda hidden_TD: [hidden_TD.clone(), hidden_TD.clone()],
}
made = RESULTS["one column"]


class MistakenLayer(DecoderLayer):
    def forward(self, hidden_TD: Tensor, residual_TD: Tensor | None, rotation: Any, context: ForwardContext) -> Any:
        hidden_TD, residual_TD = super().forward(hidden_TD, residual_TD, rotation, context)
        (hidden_TD,) = context.opaque(self.compute, hidden_TD, widths=[64])
        return hidden_TD, residual_TD

    @staticmethod
    def compute(context: ForwardContext, hidden_TD: Tensor) -> list[Tensor]:
        return made(hidden_TD)


class Mistaken(DecoderForCausalLM):
    def __init__(self, model_config: ModelConfig, parallel: ParallelState) -> None:
        config = DecoderConfig.read(ConfigFields(model_config))

        def layer(index: int) -> DecoderLayer:
            attention = SelfAttention(config, index, parallel, qkv_bias=False, output_bias=False)
            return MistakenLayer(config, attention, parallel)

        super().__init__(config, parallel, DecoderModel(config, parallel, layer))


@pytest.mark.parametrize("mistake", RESULTS)
def test_results_of_an_opaque_operation_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    register_model("Mistaken", Mistaken)
    monkeypatch.setitem(globals(), "made", RESULTS[mistake])
    folder = write_checkpoint(tmp_path, "Mistaken")
    with pytest.raises(PenstockError, match=r"opaque operation .*compute.* returned .*; declared are \[\d+, 64\]"):
        make_core(folder, dtype="float32", max_restarts=0)


def test_an_opaque_operation_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="pass it at least one tensor of rows"):
        ForwardContext({}, ()).opaque(lambda context: [], widths=())


def test_rows_of_other_sizes_are_not_read_by_kernels() -> None:
    x_TD = torch.ones(4, 64)
    with pytest.raises(RuntimeError, match="size of tensor"):
        sum_rows(x_TD, torch.ones(4, 32))
    with pytest.raises(RuntimeError, match="size of tensor"):
        add_rms_norm(x_TD.clone(), torch.ones(4, 32), torch.ones(64), 1e-5)
    assert torch.equal(sum_rows(x_TD, torch.ones(1, 64)), torch.full((4, 64), 2.0))
    normed_TD, residual_TD = add_rms_norm(x_TD.clone(), torch.ones(4, 64, dtype=torch.float64), torch.ones(64), 1e-5)
    assert normed_TD.dtype is torch.float32
    assert torch.equal(residual_TD, torch.full((4, 64), 2.0))


class NamedLikePositions(SlotOwner):
    step_inputs = (StepInput("positions", torch.int64),)

    def has_work(self, *_: object) -> bool:
        return True

    def fill(self, frame: Frame) -> None:
        frame.inputs.named["positions"].fill_(7)


def make_named_like_positions(services: object) -> SlotOwner:
    return NamedLikePositions()


def test_a_step_input_with_a_name_of_the_models_own_is_refused() -> None:
    register_feature(Feature(name="positions", worker_side=make_named_like_positions))
    with pytest.raises((PenstockError, ValueError), match="names of the model's own inputs: positions"):
        make_core("demo")


class Raises(SchedulerFeature):
    def __init__(self, services: object) -> None: ...

    def request_added(self, request: object) -> None:
        raise RuntimeError("no such adapter")


def test_a_request_that_a_feature_refuses_does_not_run() -> None:
    register_feature(Feature(name="raises", scheduler_side=Raises))
    core = make_core("demo")
    with pytest.raises(RuntimeError, match="no such adapter"):
        add(core, "a", [5, 6, 7], greedy(4))
    assert not core.scheduler.holds("a")
    assert not core.has_unfinished_requests()
    core.close()


def test_the_id_of_a_request_is_free_when_its_transfer_is_over(tmp_path: Path) -> None:
    connector.register()
    folder, prompt = write_checkpoint(tmp_path, connector.ARCHITECTURE), list(range(5, 42))
    STORE.is_on, STORE.fails = True, False
    STORE.pages.clear()
    try:
        options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 256}
        core = make_core(folder, **options)
        expected = run(core, [prompt], greedy(8))[0].tokens
        core.step()
        core.close()
        core = make_core(folder, **options)
        add(core, "a", prompt, greedy(8))
        core.step()
        core.abort_requests(["a"])
        with pytest.raises(InvalidRequest, match="'a' are being transferred"):
            add(core, "a", prompt, greedy(8))
        run(core, [[5, 6, 7]], greedy(16))
        add(core, "a", prompt, greedy(8))
        results = {"a": Result()}
        finish(core, results, 200)
        assert results["a"].tokens == expected
        core.close()
    finally:
        STORE.is_on = False


def test_sides_without_a_name_are_refused_and_features_are_registered_once() -> None:
    before = len(feature._registered)
    for side in ({"worker_side": lambda services: None}, {"scheduler_side": lambda services: Raises(services)}):
        with pytest.raises(ConfigError, match="Register a function or a class of a module"):
            Feature(name="unnamed", **side)
    for _ in range(2):
        register_feature(Feature(name="positions", worker_side=make_named_like_positions))
    assert len(feature._registered) == before + 1


def test_two_features_of_one_name_are_refused() -> None:
    register_feature(Feature(name="positions", worker_side=make_named_like_positions))
    with pytest.raises(ConfigError, match="Two features are named 'positions'"):
        register_feature(Feature(name="positions", scheduler_side=Raises))

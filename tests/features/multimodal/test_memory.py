"""Memory of media in plans: what the encoder holds, and what its largest item takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from penstock.contract import RpcCall
from penstock.device.cpu import CpuDevice
from penstock.engine.planning.plan import plan_engine
from penstock.features.multimodal.memory import encode_dummy
from penstock.features.multimodal.worker import encoder_inputs, encoder_of
from penstock.layers.linear import weights_size_bytes
from penstock.worker.worker import Worker
from support.engines import SMALL, make_core
from support.multimodal_models import PROCESSORS, save_multimodal

pytestmark = pytest.mark.one_path(reason="plans")
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "encoder_cache_size": 100}
# Families with one size of items, or whose rows merge more positions than is known.
ONE_SIZE = ("llava", "qwen2-audio", "glmasr")


# Transformers' encoder of Audio Flamingo 3 reads values of its masks, which a plan does not have.
@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "audioflamingo3"])
def test_plans_name_what_the_encoder_takes(name: str, tmp_path: Path) -> None:
    save_multimodal(tmp_path, name)
    plan = plan_engine(tmp_path, **{**SMALL, **OPTIONS}).stages[0].memory
    core = make_core(tmp_path, **OPTIONS)

    def measure(worker: Any) -> tuple[int, int, int, int]:
        """Bytes of the encoder's weights and of its activations, and rows of its largest and its smallest item."""
        encoder, device = encoder_of(worker.get_model()), worker.own_device
        assert encoder is not None
        rows = []
        for most in (100, 1):
            item = encoder.dummy_item(most)
            rows.append(len(encoder.encode(item.modality, encoder_inputs(device, item.inputs))))
        with device.measure_peak() as peak, torch.no_grad():
            encode_dummy(worker._services, True)
        item = encoder.dummy_item(100)
        inputs = sum(array.nbytes for array in item.inputs.values() if array.dtype.kind == "f")
        return weights_size_bytes(encoder), peak.bytes_above_start + inputs, *rows

    ((weights, peak, largest, smallest),) = core.collective_rpc(RpcCall(measure))
    core.close()
    assert plan["encoder_weights"] == pytest.approx(weights, rel=0.05)
    # As much again is what the allocator keeps.
    assert plan["encoder_activations"] == pytest.approx(2 * peak, rel=0.1)
    assert smallest <= largest <= 100
    assert name in ONE_SIZE or largest > 60
    for line in ("encoder weights", "encoder cache", "encoder activations"):
        assert line in plan.table()


def test_no_memory_is_planned_for_an_encoder_that_is_not_loaded(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "smolvlm")
    plan = plan_engine(tmp_path, **{**SMALL, **OPTIONS, "language_model_only": True}).stages[0].memory
    assert plan["encoder_weights"] == plan["encoder_cache"] == plan["encoder_activations"] == 0


def test_the_encoder_cache_grows_with_its_size(tmp_path: Path) -> None:
    save_multimodal(tmp_path, "smolvlm")
    sizes = []
    for num_rows in (64, 128):
        plan = plan_engine(tmp_path, **{**SMALL, **OPTIONS, "encoder_cache_size": num_rows}).stages[0].memory
        sizes.append(plan["encoder_cache"])
    # Rows of 64 numbers in float32.
    assert sizes == [64 * 64 * 4, 128 * 64 * 4]


class CountingEncoder(Worker):
    """Notes the items that its encoder encodes before the first step."""

    num_rows: ClassVar[list[int]] = []

    def load_model(self) -> None:
        super().load_model()
        encoder: Any = encoder_of(self.get_model())
        encode = encoder.encode

        def counting(modality: str, inputs: Any) -> Any:
            features = encode(modality, inputs)
            self.num_rows.append(len(features))
            return features

        encoder.encode = counting


@pytest.mark.parametrize("compiles_kernels", [False, True])
def test_the_encoder_is_warmed_up_where_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles_kernels: bool
) -> None:
    save_multimodal(tmp_path, "smolvlm")
    monkeypatch.setattr(CpuDevice, "compiles_kernels", compiles_kernels)
    CountingEncoder.num_rows.clear()
    make_core(tmp_path, **OPTIONS, worker_cls=f"{__name__}.CountingEncoder").close()
    assert CountingEncoder.num_rows == [4] * compiles_kernels

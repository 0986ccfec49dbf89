"""Zero points at both ends of their range, negative scales, and layers that a checkpoint leaves in floating point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoints.quantized_checkpoint import read_quantized_checkpoint
from penstock.config import LoadConfig, ModelConfig
from penstock.layers.linear import LinearLayer, restore_weights
from penstock.layers.quantization.method import QuantizedMethod
from penstock.loader.loader import load_model
from penstock.loader.quantized.formats import format_of
from penstock.loader.quantized.grid import on_grid
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import load_config
from support.plain_attention import sequence_logits
from support.quantized_checkpoints import (
    W8A8,
    Array,
    Layer,
    Written,
    awq_layer,
    edit_tensors,
    float_weights,
    gptq_layer,
    int8_layer,
    pack_words,
    packed_layer,
    w4a16,
    write_quantized,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
GPTQ_V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FORMATS: dict[str, tuple[Callable[[str, Array], Layer], dict[str, Any]]] = {
    "gptq": (gptq_layer(32, desc_act=False), GPTQ),
    "gptq-v2": (gptq_layer(32, desc_act=False, version=2), GPTQ_V2),
    "awq": (awq_layer(32), AWQ),
    "w4a16": (packed_layer(32, symmetric=False), w4a16(symmetric=False)),
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def load(config: ModelConfig) -> CausalLM:
    return load_model(config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)


def logits_of(model: CausalLM) -> Tensor:
    return sequence_logits(model, [TOKENS])[0]


def check_against_twin(written: Written) -> None:
    """Compare the weights with the float twin's, and the logits up to the rounding of activations."""
    expected = logits_of(load(load_config(written.float_folder)))
    model = load(written.config)
    assert (logits_of(model) - expected).norm() < 0.06 * expected.norm()
    restore_weights(model)
    floats = float_weights(written.float_folder)
    for tensor, slot in model.checkpoint_slots().items():
        assert torch.equal(slot.target, floats[tensor]), tensor


@pytest.mark.parametrize("zero", [0, 15])
@pytest.mark.parametrize("name", FORMATS)
def test_groups_whose_weights_have_one_sign_have_a_zero_point_at_an_end(tmp_path: Path, name: str, zero: int) -> None:
    quantize, config = FORMATS[name]
    sign = 1 if zero == 0 else -1
    written = write_quantized(tmp_path, lambda layer, weight: quantize(layer, sign * np.abs(weight)), config)
    check_against_twin(written)


@pytest.mark.parametrize("name", ["gptq", "gptq-v2", "awq"])
def test_a_weight_is_its_integer_less_the_zero_point_times_the_scale(name: str) -> None:
    """All zero points, beside each other in a word, and scales of both signs, as AutoRound writes them."""
    generator = np.random.default_rng(7)
    values, zeros = generator.integers(0, 16, (64, 64)), generator.integers(0, 16, (64, 2))
    zeros[:, 0] = np.tile([0, 0, 15, 15, 0, 15, 1, 0], 8)
    scales = (generator.standard_normal((64, 2)) / 8).astype(np.float16)
    expected = (values - zeros[:, np.arange(64) // 32]) * scales.astype(np.float32)[:, np.arange(64) // 32]
    stored = pack_words(zeros.T, AWQ_ORDER) if name == "awq" else pack_words(zeros.T)
    if name == "gptq":
        stored = (stored.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    tensors = {
        "qweight": pack_words(values.T, AWQ_ORDER) if name == "awq" else pack_words(values).T.copy(),
        "qzeros": stored,
        "scales": scales.T.copy(),
    }
    checkpoint = read_quantized_checkpoint({"quantization_config": FORMATS[name][1]}, "some/model")
    assert checkpoint is not None
    integers, grid = format_of(checkpoint).read("layer", {key: torch.from_numpy(one) for key, one in tensors.items()})
    weight = on_grid(integers, grid)
    assert np.array_equal(weight.numpy(), expected.astype(np.float32))
    rounded = grid.round(weight)
    assert torch.equal(rounded.values_OI.to(torch.uint8), integers)


def leave_in_float(written: Written, wanted: Callable[[str], bool]) -> None:
    """Put the float twin's weight in place of the integers of some layers."""
    floats = {name: weight for name, weight in float_weights(written.float_folder).items() if wanted(name)}

    def change(tensors: dict[str, Any]) -> None:
        layers = [name.removesuffix(".weight") for name in floats if name.endswith("_proj.weight")]
        for name in [name for name in tensors if name.rpartition(".")[0] in layers]:
            del tensors[name]
        tensors.update({f"{layer}.weight": floats[f"{layer}.weight"].numpy() for layer in layers})

    assert floats
    edit_tensors(written.config.folder, change)


@pytest.mark.parametrize(
    ("ignore", "is_float"),
    [
        (["lm_head", "re:.*down_proj"], lambda name: "down_proj" in name),
        (["re:.*lm_head", r"re:model\.layers\.0\..*"], lambda name: "layers.0." in name),
        (["lm_head", "model.layers.1.self_attn.o_proj"], lambda name: "layers.1.self_attn.o_proj" in name),
    ],
    ids=["by a pattern", "a whole block by a pattern", "by its name"],
)
@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_layers_that_are_ignored_and_stored_in_float_stay_so(
    tmp_path: Path, name: str, ignore: list[str], is_float: Callable[[str], bool]
) -> None:
    quantize, config = (int8_layer, W8A8) if name == "w8a8" else FORMATS[name]
    written = write_quantized(tmp_path, quantize, {**config, "ignore": ignore})
    leave_in_float(written, is_float)
    check_against_twin(written)
    for layer, module in load(written.config).named_modules():
        if isinstance(module, LinearLayer) and "_proj" in layer:
            assert isinstance(module.method, QuantizedMethod) != is_float(layer), layer

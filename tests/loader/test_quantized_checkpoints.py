"""Checkpoints of integers give the weights that they stand for, and models that compute with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import LLM
from penstock.attention import NO_CONTEXT
from penstock.checkpoints.quantized_checkpoint import read_quantized_checkpoint
from penstock.config import LoadConfig, ModelConfig
from penstock.contract import RpcCall
from penstock.errors import CheckpointError, ConfigError, ModelError, PenstockError, UnsupportedFeature
from penstock.kernels.native import NATIVE
from penstock.kernels.quantized import GROUP_MULTIPLE, quantize_rows
from penstock.layers.linear import LinearLayer, restore_weights
from penstock.layers.quantization.method import QuantizedMethod, ReorderedMethod
from penstock.loader.loader import load_model
from penstock.loader.quantized.formats import format_of
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import edit_config, load_config
from support.engines import greedy, make_core, random_prompts, run
from support.plain_attention import sequence_logits
from support.quantized_checkpoints import (
    W8A8,
    Written,
    awq_layer,
    edit_tensors,
    float_weights,
    gptq_layer,
    int8_layer,
    pack_words,
    packed_layer,
    torchao_config,
    torchao_int4_layer,
    torchao_int8_layer,
    w4a16,
    write_quantized,
)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT4 = {"_type": "torch.dtype", "_data": "int4"}
FORMATS = {
    "gptq": (gptq_layer(32, desc_act=False), GPTQ),
    "gptq-one-group": (gptq_layer(64, desc_act=False), {**GPTQ, "group_size": 64}),
    "gptq-v2": (gptq_layer(32, desc_act=False, version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq-desc-act": (gptq_layer(32, desc_act=True), {**GPTQ, "desc_act": True}),
    "awq": (awq_layer(32), AWQ),
    "w4a16": (packed_layer(32, symmetric=True), w4a16()),
    "w4a16-zero-points": (packed_layer(32, symmetric=False), w4a16(symmetric=False)),
    "w4a16-actorder": (packed_layer(32, symmetric=True, reordered=True), w4a16(actorder="group")),
    "w8a8": (int8_layer, W8A8),
    "torchao-int8": (torchao_int8_layer, torchao_config("Int8DynamicActivationInt8WeightConfig")),
    "torchao-int4": (torchao_int4_layer, torchao_config("IntxWeightOnlyConfig", weight_dtype=INT4)),
}
# What rounding activations to 8 bits costs in two layers of random weights; wrong weights cost more than the whole.
LOGITS_TOLERANCE = 0.06


def write(folder: Path, name: str, **overrides: Any) -> Written:
    quantize, config = FORMATS[name]
    return write_quantized(folder, quantize, config, **overrides)


def load(config: ModelConfig, load_format: str = "auto") -> CausalLM:
    return load_model(config, LoadConfig(load_format=load_format), ParallelState(), torch.device("cpu"), torch.float32)


def logits_of(model: CausalLM) -> Tensor:
    return sequence_logits(model, [TOKENS])[0]


def methods_of(model: CausalLM) -> dict[str, str]:
    return {
        name: type(module.method).__name__ for name, module in model.named_modules() if isinstance(module, LinearLayer)
    }


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_those_that_the_integers_stand_for(tmp_path: Path, name: str) -> None:
    written = write(tmp_path, name)
    model = load(written.config)
    restore_weights(model)
    expected = float_weights(written.float_folder)
    for tensor, slot in model.checkpoint_slots().items():
        assert torch.equal(slot.target, expected[tensor]), tensor


@pytest.mark.one_case_quick
@pytest.mark.parametrize("name", FORMATS)
def test_the_logits_are_those_of_the_float_twin_up_to_the_rounding_of_activations(tmp_path: Path, name: str) -> None:
    written = write(tmp_path, name)
    expected = logits_of(load(load_config(written.float_folder)))
    difference = logits_of(load(written.config)) - expected
    assert difference.norm() < LOGITS_TOLERANCE * expected.norm()


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a8"])
def test_a_massive_input_costs_only_its_group_of_32_precision(tmp_path: Path, name: str) -> None:
    layer = load(write(tmp_path, name).config).get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer, LinearLayer)
    assert isinstance(layer.method, QuantizedMethod)
    (packed_OI, *_) = layer.method.kept
    weight_OI = layer.method.unpack(packed_OI, layer.output_size)
    x_TI = torch.randn(5, layer.input_size, generator=torch.Generator().manual_seed(1))
    x_TI[:, 40] = 1000.0
    values_TI, scales_TG = quantize_rows(x_TI)
    rounded_TI = values_TI * scales_TG.repeat_interleave(GROUP_MULTIPLE, dim=1)
    assert (rounded_TI - x_TI)[:, :GROUP_MULTIPLE].abs().max() < 0.02
    torch.testing.assert_close(layer(x_TI, NO_CONTEXT), rounded_TI @ weight_OI.T, rtol=1e-4, atol=1e-3)


def test_projections_are_kept_as_integers_and_what_the_checkpoint_has_as_float_is_not(tmp_path: Path) -> None:
    methods = methods_of(load(write(tmp_path, "gptq").config))
    head = methods.pop("lm_head")
    assert set(methods.values()) == {QuantizedMethod.__name__}
    assert head != QuantizedMethod.__name__
    reordered = methods_of(load(write(tmp_path / "desc_act", "gptq-desc-act").config))
    assert set(reordered.values()) - {head} == {ReorderedMethod.__name__}


@pytest.mark.parametrize(
    ("family", "name"), [("qwen2", "gptq"), ("qwen3", "awq"), ("phi3", "w8a8"), ("gemma2", "w4a16")]
)
def test_other_families_load_too(tmp_path: Path, family: str, name: str) -> None:
    written = write(tmp_path, name, family=family)
    expected = logits_of(load(load_config(written.float_folder)))
    assert (logits_of(load(written.config)) - expected).norm() < 2 * LOGITS_TOLERANCE * expected.norm()


@pytest.mark.parametrize("name", ["gptq-desc-act", "w8a8"])
def test_an_engine_serves_it_reloads_it_and_saves_its_state(tmp_path: Path, name: str) -> None:
    written = write(tmp_path, name)
    core = make_core(written.config.folder)
    prompts = random_prompts([3, 9, 20], 97)
    before = [result.tokens for result in run(core, prompts, greedy(6))]
    core.collective_rpc(RpcCall("reload_weights"))
    assert [result.tokens for result in run(core, prompts, greedy(6))] == before
    core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "state"),)))
    again = make_core(tmp_path / "state", load_format="sharded_state")
    assert [result.tokens for result in run(again, prompts, greedy(6))] == before


def test_random_weights_are_rounded_to_as_many_bits(tmp_path: Path) -> None:
    model = load(write(tmp_path, "w8a8").config, load_format="dummy")
    assert set(methods_of(model).values()) == {QuantizedMethod.__name__}


def test_groups_must_be_as_large_as_the_configuration_says(tmp_path: Path) -> None:
    written = write(tmp_path, "gptq")
    config = edit_config(written.config.folder, quantization_config={**GPTQ, "group_size": 64})
    with pytest.raises(CheckpointError, match=r"qzeros is torch\.int32 \[4, 8\].*means torch\.int32 \[2, 8\]"):
        load(config)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    written = write(tmp_path, "awq")
    edit_tensors(written.config.folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.scales"):
        load(written.config)


def test_an_order_of_inputs_that_is_none_is_refused(tmp_path: Path) -> None:
    written = write(tmp_path, "gptq-desc-act")

    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.o_proj.g_idx"] = np.zeros(64, dtype=np.int32)

    edit_tensors(written.config.folder, spoil)
    with pytest.raises(CheckpointError, match=r"o_proj\.g_idx does not give 32 inputs to each group"):
        load(written.config)


def test_layers_that_are_computed_together_must_be_ordered_alike(tmp_path: Path) -> None:
    written = write(tmp_path, "gptq-desc-act")

    def spoil(tensors: dict[str, Any]) -> None:
        name = "model.layers.0.self_attn.k_proj.g_idx"
        tensors[name] = tensors[name][::-1]

    edit_tensors(written.config.folder, spoil)
    with pytest.raises(UnsupportedFeature, match=r"k_proj and .*q_proj are computed together"):
        load(written.config)


def test_a_layer_that_is_quantised_in_part_is_refused(tmp_path: Path) -> None:
    written = write(tmp_path, "awq")
    name = "model.layers.0.mlp.up_proj"
    weight = float_weights(written.float_folder)[f"{name}.weight"].numpy()

    def spoil(tensors: dict[str, Any]) -> None:
        for kind in ("qweight", "qzeros", "scales"):
            del tensors[f"{name}.{kind}"]
        tensors[f"{name}.weight"] = weight

    edit_tensors(written.config.folder, spoil)
    with pytest.raises(UnsupportedFeature, match=r"gate_proj: quantized, while what is computed together"):
        load(written.config)


@pytest.mark.parametrize("version", [1, 2])
def test_any_zero_point_of_gptq_is_read(version: int) -> None:
    """The first version subtracts a one from each number of a word at once, and a zero borrows from the next."""
    generator = np.random.default_rng(3)
    values, zeros = generator.integers(0, 16, (64, 64)), generator.integers(0, 16, (64, 2))
    words = pack_words(zeros.T)
    if version == 1:
        words = (words.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    config = {**GPTQ, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    checkpoint = read_quantized_checkpoint({"quantization_config": config}, "some/model")
    assert checkpoint is not None
    tensors = {
        "qweight": torch.from_numpy(pack_words(values).T.copy()),
        "qzeros": torch.from_numpy(words),
        "scales": torch.ones(2, 64),
    }
    read, grid = format_of(checkpoint).read("layer", tensors)
    assert np.array_equal(read.numpy(), values)
    assert grid.minimums_OG is not None
    assert np.array_equal((grid.minimums_OG / -grid.scales_OG).round().numpy(), zeros)


def test_biases_of_zeros_that_a_model_has_no_place_for_are_left_out(tmp_path: Path) -> None:
    """Some tools write one for each layer."""
    written = write(tmp_path, "gptq")
    expected = logits_of(load(written.config))
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(written.config.folder, lambda tensors: tensors.update({name: np.zeros(64, dtype=np.float16)}))
    assert torch.equal(logits_of(load(written.config)), expected)
    edit_tensors(written.config.folder, lambda tensors: tensors.update({name: np.ones(64, dtype=np.float16)}))
    with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
        load(written.config)


def test_biases_that_a_model_has_are_loaded_even_if_they_are_zero(tmp_path: Path) -> None:
    written = write(tmp_path, "gptq", family="qwen2")

    def clear(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"][:] = 0

    edit_tensors(written.config.folder, clear)
    edit_tensors(written.float_folder, clear)
    expected = logits_of(load(load_config(written.float_folder)))
    assert (logits_of(load(written.config)) - expected).norm() < 2 * LOGITS_TOLERANCE * expected.norm()


@pytest.mark.skipif(NATIVE is None, reason="weights are kept in a narrower dtype by the C++ kernels only")
@pytest.mark.parametrize("ties", [False, True])
def test_what_stays_in_floating_point_is_kept_in_the_dtype_of_weights(tmp_path: Path, ties: bool) -> None:
    written = write(tmp_path, "gptq", tie_word_embeddings=ties)

    def halve(tensors: dict[str, Any]) -> None:
        tensors.update({name: one.astype(np.float16) for name, one in tensors.items() if one.dtype == np.float32})

    edit_tensors(written.config.folder, halve)
    wide = load(written.config)
    narrow = load_model(
        written.config, LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32, torch.float16
    )
    heads = [model.get_submodule("lm_head") for model in (wide, narrow)]
    packed = [head.method.packed_OI for head in heads if isinstance(head, LinearLayer)]  # type: ignore[union-attr]
    assert [one.dtype for one in packed] == [torch.float32, torch.float16]
    assert torch.equal(logits_of(narrow), logits_of(wide))


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    written = write(tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"quantization='int8'.*quantized already"):
        LLM(str(written.config.folder), quantization="int8")


def w8a8_with(**changes: Any) -> dict[str, Any]:
    group = W8A8["config_groups"]["group_0"]
    return {**W8A8, "config_groups": {"group_0": {**group, **changes}}}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            UnsupportedFeature,
            "bitsandbytes.*compressed-tensors, gptq, awq, torchao, fp8",
        ),
        ({**GPTQ, "bits": 3}, UnsupportedFeature, "quantization_config.bits=3.*Supported: 4"),
        ({**GPTQ, "bits": 8}, UnsupportedFeature, "quantization_config.bits=8"),
        ({**GPTQ, "group_size": 48}, UnsupportedFeature, "group_size=48.*multiple of 32"),
        ({**GPTQ, "checkpoint_format": "marlin"}, UnsupportedFeature, "checkpoint_format='marlin'.*gptq or gptq_v2"),
        ({**GPTQ, "dynamic": {"x": {}}}, UnsupportedFeature, "dynamic"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}, "+:x": {"bits": 8}}}, UnsupportedFeature, "dynamic"),
        ({**AWQ, "version": "gemv"}, UnsupportedFeature, "version='gemv'.*gemm"),
        ({**W8A8, "format": "float-quantized"}, UnsupportedFeature, "weights.type='int'.*Supported: float"),
        ({**W8A8, "format": "naive-quantized"}, UnsupportedFeature, "format='naive-quantized'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, UnsupportedFeature, "fmt='e5m2'.*e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, UnsupportedFeature, "weight_block_size=.*two integers"),
        ({**W8A8, "kv_cache_scheme": {"num_bits": 8}}, UnsupportedFeature, "kv_cache_scheme"),
        ({**W8A8, "config_groups": {}}, UnsupportedFeature, "config_groups"),
        ({**W8A8, "sparsity_config": {"format": "24"}}, UnsupportedFeature, "sparsity_config.format='24'"),
        (w8a8_with(input_activations=None), UnsupportedFeature, "group_0.input_activations=None"),
        (
            w8a8_with(input_activations={"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}),
            UnsupportedFeature,
            "input_activations.dynamic=False",
        ),
        (w4a16(48), UnsupportedFeature, "weights.group_size=48"),
        (torchao_config("Int4WeightOnlyConfig"), UnsupportedFeature, "default._type='Int4WeightOnlyConfig'"),
        (torchao_config("IntxWeightOnlyConfig", weight_dtype={"_data": "int2"}), UnsupportedFeature, "'int2'.*int4"),
        ("gptq", ModelError, "quantization_config='gptq'.*must be an object"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(config: Any, error: type[PenstockError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_quantized_checkpoint({"quantization_config": config}, "some/model")


def test_layers_that_gptq_leaves_in_floating_point_may_be_named() -> None:
    config = {**GPTQ, "dynamic": {"-:.*mlp.gate": {}}}
    assert read_quantized_checkpoint({"quantization_config": config}, "some/model") is not None

"""Weight quantisation, and layers and models with quantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock import LLM, SamplingParams
from penstock.attention import NO_CONTEXT
from penstock.errors import ConfigError
from penstock.kernels.native.quantized import NativeQuantizedProducts
from penstock.kernels.quantized import TorchQuantizedProducts
from penstock.layers.embedding import LMHead, VocabEmbedding
from penstock.layers.linear import (
    LinearLayer,
    PlainMethod,
    process_weights_after_loading,
    restore_weights,
    weights_size_bytes,
)
from penstock.layers.mlp import GatedMLP
from penstock.layers.parallel_linear import ColumnParallelLinear
from penstock.layers.quantization.method import PRODUCTS, QuantizedMethod, choose_method
from penstock.layers.quantization.quantize import quantize_int4, quantize_int4_residual, quantize_int8, round_to_int4
from penstock.parallel import ParallelState

ONE_RANK = ParallelState()
SMALL = {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24, "device": "cpu", "num_threads": 1}


def random_layer(input_size: int, output_size: int, *, bias: bool = True) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(input_size, output_size, bias=bias, parallel=ONE_RANK)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_is_quantised_in_several_parts_has_the_values_of_each_row_alone(dtype: torch.dtype) -> None:
    weight_OI = torch.randn(700, 1001).to(dtype)
    for quantize in (quantize_int8, quantize_int4):
        whole = quantize(weight_OI)
        for rows in (slice(3), slice(250, 300), slice(699, 700)):
            some = quantize(weight_OI[rows])
            assert torch.equal(some.values_OI, whole.values_OI[rows])
            assert torch.equal(some.scales_OG, whole.scales_OG[rows])


@pytest.mark.parametrize("inputs", [1, 2, 99, 100])
def test_8_bits_are_within_half_a_step_of_the_weight_and_use_the_whole_range(inputs: int) -> None:
    weight_OI = torch.randn(30, inputs)
    weight_OI[7] = 0
    rounded = quantize_int8(weight_OI)
    scales_OI = rounded.scales_OG.repeat_interleave(32, dim=1)[:, :inputs]
    assert ((rounded.dequantize() - weight_OI).abs() <= scales_OI * 0.5001).all()
    largest = [group.abs().amax(dim=1) for group in rounded.values_OI.split(32, dim=1)]
    assert (torch.stack(largest)[:, :7] == 127).all()
    assert (rounded.dequantize()[7] == 0).all()


@pytest.mark.parametrize("inputs", [20, 128, 300])
def test_4_bits_are_closer_to_the_weight_than_the_full_range_of_each_group(inputs: int) -> None:
    weight_OI = torch.randn(40, inputs)
    rounded = quantize_int4(weight_OI, 128)
    groups = weight_OI.split(128, dim=1)
    low = torch.stack([group.amin(dim=1).clamp(max=0) for group in groups], dim=1)
    high = torch.stack([group.amax(dim=1).clamp(min=0) for group in groups], dim=1)
    scales = (high - low) / 15
    plain = round_to_int4(weight_OI, scales, (-low / scales).round().to(torch.uint8), 128)
    assert (rounded.dequantize() - weight_OI).norm() < (plain.dequantize() - weight_OI).norm()
    assert rounded.shape.num_groups == len(groups)
    assert rounded.values_OI.min() >= 0
    assert rounded.values_OI.max() <= 15


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_4_bits_hold_groups_of_one_sign_and_of_nothing(sign: float) -> None:
    weight_OI = sign * (torch.rand(10, 64) + 0.5)
    error = (quantize_int4(weight_OI, 32).dequantize() - weight_OI).norm()
    assert error <= 0.05 * weight_OI.norm()


@pytest.mark.parametrize(("quantization", "bytes_per_weight", "error"), [("int8", 1.125, 0.02), ("int4", 0.66, 0.15)])
def test_a_layer_keeps_its_weight_as_integers_only(quantization: str, bytes_per_weight: float, error: float) -> None:
    layer = random_layer(512, 256)
    x_TI = torch.randn(5, 512)
    expected = layer(x_TI, NO_CONTEXT)
    process_weights_after_loading(layer, choose_method(quantization))
    assert isinstance(layer.method, QuantizedMethod)
    assert layer.weight.numel() == 0
    assert weights_size_bytes(layer) < 512 * 256 * bytes_per_weight * 1.01
    assert (layer(x_TI, NO_CONTEXT) - expected).norm() < error * expected.norm()


def test_restoring_gives_the_rounded_weight_back() -> None:
    layer = random_layer(96, 40)
    weight = layer.weight.detach().clone()
    process_weights_after_loading(layer, choose_method("int4"))
    restore_weights(layer)
    assert torch.equal(layer.weight, quantize_int4(weight).dequantize())
    assert isinstance(layer.method, PlainMethod)


def tied_head(vocab_size: int, hidden_size: int) -> tuple[VocabEmbedding, LMHead]:
    embedding = VocabEmbedding(vocab_size, hidden_size, parallel=ONE_RANK)
    embedding.weight.data.normal_()
    return embedding, LMHead(vocab_size, hidden_size, parallel=ONE_RANK, tied_to=embedding)


def test_an_embedding_reads_its_rows_in_the_integers_of_the_head_that_it_is_tied_to() -> None:
    embedding, head = tied_head(110, 64)
    rounded = quantize_int8(embedding.weight.detach()).dequantize()
    model = nn.ModuleList([embedding, head])
    process_weights_after_loading(model, choose_method("int8"))
    ids = torch.tensor([0, 5, 109, 17, 5])
    assert torch.equal(embedding(ids, NO_CONTEXT), rounded[ids])
    # Rows fill panels, of 32 at most, and have two scales.
    assert weights_size_bytes(model) <= 128 * (64 + 2 * 4)


def test_a_tied_head_of_4_bits_has_4_more_for_the_rows_of_the_embedding() -> None:
    embedding, head = tied_head(2100, 200)
    weight = embedding.weight.detach().clone()
    x_LI = torch.randn(3, 200)
    process_weights_after_loading(head, choose_method("int4"))
    alone = random_layer(200, 2100)
    alone.weight.data.copy_(weight)
    alone.bias = None
    process_weights_after_loading(alone, choose_method("int4"))
    assert torch.equal(head(x_LI, NO_CONTEXT), alone(x_LI, NO_CONTEXT))
    ids = torch.tensor([0, 5, 2099, 17, 5])
    error = (embedding(ids, NO_CONTEXT) - weight[ids]).norm()
    assert error < 0.015 * weight[ids].norm()
    assert error < 0.15 * (quantize_int4(weight[ids]).dequantize() - weight[ids]).norm()
    if isinstance(PRODUCTS, NativeQuantizedProducts):
        # Of 200 inputs 224, in seven groups, and up to two cache lines for each panel.
        width = PRODUCTS.panel_width
        most_bytes = 2 * -(-2100 // width) * (width * (112 + 7 * 4) + 2 * 64)
        assert weights_size_bytes(nn.ModuleList([embedding, head])) <= most_bytes
    restore_weights(head)
    assert torch.equal(embedding(ids, NO_CONTEXT), embedding.weight[ids])
    assert (embedding.weight - weight).norm() < 0.015 * weight.norm()


def test_what_4_bits_have_left_over_is_rounded_part_by_part() -> None:
    weight_OI = torch.randn(2100, 200)
    rounded = quantize_int4(weight_OI)
    rest = quantize_int4(weight_OI - rounded.dequantize())
    assert torch.equal(quantize_int4_residual(weight_OI, rounded).dequantize(), rest.dequantize())


def test_the_residual_has_scales_of_the_size_of_the_weight_s() -> None:
    # Its minimums are beyond float16, those of its residual are not; both are read alike.
    weight_OI = torch.randn(40, 64) * 1e6
    rounded = quantize_int4(weight_OI)
    assert rounded.shape.scale_bytes == 4
    assert quantize_int4_residual(weight_OI, rounded).shape == rounded.shape
    embedding, head = tied_head(40, 64)
    head.weight.data.copy_(weight_OI)
    process_weights_after_loading(head, choose_method("int4"))
    ids = torch.tensor([0, 39, 7])
    assert (embedding(ids, NO_CONTEXT) - weight_OI[ids]).norm() < 0.015 * weight_OI[ids].norm()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [1.0, 1e9, torch.nan, torch.inf])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_layer_is_quantised_as_specified(quantization: str, value: float, is_tied: bool) -> None:
    layer = tied_head(70, 96)[1] if is_tied else random_layer(96, 70)
    weight_OI = layer.weight.data
    weight_OI[9, 40] = value
    process_weights_after_loading(layer, choose_method(quantization))
    expected = (quantize_int8 if quantization == "int8" else quantize_int4)(weight_OI)
    method = layer.method
    assert isinstance(method, QuantizedMethod)
    assert method.shape == expected.shape
    assert torch.equal(method.kept[0], PRODUCTS.pack(expected))
    if len(method.kept) == 2:
        assert torch.equal(method.kept[1], PRODUCTS.pack(quantize_int4_residual(weight_OI, expected)))


def test_an_embedding_gives_rows_of_integers_in_the_dtype_that_the_model_computes_in() -> None:
    embedding, head = tied_head(50, 64)
    for module in (embedding, head):
        module.to(torch.bfloat16)
        module.compute_dtype = torch.bfloat16
    process_weights_after_loading(head, choose_method("int8"))
    assert embedding.lookup is not None
    assert embedding(torch.tensor([3, 49]), NO_CONTEXT).dtype is torch.bfloat16


def test_other_dtypes_are_computed_in_float32_and_keep_theirs() -> None:
    layer = random_layer(64, 40)
    weight, bias = layer.weight.detach().clone(), layer.bias
    x_TI = torch.randn(3, 64).bfloat16()
    layer.to(torch.bfloat16)
    process_weights_after_loading(layer, choose_method("int8"))
    assert bias is not None
    assert layer(x_TI, NO_CONTEXT).dtype is torch.bfloat16
    expected = x_TI.float() @ weight.T + bias
    assert (layer(x_TI, NO_CONTEXT).float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_shipped_model_generates_the_same_with_and_without_kernels(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens() -> list[list[int]]:
        with LLM("demo", quantization=quantization, quantization_calibration="none", **SMALL) as llm:
            outputs = llm.generate(["ROMEO:", "What is"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with_kernels = tokens()
    monkeypatch.setattr(QuantizedMethod.__init__, "__defaults__", (TorchQuantizedProducts(),))
    assert tokens() == with_kernels


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_request_gets_the_same_log_probabilities_alone_and_among_others(quantization: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    prompts = [[1, *range(5, 5 + length)] for length in (3, 20, 41, 7, 1)]
    options = {"quantization": quantization, "quantization_calibration": "none", "max_num_batched_tokens": 32}
    with LLM("demo", **options, **SMALL) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, expected in zip(prompts, together, strict=True):
            llm.reset_prefix_cache()
            (alone,) = llm.generate([prompt], params, use_tqdm=False)
            assert alone.outputs[0].logprobs == expected.outputs[0].logprobs


def quantized_layers(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, LinearLayer) and isinstance(module.method, QuantizedMethod)
    ]


def test_weights_are_reloaded_quantised_and_their_state_is_saved(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    with LLM("demo", quantization="int8", **SMALL) as llm:
        before = llm.generate(["ROMEO:"], params, use_tqdm=False)[0].outputs[0].token_ids
        llm.collective_rpc("reload_weights")
        (layers,) = llm.apply_model(quantized_layers)
        assert len(layers) == 6 * 4 + 1
        assert llm.generate(["ROMEO:"], params, use_tqdm=False)[0].outputs[0].token_ids == before
        llm.collective_rpc("save_sharded_state", args=(str(tmp_path / "state"),))
    with LLM(str(tmp_path / "state"), load_format="sharded_state", **SMALL) as again:
        assert again.generate(["ROMEO:"], params, use_tqdm=False)[0].outputs[0].token_ids == before
    with pytest.raises(ConfigError, match="quantization='int4' is not valid for packed weights"):
        LLM(str(tmp_path / "state"), load_format="sharded_state", quantization="int4", **SMALL)


def test_an_unknown_quantization_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"quantization='int3' is not valid\. Allowed: int8, int4"):
        LLM("demo", quantization="int3")


def test_int4_keeps_layers_with_massive_inputs_in_int8_on_a_cpu() -> None:
    mlp = GatedMLP(64, 128, bias=False, parallel=ParallelState())
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.take_weight(torch.randn(layer.output_size, layer.input_size))
    process_weights_after_loading(mlp, choose_method("int4"))
    assert mlp.gate_up_proj.method.description == "QuantizedMethod, 4 bits in groups of 32 with minimums"
    assert mlp.down_proj.method.description == "QuantizedMethod, 8 bits in groups of 32"

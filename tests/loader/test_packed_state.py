"""A packed state restores a model with the same bits, and says what it is not for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from penstock.config import ModelConfig
from penstock.device.operator_sizes import META
from penstock.errors import CheckpointError, ConfigError, UnsupportedFeature
from penstock.kernels.native import available_instruction_sets, load_native_kernels
from penstock.kernels.native.quantized import native_quantized_products
from penstock.layers import linear
from penstock.layers.quantization import method
from penstock.layers.tensors_of import tensors_of
from penstock.loader import packed_header, packed_state
from penstock.loader.loader import restore
from penstock.loader.packed_files import metadata_of, peek_state, read_header, read_state, write_tensors
from penstock.loader.packed_header import HEADER
from penstock.loader.packed_state import PackedState
from penstock.loader.quantized import assembly
from penstock.loader.weight_files import WeightFiles
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import tiny_checkpoint, tiny_model
from support.encoder_decoders import write_encoder_decoder
from support.gguf_files import write_gguf
from support.multimodal_models import save_multimodal
from support.mxfp4_checkpoints import write_mxfp4
from support.packed_headers import content_of
from support.quantized_checkpoints import write_quantized
from support.weight_formats import LOAD, QUANTIZED, family_cases, load

CPU = torch.device("cpu")


def written(model: CausalLM, config: ModelConfig, path: Path, dtype: str = "float32") -> WeightFiles:
    state = PackedState.of(model, config, "cpu", ("float32", dtype))
    write_tensors(path, state.tensors, metadata_of(state))
    return WeightFiles((path,))


def restored(files: WeightFiles, config: ModelConfig, weights: torch.dtype = torch.float32) -> CausalLM:
    header = read_header(files)
    assert header is not None
    return restore(read_state(files, header), config, ParallelState(), "cpu", CPU, torch.float32, weights)


def described(model: CausalLM) -> list[Any]:
    return [
        (one.path, one.tensor.dtype, one.tensor.shape, one.tensor.stride(), one.is_weight) for one in tensors_of(model)
    ]


def check(config: ModelConfig, tmp_path: Path, weights: torch.dtype = torch.float32) -> None:
    model = load(config, weights) if weights is torch.float32 else load_narrow(config, weights)
    files = written(model, config, tmp_path / "state.safetensors")
    again = restored(files, config, weights)
    assert described(again) == described(model)
    for one, other in zip(tensors_of(again), tensors_of(model), strict=True):
        assert torch.equal(bits(one.tensor), bits(other.tensor)), one.path
    methods = [
        [repr(vars(module.get_submodule(name)).get("method").__class__) for name, _ in module.named_modules()]
        for module in (model, again)
    ]
    assert methods[0] == methods[1]
    header = read_header(files)
    assert header is not None
    unloaded = restore(peek_state(files, header), config, ParallelState(), "cpu", META, torch.float32, weights)
    assert [one[:3] for one in described(unloaded)] == [one[:3] for one in described(model)]


def load_narrow(config: ModelConfig, weights: torch.dtype) -> CausalLM:
    from penstock.loader.loader import load_model

    return load_model(config, LOAD, ParallelState(), CPU, torch.float32, weights)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(("family", "quantization"), family_cases())
def test_families(family: str, quantization: str | None, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    check(ModelConfig.load(str(tmp_path), quantization=quantization), tmp_path)


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantized_checkpoints(form: str, tmp_path: Path) -> None:
    quantize, config = QUANTIZED[form]
    check(write_quantized(tmp_path, quantize, config).config, tmp_path)


def test_mxfp4(tmp_path: Path) -> None:
    check(write_mxfp4(tmp_path)[0], tmp_path)


def test_gguf(tmp_path: Path) -> None:
    model = tiny_model("llama", intermediate_size=128)
    model.to(torch.float32).requires_grad_(False)
    path = write_gguf(model, "llama", tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    check(ModelConfig.load(str(path)), tmp_path)


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("write", [partial(save_multimodal, name="llava"), write_encoder_decoder])
def test_encoders(write: Callable[[Path], object], quantization: str | None, tmp_path: Path) -> None:
    write(tmp_path)
    check(ModelConfig.load(str(tmp_path), quantization=quantization), tmp_path)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_tied_heads_and_narrow_weights(quantization: str | None, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    check(ModelConfig.load(str(tmp_path), quantization=quantization), tmp_path, torch.bfloat16)


@pytest.mark.parametrize(("family", "quantization"), [("deepseek_v3", "int4"), ("llama", None), ("qwen2", "int8")])
def test_other_kernels_get_repacked_weights(
    family: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = available_instruction_sets()[1:]
    if not others:
        pytest.skip("this processor, or the build, has one instruction set")
    tiny_checkpoint(tmp_path, family)
    config = ModelConfig.load(str(tmp_path), quantization=quantization)
    model = load(config)
    with monkeypatch.context() as patch:
        for name, value in kernels_of(others[-1].name).items():
            for module in MODULES[name]:
                patch.setattr(module, name, value)
        other = load(config)
        files = written(other, config, tmp_path / "state.safetensors")
    header = read_header(files)
    assert header is not None
    assert header.kernels.floats == others[-1].name
    again = restored(files, config)
    for one, expected in zip(tensors_of(again), tensors_of(model), strict=True):
        assert one.path == expected.path
        assert torch.equal(bits(one.tensor), bits(expected.tensor)), one.path


MODULES = {
    "NATIVE": (linear, assembly, packed_header, packed_state),
    "PRODUCTS": (method, packed_header),
}


def kernels_of(name: str) -> dict[str, Any]:
    kernels = load_native_kernels(name)
    return {"NATIVE": kernels, "PRODUCTS": native_quantized_products(kernels)}


@pytest.fixture
def int8(tmp_path: Path) -> tuple[ModelConfig, WeightFiles]:
    tiny_checkpoint(tmp_path)
    config = ModelConfig.load(str(tmp_path), quantization="int8")
    return config, written(load(config), config, tmp_path / "state.safetensors")


def rewritten(files: WeightFiles, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> WeightFiles:
    header, tensors = content_of(files.paths[0])
    change(header, tensors)
    write_tensors(files.paths[0], tensors, {HEADER: json.dumps(header)})
    return files


LAYER = "model.layers.0.mlp.down_proj"
CHANGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], str]] = {
    "version": (lambda header, _: header.update(version=0), "layout version 0"),
    "kernels": (
        lambda header, _: header["kernels"].update(integers="sse9"),
        "kernels .* sse9, which are not available",
    ),
    "device": (lambda header, _: header["kernels"].update(device="cuda"), "are for cuda"),
    "method": (lambda header, _: header["layers"][LAYER].update(method="Other"), "method Other"),
    "layers": (lambda header, _: header["layers"].pop(LAYER), f"of another model.*{LAYER}"),
    "missing": (lambda _, tensors: tensors.pop(f"{LAYER}.method.packed_OI"), f"lack {LAYER}.method.packed_OI"),
    "small": (
        lambda _, tensors: tensors.update({f"{LAYER}.method.packed_OI": torch.zeros(8, dtype=torch.uint8)}),
        f"{LAYER}.method.packed_OI as torch.uint8 \\[8\\]",
    ),
    "more": (
        lambda _, tensors: tensors.update(other=torch.zeros(1)),
        "1 tensors that the model does not, such as other",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_refused(int8: tuple[ModelConfig, WeightFiles], change: str) -> None:
    apply, message = CHANGES[change]
    with pytest.raises(CheckpointError, match=message):
        restored(rewritten(int8[1], apply), int8[0])


def test_another_quantization_is_refused(int8: tuple[ModelConfig, WeightFiles]) -> None:
    with pytest.raises(ConfigError, match="quantization='int4' is not valid for packed weights .*'int8'"):
        restored(int8[1], ModelConfig.load(str(int8[0].folder), quantization="int4"))


def test_changed_bytes_are_noticed(int8: tuple[ModelConfig, WeightFiles]) -> None:
    path = int8[1].paths[0]
    with path.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"abc")
    with pytest.raises(CheckpointError, match="other bytes than were written"):
        restored(int8[1], int8[0])


def test_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    config = ModelConfig.load(str(tmp_path), model_impl="transformers")
    with pytest.raises(UnsupportedFeature, match="packed state of a model that runs through Transformers"):
        PackedState.of(load(config), config, "cpu", ("float32", "float32"))

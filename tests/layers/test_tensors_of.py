"""The walk over a model's tensors misses none, and takes no memory twice."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor, nn

from penstock.config import ModelConfig
from penstock.layers.linear import weights_size_bytes
from penstock.layers.tensors_of import tensors_of
from penstock.loader.loader import load_without_memory
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import tiny_checkpoint, tiny_model
from support.encoder_decoders import write_encoder_decoder
from support.gguf_files import write_gguf
from support.multimodal_models import save_multimodal
from support.mxfp4_checkpoints import write_mxfp4
from support.quantized_checkpoints import write_quantized
from support.weight_formats import LOAD, QUANTIZED, family_cases, load


def memory(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


def reachable_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that the interpreter reaches from a model, without other models, modules of code, and ranks."""
    own = {id(module) for module in model.modules()}
    passed: set[int] = set()
    waiting: list[object] = [model]
    found = []
    while waiting:
        value = waiting.pop()
        is_foreign = isinstance(value, nn.Module) and id(value) not in own
        if id(value) in passed or is_foreign or isinstance(value, type | types.ModuleType | ParallelState):
            continue
        passed.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, types.FunctionType):
            waiting.extend(cell.cell_contents for cell in value.__closure__ or ())
        else:
            waiting.extend(gc.get_referents(value))
    return [tensor for tensor in found if tensor.numel()]


def check(model: CausalLM) -> None:
    found = tensors_of(model)
    assert sum(one.num_bytes for one in found) == weights_size_bytes(model)
    places = [memory(one.tensor) for one in found]
    assert len(set(places)) == len(places)
    assert len({one.path for one in found}) == len(found)
    assert {memory(tensor) for tensor in reachable_tensors(model)} <= set(places)
    for one in found:
        assert at_path(model, one.path) is one.tensor, one.path
    parameters = {memory(parameter) for parameter in model.parameters() if parameter.numel()}
    buffers = {memory(buffer) for buffer in model.buffers() if buffer.numel()}
    assert parameters <= {memory(one.tensor) for one in found if one.is_weight}
    assert buffers == {memory(one.tensor) for one in found if not one.is_weight}


def at_path(value: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(value, list | tuple):
            value = value[int(name)]
        else:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize(("family", "quantization"), family_cases())
def test_families(family: str, quantization: str | None, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    check(load(ModelConfig.load(str(tmp_path), quantization=quantization)))


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantized_checkpoints(form: str, tmp_path: Path) -> None:
    quantize, written = QUANTIZED[form]
    check(load(write_quantized(tmp_path, quantize, written).config))


def test_mxfp4(tmp_path: Path) -> None:
    check(load(write_mxfp4(tmp_path)[0]))


def test_gguf(tmp_path: Path) -> None:
    model = tiny_model("llama", intermediate_size=128)
    model.to(torch.float32).requires_grad_(False)
    check(load(ModelConfig.load(str(write_gguf(model, "llama", tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)))))


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("write", [partial(save_multimodal, name="llava"), write_encoder_decoder])
def test_encoders(write: Callable[[Path], object], quantization: str | None, tmp_path: Path) -> None:
    write(tmp_path)
    check(load(ModelConfig.load(str(tmp_path), quantization=quantization)))


def test_tied_heads_in_other_dtypes(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    for dtype in (torch.float32, torch.bfloat16):
        check(load(config, dtype))


def test_a_model_without_memory_has_the_same_paths(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path, "deepseek_v3")
    with_memory, (without, _) = load(config), load_without_memory(config, LOAD, ParallelState(), "cpu", torch.float32)
    described = [
        [(one.path, one.tensor.shape, one.is_weight) for one in tensors_of(of)] for of in (with_memory, without)
    ]
    assert described[0] == described[1]

"""Checkpoints with FP8 weights give the model of the floats that these stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import CheckpointError
from support.checkpoints import edit_config
from support.engines import greedy, make_core, random_prompts, run
from support.float8_checkpoints import FORMATS, write_float8
from support.plain_attention import sequence_logits
from support.transformers_models import load


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_float_twin(tmp_path: Path, name: str) -> None:
    ours, twin = write_float8(tmp_path, name)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    (found,), (expected,) = (sequence_logits(load(config), [tokens]) for config in (ours, twin))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_an_engine_generates_the_tokens_of_the_float_twin(tmp_path: Path, family: str) -> None:
    results = []
    sizes = {} if family == "llama" else {"kv_lora_rank": 48}
    for config in write_float8(tmp_path, "fp8 blocks", family, **sizes):
        core = make_core(config.folder, dtype="float32")
        results.append(run(core, random_prompts((5, 21), 97), greedy(12, logprobs=1)))
        core.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("missing", ["weight_scale", "weight"])
def test_a_weight_without_its_scale_is_refused(tmp_path: Path, missing: str) -> None:
    config, _ = write_float8(tmp_path, "fp8 tensor")
    path = config.folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.0.self_attn.q_proj.{missing}"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"FP8 layers are missing: model.layers.0.self_attn.q_proj.weight"):
        load(config)


def test_scales_of_another_block_size_are_refused(tmp_path: Path) -> None:
    config, _ = write_float8(tmp_path, "fp8 blocks")
    config = edit_config(config.folder, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    message = r"weight_scale is \[4, 4\]. The weight, \[64, 104\], needs \[2, 4\] scales, for blocks of 32 x 32"
    with pytest.raises(CheckpointError, match=message):
        load(config)

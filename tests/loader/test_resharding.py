"""Saved states loaded with another arrangement of ranks have the bits of the checkpoint loaded with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import CheckpointError
from penstock.layers.linear import LinearLayer, process_weights_after_loading, restore_weights
from penstock.layers.quantization.method import QuantizedMethod
from penstock.layers.quantization.quantize import quantize_int8
from penstock.layers.quantization.smoothing import smooth, smoothable
from penstock.layers.tensors_of import tensors_of
from penstock.loader.arrangement import Arrangement
from penstock.loader.loader import load_model, load_without_memory
from penstock.loader.packed_state import PackedState, is_quantized_model
from penstock.loader.sharded_state import copy_model_files, save_sharded_state
from penstock.loader.tensorized import write_tensorized
from penstock.models.attention_layers import attention_layers
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from penstock.parallel.group import OneRank
from support.checkpoints import FAMILIES, MIXTURES, RECURRENT, tiny_checkpoint, tiny_model
from support.float8_checkpoints import write_float8
from support.gguf_files import write_gguf
from support.multimodal_models import save_multimodal
from support.mxfp4_checkpoints import write_mxfp4
from support.quantized_checkpoints import torchao_config, torchao_int4_layer, torchao_int8_layer, write_quantized
from support.scaled_caches import add_tensors
from support.weight_formats import LOAD, QUANTIZED

CPU = torch.device("cpu")
SAVED = LoadConfig(load_format="sharded_state", use_tqdm_on_load=False)
# Sizes that four ranks divide, with whole groups of 32 inputs in each share.
DIVISIBLE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
}
WHOLE = Arrangement(1, 1)
CHANGES = {
    "join": (Arrangement(2, 1), WHOLE),
    "divide": (WHOLE, Arrangement(2, 1)),
    "divide again": (Arrangement(2, 1), Arrangement(4, 1)),
    "stages": (WHOLE, Arrangement(1, 2)),
    "stages to shares": (Arrangement(1, 2), Arrangement(2, 1)),
    "both": (Arrangement(2, 2), Arrangement(4, 2, (1, 3))),
    "other stages": (Arrangement(1, 2, (3, 1)), Arrangement(1, 2)),
}


def load(config: ModelConfig, parallel: ParallelState, options: LoadConfig = LOAD) -> CausalLM:
    return load_model(config, options, parallel, CPU, torch.float32)


def save(config: ModelConfig, arrangement: Arrangement, folder: Path, save_id: str | None = None) -> ModelConfig:
    """Save the state of all ranks; return its configuration."""
    for parallel in arrangement.ranks():
        model = load(config, parallel)
        is_packed = is_quantized_model(model) or "quantization_config" in config.hf_config
        packed = PackedState.of(model, config, "cpu", ("float32", "float32")) if is_packed else None
        save_sharded_state(model, folder, parallel, packed=packed, save_id=save_id)
    copy_model_files(config.folder, folder)
    return ModelConfig.load(str(folder))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def check(config: ModelConfig, before: Arrangement, after: Arrangement, folder: Path) -> None:
    saved = save(config, before, folder)
    for parallel in after.ranks():
        expected, found = load(config, parallel), load(saved, parallel, SAVED)
        check_bits(found, expected)
        unloaded, _ = load_without_memory(saved, SAVED, parallel, "cpu", torch.float32)
        assert forms(unloaded) == forms(found)


def check_bits(found: CausalLM, expected: CausalLM) -> None:
    for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert one.path == other.path
        assert torch.equal(bits(one.tensor), bits(other.tensor)), one.path


def scales_of(model: CausalLM) -> list[Any]:
    return [layer.cache_scales for layer in attention_layers(model).values()]


def forms(model: CausalLM) -> list[Any]:
    return [(one.path, one.tensor.dtype, one.tensor.shape) for one in tensors_of(model)]


@pytest.mark.parametrize(
    ("quantization", "change"),
    [
        pytest.param(quantization, change, marks=[] if (index + number) % 3 == 0 else [pytest.mark.slow])
        for index, change in enumerate(CHANGES)
        for number, quantization in enumerate([None, "int8", "int4"])
    ],
)
def test_weights_are_those_of_the_checkpoint(quantization: str | None, change: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=quantization != "int8", **DIVISIBLE)
    config = ModelConfig.load(str(tmp_path / "model"), quantization=quantization)
    check(config, *CHANGES[change], tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES, *RECURRENT])
@pytest.mark.parametrize("change", ["join", "divide"])
def test_families(family: str, change: str, tmp_path: Path) -> None:
    check(tiny_checkpoint(tmp_path / "model", family), *CHANGES[change], tmp_path / "saved")


@pytest.mark.parametrize("change", ["join", "divide", "stages"])
@pytest.mark.parametrize("form", [form for form in QUANTIZED if form != "act-order"])
def test_quantised_checkpoints(form: str, change: str, tmp_path: Path) -> None:
    quantize, quantization_config = QUANTIZED[form]
    config = write_quantized(tmp_path / "model", quantize, quantization_config, **DIVISIBLE).config
    check(config, *CHANGES[change], tmp_path / "saved")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("change", ["join", "divide"])
def test_torchao(bits: int, change: str, tmp_path: Path) -> None:
    quantize, kind = {
        4: (torchao_int4_layer, ("IntxWeightOnlyConfig", {"weight_dtype": {"_data": "int4", "_type": "torch.dtype"}})),
        8: (torchao_int8_layer, ("Int8WeightOnlyConfig", {})),
    }[bits]
    config = write_quantized(tmp_path / "model", quantize, torchao_config(kind[0], **kind[1]), **DIVISIBLE).config
    check(config, *CHANGES[change], tmp_path / "saved")


@pytest.mark.parametrize("change", ["join", "divide"])
def test_float8(change: str, tmp_path: Path) -> None:
    config, _ = write_float8(tmp_path / "model", "fp8 tensor")
    check(config, *CHANGES[change], tmp_path / "saved")


@pytest.mark.parametrize("change", ["join", "divide", "stages"])
def test_encoders_beside_the_model(change: str, tmp_path: Path) -> None:
    save_multimodal(tmp_path / "model", "llava")
    check(ModelConfig.load(str(tmp_path / "model")), *CHANGES[change], tmp_path / "saved")


def test_a_share_of_one_group_is_joined_by_groups(tmp_path: Path) -> None:
    quantize, quantization_config = QUANTIZED["gptq"]
    config = write_quantized(tmp_path / "model", quantize, quantization_config).config  # shares of 32 inputs
    saved = save(config, Arrangement(2, 1), tmp_path / "saved")
    check_bits(load(saved, ParallelState(), SAVED), load(config, ParallelState()))


def test_ranks_share_no_inputs_of_act_order(tmp_path: Path) -> None:
    quantize, quantization_config = QUANTIZED["act-order"]
    config = write_quantized(tmp_path / "model", quantize, quantization_config).config
    check(config, WHOLE, Arrangement(1, 2), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"o_proj of a state that was saved with .*act-order\), so ranks cannot"):
        load(ModelConfig.load(str(tmp_path / "saved")), Arrangement(2, 1).ranks()[0], SAVED)


@pytest.mark.parametrize("change", ["join", "divide", "stages"])
def test_mxfp4(change: str, tmp_path: Path) -> None:
    check(write_mxfp4(tmp_path / "model")[0], *CHANGES[change], tmp_path / "saved")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("change", ["join", "divide", "stages"])
def test_gguf(kind: str, change: str, tmp_path: Path) -> None:
    model = tiny_model("llama", **DIVISIBLE).to(torch.float32).requires_grad_(False)
    path = write_gguf(model, "llama", tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind])
    config = ModelConfig.load(str(path))
    check(config, *CHANGES[change], tmp_path / "saved")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_scales_of_a_kv_cache(quantization: str | None, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", **DIVISIBLE)
    layers = [f"model.layers.{layer}.self_attn" for layer in (1, 3)]
    scales = {f"{name}.{kind}_scale": torch.tensor(0.5) for name in layers for kind in "kv"}
    add_tensors(tmp_path / "model", scales)
    config = ModelConfig.load(str(tmp_path / "model"), quantization=quantization)
    saved = save(config, Arrangement(2, 1), tmp_path / "saved")
    for parallel in Arrangement(1, 2).ranks():
        found, expected = load(saved, parallel, SAVED), load(config, parallel)
        assert scales_of(found) == scales_of(expected)
        assert any(scales_of(found))


def test_weights_that_were_smoothed_by_ranks(tmp_path: Path) -> None:
    """Each rank's factors are in the weights, so one rank computes the same products as two."""
    tiny_checkpoint(tmp_path / "model", **DIVISIBLE)
    floats, config = (ModelConfig.load(str(tmp_path / "model"), quantization=option) for option in (None, "int8"))
    saved_models = []
    for parallel in Arrangement(2, 1).ranks():
        model = load(floats, parallel)
        for layer in smoothable([one for one in model.modules() if isinstance(one, LinearLayer)]):
            smooth(layer, torch.linspace(0.5, 8.0, layer.input_size), OneRank())
        restore_weights(model)
        process_weights_after_loading(model, lambda layer: QuantizedMethod(quantize_int8))
        saved_models.append(model)
        packed = PackedState.of(model, config, "cpu", ("float32", "float32"))
        save_sharded_state(model, tmp_path / "saved", parallel, packed=packed)
    copy_model_files(config.folder, tmp_path / "saved")
    found = load(ModelConfig.load(str(tmp_path / "saved")), ParallelState(), SAVED)
    for name, module in found.named_modules():
        if name.endswith("down_proj"):
            assert module.has_smoothed_inputs
            parts = [model.get_submodule(name) for model in saved_models]
            weights = [one.method.unpack(one.method.packed_OI, one.output_size) for one in (module, *parts)]
            assert torch.equal(weights[0], torch.cat(weights[1:], 1))


@pytest.mark.parametrize("before", [WHOLE, Arrangement(2, 1)])
def test_groups_that_would_cross_shares_are_refused(before: Arrangement, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", **{**DIVISIBLE, "intermediate_size": 96})
    config = ModelConfig.load(str(tmp_path / "model"), quantization="int8")
    saved = save(config, before, tmp_path / "saved")
    after = Arrangement(3 - before.tensor_parallel_size, 1)
    message = (
        f"down_proj of a state that was saved with {before} cannot be shared by {after}: a share of 48 of its input "
        r"features has no whole groups, which are of 32\. Load the checkpoint"
    )
    with pytest.raises(CheckpointError, match=message):
        load(saved, after.ranks()[0], SAVED)


def test_groups_of_another_size_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", **{**DIVISIBLE, "intermediate_size": 32})
    config = ModelConfig.load(str(tmp_path / "model"), quantization="int4")
    saved = save(config, Arrangement(2, 1), tmp_path / "saved")
    with pytest.raises(CheckpointError, match="has groups of 16 input features .* would have groups of 32"):
        load(saved, ParallelState(), SAVED)


def test_files_that_are_missing_or_of_another_state_are_named(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path / "model", **DIVISIBLE)
    saved = save(config, Arrangement(2, 1), tmp_path / "saved")
    path = tmp_path / "saved" / "model-rank-1-part-0.safetensors"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-rank-1-part-0\.safetensors, the share of rank 1"):
        load(saved, ParallelState(), SAVED)
    path.write_bytes(content.replace(b'"tensor_parallel_size": "2"', b'"tensor_parallel_size": "x"'))
    with pytest.raises(CheckpointError, match="tensor_parallel_size='x', .*which is no arrangement of ranks"):
        load(saved, ParallelState(), SAVED)
    path.write_bytes(
        content.replace(b'"tensor_parallel_size": "2"', b'"tensor_parallel_size": "1"').replace(
            b'"pipeline_parallel_size": "1"', b'"pipeline_parallel_size": "2"'
        )
    )
    with pytest.raises(CheckpointError, match="rank-1-part-0.* was saved with tensor_parallel_size=1, .*do not belong"):
        load(saved, ParallelState(), SAVED)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_with_the_name_of_another_rank_is_refused(rank: int, tmp_path: Path) -> None:
    # Both ranks' shares have the same shapes.
    config = tiny_checkpoint(tmp_path / "model", vocab_size=96, **DIVISIBLE)
    saved = save(config, Arrangement(2, 1), tmp_path / "saved")
    paths = [tmp_path / "saved" / f"model-rank-{number}-part-0.safetensors" for number in range(2)]
    paths[rank].write_bytes(paths[1 - rank].read_bytes())
    for parallel in (ParallelState(), Arrangement(2, 1).ranks()[rank]):
        with pytest.raises(CheckpointError, match=f"has the share of rank '{1 - rank}', and its name says rank {rank}"):
            load(saved, parallel, SAVED)


def test_ranks_of_different_engines_are_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "model", **DIVISIBLE)
    for number, quantization in enumerate(("int8", "int4")):
        config = ModelConfig.load(str(tmp_path / "model"), quantization=quantization)
        parallel = Arrangement(2, 1).ranks()[number]
        model = load(config, parallel)
        packed = PackedState.of(model, config, "cpu", ("float32", "float32"))
        save_sharded_state(model, tmp_path / "saved", parallel, packed=packed)
    copy_model_files(config.folder, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="rank 1 has quantization='int4', and that of rank 0 has 'int8'"):
        load(ModelConfig.load(str(tmp_path / "saved")), ParallelState(), SAVED)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("ids", [("a", "b"), ("a", None), (None, "a")])
def test_ranks_of_different_saves_are_refused(
    ids: tuple[str | None, str | None], quantization: str | None, tmp_path: Path
) -> None:
    """By every rank that sees both, of the same arrangement too."""
    tiny_checkpoint(tmp_path / "model", **DIVISIBLE)
    config = ModelConfig.load(str(tmp_path / "model"), quantization=quantization)
    arrangement = Arrangement(2, 1)
    for name, save_id in zip(("one", "other"), ids, strict=True):
        saved = save(config, arrangement, tmp_path / name, save_id)
    for parallel in (ParallelState(), *arrangement.ranks()):
        load(saved, parallel, SAVED)
    of_rank_1 = "model-rank-1-part-0.safetensors"
    shutil.copy(tmp_path / "one" / of_rank_1, saved.folder / of_rank_1)
    for parallel in (ParallelState(), *arrangement.ranks(), *Arrangement(4, 1).ranks()):
        with pytest.raises(CheckpointError, match="is of another save than model-rank-.*: it has save_id=") as raised:
            load(saved, parallel, SAVED)
        assert all(repr(save_id) in str(raised.value) for save_id in ids)
        assert of_rank_1 in str(raised.value)
        assert "Copy the files of all ranks of one save_sharded_state into an empty folder" in str(raised.value)
    # A rank that has its own file alone, as on another machine, sees no other.
    (saved.folder / of_rank_1).unlink()
    load(saved, arrangement.ranks()[0], SAVED)


def test_parts_of_different_saves_are_refused(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path / "model")
    for name in ("one", "other"):
        save_sharded_state(
            load(config, ParallelState()), tmp_path / name, ParallelState(), max_size=40_000, save_id=name
        )
        copy_model_files(config.folder, tmp_path / name)
    shutil.copy(tmp_path / "one" / "model-rank-0-part-1.safetensors", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors is of another save .*save_id='one'.*has 'other'"):
        load(ModelConfig.load(str(tmp_path / "other")), ParallelState(), SAVED)


def test_files_of_tensorizer(tmp_path: Path) -> None:
    pytest.importorskip("tensorizer", reason="the package tensorizer is not installed")
    tiny_checkpoint(tmp_path, **DIVISIBLE)
    config = ModelConfig.load(str(tmp_path), quantization="int4")
    uri = str(tmp_path / "model-%03d.tensors")
    for parallel in Arrangement(2, 1).ranks():
        write_tensorized(PackedState.of(load(config, parallel), config, "cpu", ("float32", "float32")), uri, parallel)
    options = LoadConfig(load_format="tensorizer", model_loader_extra_config={"tensorizer_uri": uri})
    for arrangement in (WHOLE, Arrangement(2, 1), Arrangement(4, 1)):
        for parallel in arrangement.ranks():
            check_bits(load(config, parallel, options), load(config, parallel))

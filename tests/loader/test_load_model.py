"""`load_model` gives a model that runs, whatever format and dtype its checkpoint has, and needs its memory once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.config import LoadConfig, ModelConfig
from penstock.errors import CheckpointError
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import load_config, oracle_logits, save_checkpoint, tiny_checkpoint, tiny_config, tiny_model
from support.plain_attention import sequence_logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def load(model_config: ModelConfig, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> CausalLM:
    load_config = LoadConfig(load_format=load_format)
    return load_model(model_config, load_config, ParallelState(), torch.device("cpu"), dtype)


def logits_of(model: CausalLM) -> Tensor:
    return sequence_logits(model, [TOKENS])[0]


def save_bins(folder: Path, state: dict[str, Tensor], num_shards: int = 1) -> None:
    """Replace the folder's safetensors by the `.bin` files that older versions of Transformers wrote."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    if num_shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = sorted(state)
    weight_map = {}
    for shard in range(num_shards):
        file = f"pytorch_model-{shard + 1:05}-of-{num_shards:05}.bin"
        torch.save({name: state[name] for name in names[shard::num_shards]}, folder / file)
        weight_map.update(dict.fromkeys(names[shard::num_shards], file))
    write_index(folder / "pytorch_model.bin.index.json", weight_map)


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("compute_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("saved_dtype", DTYPES, ids=str)
def test_every_saved_dtype_loads_into_every_compute_dtype(
    tmp_path: Path, saved_dtype: torch.dtype, compute_dtype: torch.dtype
) -> None:
    oracle = tiny_model("qwen2")
    model = load(save_checkpoint(oracle, tmp_path, dtype=saved_dtype), compute_dtype)
    expected = oracle.state_dict()["model.embed_tokens.weight"].to(saved_dtype).to(compute_dtype)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), expected)
    assert {parameter.dtype for parameter in model.parameters()} == {compute_dtype}


def test_sharded_safetensors(tmp_path: Path) -> None:
    oracle = tiny_model("llama")
    config = save_checkpoint(oracle, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    torch.testing.assert_close(logits_of(load(config)), oracle_logits(oracle, TOKENS), rtol=0, atol=1e-4)


def test_shards_without_an_index(tmp_path: Path) -> None:
    oracle = tiny_model("llama")
    config = save_checkpoint(oracle, tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    torch.testing.assert_close(logits_of(load(config)), oracle_logits(oracle, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_pytorch_bin_files(tmp_path: Path, num_shards: int, load_format: str) -> None:
    oracle = tiny_model("llama", tie_word_embeddings=True)
    config = save_checkpoint(oracle, tmp_path)
    save_bins(tmp_path, oracle.state_dict(), num_shards)
    model = load(config, load_format=load_format)
    torch.testing.assert_close(logits_of(model), oracle_logits(oracle, TOKENS), rtol=0, atol=1e-4)


def test_auto_prefers_safetensors(tmp_path: Path) -> None:
    oracle = tiny_model("llama")
    config = save_checkpoint(oracle, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    torch.testing.assert_close(logits_of(load(config)), oracle_logits(oracle, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("load_format", "wanted"),
    [
        ("auto", "model.safetensors or pytorch_model.bin or GGUF file"),
        ("safetensors", "model.safetensors"),
        ("pt", "pytorch_model.bin"),
    ],
)
def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path, load_format: str, wanted: str) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=rf"There is no {wanted}, .* The folder holds config\.json"):
        load(load_config(tmp_path), load_format=load_format)


def test_the_model_is_frozen_and_in_evaluation_mode(tmp_path: Path) -> None:
    model = load(tiny_checkpoint(tmp_path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_tied_weights_exist_once(tmp_path: Path) -> None:
    model = load(tiny_checkpoint(tmp_path, tie_word_embeddings=True))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_loading_leaves_the_default_dtype_alone(tmp_path: Path) -> None:
    load(tiny_checkpoint(tmp_path), torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(0).device == torch.device("cpu")


def test_dummy_weights_need_no_files_and_give_telling_logits(tmp_path: Path) -> None:
    tiny_config("qwen3", architectures=["Qwen3ForCausalLM"], head_dim=32).save_pretrained(tmp_path)
    logits = logits_of(load(load_config(tmp_path), load_format="dummy"))
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_dummy_weights_depend_on_their_names_alone(tmp_path: Path) -> None:
    for name, layers in (("small", 1), ("large", 3)):
        config = tiny_config("llama", architectures=["LlamaForCausalLM"], num_hidden_layers=layers)
        config.save_pretrained(tmp_path / name)
    small, again, large = (
        load(load_config(tmp_path / name), load_format="dummy") for name in ("small", "small", "large")
    )
    parameters = dict(small.named_parameters())
    for name, parameter in parameters.items():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, large.get_parameter(name))
    embedding, head = parameters["model.embed_tokens.weight"], parameters["lm_head.weight"]
    assert not torch.equal(embedding, head)


def test_native_models_never_import_transformers(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    script = f"""
import sys, torch
from penstock.config import LoadConfig, ModelConfig
from penstock.loader.loader import load_model
from penstock.parallel import ParallelState
load_model(ModelConfig.load({str(tmp_path)!r}), LoadConfig(), ParallelState(), torch.device("cpu"), torch.float32)
sys.exit("transformers" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_loading_is_not_slowed_by_a_progress_bar_where_there_is_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(tiny_checkpoint(tmp_path))
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.gpu
def test_a_model_on_cuda_equals_the_one_on_the_cpu(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path, "qwen3", head_dim=32)
    expected = load(config)
    model = load_model(config, LoadConfig(), ParallelState(), torch.device("cuda"), torch.float32)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cuda"}
    moved: nn.Module = model.to("cpu")
    torch.testing.assert_close(sequence_logits(moved, [TOKENS])[0], logits_of(expected), rtol=0, atol=1e-5)

"""A plan made without a device says what the running engine then uses."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.device.limits import MemoryLimit
from penstock.engine.plan import plan_engine
from penstock.errors import CheckpointError, ConfigError, ModelNotFound, OutOfMemory, UnsupportedFeature
from penstock.loader.sharded_state import copy_model_files
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_config, tiny_model
from support.engines import SMALL, make_core

MIB = 1 << 20
# What a measurement of resident memory is good for, at the sizes that tests can afford. tests/worker/test_estimate.py
# compares with the bytes of the tensors instead.
NOISE = 12 * MIB
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": True, "vocab_size": 5000}),  # the head is packed beside the embedding
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 24}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32}),
]


def compare(folder: Path | str, **options: Any) -> None:
    """Everything that is counted is equal; what is measured is close."""
    plan = plan_engine(str(folder), **options)
    core = make_core(folder, **options)
    memory, kv_cache = core.memory_plan, core.kv_cache_config
    (bytes_per_token,) = core.collective_rpc(
        lambda worker: sum(spec.page_size_bytes / spec.block_size for spec in worker.get_kv_cache_spec().values())
    )
    max_model_len = core.max_model_len
    core.close()
    assert plan.kv_bytes_per_token == bytes_per_token
    # The copies that one norm per head makes of its weight are left out.
    assert plan.memory.weights == pytest.approx(memory.weights, rel=0.02)
    assert plan.memory.runner_state == memory.runner_state
    assert plan.memory.activations == pytest.approx(memory.activations, rel=0.25, abs=NOISE)
    assert plan.memory.sampling == pytest.approx(memory.sampling, rel=0.25, abs=NOISE)
    assert (plan.memory.total, plan.memory.requested_kv_cache) == (memory.total, memory.requested_kv_cache)
    assert plan.memory.fraction == pytest.approx(memory.fraction, rel=0.1)
    assert plan.max_model_len == max_model_len
    if memory.requested_kv_cache is not None:
        assert (plan.kv_cache.num_blocks, plan.kv_cache.size_bytes) == (kv_cache.num_blocks, kv_cache.size_bytes)
    else:
        assert plan.kv_cache.size_bytes == pytest.approx(kv_cache.size_bytes, rel=0.1)
        assert plan.memory.left_for_kv_cache == pytest.approx(memory.left_for_kv_cache, rel=0.1)


@pytest.mark.parametrize(
    ("family", "changes"), FAMILIES, ids=[f"{index}-{family}" for index, (family, _) in enumerate(FAMILIES)]
)
def test_a_plan_is_what_the_engine_uses(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, family, **changes)
    compare(tmp_path, **SMALL)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"max_model_len": 50, "block_size": 8},
        {"max_model_len": "auto", "kv_cache_memory_bytes": 48_000},
        {"kv_cache_memory_bytes": None, "memory_fraction": 0.2, "max_num_seqs": 4},
        {"kv_cache_memory_bytes": None, "max_num_seqs": 200, "max_num_batched_tokens": 1000},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_to_the_engine(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path)
    compare(tmp_path, **{**SMALL, **options})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_checkpoints_dtype_does_not_matter_but_the_computes(tmp_path: Path, dtype: torch.dtype) -> None:
    save_checkpoint(tiny_model("llama"), tmp_path, dtype=dtype)
    compare(tmp_path, **SMALL)


def test_other_formats(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path / "a", tie_word_embeddings=True)
    model = tiny_model("llama", tie_word_embeddings=True)
    shutil.copytree(tmp_path / "a", tmp_path / "bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    compare(tmp_path / "bin", **SMALL)
    compare(tmp_path / "a", **SMALL, load_format="dummy")
    core = make_core(tmp_path / "a")
    core.collective_rpc("save_sharded_state", args=(str(tmp_path / "state"),), kwargs={"max_size": 40_000})
    core.close()
    assert config.folder != tmp_path / "state"
    compare(tmp_path / "state", **SMALL, load_format="sharded_state")


def test_nothing_heavy_is_imported_and_no_weight_is_read(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    size = path.stat().st_size
    with path.open("r+b") as file:
        # A file of the same size without content after its header.
        file.truncate(header_bytes)
        file.truncate(size)
    code = (
        "import sys\nfrom penstock.engine.plan import plan_engine\n"
        f"plan_engine({str(tmp_path)!r}, device='cpu').table()\n"
        "heavy = ('torch', 'transformers', 'numpy', 'safetensors', 'huggingface_hub')\n"
        "sys.exit(repr([name for name in heavy if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stderr.strip() == "[]"


def test_a_plan_that_does_not_work_out_is_refused_as_by_the_engine(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(OutOfMemory, match="(?s)One request of max_model_len=128 tokens needs .*= left for"):
        plan_engine(str(tmp_path), device="cpu", kv_cache_memory_bytes=40_000)
    with pytest.raises(OutOfMemory, match="(?s)leaves no memory for the KV cache.*A token takes 512 bytes of KV cache"):
        plan_engine(str(tmp_path), device="cpu", memory_fraction=0.001)


def test_weights_that_are_missing_damaged_or_of_a_strange_dtype_are_named(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"There are no weights to plan for .*config\.json"):
        plan_engine(str(tmp_path), device="cpu")
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedFeature, match=r"model\.norm\.weight has the dtype I8"):
        plan_engine(str(tmp_path), device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="is damaged"):
        plan_engine(str(tmp_path), device="cpu")


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="There is no option block_sze"):
        plan_engine("demo", block_sze=3)
    with pytest.raises(ModelNotFound, match="nowhere"):
        plan_engine("/nowhere")


def test_what_checkpoints_hold_beside_weights_does_not_count(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save_checkpoint(model, tmp_path)
    expected = plan_engine(str(tmp_path), device="cpu").memory.weights
    from safetensors.torch import load_file, save_file

    content = load_file(tmp_path / "model.safetensors")
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    content["h.0.attn.bias"] = torch.zeros(1, 1, 64, 64, dtype=torch.uint8)
    save_file(content, tmp_path / "model.safetensors")
    assert plan_engine(str(tmp_path), device="cpu").memory.weights == expected


def _on_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, headers: dict[str, tuple[str, list[int]]]) -> list[str]:
    """A hub whose repository has the folder's configuration; records the patterns that were downloaded."""
    import huggingface_hub

    asked: list[str] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    def get_safetensors_metadata(self: object, repo_id: str, *, revision: str | None) -> SimpleNamespace:
        tensors = {name: SimpleNamespace(dtype=dtype, shape=shape) for name, (dtype, shape) in headers.items()}
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", get_safetensors_metadata)
    return asked


def test_of_a_hub_id_only_the_configuration_and_the_headers_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_checkpoint(tmp_path / "local")
    expected = plan_engine(str(config.folder), device="cpu")
    headers = {name: ("F32", list(tensor.shape)) for name, tensor in tiny_model("llama").state_dict().items()}
    hub = tmp_path / "hub"
    hub.mkdir()
    copy_model_files(config.folder, hub)
    asked = _on_hub(monkeypatch, hub, headers)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    plan = plan_engine("someone/model", device="cpu")
    assert asked == ["*.json"]
    assert plan.model == "someone/model"
    assert (plan.memory.weights, plan.kv_cache) == (expected.memory.weights, expected.kv_cache)
    # What is in the local cache is read there.
    shutil.copyfile(config.folder / "model.safetensors", hub / "model.safetensors")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert plan_engine("someone/model", device="cpu").memory.weights == expected.memory.weights
    (hub / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="its weight files are not in the local hub cache"):
        plan_engine("someone/model", device="cpu")


def test_a_gpu_is_planned_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.plan.gpu_memory", lambda: None)
    assert plan_engine("demo", max_num_seqs=8).device == "cpu"
    with pytest.raises(UnsupportedFeature, match="device='cuda' is not available"):
        plan_engine("demo", device="cuda")
    memory = MemoryLimit(total_bytes=80 << 30, free_bytes=80 << 30)
    monkeypatch.setattr("penstock.engine.plan.gpu_memory", lambda: memory)
    plan = plan_engine("demo", max_num_seqs=8)
    assert (plan.device, plan.dtype.name) == ("cuda", "bfloat16")
    assert plan.memory.budget == int(0.9 * (80 << 30))
    # Half of float32, and no head is packed there.
    in_float32 = plan_engine("demo", max_num_seqs=8, device="cpu", dtype="float32").memory.weights
    assert plan.memory.weights < 0.55 * in_float32


def test_the_table_and_the_data_say_the_same(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "mistral", sliding_window=24)
    plan = plan_engine(str(tmp_path), **SMALL)
    table, data = plan.table(), plan.to_dict()
    for text in ("MistralForCausalLM", "2 layers (2 with a window)", "in float32", "= left for the KV cache"):
        assert text in table
    assert f"{data['kv_cache']['num_blocks']:,}" in table
    assert data["kv_cache"]["bytes"] == plan.kv_cache.size_bytes
    # Keys and values of 2 heads of 16 in 2 layers.
    assert data["kv_cache"]["bytes_per_token"] == 2 * 2 * 16 * 4 * 2
    memory = data["memory"]
    terms = ("process", "weights", "activations", "sampling", "runner_state")
    assert memory["left_for_kv_cache"] == memory["budget"] - sum(memory[term] for term in terms)
    assert set(memory) >= {field.name for field in dataclasses.fields(plan.memory)}

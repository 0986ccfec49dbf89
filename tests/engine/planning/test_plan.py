"""A plan made without a device equals the memory use of the running engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.contract import AttentionSpec, RpcCall
from penstock.device.limits import MemoryLimit
from penstock.engine.planning.plan import plan_engine
from penstock.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFound,
    OutOfMemory,
    UnsupportedFeature,
)
from penstock.kernels.native import NATIVE
from penstock.loader.sharded_state import copy_model_files
from penstock.models.registry import supported_architectures
from penstock.observability.units import format_bytes
from penstock.runner.sampling import LogitsProcessor, LogitsRows, ProcessorContext
from penstock.worker import WorkerBase
from penstock.worker.memory_plan import LIBRARY_BYTES
from support.checkpoints import FAMILIES as NATIVE_FAMILIES
from support.checkpoints import (
    MIXTURES,
    RECURRENT,
    VOCAB_SIZE,
    edit_config,
    save_checkpoint,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)
from support.draft_heads import HIDDEN, eagle3_weights, eagle_weights, write_head, write_mimo
from support.encoder_decoders import FAMILIES as ENCODER_DECODERS
from support.encoder_decoders import write_encoder_decoder
from support.engines import SMALL, make_core
from support.quantized_checkpoints import gptq_layer, write_quantized
from support.transformers_models import FAMILIES as FALLBACK_FAMILIES
from support.transformers_models import save_for_fallback, tiny_transformers_model

MIB = 1 << 20
# Of each term; tests/worker/test_reserve.py compares with what full steps really take.
TOLERANCE = 0.1
# Steps that are large enough for tensors to matter beside what libraries take.
PLANNED = {**SMALL, "max_num_batched_tokens": 4000}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in MIXTURES),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": True, "vocab_size": 5000}),  # the head is packed beside the embedding
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 24}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"head_dim": 16, "intermediate_size": 500}),
    ("phi3", {}),
    ("gemma2", {"sliding_window": 24}),
    ("gemma3", {}),
    ("gpt2", {}),
    ("gpt2", {"n_inner": 500}),
    ("granite", {}),
    ("ernie4_5", {"use_bias": True}),
    ("hunyuan_v1_dense", {}),
    ("olmo2", {}),
]


@pytest.mark.slow
def test_the_plan_of_two_workers_is_that_of_each(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("llama"), tmp_path)
    options = {**PLANNED, "tensor_parallel_size": 2}
    plan, core = plan_engine(str(tmp_path), **options), make_core(tmp_path, **options)
    memory, kv_cache = core.memory_plan, core.kv_cache_config
    core.close()
    assert plan.memory["weights"] == pytest.approx(memory["weights"], rel=TOLERANCE)
    assert plan.memory["activations"] == pytest.approx(memory["activations"], rel=TOLERANCE)
    assert plan.memory["sampling"] == pytest.approx(memory["sampling"], rel=TOLERANCE)
    assert (plan.memory.total, plan.memory["runner_state"]) == (memory.total, memory["runner_state"])
    assert (plan.kv_cache.pools[0].num_blocks, plan.kv_cache.size_bytes) == (
        kv_cache.pools[0].num_blocks,
        kv_cache.size_bytes,
    )
    assert plan.engine_bytes == 2 * (plan.memory.without_kv_cache + plan.kv_cache.size_bytes)
    alone = plan_engine(str(tmp_path), **PLANNED)
    assert (2 * plan.kv_bytes_per_token, plan.memory.total) == (alone.kv_bytes_per_token, alone.memory.total // 2)


def receive_buffer_of(worker: WorkerBase) -> int:
    """Bytes of a worker's receive buffer, counted."""
    return int(worker.runner.stage._received.nbytes)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("gpt2", 2)])
@pytest.mark.slow
def test_the_plan_of_stages_is_that_of_each(family: str, ranks: int, tmp_path: Path) -> None:
    save_checkpoint(tiny_model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 6}), tmp_path)
    options = {**PLANNED, "pipeline_layers": "4,2", "pipeline_parallel_size": 2, "tensor_parallel_size": ranks}
    plan, core = plan_engine(str(tmp_path), **options), make_core(tmp_path, **options)
    memories, kv_cache = core.collective_rpc(RpcCall("determine_available_memory")), core.kv_cache_config
    buffers = core.collective_rpc(RpcCall(receive_buffer_of))
    core.close()
    assert [memory["receive_buffer"] for memory in memories] == buffers
    assert [stage.memory["receive_buffer"] for stage in plan.stages] == buffers[::ranks]
    assert [size > 0 for size in buffers] == [False] * ranks + [True] * ranks
    assert plan.table().count("received hidden states") == 1
    for index, (stage, num_layers) in enumerate(zip(plan.stages, (4, 2), strict=True)):
        memory = memories[index * ranks]
        assert len(stage.specs) == num_layers
        assert stage.memory["weights"] == pytest.approx(memory["weights"], rel=TOLERANCE)
        assert stage.memory["activations"] == pytest.approx(memory["activations"], rel=TOLERANCE)
        assert stage.memory["sampling"] == pytest.approx(memory["sampling"], rel=TOLERANCE)
        assert (stage.memory.total, stage.memory["runner_state"]) == (memory.total, memory["runner_state"])
        assert 6 * stage.kv_cache.size_bytes == num_layers * kv_cache.size_bytes
    assert (plan.kv_cache.pools[0].num_blocks, plan.kv_cache.size_bytes) == (
        kv_cache.pools[0].num_blocks,
        kv_cache.size_bytes,
    )
    alone = plan_engine(str(tmp_path), **PLANNED)
    assert plan.kv_bytes_per_token * ranks == alone.kv_bytes_per_token
    assert plan.engine_bytes == ranks * sum(stage.worker_bytes for stage in plan.stages)
    assert "stage 2 of 2 (2 layers" in plan.table()
    assert [stage["num_layers"] for stage in plan.to_dict()["stages"]] == [4, 2]


@pytest.mark.parametrize(("method", "num_received"), [("eagle", 1), ("eagle3", 3)])
@pytest.mark.slow
def test_the_plan_of_stages_knows_which_of_them_drafts(method: str, num_received: int, tmp_path: Path) -> None:
    """The plan also counts the auxiliary hidden states that other stages send to the drafting stage."""
    folder = save_checkpoint(tiny_model("llama", num_hidden_layers=4, vocab_size=VOCAB_SIZE), tmp_path / "model").folder
    weights, sizes = eagle_weights() if method == "eagle" else eagle3_weights(), {"draft_vocab_size": 40}
    head = write_head(tmp_path / "head", weights, max_position_embeddings=128, **sizes)
    drafts = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    options = {**PLANNED, "pipeline_parallel_size": 2, "speculative_config": drafts}
    plan, core = plan_engine(str(folder), **options), make_core(folder, **options)
    memories, kv_cache = core.collective_rpc(RpcCall("determine_available_memory")), core.kv_cache_config
    buffers = core.collective_rpc(RpcCall(receive_buffer_of))
    core.close()
    assert [memory["receive_buffer"] for memory in memories] == buffers
    assert [stage.memory["receive_buffer"] for stage in plan.stages] == buffers
    assert buffers == [0, num_received * PLANNED["max_num_batched_tokens"] * HIDDEN * 4]
    # The last one has the head's layer besides, and the embedding that the head shares.
    assert [len(stage.specs) for stage in plan.stages] == [2, 3]
    for stage, memory in zip(plan.stages, memories, strict=True):
        assert stage.memory["weights"] == pytest.approx(memory["weights"], rel=TOLERANCE)
        assert stage.memory["activations"] == pytest.approx(memory["activations"], rel=TOLERANCE)
        assert stage.memory["sampling"] == pytest.approx(memory["sampling"], rel=TOLERANCE)
        assert (stage.memory.total, stage.memory["runner_state"]) == (memory.total, memory["runner_state"])
    assert (plan.kv_cache.pools[0].num_blocks, plan.kv_cache.size_bytes) == (
        kv_cache.pools[0].num_blocks,
        kv_cache.size_bytes,
    )


def compare(folder: Path | str, **options: Any) -> None:
    """Compare plans: terms of the options must be equal, terms of the model close."""
    plan = plan_engine(str(folder), **options)
    core = make_core(folder, **options)
    memory, kv_cache = core.memory_plan, core.kv_cache_config
    (bytes_per_token,) = core.collective_rpc(
        RpcCall(
            lambda worker: sum(
                spec.page_size_bytes / spec.block_size
                for spec in worker.get_kv_cache_spec().values()
                if isinstance(spec, AttentionSpec)
            )
        )
    )
    max_model_len = core.max_model_len
    core.close()
    assert plan.kv_bytes_per_token == bytes_per_token
    assert plan.memory["weights"] == pytest.approx(memory["weights"], rel=TOLERANCE)
    assert plan.memory["runner_state"] == memory["runner_state"]
    assert plan.memory["logits_processors"] == memory["logits_processors"]
    planned, counted = (terms["activations"] - LIBRARY_BYTES["cpu"] for terms in (plan.memory, memory))
    assert planned == pytest.approx(counted, rel=TOLERANCE)
    assert plan.memory["sampling"] == pytest.approx(memory["sampling"], rel=TOLERANCE)
    assert (plan.memory.total, plan.memory.requested_kv_cache) == (memory.total, memory.requested_kv_cache)
    assert plan.memory.fraction == pytest.approx(memory.fraction, rel=TOLERANCE)
    assert plan.max_model_len == max_model_len
    if memory.requested_kv_cache is not None:
        assert (plan.kv_cache.pools[0].num_blocks, plan.kv_cache.size_bytes) == (
            kv_cache.pools[0].num_blocks,
            kv_cache.size_bytes,
        )
    else:
        # This process has had other engines: it holds more than one that has just begun, which a plan is made for.
        left = plan.memory.left_for_kv_cache - max(0, memory["process"] - plan.memory["process"])
        assert left == pytest.approx(memory.left_for_kv_cache, rel=TOLERANCE)
        assert min(plan.kv_cache.size_bytes, left) == pytest.approx(kv_cache.size_bytes, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "changes"), FAMILIES, ids=[f"{index}-{family}" for index, (family, _) in enumerate(FAMILIES)]
)
def test_a_plan_is_what_the_engine_uses(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, family, **changes)
    compare(tmp_path, **PLANNED)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_a_plan_of_an_encoder_decoder_is_what_the_engine_uses(tmp_path: Path, family: str) -> None:
    compare(write_encoder_decoder(tmp_path, family), **PLANNED)


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.one_case_quick
def test_a_plan_of_recurrent_layers_is_what_the_engine_uses(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    compare(tmp_path, **{**PLANNED, "kv_cache_memory_bytes": 32 << 20})


def test_every_native_family_is_compared() -> None:
    compared = {{**NATIVE_FAMILIES, **MIXTURES}[family].architecture for family, _ in FAMILIES}
    compared |= {family.architecture for family in RECURRENT.values()}
    compared |= {architecture for _, architecture, _ in ENCODER_DECODERS.values()}
    named_twice = {"MiMoForCausalLM", "MiniMaxText01ForCausalLM", "PhiMoEForCausalLM"}
    assert compared | named_twice == set(supported_architectures())


@pytest.mark.parametrize(
    "options", [{}, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}], ids=str
)
def test_a_plan_of_mimo_is_what_the_engine_uses(tmp_path: Path, options: dict[str, Any]) -> None:
    compare(write_mimo(tmp_path), **PLANNED, **options)


def test_a_plan_with_the_products_of_torch_is_what_the_engine_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's products keep a packed copy of a tied output head beside the embedding."""
    monkeypatch.setenv("PENSTOCK_CPU_PRODUCTS", "torch")
    tiny_checkpoint(tmp_path, tie_word_embeddings=True, vocab_size=5000)
    compare(tmp_path, **PLANNED)


@pytest.mark.parametrize("family", sorted({family for family, _ in FAMILIES}))
def test_random_weights_are_planned_for_without_a_checkpoint(tmp_path: Path, family: str) -> None:
    # Norms and biases, which are not counted one by one, are small beside this.
    tiny_checkpoint(tmp_path, family, vocab_size=1000)
    compare(tmp_path, **PLANNED, load_format="dummy")


@pytest.mark.parametrize("name", FALLBACK_FAMILIES)
@pytest.mark.one_case_quick
def test_a_plan_for_a_model_of_transformers_is_what_the_engine_uses(tmp_path: Path, name: str) -> None:
    class_name, overrides = FALLBACK_FAMILIES[name]
    save_for_fallback(tiny_transformers_model(class_name, **overrides), tmp_path)
    compare(tmp_path, **PLANNED, model_impl="transformers")


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"max_model_len": 50, "block_size": 8},
        {"max_model_len": "auto", "kv_cache_memory_bytes": 48_000, "max_num_batched_tokens": 64},
        {"kv_cache_memory_bytes": None, "memory_fraction": 0.2, "max_num_seqs": 4},
        {"kv_cache_memory_bytes": None, "max_num_seqs": 200, "max_num_batched_tokens": 1000},
        {"max_num_seqs": 3000, "max_logprobs": -1, "kv_cache_memory_bytes": 8 << 20},
        {"max_num_batched_tokens": 30, "max_num_seqs": 2, "max_logprobs": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.each_value_quick
def test_options_mean_what_they_mean_to_the_engine(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, family)
    compare(tmp_path, **{**PLANNED, **options})


@pytest.mark.parametrize("model", ["demo", "60 million"])
def test_a_plan_for_models_of_some_size(tmp_path: Path, model: str) -> None:
    folder, options = model, {}
    if model != "demo":
        folder, options = str(tmp_path), {"load_format": "dummy"}
        shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32_000}
        tiny_config("llama", **shape, num_attention_heads=8, num_key_value_heads=4).save_pretrained(tmp_path)
        edit_config(tmp_path, architectures=["LlamaForCausalLM"])
    for num_seqs, num_tokens in ((256, 2048), (32, 512)):
        settings = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens, "kv_cache_memory_bytes": 64 * MIB}
        compare(folder, device="cpu", num_threads=1, **settings, **options)


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
    core.collective_rpc(RpcCall("save_sharded_state", (str(tmp_path / "state"),), {"max_size": 40_000}))
    core.close()
    assert config.folder != tmp_path / "state"
    compare(tmp_path / "state", **SMALL, load_format="sharded_state")


def test_no_weight_is_read(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    expected = plan_engine(str(tmp_path), device="cpu")
    path = tmp_path / "model.safetensors"
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    size = path.stat().st_size
    with path.open("r+b") as file:
        # A file of the same size without content after its header.
        file.truncate(header_bytes)
        file.truncate(size)
    plan = plan_engine(str(tmp_path), device="cpu")
    for term in ("weights", "activations"):
        assert plan.memory[term] == expected.memory[term]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_a_plan_takes_no_memory_to_speak_of(tmp_path: Path) -> None:
    """A model of 70 billion parameters is planned in little memory and time."""
    shape = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "vocab_size": 128_256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    tiny_config("llama", **shape, **heads).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["LlamaForCausalLM"], torch_dtype="bfloat16")
    code = (
        "import resource, sys\nfrom penstock.engine.planning.plan import plan_engine\n"
        "from penstock.errors import OutOfMemory\n"
        f"try:\n    plan_engine({str(tmp_path)!r}, device='cpu', load_format='dummy', dtype='bfloat16')\n"
        "except OutOfMemory as error:\n    print(error)\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        # Its own, where the resource usage has the largest size of the process that it was forked from.
        "size = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(used.ru_utime + used.ru_stime, size)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    seconds, kibibytes = result.stdout.splitlines()[-1].split()
    assert float(seconds) < 10  # of a processor
    assert int(kibibytes) < 700 * 1024
    if "leaves no memory" in result.stdout:
        assert re.search(r"weights +13\d\.\d\d GiB", result.stdout)


def test_a_plan_that_does_not_work_out_is_refused_as_by_the_engine(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(OutOfMemory, match="(?s)One request of max_model_len=128 tokens needs .*= left for"):
        plan_engine(str(tmp_path), device="cpu", kv_cache_memory_bytes=40_000)
    with pytest.raises(OutOfMemory, match="(?s)leaves no memory for the KV cache.*A token takes 512 bytes of KV cache"):
        plan_engine(str(tmp_path), device="cpu", memory_fraction=0.001)


def test_weights_that_are_missing_damaged_or_of_a_strange_dtype_are_named(tmp_path: Path) -> None:
    tiny_config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"There is no model\.safetensors or .*config\.json"):
        plan_engine(str(tmp_path), device="cpu")
    from safetensors.torch import save_file

    state = dict(tiny_model("llama").state_dict())
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int8)
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight \(torch\.int8\); 1 missing: lm_head\.weight"):
        plan_engine(str(tmp_path), device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="is damaged"):
        plan_engine(str(tmp_path), device="cpu")


def test_the_title_names_the_quantization_of_a_checkpoint_and_of_the_option(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    folder = write_quantized(tmp_path, gptq_layer(32, desc_act=False), config).config.folder
    planned = plan_engine(str(folder), **SMALL)
    assert planned.to_dict()["quantization"] == "gptq"
    assert "on cpu in float32 (gptq weights; otherwise " in planned.table()
    assert "(int8 weights; otherwise " in plan_engine("demo", quantization="int8", **SMALL).table()


@pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
@pytest.mark.processor
def test_the_title_names_the_arithmetic_of_products() -> None:
    planned = plan_engine("demo", cpu_arithmetic="bfloat16", **SMALL)
    assert planned.products is not None
    assert planned.products.startswith("products in bfloat16 arithmetic, added in float32, ")
    assert planned.to_dict()["products"] == planned.products
    assert f"; {planned.products})" in " ".join(planned.table().split())
    assert plan_engine("demo", cpu_arithmetic="float32", **SMALL).products == "products widen them"
    assert plan_engine("demo", dtype="float32", **SMALL).products is None
    assert "otherwise" not in plan_engine("demo", **SMALL).table()


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="There is no option block_sze"):
        plan_engine("demo", block_sze=3)
    with pytest.raises(ModelNotFound, match="nowhere"):
        plan_engine("/nowhere")


def test_what_checkpoints_hold_beside_weights_does_not_count(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save_checkpoint(model, tmp_path)
    expected = plan_engine(str(tmp_path), device="cpu").memory["weights"]
    from safetensors.torch import load_file, save_file

    content = load_file(tmp_path / "model.safetensors")
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(content, tmp_path / "model.safetensors")
    assert plan_engine(str(tmp_path), device="cpu").memory["weights"] == expected


def _on_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, headers: dict[str, tuple[str, list[int]]]) -> list[str]:
    """Fake hub with the folder's configuration; records the downloaded patterns."""
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
    assert (plan.memory["weights"], plan.kv_cache) == (expected.memory["weights"], expected.kv_cache)
    # What is in the local cache is read there.
    shutil.copyfile(config.folder / "model.safetensors", hub / "model.safetensors")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert plan_engine("someone/model", device="cpu").memory["weights"] == expected.memory["weights"]
    (hub / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="its weight files are not in the local hub cache"):
        plan_engine("someone/model", device="cpu")


def test_a_gpu_is_planned_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.planning.plan.gpu_memory", lambda: None)
    assert plan_engine("demo", max_num_seqs=8).device == "cpu"
    with pytest.raises(UnsupportedFeature, match="device='cuda' is not available"):
        plan_engine("demo", device="cuda")
    memory = MemoryLimit(total_bytes=80 << 30, free_bytes=80 << 30)
    monkeypatch.setattr("penstock.engine.planning.plan.gpu_memory", lambda: memory)
    plan = plan_engine("demo", max_num_seqs=8)
    assert (plan.device, plan.dtype.name) == ("cuda", "bfloat16")
    assert plan.memory.budget == int(0.9 * (80 << 30))
    # Attention by definition writes all scores down, which no GPU needs to that torch serves.
    assert plan.memory["activations"] > plan_engine("demo", max_num_seqs=8, device="cpu").memory["activations"]
    assert plan_engine("demo", device="cuda", quantization="int8").memory["weights"] < 0.6 * plan.memory["weights"]
    with pytest.raises(UnsupportedFeature, match=r"kv_cache_dtype='int8' on cuda: .*\. Use kv_cache_dtype='auto'"):
        plan_engine("demo", device="cuda", kv_cache_dtype="int8")
    # Half of float32, and no head is packed there.
    in_float32 = plan_engine("demo", max_num_seqs=8, device="cpu", dtype="float32").memory["weights"]
    assert plan.memory["weights"] < 0.55 * in_float32


class Remembering(LogitsProcessor):
    """Logits processor with a table of floats as large as that of the penalties."""

    name = "remembering"

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self.table = torch.zeros(context.num_slots, context.vocab_size)

    def add_request(self, *_: Any) -> bool:
        return False

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
        return logits


def test_what_custom_logits_processors_keep_is_planned_for(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    processors = {"logits_processors": (Remembering,)}
    compare(tmp_path, **SMALL, **processors)
    memory = plan_engine(str(tmp_path), **SMALL, **processors).memory
    assert memory["logits_processors"] == (SMALL["max_num_seqs"] + 1) * VOCAB_SIZE * 4
    without = plan_engine(str(tmp_path), **SMALL).memory
    assert memory.without_kv_cache - without.without_kv_cache == memory["logits_processors"]
    assert "- custom logits processors" in memory.table()
    assert "processors" not in without.table()


def test_the_memory_of_a_feature_is_a_term_of_its_name(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    options = {**SMALL, "enable_lora": True, "max_loras": 2}
    plan, core = plan_engine(str(tmp_path), **options), make_core(tmp_path, **options)
    memory = core.memory_plan
    core.close()
    assert plan.memory["lora_adapters"] == memory["lora_adapters"] > 0
    assert plan.to_dict()["memory"]["lora_adapters"] == memory["lora_adapters"]
    assert "- LoRA adapters" in plan.table()
    without = plan_engine(str(tmp_path), **SMALL).memory
    assert "LoRA" not in without.table()
    assert plan.memory.without_kv_cache - without.without_kv_cache >= memory["lora_adapters"]


def test_the_table_and_the_data_say_the_same(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "mistral", sliding_window=24)
    plan = plan_engine(str(tmp_path), **SMALL)
    table, data = plan.table(), plan.to_dict()
    for text in ("MistralForCausalLM", "2 layers (2 with a window or chunks)", "in float32", "= left for the KV cache"):
        assert text in table
    assert f"{data['kv_cache']['num_blocks']:,}" in table
    assert data["kv_cache"]["bytes"] == plan.kv_cache.size_bytes
    # Keys and values of 2 heads of 16 in 2 layers.
    assert data["kv_cache"]["bytes_per_token"] == 2 * 2 * 16 * 4 * 2
    memory = data["memory"]
    terms = ("process", "weights", "activations", "sampling", "runner_state", "hidden_states")
    assert memory["left_for_kv_cache"] == memory["budget"] - sum(memory[term] for term in terms)
    assert set(memory) >= {"total", "free_at_start", "fraction", "requested_kv_cache", "is_default_fraction"}
    assert data["engine_bytes"] == sum(memory[term] for term in terms) + data["kv_cache"]["bytes"]
    assert f"filled: {format_bytes(data['engine_bytes'])}" in table

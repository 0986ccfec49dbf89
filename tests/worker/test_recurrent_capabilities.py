"""Models with recurrent layers and each feature: tokens do not depend on the arrangement of workers."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

import pytest
from test_capabilities import (
    AWQ,
    CORE,
    ENGINES,
    LAUNCHED,
    POOLING,
    SCATTERED,
    STAGES,
    TENSOR,
    TURNS,
    WAYS,
    Way,
    always,
    assert_near,
    drafting,
    pooled,
    try_together,
    with_adapters,
    with_head,
    with_head_on_layers,
)

from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.errors import UnsupportedArgument
from penstock.worker.capabilities import check_options
from support.adapters import make_adapters
from support.checkpoints import tiny_checkpoint, tiny_model
from support.fake_engine import byte_level_tokenizer, write_tokenizer
from support.gguf_recurrent import write_recurrent
from support.quantized_checkpoints import awq_layer, write_quantized
from support.qwen_mtp import write_agreeing_mtp
from support.tried_features import LAYERS, VOCAB_SIZE, arranged, drafts_of, started, write_hybrid

ALL = {**STAGES, **TURNS, **SCATTERED}
ARRANGED: dict[str, dict[str, Any]] = {"TP": TENSOR, "PP x DCP x SP": ALL, "core x DP": {**CORE, **ENGINES}}
# Room for a few requests; how many blocks and states it makes depends on the arrangement.
MEMORY = {"kv_cache_memory_bytes": "512KiB"}
# Its pools are planned so that states run out, and not blocks; `test_recurrent_families` preempts.
WITHOUT = ("cached_and_preempted", "priorities")


def together(*names: str) -> Way:
    """Features of `test_capabilities` in one engine of a hybrid model.

    Its layers are narrower, so that a rounded one is further off.
    """

    def options(folder: Path) -> dict[str, Any]:
        return {key: value for name in names for key, value in WAYS[name].options(folder).items()}

    return Way(options, write_hybrid, 2 * max(WAYS[name].off_by for name in names))


def of_size_of_heads(folder: Path) -> Path:
    return write_hybrid(folder, vocab_size=97, hidden_size=64, mamba_n_heads=8)


def for_adapters(folder: Path) -> dict[str, Any]:
    """Adapters of attention, and of recurrent layers too."""
    if not (folder / "adapter0").exists():
        variants: list[dict[str, Any]] = [
            {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            {"r": 8, "lora_alpha": 16, "target_modules": ["in_proj", "out_proj", "o_proj"]},
            {"r": 3, "lora_alpha": 6, "target_modules": ["in_proj", "k_proj"]},
        ]
        kinds = ["linear_attention", "full_attention", *["linear_attention"] * 3, "full_attention"]
        sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": LAYERS, "num_key_value_heads": 1, "layer_types": kinds}
        make_adapters(tiny_model("granitemoehybrid", **sizes), folder, variants)
    return {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def with_mtp(folder: Path) -> Path:
    write_agreeing_mtp(folder, "qwen3_5", num_key_value_heads=1)
    return folder


def gguf_file(folder: Path) -> Path:
    folder.mkdir()
    model = tiny_model("jamba", vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS, num_key_value_heads=1)
    return write_recurrent(model, "jamba", folder / "model.gguf")


def awq(folder: Path) -> Path:
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 128}
    kinds = ["conv", "full_attention"] * (LAYERS // 2)
    sizes |= {"layer_types": kinds, "block_auto_adjust_ff_dim": False, "num_key_value_heads": 1}
    return write_quantized(folder, awq_layer(32), AWQ, "lfm2", **sizes).config.folder


def pure(folder: Path) -> Path:
    return tiny_checkpoint(folder, "mamba2", vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS).folder


OF_HYBRIDS = {
    "plain": Way(model=write_hybrid),
    "int8": together("int8 weights", "int8 KV cache", "adaptive draft lengths"),
    "int4": together("int4 weights", "KV cache of another dtype than the model's", "n-gram drafts"),
    "GPTQ calibration": together("int4 with GPTQ calibration", "suffix decoding"),
    "bfloat16": together("bfloat16 weights", "draft model", "batch invariance"),
    "bfloat16 arithmetic": together("bfloat16 arithmetic"),
    "AWQ checkpoints": Way(model=awq, off_by=0.2),
    "GGUF checkpoints": Way(model=gguf_file),
    "EAGLE": Way(with_head, of_size_of_heads),
    "EAGLE-3": Way(with_head_on_layers, of_size_of_heads),
    "MTP": Way(drafting("mtp"), with_mtp),
    "LoRA adapters": Way(for_adapters, write_hybrid, attempt=with_adapters),
    "pooling": Way(always(**POOLING), write_hybrid, attempt=pooled),
    "snapshots of all blocks": Way(always(mamba_cache_mode="all"), write_hybrid),
    "bfloat16 states": Way(always(mamba_cache_dtype="bfloat16"), write_hybrid, off_by=0.02),
    "no attention": Way(drafting("ngram", prompt_lookup_max=2), pure),
    "no attention, pooling": Way(always(**POOLING), pure, attempt=pooled),
}
STAGES_OF = {"MTP": {"pipeline_layers": (2, 2)}}


def refusal(way: Way, folder: Path, arrangement: dict[str, Any]) -> str | None:
    try:
        check_options(
            EngineConfig.create(str(folder), device="cpu", **arrangement, **way.options(folder.parent)), "cpu"
        )
    except UnsupportedArgument as error:
        return str(error)
    return None


def tried(name: str, folder: Path, arrangement: dict[str, Any]) -> Any:
    """Results of a way; the refusal of an arrangement."""
    way, model = OF_HYBRIDS[name], folder / name / "model"
    if not model.exists():
        (folder / name).mkdir()
        way.model(model)
    found = next((model / name for name in ("quantized", "model.gguf") if (model / name).exists()), model)
    if found.is_dir():
        write_tokenizer(found, byte_level_tokenizer())
    if "pipeline_layers" in arrangement:
        arrangement = arrangement | STAGES_OF.get(name, {})
    message = refusal(way, found, arrangement)
    if message is not None:
        return message
    options = {**arranged(arrangement), **MEMORY, **way.options(folder / name)}
    with started(found, folder / name, options) as engine:
        if "speculative_config" in options:
            assert max(engine.core.collective_rpc(RpcCall(drafts_of))) > 0
        return way.attempt(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@functools.cache
def of_one_worker(name: str, folder: Path) -> Any:
    return tried(name, folder, {})


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ARRANGED)
@pytest.mark.parametrize("name", OF_HYBRIDS)
def test_what_is_allowed_gives_what_one_worker_gives(name: str, arrangement: str, folder: Path) -> None:
    options = ARRANGED[arrangement]
    found = tried(name, folder, options)
    if isinstance(found, str):
        assert any(name in found for name in ("decode_context_parallel_size", "pipeline_parallel_size", "enable_sp"))
        return
    (expected, likely), (tokens, probable) = of_one_worker(name, folder), found
    assert tokens[0] == tokens[1]
    off_by = OF_HYBRIDS[name].off_by
    if off_by and "tensor_parallel_size" in options:
        assert statistics.mean(abs(ours - theirs) for ours, theirs in zip(probable, likely, strict=True)) < off_by
    else:
        assert tokens == expected
        assert probable == pytest.approx(likely, abs=2e-4)


@pytest.fixture(scope="module")
def together_on_one_worker(folder: Path) -> dict[str, Any]:
    return try_together(write_hybrid(folder / "together"), folder, MEMORY, without=WITHOUT)


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ARRANGED)
def test_what_needs_no_engine_of_its_own_works(
    arrangement: str, folder: Path, together_on_one_worker: dict[str, Any], tmp_path: Path
) -> None:
    found = try_together(folder / "together", tmp_path, {**ARRANGED[arrangement], **MEMORY}, without=WITHOUT)
    assert_near(found, {name: together_on_one_worker[name] for name in found})


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
@pytest.mark.parametrize("options", [TURNS, {**TURNS, **LAUNCHED}], ids=["DCP", "torchrun x DCP"])
def test_models_without_attention_have_nothing_to_share_by_positions(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    config = EngineConfig.create(str(tiny_checkpoint(tmp_path, family).folder), device="cpu", **options)
    with pytest.raises(UnsupportedArgument, match=r"decode_context_parallel_size=2 with \w+ForCausalLM: its recurrent"):
        check_options(config, "cpu")


def test_latents_beside_recurrent_layers_are_refused_as_those_of_other_models(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint(tmp_path, "kimi_linear").folder)
    for options, why in ((TURNS, "not sharded by positions"), ({"kv_cache_dtype": "int8"}, "float32 and bfloat16")):
        with pytest.raises(UnsupportedArgument, match=why):
            check_options(EngineConfig.create(folder, device="cpu", **options), "cpu")

"""GGUF files of mixtures of experts load as the model that they were written from, and experts keep their blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from penstock.config import LoadConfig, ModelConfig
from penstock.engine.planning.plan import plan_engine
from penstock.kernels.quantized import TorchQuantizedProducts
from penstock.layers.linear import LinearLayer, restore_weights, weights_size_bytes
from penstock.layers.quantization.method import PRODUCTS, QuantizedMethod
from penstock.loader.loader import load_model
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import oracle_logits, tiny_model
from support.engines import greedy, make_core, run
from support.gguf_mixtures import ARCHITECTURES, write_mixture
from support.plain_attention import sequence_logits, usual_difference
from support.ranks import contexts, run_ranks

TOKENS = [5, 17, 3, 88, 41, 9, 64, 23, 7, 11, 90, 2, 33]
_BLOCKS = {"moe_intermediate_size": 64, "intermediate_size": 128}
_LATENT = {**_BLOCKS, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_BLOCKS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "qwen3_moe": {**_BLOCKS, "head_dim": 16, "norm_topk_prob": True},
    "gpt_oss": {"intermediate_size": 64, "swiglu_limit": 7.0},
    "deepseek_v2": {**_LATENT, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek_v3": {**_LATENT, "norm_topk_prob": True},
}
computed_in_place = pytest.mark.skipif(
    isinstance(PRODUCTS, TorchQuantizedProducts), reason="without the C++ kernels GGUF files are dequantised"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


def written(family: str, folder: Path, kind: Type) -> tuple[Path, Any]:
    """File of a random mixture, and the model with the values that the file has."""
    model = tiny_model(family, **SIZES[family])
    with torch.no_grad():
        return write_mixture(model, family, folder / "tiny.gguf", kind), model


def load(path: Path, quantization: str | None = None, parallel: ParallelState | None = None) -> CausalLM:
    config = ModelConfig.load(str(path), quantization=quantization)
    quiet = LoadConfig(use_tqdm_on_load=False)
    return load_model(config, quiet, parallel or ParallelState(), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0, Type.MXFP4], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.one_case_quick
def test_logits_are_those_of_the_dequantised_model(family: str, kind: Type, tmp_path: Path) -> None:
    path, oracle = written(family, tmp_path, kind)
    (logits,) = sequence_logits(load(path, "none"), [TOKENS])
    expected = oracle_logits(oracle, TOKENS)
    assert expected.std() > 0.3, "logits this small would match anything"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@computed_in_place
@pytest.mark.parametrize("kind", [Type.MXFP4, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.one_case_quick
def test_experts_are_computed_from_their_blocks(family: str, kind: Type, tmp_path: Path) -> None:
    path, oracle = written(family, tmp_path, kind)
    model = load(path)
    experts = [layer for name, layer in model.named_modules() if ".experts." in name and isinstance(layer, LinearLayer)]
    assert experts
    assert all(isinstance(layer.method, QuantizedMethod) for layer in experts)
    (logits,) = sequence_logits(model, [TOKENS])
    assert 0 < usual_difference(logits, oracle_logits(oracle, TOKENS)) < 0.05
    planned = plan_engine(path, kv_cache_memory_bytes=1 << 22, dtype="float32").stages[0].memory["weights"]
    assert planned == weights_size_bytes(model)
    plain = load(path, "none")
    restore_weights(model)
    restore_weights(plain)
    for name, slot in model.checkpoint_slots().items():
        torch.testing.assert_close(slot.target, plain.checkpoint_slots()[name].target, rtol=1e-6, atol=1e-7)


@computed_in_place
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.one_case_quick
def test_two_ranks_share_the_blocks(family: str, tmp_path: Path) -> None:
    path, _ = written(family, tmp_path, Type.Q8_0)
    (expected,) = sequence_logits(load(path), [TOKENS])
    ranks = [load(path, parallel=parallel) for parallel in contexts(2)]
    for found in run_ranks(2, lambda rank: sequence_logits(ranks[rank], [TOKENS])):
        assert not isinstance(found, BaseException), found
        assert usual_difference(found[0], expected) < 0.03


@computed_in_place
@pytest.mark.slow
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_two_stages_have_the_tokens_of_one_worker(family: str, tmp_path: Path) -> None:
    path, _ = written(family, tmp_path, Type.MXFP4)
    tokens = []
    for size in (1, 2):
        core = make_core(path, dtype="float32", pipeline_parallel_size=size)
        tokens.append([result.tokens for result in run(core, [TOKENS, TOKENS[:3]], greedy(8))])
        core.close()
    assert tokens[0] == tokens[1]

"""GGUF files of models with recurrent layers run as the model that they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import AutoConfig

from penstock.checkpoints.gguf.container import Header
from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.gguf.recurrent_fields import _period
from penstock.errors import CheckpointError, ModelError, UnsupportedFeature
from penstock.layers.weights import Part
from penstock.loader.gguf.changes import GroupedHeads
from penstock.loader.gguf.tensors import GgufWeights
from penstock.parallel import Share
from support.checkpoints import VOCAB_SIZE, tiny_model
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.gguf_recurrent import ARCHITECTURES, write_recurrent, write_weights
from support.qwen_mtp import stacked_experts, write_agreeing_mtp

# What files do not have is as they have it.
CHANGES: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "granitemoehybrid": {},
    "bamba": {},
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {},
    "mamba2": {},
    "nemotron_h": {"time_step_min": 0.001},
    "nemotron_h_moe": {"time_step_min": 0.001, "moe_latent_size": 24},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, CHANGES[family]) for family in ARCHITECTURES),
        ("granitemoehybrid", {"num_local_experts": 0}),
        ("bamba", {"attn_layer_indices": [0, 2], "attention_bias": False, "num_key_value_heads": 1}),
        ("jamba", {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}),
    ],
    ids=str,
)
def test_a_file_runs_as_its_model(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    oracle = tiny_model(family, **changes)
    path = write_recurrent(oracle, family, tmp_path / "model.gguf")
    core = make_core(path, dtype="float32", max_model_len=64, kv_cache_memory_bytes=8 << 20)
    prompts = random_prompts([17, 4], VOCAB_SIZE)
    for prompt, result in zip(prompts, run(core, prompts, greedy(6, logprobs=2)), strict=True):
        assert result.error is None, result.error
        assert_greedy_continuation(oracle, prompt, result)
    core.close()


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_quantised_matrices_of_mamba_are_read_as_they_are(family: str, tmp_path: Path) -> None:
    sizes = {
        "mamba": {"time_step_rank": 32, "hidden_size": 64},
        "jamba": {"mamba_dt_rank": 32, "num_experts": 1, "intermediate_size": 96},
    }
    oracle = tiny_model(family, **sizes[family])
    path = write_recurrent(oracle, family, tmp_path / "model.gguf", Type.Q8_0)
    core = make_core(path, dtype="float32", quantization="none", max_model_len=64, kv_cache_memory_bytes=8 << 20)
    prompts = random_prompts([17, 4], VOCAB_SIZE)
    for prompt, result in zip(prompts, run(core, prompts, greedy(6, logprobs=2)), strict=True):
        assert_greedy_continuation(oracle, prompt, result)
    core.close()
    core = make_core(path, max_model_len=64, kv_cache_memory_bytes=8 << 20)
    assert all(result.error is None for result in run(core, prompts, greedy(6)))
    core.close()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.each_value_quick
def test_a_layer_for_more_tokens_drafts_as_from_safetensors(family: str, tmp_path: Path) -> None:
    write_agreeing_mtp(tmp_path / "model", family, **CHANGES[family])
    weights = stacked_experts(load_file(tmp_path / "model" / "model.safetensors"))
    config = AutoConfig.from_pretrained(tmp_path / "model")
    path = write_weights(weights, config, family, tmp_path / "m.gguf", num_drafting=1)
    drafting = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    prompts, found = random_prompts([17, 4], VOCAB_SIZE), []
    for model in (tmp_path / "model", path):
        core = make_core(
            model, dtype="float32", max_model_len=64, kv_cache_memory_bytes=8 << 20, speculative_config=drafting
        )
        tokens = [result.tokens for result in run(core, prompts, greedy(16))]
        metrics = core.scheduler.spec_decode_metrics
        found.append((tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens))
        core.close()
    assert found[0] == found[1]
    assert 0 < found[1][2] < found[1][1]


def test_a_file_without_a_layer_for_more_tokens_is_no_drafter(tmp_path: Path) -> None:
    path = write_recurrent(tiny_model("qwen3_5"), "qwen3_5", tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="mtp_num_hidden_layers=0"):
        make_core(path, max_model_len=64, speculative_config={"method": "mtp", "num_speculative_tokens": 1})


def test_layers_of_jamba_without_a_period_are_refused() -> None:
    header = Header({"general.architecture": "jamba"}, ())
    with pytest.raises(UnsupportedFeature, match=r"attn_layers \[0, 1, 3\].*every layer in so many"):
        _period(Metadata("m.gguf", header), "attn_layer", [0, 1, 3], 4)


def test_halves_of_a_matrix_that_are_two_tensors_keep_their_blocks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "mamba_n_heads": 8, "shared_intermediate_size": 96, "num_local_experts": 0}
    write_recurrent(tiny_model("granitemoehybrid", **sizes), "granitemoehybrid", tmp_path / "m.gguf", Type.Q8_0)
    weights = GgufWeights.find(tmp_path)
    assert weights is not None
    name = "model.layers.1.shared_mlp.input_linear.weight"
    whole = weights.grid(name)
    of_second_rank = weights.grid(name, Part(0, (Share(48, 48, 192), Share(144, 48, 192))))
    assert whole is not None
    assert of_second_rank is not None
    values_OI = dict(weights.iterate())[name]
    scales_OG = whole.grid.scales_OG
    assert scales_OG.shape == (192, 2)
    largest_O = (values_OI.clone() / scales_OG.repeat_interleave(32, 1)).round().abs().amax(1)
    assert torch.equal(largest_O, torch.full((192,), 127.0))
    assert torch.equal(of_second_rank.grid.scales_OG, torch.cat((scales_OG[48:96], scales_OG[144:])))


def test_scales_of_groups_follow_their_heads() -> None:
    heads, generator = GroupedHeads(num_keys=2, num_values=3, size=8, dim=1), torch.Generator().manual_seed(0)
    assert (heads.apply(torch.arange(48)[None])[0, ::8] // 8).tolist() == [0, 2, 4, 1, 3, 5]
    values_OI, scales_OG = torch.randn(4, 48, generator=generator), torch.randn(4, 12, generator=generator)
    scaled_OI = heads.apply(values_OI) * heads.of_grid(scales_OG).repeat_interleave(4, 1)
    assert torch.equal(heads.apply(values_OI * scales_OG.repeat_interleave(4, 1)), scaled_OI)
    assert torch.equal(heads.of_grid(scales_OG[:, :1]), scales_OG[:, :1])
    with pytest.raises(CheckpointError, match="5 groups"):
        heads.of_grid(scales_OG[:, :5])
    with pytest.raises(CheckpointError, match="6 value heads of 8 has 40"):
        heads.apply(values_OI[:, :40])

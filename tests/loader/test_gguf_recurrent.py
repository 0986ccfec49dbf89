"""GGUF files of models with recurrent layers run as the model that they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from penstock.errors import CheckpointError
from penstock.layers.weights import Part
from penstock.loader.gguf.changes import GroupedHeads
from penstock.loader.gguf.tensors import GgufWeights
from penstock.parallel import Share
from support.checkpoints import VOCAB_SIZE, tiny_model
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.gguf_recurrent import ARCHITECTURES, write_recurrent

# What files do not have is as they have it.
CHANGES: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "granitemoehybrid": {},
    "mamba2": {},
    "nemotron_h": {"time_step_min": 0.001},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, CHANGES[family]) for family in ARCHITECTURES), ("granitemoehybrid", {"num_local_experts": 0})],
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
    values_OI, scales_OG = torch.randn(4, 48, generator=generator), torch.randn(4, 12, generator=generator)
    scaled_OI = heads.apply(values_OI) * heads.of_grid(scales_OG).repeat_interleave(4, 1)
    assert torch.equal(heads.apply(values_OI * scales_OG.repeat_interleave(4, 1)), scaled_OI)
    assert torch.equal(heads.of_grid(scales_OG[:, :1]), scales_OG[:, :1])
    with pytest.raises(CheckpointError, match="5 groups"):
        heads.of_grid(scales_OG[:, :5])
    with pytest.raises(CheckpointError, match="6 value heads of 8 has 40"):
        heads.apply(values_OI[:, :40])

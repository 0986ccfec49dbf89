"""GGUF files of models with recurrent layers run as the model that they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import VOCAB_SIZE, tiny_model
from support.engines import assert_greedy_continuation, greedy, make_core, random_prompts, run
from support.gguf_recurrent import ARCHITECTURES, write_recurrent

# What files do not have is as they have it.
CHANGES: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "mamba2": {},
    "nemotron_h": {"time_step_min": 0.001},
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_runs_as_its_model(family: str, tmp_path: Path) -> None:
    oracle = tiny_model(family, **CHANGES[family])
    path = write_recurrent(oracle, family, tmp_path / "model.gguf")
    core = make_core(path, dtype="float32", max_model_len=64, kv_cache_memory_bytes=8 << 20)
    prompts = random_prompts([17, 4], VOCAB_SIZE)
    for prompt, result in zip(prompts, run(core, prompts, greedy(6, logprobs=2)), strict=True):
        assert result.error is None, result.error
        assert_greedy_continuation(oracle, prompt, result)
    core.close()

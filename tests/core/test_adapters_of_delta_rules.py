"""LoRA adapters of layers with recurrent states, compared with PEFT on Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.adapted_models import OPTIONS, PROMPTS, adapted, assert_same, run
from support.engines import make_core

# By family: projections, also such as have several parts in one tensor.
_FAMILIES = {
    "qwen3_next": [["q_proj", "v_proj", "in_proj_qkvz", "in_proj_ba"], ["o_proj", "out_proj"]],
    "qwen3_5": [["q_proj", "in_proj_qkv", "in_proj_z", "in_proj_b"], ["in_proj_a", "out_proj"]],
    "olmo_hybrid": [["q_proj", "g_proj", "b_proj"], ["v_proj", "a_proj", "o_proj"]],
    "minimax": [["qkv_proj", "output_gate", "q_proj"], ["out_proj", "o_proj"]],
    "kimi_linear": [["q_proj", "b_proj", "g_b_proj"], ["k_proj", "o_proj", "g_a_proj"]],
    "mamba": [["in_proj", "x_proj"], ["x_proj", "lm_head"]],
    "falcon_mamba": [["x_proj"], ["in_proj", "x_proj"]],
    "jamba": [["x_proj", "q_proj"], ["in_proj", "x_proj", "o_proj"]],
    "mamba2": [["in_proj"], ["in_proj", "lm_head"]],
    "zamba2": [["in_proj", "linear"], ["out_proj", "in_proj"]],
    "nemotron_h": [["in_proj", "q_proj", "up_proj"], ["in_proj", "o_proj", "down_proj"]],
    "recurrent_gemma": [["linear_x", "q_proj", "up_proj"], ["linear_y", "linear_out", "o_proj", "gate_proj"]],
}
_NUMBERS = [1, 0, 2]
# Transformers takes a text of one token for the next one of the text before it in RecurrentGemma.
_PROMPTS = [PROMPTS[index] for index in (0, 1, 3)]


@pytest.mark.parametrize("options", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.each_value_quick
def test_projections_have_adapters(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    variants = [{"r": 3, "target_modules": modules} for modules in _FAMILIES[family]]
    with adapted(tmp_path, family, variants) as model:
        core = make_core(model.folder, **OPTIONS, **options)
        results = run(core, model, _PROMPTS, _NUMBERS)
        core.close()
        assert_same(results, [model.expected(*pair) for pair in zip(_PROMPTS, _NUMBERS, strict=True)])


@pytest.mark.one_path(reason="adapters are refused before any step")
def test_projections_of_shared_blocks_are_refused_by_name(tmp_path: Path) -> None:
    with adapted(tmp_path, "zamba2", [{"r": 3, "target_modules": ["q_proj"]}]) as model:
        core = make_core(model.folder, **OPTIONS)
        (result,) = run(core, model, PROMPTS[:1], [1])
        core.close()
    assert result.error is not None
    assert "adapters of this model cannot change" in result.error
    assert ".q_proj" in result.error

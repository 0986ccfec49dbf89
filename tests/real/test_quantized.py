"""Quantised weights of SmolLM2-135M-Instruct, and of a rescaled copy, beside float32."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

import penstock
from penstock.bench.quality.run import evaluate
from penstock.config import EngineConfig
from support.real_model import MARKS

pytestmark = MARKS
# Rise of the loss, and mean change of a token's log-probability, that a format may cost.
_LIMITS = {"int8": (0.01, 0.1), "int4": (0.06, 0.6)}


def _rescaled(model: transformers.LlamaForCausalLM, folder: Path) -> Path:
    """Save a model of the same function whose weights lie on no grid of the file's, with features of unequal size."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                factors = torch.rand(norm.weight.shape[0], generator=random) * 1.5 + 0.5
                norm.weight /= factors
                for reader in readers:
                    reader.weight *= factors
            factors = torch.rand(mlp.down_proj.in_features, generator=random) * 1.5 + 0.5
            mlp.up_proj.weight /= factors[:, None]
            mlp.down_proj.weight *= factors
    model.save_pretrained(folder)
    for file in EngineConfig.create("smollm2").model.tokenizer_folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("is_rescaled", [False, True], ids=["as published", "rescaled"])
def test_quantised_weights_keep_what_the_model_says(oracle, tmp_path, is_rescaled):
    model = str(_rescaled(oracle, tmp_path)) if is_rescaled else "smollm2"
    text = (Path(penstock.__file__).parents[2] / "LICENSE").read_text()
    options = {"device": "cpu", "kv_cache_memory_bytes": "128MiB"}
    _, results = evaluate(
        *(model, text, list(_LIMITS), options),
        against="float32",
        window=256,
        max_tokens=1024,
        on_measured=lambda format: None,
    )
    for result in results[1:]:
        loss_change, mean_change = _LIMITS[result.format]
        assert result.closeness.loss_change <= loss_change, result
        assert result.closeness.mean_change <= mean_change, result

"""Engines with an FP8 KV cache and a checkpoint's scales, against Transformers over keys and values in FP8."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from penstock.errors import UnsupportedArgument, UnsupportedFeature
from penstock.system.env import interprets_triton
from support.checkpoints import VOCAB_SIZE, oracle_logits
from support.engines import Result, greedy, make_core, random_prompts, run, run_layer_by_layer
from support.scaled_caches import save_scaled, scaled_model
from support.triton_device import DEVICE, needs_triton

if interprets_triton():
    import support.triton_interpreter  # noqa: F401 - repairs the interpreter

PROMPTS = random_prompts((5, 37), VOCAB_SIZE)


def mean_error(oracle: PreTrainedModel, results: list[Result]) -> float:
    """Mean distance of tokens' log-probabilities from the oracle's."""
    errors = []
    for prompt, result in zip(PROMPTS, results, strict=True):
        likely = oracle_logits(oracle, prompt + result.tokens).log_softmax(-1)[len(prompt) - 1 : -1]
        rows = zip(result.logprobs, result.tokens, likely, strict=True)
        errors += [abs(found[token] - float(expected[token])) for found, token, expected in rows]
    return sum(errors) / len(errors)


def results_of(folder: Path, **options: str) -> list[Result]:
    # A small budget cuts the longer prompt into chunks, which run beside the other's decodes.
    core = make_core(folder, dtype="float32", block_size=16, max_num_batched_tokens=20, **options)
    results = run(core, PROMPTS, greedy(6, logprobs=1))
    core.close()
    return results


@pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(f"triton_{name}", marks=needs_triton) for name in ("paged", "invariant"))]
)
def test_an_engine_computes_with_the_scales(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_layer_by_layer(monkeypatch)
    oracle = scaled_model()
    save_scaled(oracle, tmp_path)
    results = results_of(tmp_path, device=DEVICE, kv_cache_dtype="fp8", attention_backend=backend)
    assert mean_error(oracle, results) < 0.01


def test_values_saturate_without_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oracle = scaled_model()
    oracle.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="penstock"):
        results = results_of(tmp_path, device="cpu", kv_cache_dtype="fp8", attention_backend="reference")
    assert mean_error(oracle, results) > 0.05
    assert "0 of 2 layers have scales" in caplog.text


def test_a_cache_of_another_dtype_does_without_the_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oracle = scaled_model()
    (tmp_path / "plain").mkdir()
    oracle.save_pretrained(tmp_path / "plain")
    save_scaled(oracle, tmp_path / "scaled")
    with caplog.at_level(logging.INFO, logger="penstock"):
        found, expected = (results_of(tmp_path / name, device="cpu") for name in ("scaled", "plain"))
    assert found == expected
    assert "scales of an FP8 KV cache are not used with kv_cache_dtype='float32'" in caplog.text


def test_what_has_no_float8_cache_is_refused_by_name(tmp_path: Path) -> None:
    save_scaled(scaled_model(), tmp_path)
    with pytest.raises(UnsupportedArgument, match="kv_cache_dtype='fp8'.*attention_backend='reference'"):
        make_core(tmp_path, kv_cache_dtype="fp8")
    for backend in ("cpu_native", "cpu_paged"):
        with pytest.raises(UnsupportedFeature, match=f"{backend}: .*(float8|C\\+\\+)"):
            make_core(tmp_path, kv_cache_dtype="fp8", attention_backend=backend)


def test_the_oracle_rounds() -> None:
    """Its logits are near those over keys and values in float32, and not equal to them."""
    model = scaled_model()
    found = oracle_logits(model, PROMPTS[1])
    model.config._attn_implementation = "eager"
    error = (found - oracle_logits(model, PROMPTS[1])).abs()
    assert 0 < error.mean() < 0.2
    assert torch.isfinite(error).all()

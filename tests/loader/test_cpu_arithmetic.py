"""bfloat16 arithmetic of bfloat16 checkpoints: its choice, and its distance from float32 beside Transformers' own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.attention import NO_CONTEXT
from penstock.config import LoadConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.kernels.native import NATIVE
from penstock.layers.linear import LinearLayer, NativeBfloat16Method, NativeMethod, PackedMethod, weights_size_bytes
from penstock.loader.loader import load_model
from penstock.loader.sharded_state import copy_model_files, save_sharded_state
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from penstock.worker.inspection import inspect_model
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import greedy, make_core, random_prompts, run
from support.plain_attention import sequence_logits

pytestmark = [pytest.mark.processor, pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def load(config: ModelConfig, weights: torch.dtype = torch.bfloat16, **options: Any) -> CausalLM:
    return load_model(config, LoadConfig(**options), ParallelState(), torch.device("cpu"), torch.float32, weights)


def checkpoint(folder: Path, family: str = "llama", *, cpu_arithmetic: str = "bfloat16", **changes: Any) -> ModelConfig:
    save_checkpoint(tiny_model(family, **changes), folder, dtype=torch.bfloat16)
    return ModelConfig.load(str(folder), cpu_arithmetic=cpu_arithmetic)


def methods(model: CausalLM) -> set[type]:
    return {type(module.method) for module in model.modules() if isinstance(module, LinearLayer)}


def logits_of(model: CausalLM) -> Tensor:
    return sequence_logits(model, [TOKENS])[0]


def prefers_bfloat16(has: bool) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr("penstock.kernels.native.NativeKernels.prefers_bfloat16", has)


def has_instructions(patch: pytest.MonkeyPatch, *, products: bool = True, tiles: bool = False) -> None:
    """Let the processor say that it has these instructions; where it has not, the kernels emulate them."""
    assert NATIVE is not None
    has = replace(NATIVE.instruction_set, has_bfloat16_products=products, has_tiles=tiles)
    patch.setattr(NATIVE, "instruction_set", has)


@pytest.mark.parametrize(
    ("has", "cpu_arithmetic", "expected"),
    [
        (True, "auto", NativeBfloat16Method),
        (True, "float32", NativeMethod),
        (False, "auto", NativeMethod),
        (False, "bfloat16", NativeBfloat16Method),
    ],
)
def test_the_processor_and_the_option_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool, cpu_arithmetic: str, expected: type
) -> None:
    prefers_bfloat16(has)(monkeypatch)
    assert methods(load(checkpoint(tmp_path, cpu_arithmetic=cpu_arithmetic))) == {expected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_weights_are_multiplied_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    prefers_bfloat16(True)(monkeypatch)
    assert methods(load(tiny_checkpoint(tmp_path), dtype)) == {NativeMethod}


def test_layers_with_an_odd_number_of_inputs_are_multiplied_in_float32(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path, intermediate_size=111))
    odd = [module for module in model.modules() if isinstance(module, LinearLayer) and module.input_size == 111]
    assert {type(layer.method) for layer in odd} == {NativeMethod}
    assert methods(model) == {NativeMethod, NativeBfloat16Method}
    assert logits_of(model).isfinite().all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_log_probabilities_are_closer_to_float32_than_those_of_transformers_in_bfloat16(
    tmp_path: Path, family: str
) -> None:
    config = checkpoint(tmp_path, family)
    ours = logits_of(load(config)).log_softmax(-1)
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(family).bfloat16().to(dtype).eval()  # the checkpoint's values
        with torch.inference_mode():
            theirs[dtype] = model(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    exact = theirs[torch.float32]
    assert 0 < (ours - exact).abs().mean() < (theirs[torch.bfloat16] - exact).abs().mean()


def test_an_engine_says_so_and_its_matrices_take_the_bytes_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefers_bfloat16(True)(monkeypatch)
    has_instructions(monkeypatch)
    config = checkpoint(tmp_path, vocab_size=160, intermediate_size=128)  # full panels, so no padding
    with caplog.at_level(logging.INFO):
        core = make_core(tmp_path)
    run(core, random_prompts([5], vocab_size=97), greedy(3))
    core.close()
    assert "products in bfloat16 arithmetic, added in float32, by AVX512-BF16" in caplog.text
    model = load(config)
    assert "NativeBfloat16Method" in inspect_model(model)
    assert weights_size_bytes(model) == weights_size_bytes(load(replace(config, cpu_arithmetic="float32")))


def test_tiles_are_packed_and_named_where_the_processor_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Emulated: a processor without AMX computes the same bits."""
    prefers_bfloat16(True)(monkeypatch)
    has_instructions(monkeypatch)
    by_pairs = logits_of(load(checkpoint(tmp_path)))
    has_instructions(monkeypatch, tiles=True)
    model = load(checkpoint(tmp_path))
    packed = {kept.dtype for layer in model.modules() if isinstance(layer, LinearLayer) for kept in layer.method.kept}
    assert packed == {torch.uint32}
    assert 0 < (logits_of(model) - by_pairs).abs().mean() < 0.01  # the order of sums
    prompts = random_prompts([5, 20, 33], vocab_size=97)
    with caplog.at_level(logging.INFO):
        core = make_core(tmp_path)
    assert "added in float32, by AMX tiles" in caplog.text
    together = run(core, prompts, greedy(6))
    alone = [run(core, [prompt], greedy(6))[0] for prompt in prompts]
    core.close()
    assert [result.tokens for result in together] == [result.tokens for result in alone]


def test_a_reason_not_to_use_tiles_is_in_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path)
    monkeypatch.setattr("penstock.worker.worker.why_no_tiles", lambda: "refused")
    with caplog.at_level(logging.WARNING):
        make_core(tmp_path).close()
    assert caplog.text.count("The AMX tiles of this processor are not used: refused") == 1


def test_without_instructions_the_log_says_that_they_are_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_instructions(monkeypatch, products=False)
    checkpoint(tmp_path)
    with caplog.at_level(logging.INFO):
        make_core(tmp_path, cpu_arithmetic="bfloat16").close()
    assert "emulated, since this CPU has no instructions for them" in caplog.text


def test_a_saved_state_has_the_weights_bit_for_bit_and_the_arithmetic_stays(tmp_path: Path) -> None:
    config = checkpoint(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    model = load(config)
    before = logits_of(model)
    save_sharded_state(model, tmp_path / "state", ParallelState())
    copy_model_files(tmp_path / "model", tmp_path / "state")
    assert methods(model) == {NativeBfloat16Method}
    assert torch.equal(logits_of(model), before)
    state = ModelConfig.load(str(tmp_path / "state"), cpu_arithmetic="bfloat16")
    assert torch.equal(logits_of(load(state, load_format="sharded_state")), before)


def test_a_tied_embedding_reads_exact_rows_of_the_head(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path, tie_word_embeddings=True))
    head = model.get_submodule("lm_head")
    assert isinstance(head, LinearLayer)
    assert isinstance(head.method, PackedMethod)
    expected = tiny_model("llama", tie_word_embeddings=True).bfloat16().float().get_input_embeddings()
    ids = torch.tensor([1, 96, 50, 1])
    assert torch.equal(model.get_submodule("model.embed_tokens")(ids, NO_CONTEXT), expected(ids))


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantization": "int8"}])
def test_bfloat16_arithmetic_is_refused_where_no_layer_can_have_it(tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"cpu_arithmetic='bfloat16' is not valid .* unquantized weights in bfloat16"):
        make_core(tmp_path, cpu_arithmetic="bfloat16", **options)


def test_an_unknown_arithmetic_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="cpu_arithmetic='int8'"):
        ModelConfig.load(str(tmp_path), cpu_arithmetic="int8")

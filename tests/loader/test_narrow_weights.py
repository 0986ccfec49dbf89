"""Matrices in half precision, in float32 arithmetic: the bits of a float32 run on their values, in half the memory."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import LoadConfig, ModelConfig
from penstock.kernels.native import NATIVE
from penstock.layers.linear import NativeMethod, process_weights_after_loading, restore_weights, weights_size_bytes
from penstock.loader.loader import find_stored_dtype, load_model
from penstock.loader.sharded_state import copy_model_files, save_sharded_state
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.engines import greedy, make_core, random_prompts, run
from support.plain_attention import sequence_logits
from support.transformers_models import save_for_fallback, tiny_transformers_model

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels were not built")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
HALVES = [torch.bfloat16, torch.float16]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
    ("phi3", {}),
    ("gemma2", {}),
    ("gemma3", {}),
    ("gpt2", {}),
    ("olmo2", {}),
]


def load(config: ModelConfig, weights_dtype: torch.dtype, **options: Any) -> CausalLM:
    load_config = LoadConfig(**options)
    config = dataclasses.replace(config, cpu_arithmetic="float32")
    device = torch.device("cpu")
    return load_model(config, load_config, ParallelState(), device, torch.float32, weights_dtype)


def logits_of(model: CausalLM) -> Tensor:
    return sequence_logits(model, [TOKENS])[0]


def matrices(model: CausalLM) -> int:
    """Values in matrices, each counted once."""
    restore_weights(model)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
def test_logits_have_the_bits_of_a_float32_run(
    tmp_path: Path, family: str, changes: dict[str, Any], half: torch.dtype
) -> None:
    config = save_checkpoint(tiny_model(family, **changes), tmp_path, dtype=half)
    narrow, wide = load(config, half), load(config, torch.float32)
    assert torch.equal(logits_of(narrow), logits_of(wide))
    for name, parameter in narrow.named_parameters():
        if parameter.dim() == 1 and parameter.numel():
            assert parameter.dtype == torch.float32, name


@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "StableLmForCausalLM", "OPTForCausalLM", "CohereForCausalLM"])
def test_models_of_transformers_too(tmp_path: Path, name: str) -> None:
    config = save_for_fallback(tiny_transformers_model(name), tmp_path)
    narrow = load(config, torch.bfloat16)
    rounded = tiny_transformers_model(name)
    for module in rounded.modules():
        # Those that stay as they are: norms, and OPT's positions, which are an embedding of its own.
        if type(module) in (torch.nn.Linear, torch.nn.Embedding):
            module.weight.data = module.weight.data.bfloat16().float()
    wide = load(save_for_fallback(rounded, tmp_path / "rounded"), torch.float32)
    assert torch.equal(logits_of(narrow), logits_of(wide))


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_take_half_and_are_held_once(tmp_path: Path, tied: bool) -> None:
    changes = {"tie_word_embeddings": tied, "vocab_size": 160, "intermediate_size": 128}  # full panels, so no padding
    config = save_checkpoint(tiny_model("llama", **changes), tmp_path, dtype=torch.bfloat16)
    narrow, wide = load(config, torch.bfloat16), load(config, torch.float32)
    saved = weights_size_bytes(wide) - weights_size_bytes(narrow)
    assert saved == 2 * matrices(wide) == 2 * matrices(narrow)


def test_weights_can_be_restored_and_packed_again(tmp_path: Path) -> None:
    config = save_checkpoint(tiny_model("llama", tie_word_embeddings=True), tmp_path, dtype=torch.bfloat16)
    model = load(config, torch.bfloat16)
    before = logits_of(model)
    restore_weights(model)
    assert model.get_parameter("lm_head.weight").dtype == torch.bfloat16
    # Products of torch in float32: slower and in another order, not other values.
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-4)
    process_weights_after_loading(model)
    assert isinstance(model.get_submodule("lm_head").method, NativeMethod)
    assert torch.equal(logits_of(model), before)


def test_a_saved_state_holds_them_as_they_are(tmp_path: Path) -> None:
    config = save_checkpoint(tiny_model("qwen2"), tmp_path / "model", dtype=torch.bfloat16)
    model = load(config, torch.bfloat16)
    written = save_sharded_state(model, tmp_path / "state", ParallelState())
    copy_model_files(tmp_path / "model", tmp_path / "state")
    num_parameters = sum(parameter.numel() for parameter in tiny_model("qwen2").parameters())
    assert sum(path.stat().st_size for path in written) < 0.6 * 4 * num_parameters
    state = ModelConfig.load(str(tmp_path / "state"))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(logits_of(load(state, dtype, load_format="sharded_state")), logits_of(model))


def test_rounding_that_no_request_asked_for_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_checkpoint(tmp_path)  # in float32
    with caplog.at_level(logging.WARNING):
        load(dataclasses.replace(config, dtype="bfloat16"), torch.bfloat16)
        assert not caplog.records
        load(config, torch.bfloat16)
    assert "such as" in caplog.text
    assert "torch.float32" in caplog.text


def test_the_files_decide_rather_than_config_json(tmp_path: Path) -> None:
    states = {dtype: {name: t.to(dtype) for name, t in tiny_model("llama").state_dict().items()} for dtype in HALVES}
    wide = tiny_model("llama").state_dict()
    mixed = {name: wide[name] if "embed" in name else tensor for name, tensor in states[torch.bfloat16].items()}
    norms_wide = {name: wide[name] if "norm" in name else tensor for name, tensor in states[torch.bfloat16].items()}
    cases = [(states[torch.bfloat16], "bfloat16"), (states[torch.float16], "float16"), (mixed, "float32")]
    for number, (state, expected) in enumerate([*cases, (norms_wide, "bfloat16"), (wide, "float32")]):
        folder = tmp_path / str(number)
        tiny_model("llama").save_pretrained(folder, state_dict=dict(state))
        assert find_stored_dtype(folder, LoadConfig(), ParallelState()) == expected
    torch.save(states[torch.float16], tmp_path / "4" / "pytorch_model.bin")
    assert find_stored_dtype(tmp_path / "4", LoadConfig(load_format="pt"), ParallelState()) == "float16"
    (tmp_path / "4" / "model.safetensors").write_bytes(b"damaged")
    assert find_stored_dtype(tmp_path / "4", LoadConfig(), ParallelState()) is None
    assert find_stored_dtype(tmp_path, LoadConfig(), ParallelState()) is None


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_an_engine_in_float32_arithmetic_gives_equal_results_and_its_log_says_so(
    tmp_path: Path, half: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    name = str(half).removeprefix("torch.")
    save_checkpoint(tiny_model("llama"), tmp_path, dtype=half)
    prompts = random_prompts([5, 17, 30], vocab_size=97)
    params = greedy(12, logprobs=-1)
    results = {}
    for dtype in ("auto", "float32", name):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            core = make_core(tmp_path, dtype=dtype, cpu_arithmetic="float32", max_logprobs=-1)
        assert "computed in float32" in caplog.text
        assert (f"weights stay in {name}" in caplog.text) == (dtype != "float32")
        assert ("products widen them" in caplog.text) == (dtype != "float32")
        results[dtype] = run(core, prompts, params)
        core.close()
    assert results["auto"] == results["float32"] == results[name]

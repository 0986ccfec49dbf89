"""After the last attention a step goes on with the requests' last tokens alone, unless others are asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from penstock.contract import RpcCall, SamplingParams
from penstock.kernels.native import NATIVE
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, greedy, make_core, random_prompts, run, run_layer_by_layer

# With 16 tokens a step: whole prompts, parts of them and decodes beside each other.
PROMPTS = random_prompts([1, 5, 33, 12, 70], VOCAB_SIZE)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4}
needs_native = pytest.mark.skipif(NATIVE is None, reason="the C++ kernels are not there")


def params(**fields: Any) -> SamplingParams:
    return greedy(6, logprobs=VOCAB_SIZE, **fields)


def results(folder: Path, ask_about_prompts: bool, **options: Any) -> list[Result]:
    core = make_core(folder, **{**OPTIONS, **options})
    try:
        return run(core, PROMPTS, params(prompt_logprobs=0 if ask_about_prompts else None))
    finally:
        core.close()


def assert_same(folder: Path, tolerance: float, **options: Any) -> None:
    """Whether the other hidden states are computed too, as those who ask about prompts need them."""
    for last, every in zip(*(results(folder, asked, **options) for asked in (False, True)), strict=True):
        assert last.tokens == every.tokens
        for row, expected in zip(last.logprobs, every.logprobs, strict=True):
            assert row.keys() == expected.keys()
            assert max(abs(row[token] - expected[token]) for token in row) <= tolerance


@needs_native
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi3", "gemma2", "gemma3"])
@pytest.mark.each_value_quick
def test_programs_give_the_same_bits(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    assert_same(tmp_path, 0.0)


@needs_native
@pytest.mark.parametrize("option", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"num_threads": 2}])
@pytest.mark.each_value_quick
def test_programs_give_the_same_bits_with_options(tmp_path: Path, option: dict[str, Any]) -> None:
    tiny_checkpoint(tmp_path, "qwen3")
    assert_same(tmp_path, 0.0, **option)


@pytest.mark.parametrize("backend", ["cpu_native", "cpu_paged", "reference"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "gpt2"])
@pytest.mark.one_case_quick
def test_layers_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, backend: str) -> None:
    if backend == "cpu_native" and NATIVE is None:
        pytest.skip("the C++ kernels are not there")
    tiny_checkpoint(tmp_path, family)
    run_layer_by_layer(monkeypatch)
    assert_same(tmp_path, 1e-5, attention_backend=backend)


def test_a_single_layer(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    assert_same(tmp_path, 1e-5)


def test_through_transformers(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    assert_same(tmp_path, 1e-5, model_impl="transformers")


def test_a_prefix_that_another_request_writes_in_the_same_step(tmp_path: Path) -> None:
    """The last layer's keys and values of all tokens are there before any query reads them."""
    tiny_checkpoint(tmp_path, "llama")
    shared = random_prompts([24], VOCAB_SIZE)[0]
    prompts = [[*shared, 3 + index] for index in range(4)]
    core = make_core(tmp_path, **{**OPTIONS, "max_num_batched_tokens": 64})
    try:
        together = run(core, prompts, params())
        core.reset_prefix_cache()
        alone = [run(core, [prompt], params())[0] for prompt in prompts]
    finally:
        core.close()
    assert [result.tokens for result in together] == [result.tokens for result in alone]


@pytest.mark.parametrize(("family", "mlp"), [("llama", "model.layers.{}.mlp"), ("gpt2", "layers.{}.mlp")])
def test_other_rows_are_not_computed(tmp_path: Path, family: str, mlp: str) -> None:
    tiny_checkpoint(tmp_path, family)
    core = make_core(tmp_path, **{**OPTIONS, "max_num_batched_tokens": 64})
    seen: dict[str, list[int]] = {"first": [], "last": []}
    try:
        core.collective_rpc(RpcCall("apply_model", (lambda model: _watch(model, mlp, seen),)))
        run(core, PROMPTS[1:4], greedy(1))
        assert seen == {"first": [50], "last": [3]}
        core.reset_prefix_cache()
        run(core, PROMPTS[1:4], [greedy(1), greedy(1), greedy(1, prompt_logprobs=0)])
        assert seen == {"first": [50, 50], "last": [3, 50]}
    finally:
        core.close()


def _watch(model: nn.Module, mlp: str, seen: dict[str, list[int]]) -> None:
    num_layers = len(list(model.get_submodule(mlp.partition(".{}")[0]).children()))
    for name, number in (("first", 0), ("last", num_layers - 1)):
        model.get_submodule(mlp.format(number)).register_forward_hook(_note(seen[name]))


def _note(rows: list[int]) -> Any:
    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows.append(output.shape[0])

    return note

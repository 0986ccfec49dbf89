"""Repeated greedy steps as one C++ call from tokens to tokens, beside the same steps in several calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import BoundChoices
from support.checkpoints import VOCAB_SIZE, tiny_checkpoint
from support.engines import Result, add, finish, greedy, make_core, random_prompts, run, run_layer_by_layer

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels"),
    pytest.mark.one_path(reason="looks at steps that are one call, which the plain path does not have"),
]

PROMPTS = random_prompts([1, 5, 33, 70], VOCAB_SIZE)
# Not all end together, so that batches of several sizes repeat.
PARAMS = [greedy(9), greedy(40), greedy(23), greedy(40)]
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16 weights": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each step that ran in one call."""
    steps: list[int] = []
    original = BoundChoices.run

    def noted(self: BoundChoices) -> Any:
        chosen = original(self)
        steps.append(len(chosen[0]))
        return chosen

    monkeypatch.setattr(BoundChoices, "run", noted)
    return steps


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    core = make_core(folder, **options)
    try:
        return [result.tokens for result in run(core, PROMPTS, PARAMS)]
    finally:
        core.close()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_families_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: list[int], family: str
) -> None:
    tiny_checkpoint(tmp_path, family)
    expect_the_same(tmp_path, monkeypatch, at_once, FORMS["float32"])


@pytest.mark.processor
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.each_value_quick
def test_forms_of_weights_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: list[int], form: str, is_tied: bool
) -> None:
    tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=is_tied)
    expect_the_same(tmp_path, monkeypatch, at_once, FORMS[form])


def expect_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, at_once: list[int], options: dict[str, Any]) -> None:
    found = tokens(folder, **options)
    assert {4, 3, 2} <= set(at_once)
    at_once.clear()
    run_layer_by_layer(monkeypatch)
    assert tokens(folder, **options) == found
    assert not at_once


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2"])
def test_other_models_take_several_calls(tmp_path: Path, at_once: list[int], family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    assert all(len(found) == params.max_tokens for found, params in zip(tokens(tmp_path), PARAMS, strict=True))
    assert not at_once


@pytest.mark.parametrize(
    "demand", [{"logprobs": 3}, {"temperature": 0.7}, {"logit_bias": {5: 3.0}}, {"prompt_logprobs": 2}]
)
def test_a_request_that_wants_more_than_the_largest_logit_gets_it(
    tmp_path: Path, at_once: list[int], demand: dict[str, Any]
) -> None:
    """While it decodes no step is one call, unless all it wants is about its prompt; before and after it they are."""
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    demanding = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 8, "ignore_eos": True, **demand})
    try:
        (expected,) = run(core, PROMPTS[3:], greedy(40))
        (alone,) = run(core, PROMPTS[2:3], demanding)
        core.reset_prefix_cache()

        add(core, "plain", PROMPTS[3], greedy(40))
        results: dict[str, Result] = {}
        step(core, 10, results)
        at_once.clear()
        add(core, "demanding", PROMPTS[2], demanding)
        while "demanding" not in results or results["demanding"].finish_reason is None:
            step(core, 1, results)
        assert (at_once.count(2) > 0) == ("prompt_logprobs" in demand)
        finish(core, results)
        assert at_once.count(1) > 10
        assert results["plain"].tokens == expected.tokens
        assert results["demanding"].tokens == alone.tokens
        assert results["demanding"].logprobs == alone.logprobs
    finally:
        core.close()


def step(core: EngineCore, count: int, results: dict[str, Result]) -> None:
    for _ in range(count):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)


@pytest.mark.parametrize("what", ["layer", "choice"])
def test_what_is_done_to_a_model_takes_effect_at_once(tmp_path: Path, at_once: list[int], what: str) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    try:
        add(core, "a", PROMPTS[1], greedy(40))
        results: dict[str, Result] = {}
        step(core, 10, results)
        assert at_once
        at_once.clear()
        core.collective_rpc(RpcCall("apply_model", (lambda model: _make_constant(model, what),)))
        finish(core, results)
        assert len(set(results["a"].tokens[:10])) > 1
        assert set(results["a"].tokens[10:]) == {0 if what == "layer" else 17}
        assert bool(at_once) == (what == "layer")
    finally:
        core.close()


def _make_constant(model: Any, what: str) -> None:
    if what == "layer":
        # All logits become zero, and the first token is the largest of equals.
        model.model.norm.weight = nn.Parameter(torch.zeros_like(model.model.norm.weight), requires_grad=False)
    else:
        model.lm_head.compute_greedy = lambda hidden_LD, _: _always(hidden_LD, 17)


@pytest.mark.parametrize("part", ["", "model", "model.embed_tokens"])
def test_hooks_are_called(tmp_path: Path, at_once: list[int], part: str) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    seen: list[nn.Module] = []
    try:
        core.collective_rpc(RpcCall("apply_model", (lambda model: _watch(model.get_submodule(part), seen),)))
        run(core, PROMPTS[:1], greedy(9))
        assert len(seen) == 9
        assert not at_once
    finally:
        core.close()


def _watch(module: nn.Module, seen: list[nn.Module]) -> None:
    module.register_forward_hook(lambda module, inputs, output: seen.append(module))


def _always(hidden_LD: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = hidden_LD.shape[0]
    return torch.full((num_rows,), token), torch.zeros(num_rows, dtype=torch.bool)


def test_what_is_not_a_number_ends_the_request(tmp_path: Path, at_once: list[int]) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    try:
        add(core, "a", PROMPTS[1], greedy(40))
        results: dict[str, Result] = {}
        step(core, 10, results)
        core.collective_rpc(RpcCall("apply_model", (_spoil,)))
        at_once.clear()
        finish(core, results)
        assert at_once == [1]
        assert "NaN or infinite" in (results["a"].error or "")
        assert len(results["a"].tokens) == 10
    finally:
        core.close()


def _spoil(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight * torch.nan, requires_grad=False)

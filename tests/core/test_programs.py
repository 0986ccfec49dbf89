"""A model's layers as one C++ call, beside the same layers called one by one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from penstock.attention import ForwardContext
from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import PROGRAM_ROWS, NativeProgram
from penstock.layers.mlp import GatedMLP
from support.checkpoints import FAMILIES, MIXTURES, VOCAB_SIZE, tiny_checkpoint
from support.engines import make_core, random_prompts, run, run_layer_by_layer
from support.mxfp4_checkpoints import write_mxfp4

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="programs are made of the C++ kernels"),
    pytest.mark.one_path(reason="looks at what is recorded of a model, which on the plain path is nothing"),
]

RECORDED = [
    *["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "granite"],
    *["ernie4_5", "hunyuan_v1_dense", "olmo2"],
]
_MIXTURES = [
    *["qwen3_moe", "gpt_oss", "glm4_moe", "granitemoe", "mixtral"],
    *["dots1", "ernie4_5_moe", "hunyuan_v1_moe", "phimoe"],
    *["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "olmoe", "minimax_m2"],
]
_IN_SEGMENTS = ["qwen2_moe"]
_LAYER_BY_LAYER = ["gpt2", "llama4"]
PROMPTS = random_prompts([1, 5, 33, 70], VOCAB_SIZE)
PARAMS = SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True, logprobs=VOCAB_SIZE)
OPTIONS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "bfloat16 cache": {"kv_cache_dtype": "bfloat16"},
}


def programs(core: EngineCore) -> list[NativeProgram]:
    (found,) = core.collective_rpc(RpcCall(_recorded))
    return found


def _recorded(worker: Any) -> list[NativeProgram]:
    # Any call but a step's makes the worker forget: a step records anew.
    worker.execute_dummy_batch()
    return [program for program in worker.runner.execution.programs._recorded.values() if program is not None]


def results(folder: Path, **options: Any) -> tuple[list[Any], int]:
    """Tokens and all their log-probabilities, and how many programs there were."""
    core = make_core(folder, **{"dtype": "float32", **options})
    try:
        num_programs = len(programs(core))
        found = run(core, PROMPTS, PARAMS)
        return [(result.tokens, result.logprobs) for result in found], num_programs
    finally:
        core.close()


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    recorded, num_programs = results(folder, **options)
    assert num_programs == 1
    run_layer_by_layer(monkeypatch)
    one_by_one, num_programs = results(folder, **options)
    assert num_programs == 0
    assert recorded == one_by_one


@pytest.mark.parametrize("family", RECORDED)
def test_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    both(tmp_path, monkeypatch, **OPTIONS["chunked"])


@pytest.mark.parametrize("family", _MIXTURES)
@pytest.mark.parametrize("option", ["chunked", "int4", "bfloat16"])
@pytest.mark.one_case_quick
def test_experts_are_part_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, option: str
) -> None:
    tiny_checkpoint(tmp_path, family)
    options = OPTIONS.get(option, {"dtype": option})
    core = make_core(tmp_path, **{"dtype": "float32", **options})
    run(core, PROMPTS[:1], PARAMS)
    assert [program.num_segments for program in programs(core)] == [1]
    core.close()
    both(tmp_path, monkeypatch, **options)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "minimax", "falcon_mamba"])
@pytest.mark.one_case_quick
def test_recurrences_are_part_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    options = {**OPTIONS["chunked"], "max_model_len": 96, "kv_cache_memory_bytes": 24 << 20}
    core = make_core(tmp_path, dtype="float32", **options)
    run(core, PROMPTS[:1], PARAMS)
    assert [program.num_segments for program in programs(core)] == [1]
    core.close()
    both(tmp_path, monkeypatch, **options)


def test_experts_in_mxfp4_are_part_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = write_mxfp4(tmp_path)
    core = make_core(stored.folder, dtype="float32")
    run(core, PROMPTS[:1], PARAMS)
    assert [program.num_segments for program in programs(core)] == [1]
    core.close()
    both(stored.folder, monkeypatch, **OPTIONS["chunked"])


@pytest.mark.parametrize("option", ["int8", "int4", "int8 cache", "bfloat16 cache"])
def test_same_bits_with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    tiny_checkpoint(tmp_path, "qwen3")
    both(tmp_path, monkeypatch, **OPTIONS[option])


def test_biases_and_untied_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    both(tmp_path, monkeypatch)


def test_more_last_tokens_than_go_from_kernel_to_kernel_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, "gemma2")
    prompts = random_prompts([1 + index % 4 for index in range(PROGRAM_ROWS + 60)], VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=2, ignore_eos=True, logprobs=3)

    def together() -> list[Any]:
        core = make_core(tmp_path, dtype="float32", max_num_seqs=len(prompts), max_num_batched_tokens=2048)
        try:
            return [(result.tokens, result.logprobs) for result in run(core, prompts, params)]
        finally:
            core.close()

    recorded = together()
    run_layer_by_layer(monkeypatch)
    assert together() == recorded


@pytest.mark.parametrize("family", _IN_SEGMENTS)
def test_parts_without_a_kernel_run_between_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tiny_checkpoint(tmp_path, family)
    core = make_core(tmp_path, dtype="float32")
    assert [program.num_segments > 1 for program in programs(core)] == [True]
    core.close()
    both(tmp_path, monkeypatch)


def test_the_page_has_each_family_with_the_way_in_which_it_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "internals" / "cpu.md").read_text()
    rows = re.findall(r"^\| (one program|segments|layer by layer) \| (.+) \|$", page, re.MULTILINE)
    ways = {way: re.findall(r"`(\w+)`", families) for way, families in rows}
    expected = {"one program": RECORDED + _MIXTURES, "segments": _IN_SEGMENTS, "layer by layer": _LAYER_BY_LAYER}
    assert {way: sorted(families) for way, families in ways.items()} == {
        way: sorted(families) for way, families in expected.items()
    }
    assert sorted(family for families in ways.values() for family in families) == sorted([*FAMILIES, *MIXTURES])


@pytest.mark.parametrize("family", _LAYER_BY_LAYER)
def test_others_run_layer_by_layer(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path, family)
    assert results(tmp_path)[1] == 0


def test_hooks_are_seen(tmp_path: Path) -> None:
    """Changes to a model take effect, though a program was recorded before."""
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    try:
        before = run(core, PROMPTS[:1], PARAMS)
        core.collective_rpc(RpcCall("apply_model", (_double_the_norm,)))
        core.reset_prefix_cache()
        after = run(core, PROMPTS[:1], PARAMS)
        assert before[0].logprobs != after[0].logprobs
        assert len(programs(core)) == 1

        seen: list[int] = []
        core.collective_rpc(RpcCall("apply_model", (lambda model: _watch(model, seen),)))
        run(core, PROMPTS[:1], PARAMS)
        assert seen
        assert not programs(core)
        (text,) = core.collective_rpc(RpcCall("get_model_inspection"))
        assert text.splitlines()[-1].startswith("Layer by layer (")
        assert "has a hook" in text.splitlines()[-1]
    finally:
        core.close()


def _double_the_norm(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(norm.weight * 2, requires_grad=False)


def _watch(model: Any, seen: list[int]) -> None:
    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(output.shape[0])

    model.model.layers[1].mlp.register_forward_hook(note)


class Shifted(GatedMLP):
    """With an operator for which there is no kernel."""

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        return super().forward(hidden_TD, context) + 0.5


class Halved(GatedMLP):
    """With another kernel."""

    def forward(self, hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        return super().forward(hidden_TD, context).mul_(0.5)


@pytest.mark.parametrize(("mlp", "is_recorded"), [(Shifted, False), (Halved, True)])
def test_a_forward_of_another_class_is_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlp: type[GatedMLP], is_recorded: bool
) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    try:
        (plain,) = run(core, PROMPTS[3:], PARAMS)
        core.collective_rpc(RpcCall("apply_model", (lambda model: _replace(model, mlp),)))
        core.reset_prefix_cache()
        (changed,) = run(core, PROMPTS[3:], PARAMS)
        assert changed.logprobs != plain.logprobs
        assert len(programs(core)) == is_recorded
        run_layer_by_layer(monkeypatch)
        core.collective_rpc(RpcCall("execute_dummy_batch"))
        core.reset_prefix_cache()
        (one_by_one,) = run(core, PROMPTS[3:], PARAMS)
        assert not programs(core)
        assert (changed.tokens, changed.logprobs) == (one_by_one.tokens, one_by_one.logprobs)
    finally:
        core.close()


def _replace(model: Any, mlp: type[GatedMLP]) -> None:
    model.model.layers[1].mlp.__class__ = mlp


def test_a_method_of_an_instance_is_called_in_every_step(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    core = make_core(tmp_path, dtype="float32")
    seen: list[int] = []
    try:
        core.collective_rpc(RpcCall("apply_model", (lambda model: _wrap(model, seen),)))
        run(core, PROMPTS[:1], PARAMS)
        assert len(seen) == PARAMS.max_tokens
        assert not programs(core)
    finally:
        core.close()


def _wrap(model: Any, seen: list[int]) -> None:
    mlp = model.model.layers[1].mlp
    original = mlp.forward

    def noted(hidden_TD: Tensor, context: ForwardContext) -> Tensor:
        seen.append(hidden_TD.shape[0])
        return original(hidden_TD, context)

    mlp.forward = noted

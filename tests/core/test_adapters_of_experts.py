"""LoRA adapters of routers and experts, compared with PEFT on Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.contract import RpcCall
from penstock.errors import CheckpointError
from support.adapted_models import OPTIONS, PROMPTS, Adapted, adapted, assert_same, run
from support.adapters import request_of
from support.checkpoints import tiny_model
from support.engines import make_core


def variants_of(block: str, router: str, modules: list[str]) -> list[dict[str, Any]]:
    """Adapters of experts, of a router, and of linear layers, by the names of Transformers' modules."""
    experts = [f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"]
    return [
        {"r": 3, "target_modules": modules, "target_parameters": [*experts, f"{block}.{router}.weight"]},
        {"r": 2, "target_modules": [], "target_parameters": experts[1:], "rank_pattern": {"down_proj": 5}},
    ]


_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_VARIANTS = variants_of("mlp", "gate", ["q_proj"])
_SHARED = [{"r": 4, "target_modules": r".*shared_experts?\.(gate|up|down)_proj|.*shared_expert_gate"}]
# By family: adapters of its experts, and of modules of its mixture.
_FAMILIES: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": _VARIANTS,
    "mixtral": _VARIANTS,
    "olmoe": _VARIANTS,
    "qwen2_moe": [*_VARIANTS, *_SHARED],
    "glm4_moe": [*_VARIANTS, *_SHARED],
    # Outputs of gate and up alternate, and attention has sinks.
    "gpt_oss": variants_of("mlp", "router", _ATTENTION),
    "granitemoe": variants_of("block_sparse_moe", "router", _ATTENTION),
    "ernie4_5_moe": [*variants_of("mlp", "gate", _ATTENTION), *_SHARED],
    "hunyuan_v1_moe": [
        *variants_of("mlp", "gate.wg", _ATTENTION),
        {"r": 4, "target_modules": r".*shared_mlp\.(gate|up|down)_proj"},
    ],
    "phimoe": variants_of("mlp", "router", _ATTENTION),
}
_NUMBERS = [1, 0, 2, 3]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    with adapted(tmp_path_factory.mktemp("qwen"), "qwen3_moe", _VARIANTS) as made:
        yield made


def check(model: Adapted, **options: Any) -> None:
    numbers = [number for number in _NUMBERS if number < len(model.requests)]
    core = make_core(model.folder, **OPTIONS, **options)
    results = run(core, model, PROMPTS[: len(numbers)], numbers)
    core.close()
    assert_same(results, [model.expected(*pair) for pair in zip(PROMPTS, numbers, strict=False)])


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.one_case_quick
def test_experts_and_routers_have_adapters(family: str, tmp_path: Path) -> None:
    with adapted(tmp_path, family, _FAMILIES[family]) as model:
        check(model)


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_steps_without_adapters_are_one_call(qwen: Adapted) -> None:
    core = make_core(qwen.folder, **OPTIONS, enable_prefix_caching=False)
    run(core, qwen, PROMPTS[:2], [0, 0])
    programs = core._executor._wrapper.worker.runner.execution.programs  # type: ignore[attr-defined, union-attr]
    before = dict(programs._recorded)
    assert before
    assert all(program is not None and program.num_segments == 1 for program in before.values())
    run(core, qwen, PROMPTS[:2], [1, 0])
    assert {what: programs._recorded[what] for what in before} == before
    core.close()


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"max_num_batched_tokens": 16}],
    ids=["tp", "pp", "chunked"],
)
@pytest.mark.slow
def test_ranks_and_chunks_give_the_same_tokens(qwen: Adapted, options: dict[str, Any]) -> None:
    check(qwen, **options)


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"max_num_batched_tokens": 16}], ids=["tp", "chunked"]
)
@pytest.mark.slow
def test_other_layouts_of_experts_are_shared_by_ranks(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    with adapted(tmp_path, family, _FAMILIES[family]) as model:
        check(model, **options)


@pytest.mark.one_path(reason="no step runs")
def test_adapters_of_stacked_biases_are_refused_by_name(tmp_path: Path) -> None:
    """PEFT takes a parameter with two dimensions for one matrix."""
    biases = [{"r": 2, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj_bias"]}]
    with adapted(tmp_path, "gpt_oss", biases) as model:
        core = make_core(model.folder, **OPTIONS)
        message = r"\['mlp\.experts\.gate_up_proj_bias'\].*\[5, 96\].*\[96, 64\] of gate_up_proj"
        with pytest.raises(CheckpointError, match=message):
            core.collective_rpc(RpcCall("add_lora", (model.requests[1],)))
        core.close()


@pytest.mark.one_path(reason="only the names of the matrices differ")
def test_experts_may_have_matrices_of_their_own(tmp_path: Path) -> None:
    """The form of checkpoints whose experts were modules, as older versions of Transformers had them."""
    with adapted(tmp_path, "qwen3_moe", []) as model:
        generator = torch.Generator().manual_seed(0)
        tensors, plain = {}, {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
        for expert in (0, 2):
            for name in ("gate_proj", "up_proj", "down_proj"):
                whole = plain[f"model.layers.1.mlp.experts.{'down_proj' if name == 'down_proj' else 'gate_up_proj'}"]
                weight = whole[expert] if name == "down_proj" else whole[expert].chunk(2)[name == "up_proj"]
                a = torch.randn(4, weight.shape[1], generator=generator) * 0.2
                b = torch.randn(weight.shape[0], 4, generator=generator) * 0.2
                prefix = f"base_model.model.model.layers.1.mlp.experts.{expert}.{name}"
                tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
                weight += 2 * b @ a
        folder = tmp_path / "adapter"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
        model.requests.append(request_of(1, folder))
        core = make_core(model.folder, **OPTIONS)
        results = run(core, model, PROMPTS[:2], [1, 0])
        core.close()
        merged = tiny_model("qwen3_moe")
        merged.load_state_dict(plain)
        changed = Adapted(model.folder, merged, [None])
        assert_same(results, [changed.expected(PROMPTS[0], 0), model.expected(PROMPTS[1], 0)])


@pytest.mark.one_path(reason="no step runs")
def test_matrices_of_other_experts_are_refused_by_name(qwen: Adapted, tmp_path: Path) -> None:
    core = make_core(qwen.folder, **OPTIONS)
    for index, (options, message) in enumerate(
        [
            ({"num_experts": 3}, r"mlp\.experts\.gate_up_proj, which do not have 6 times the rank 3"),
            ({"moe_intermediate_size": 24}, r"changes a parameter of model\.layers\.\d\.mlp\.experts \("),
        ]
    ):
        with adapted(tmp_path / str(index), "qwen3_moe", _VARIANTS[:1], **options) as other:
            adapter = other.requests[1]
        with pytest.raises(CheckpointError, match=message):
            core.collective_rpc(RpcCall("add_lora", (adapter,)))
    core.close()

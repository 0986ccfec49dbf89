"""LoRA adapters in whole engines, compared with PEFT on Transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.errors import InvalidRequest, WorkerError
from penstock.features.lora.request import LoRARequest
from penstock.features.lora.tables import AdapterTables, PackedModelAdapter
from penstock.kernels.quantized import GROUP_MULTIPLE, quantize_rows
from penstock.layers.linear import LinearLayer
from support.adapted_models import (
    ADAPTERS,
    NUM_TOKENS,
    OPTIONS,
    PROMPTS,
    Adapted,
    adapted,
    assert_same,
    in_memory,
    run,
)
from support.adapters import make_adapters, parts_of, request_of, with_adapter
from support.checkpoints import oracle_logits, save_checkpoint, tiny_model
from support.engines import Result, add, finish, greedy, make_core
from support.transformers_models import FAMILIES, tiny_transformers_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    with adapted(tmp_path_factory.mktemp("llama")) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llama: Adapted) -> list[tuple[list[int], list[torch.Tensor]]]:
    return [llama.expected(prompt, number) for prompt, number in zip(PROMPTS, ADAPTERS, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"kv_cache_memory_bytes": 68_000},
        {"max_loras": 2},
        {"max_loras": 1, "max_cpu_loras": 3},
        {"async_scheduling": True},
    ],
    ids=["all-at-once", "chunked", "preempted", "two-slots", "one-slot", "async"],
)
@pytest.mark.each_value_quick
def test_mixed_batches_give_the_tokens_and_log_probabilities_of_peft(
    llama: Adapted, expected: list[tuple[list[int], list[torch.Tensor]]], options: dict[str, Any]
) -> None:
    core = make_core(llama.folder, **{**OPTIONS, **options})
    if "kv_cache_memory_bytes" in options:
        # Requests that waited for their adapters would run one after another, and have room.
        for request in llama.requests[1:]:
            core.collective_rpc(RpcCall("add_lora", (request,)))
    results = run(core, llama)
    num_preemptions = core.scheduler.num_preemptions
    core.close()
    assert_same(results, expected)
    assert (num_preemptions > 0) is ("kv_cache_memory_bytes" in options)


def test_requests_alone_have_the_bits_of_a_mixed_batch(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS, enable_prefix_caching=False)
    together = run(core, llama)
    alone = [run(core, llama, [prompt], [number])[0] for prompt, number in zip(PROMPTS, ADAPTERS, strict=True)]
    core.close()
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == other.logprobs


def test_cached_prefixes_are_shared_by_requests_of_one_adapter_alone(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS)
    run(core, llama, [PROMPTS[1]], [1])
    found = [run(core, llama, [PROMPTS[1]], [number])[0] for number in (1, 2, 0)]
    core.close()
    assert [result.num_cached_tokens for result in found] == [36, 0, 0]
    assert_same(found, [llama.expected(PROMPTS[1], number) for number in (1, 2, 0)])


def test_cached_prefixes_outlast_the_place_of_their_adapter_in_memory(llama: Adapted) -> None:
    core = make_core(llama.folder, **{**OPTIONS, "max_loras": 1, "max_cpu_loras": 1})
    found = [run(core, llama, [PROMPTS[1]], [number])[0] for number in (1, 2, 3, 1, 2, 3)]
    assert [result.num_cached_tokens for result in found] == [0, 0, 0, 36, 36, 36]
    assert_same(found, [llama.expected(PROMPTS[1], number) for number in (1, 2, 3)] * 2)
    again = request_of(1, Path(llama.requests[1].lora_path), load_inplace=True)
    core.collective_rpc(RpcCall("add_lora", (again,)))
    assert run(core, llama, [PROMPTS[1]], [1])[0].num_cached_tokens == 0
    core.close()


def test_a_step_without_adapters_is_that_of_an_engine_without(llama: Adapted) -> None:
    results = []
    for options in (OPTIONS, {**OPTIONS, "enable_lora": False}):
        core = make_core(llama.folder, **options)
        results.append(run(core, llama, adapters=[0] * len(PROMPTS)))
        core.close()
    for one, other in zip(*results, strict=True):
        assert one.logprobs == other.logprobs


@pytest.mark.one_path(reason="recorded programs belong to the fast paths")
def test_steps_are_one_call_and_loading_records_nothing_anew(llama: Adapted) -> None:
    core = make_core(llama.folder, **{**OPTIONS, "max_loras": 2}, enable_prefix_caching=False)
    run(core, llama)
    programs = core._executor._wrapper.worker.runner.execution.programs  # type: ignore[attr-defined, union-attr]
    before = dict(programs._recorded)
    assert all(program is not None and program.num_segments == 1 for program in before.values())
    run(core, llama)
    core.collective_rpc(RpcCall("add_lora", (request_of(2, Path(llama.requests[2].lora_path), load_inplace=True),)))
    run(core, llama)
    assert programs._recorded == before
    core.close()


def test_adapters_in_memory_replace_one_another_between_two_steps(llama: Adapted) -> None:
    folders = [Path(llama.requests[number].lora_path) for number in (2, 3)]
    core = make_core(llama.folder, **OPTIONS)
    results = []
    for folder in folders:
        adapter = in_memory(1, folder, load_inplace=True)
        core.collective_rpc(RpcCall("add_lora", (adapter,)))
        model = replace(llama, requests=[None, adapter])
        results += run(core, model, [PROMPTS[1]], [1])
    core.close()
    assert_same(results, [llama.expected(PROMPTS[1], number) for number in (2, 3)])
    assert results[1].num_cached_tokens == 0


def test_requests_go_on_with_weights_that_replace_their_adapter_in_place(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS)
    first, second = (Path(llama.requests[number].lora_path) for number in (2, 3))
    results = run_until(core, request_of(1, first), num_tokens=3)
    other = LoRARequest("adapter1", 1, str(second), load_inplace=True)
    core.collective_rpc(RpcCall("add_lora", (other,)))
    add(core, "new", PROMPTS[1], greedy(6), parts=parts_of(other))
    finish(core, results)
    core.close()
    tokens = results["r"].tokens
    assert tokens[:3] == llama.expected(PROMPTS[1], 2)[0][:3]
    assert tokens[3:] == llama.expected([*PROMPTS[1], *tokens[:3]], 3)[0][:3]
    assert results["new"].tokens == llama.expected(PROMPTS[1], 3)[0][:6]


@pytest.mark.one_path(reason="which adapters a core knows is no matter of how it makes its steps")
@pytest.mark.parametrize("is_in_memory", [False, True], ids=["of a folder", "in memory"])
def test_requests_keep_a_removed_adapter_whose_number_another_one_gets(llama: Adapted, is_in_memory: bool) -> None:
    core = make_core(llama.folder, **OPTIONS)
    first, second = (Path(llama.requests[number].lora_path) for number in (2, 3))
    adapter = in_memory(1, first) if is_in_memory else request_of(1, first)
    core.collective_rpc(RpcCall("add_lora", (adapter,)))
    results = run_until(core, adapter, num_tokens=3)
    assert core.collective_rpc(RpcCall("remove_lora", (1,))) == [True]
    other = LoRARequest("adapter1", 1, str(second))
    assert core.collective_rpc(RpcCall("add_lora", (other,))) == [True]
    # The request gives up its slot, and takes one again.
    core.scheduler.preempt_all()
    add(core, "new", PROMPTS[1], greedy(6), parts=parts_of(other))
    finish(core, results)
    assert results["r"].tokens == llama.expected(PROMPTS[1], 2)[0][:6]
    assert results["new"].tokens == llama.expected(PROMPTS[1], 3)[0][:6]
    assert [len(held) for held in core.collective_rpc(RpcCall("list_loras"))] == [1]
    core.close()


@pytest.mark.one_path(reason="which adapters a core knows is no matter of how it makes its steps")
def test_a_request_whose_adapter_has_other_files_now_ends_with_an_error(llama: Adapted, tmp_path: Path) -> None:
    first, second = (Path(llama.requests[number].lora_path) for number in (2, 3))
    shutil.copytree(first, tmp_path / "latest")
    core = make_core(llama.folder, **{**OPTIONS, "max_loras": 1})
    adapter = request_of(1, tmp_path / "latest")
    results = run_until(core, adapter, num_tokens=3)
    shutil.copytree(second, tmp_path / "latest", dirs_exist_ok=True)
    # New workers have to read the adapter again.
    core._interrupted = "a test"
    finish(core, results)
    assert "has other files in" in (results["r"].error or "")
    again = request_of(1, tmp_path / "latest", load_inplace=True)
    core.collective_rpc(RpcCall("add_lora", (again,)))
    assert_same(run(core, replace(llama, requests=[None, again]), PROMPTS[:1], [1]), [llama.expected(PROMPTS[0], 3)])
    core.close()


def run_until(core: EngineCore, adapter: LoRARequest, num_tokens: int) -> dict[str, Result]:
    """Start a request of six tokens, and step until it has some."""
    add(core, "r", PROMPTS[1], greedy(6), parts=parts_of(adapter))
    results = {"r": Result()}
    while len(results["r"].tokens) < num_tokens:
        for output in core.step():
            results["r"].take(output)
    return results


@pytest.mark.one_path(reason="which adapters a core knows is no matter of how it makes its steps")
def test_running_requests_keep_a_removed_adapter(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS)
    adapter = llama.requests[2]
    assert adapter is not None
    results = run_until(core, adapter, num_tokens=3)
    assert core.collective_rpc(RpcCall("remove_lora", (2,))) == [True]
    assert core.collective_rpc(RpcCall("known_loras")) == [[]]
    with pytest.raises(InvalidRequest, match="There is no adapter 'adapter2'"):
        add(core, "new", PROMPTS[1], greedy(6), parts=parts_of(adapter.reference))
    finish(core, results)
    core.close()
    assert results["r"].tokens == llama.expected(PROMPTS[1], 2)[0][:6]


@pytest.mark.one_path(reason="which adapters a core knows is no matter of how it makes its steps")
def test_offered_adapters_are_loaded_for_their_first_request_unless_removed(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS)
    offered = [request for request in llama.requests[1:4] if request is not None]
    core.collective_rpc(RpcCall("offer_loras", (offered,)))
    assert core.collective_rpc(RpcCall("list_loras")) == [set()]
    core.collective_rpc(RpcCall("remove_lora", (2,)))
    core.collective_rpc(RpcCall("offer_loras", (offered,)))
    (known,) = core.collective_rpc(RpcCall("known_loras"))
    assert [adapter.lora_int_id for adapter in known] == [1, 3]
    references = replace(llama, requests=[None, *(adapter.reference for adapter in offered)])
    results = run(core, references, PROMPTS[:2], [1, 3])
    core.close()
    assert_same(results, [llama.expected(*pair) for pair in zip(PROMPTS[:2], [1, 3], strict=True)])


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
@pytest.mark.one_case_quick
def test_ranks_share_adapters(
    llama: Adapted, expected: list[tuple[list[int], list[torch.Tensor]]], options: dict[str, Any]
) -> None:
    core = make_core(llama.folder, **{**OPTIONS, **options})
    results = run(core, llama)
    core.close()
    assert_same(results, expected)


def test_adapters_are_applied_to_quantised_layers(llama: Adapted, tmp_path: Path) -> None:
    core = make_core(llama.folder, **OPTIONS, quantization="int8", enable_prefix_caching=False)
    (weights,) = core.collective_rpc(RpcCall(_dequantised))
    results = run(core, llama)
    core.close()
    model = tiny_model("llama")
    model.load_state_dict(weights, strict=False)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(_rounded_inputs)
    # PEFT saves the base weights of embeddings and LM heads with their adapters, and loads them.
    folders = make_adapters(model, tmp_path)
    quantised = Adapted(llama.folder, model, [None, *(request_of(n + 1, path) for n, path in enumerate(folders))])
    assert_same(results, [quantised.expected(*pair) for pair in zip(PROMPTS, ADAPTERS, strict=True)])


def _rounded_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Inputs of a product as the engine rounds them: int8, in groups with a scale of their own."""
    (x,) = inputs
    values_TI, scales_TG = quantize_rows(x.flatten(0, -2))
    scales_TI = scales_TG.repeat_interleave(GROUP_MULTIPLE, dim=1)[:, : x.shape[-1]]
    return ((values_TI * scales_TI).view(x.shape),)


def _dequantised(worker: Any) -> dict[str, torch.Tensor]:
    """Weights of all linear layers by their names in Transformers."""
    model, weights = worker.get_model(), {}
    for name, (module, shard) in model.modules_by_name().items():
        if isinstance(module, LinearLayer):
            place = module.adapter_place(shard)
            whole = module.method.unpack(module.method.packed_OI, module.output_size)
            weights[f"{name}.weight"] = whole[place.first_output : place.first_output + place.num_outputs].clone()
    return weights


FURTHER = {
    "gpt2": [
        {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
        {"r": 3, "target_modules": ["wte", "lm_head"]},
    ],
    "phi3": [{"r": 4, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}],
    "gemma3": [{"r": 4, "target_modules": ["q_proj", "embed_tokens", "down_proj"]}],
    "qwen3_moe": [{"r": 4, "target_modules": ["q_proj", "o_proj", "lm_head"]}],
    "llama4": [{"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}],
    "deepseek_v3": [{"r": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "lm_head"]}],
}


@pytest.mark.parametrize("family", FURTHER)
@pytest.mark.one_case_quick
def test_other_families_have_adapters(family: str, tmp_path: Path) -> None:
    with adapted(tmp_path, family, FURTHER[family]) as model:
        numbers = [0, *range(1, 1 + len(FURTHER[family]))]
        core = make_core(model.folder, **OPTIONS)
        results = run(core, model, PROMPTS[: len(numbers)], numbers)
        core.close()
        assert_same(results, [model.expected(*pair) for pair in zip(PROMPTS, numbers, strict=False)])


def test_models_of_transformers_have_adapters(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [
        {"r": 4, "target_modules": "all-linear"},
        {"r": 6, "target_modules": ["embed_in", "embed_out", "query_key_value"]},
    ]
    class_name, options = FAMILIES["gpt-neox"]
    model = tiny_transformers_model(class_name, **options)
    save_checkpoint(model, tmp_path / "model")
    folders = make_adapters(model, tmp_path, variants)
    made = Adapted(tmp_path / "model", model, [None, *(request_of(n + 1, path) for n, path in enumerate(folders))])
    core = make_core(made.folder, **OPTIONS)
    results = run(core, made, PROMPTS[:3], [1, 0, 2])
    core.close()
    assert_same(results, [made.expected(prompt, number) for prompt, number in zip(PROMPTS, [1, 0, 2], strict=False)])


def test_a_drafter_has_no_adapter_and_its_target_has(
    llama: Adapted, expected: list[tuple[list[int], list[torch.Tensor]]]
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    core = make_core(llama.folder, **OPTIONS, speculative_config=drafts)
    results = run(core, llama)
    core.close()
    assert_same(results, expected)


def test_prompts_have_the_log_probabilities_of_their_adapters(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS)
    for index, number in enumerate((0, 4, 7)):
        params = greedy(1, prompt_logprobs=1)
        add(core, f"r{index}", PROMPTS[5], params, parts=parts_of(llama.requests[number]))
    results: dict[str, Result] = {}
    finish(core, results)
    core.close()
    for index, number in enumerate((0, 4, 7)):
        request = llama.requests[number]
        model = llama.model if request is None else with_adapter(llama.model, Path(request.lora_path))
        rows = oracle_logits(model, PROMPTS[5]).log_softmax(-1)
        if request is not None:
            model.unload()
        found = results[f"r{index}"].prompt_logprobs
        assert found is not None
        for row, logprobs in zip(rows, found, strict=False):
            for token, logprob in logprobs.items():
                assert abs(logprob - float(row[token])) < 1e-4


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_alone(llama: Adapted, tmp_path: Path) -> None:
    core = make_core(llama.folder, **OPTIONS)
    model = replace(llama, requests=[None, llama.requests[1], request_of(2, tmp_path)])
    results = run(core, model, PROMPTS[:3], [1, 2, 0])
    core.close()
    assert "no adapter_config.json" in (results[1].error or "")
    assert results[0].error is None
    assert results[2].error is None


@pytest.mark.one_path(reason="what a failure leaves behind is no matter of how steps are made")
def test_weights_that_cannot_be_written_fail_their_request_and_take_no_slot(
    llama: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(llama.folder, **{**OPTIONS, "max_loras": 1})
    with monkeypatch.context() as patched:
        patched.setattr(AdapterTables, "write", _fail)
        for _ in range(3):
            assert "cannot be written" in (run(core, llama, PROMPTS[:1], [1])[0].error or "")
    assert_same(run(core, llama, PROMPTS[:2], [1, 2]), [llama.expected(PROMPTS[0], 1), llama.expected(PROMPTS[1], 2)])
    # Nor does a failure in place leave parts of other weights in the slot.
    other = LoRARequest("adapter2", 2, llama.requests[3].lora_path, load_inplace=True)  # type: ignore[union-attr]
    with monkeypatch.context() as patched:
        patched.setattr(AdapterTables, "write", _write_a_part_once)
        with pytest.raises(WorkerError, match="cannot be written"):
            core.collective_rpc(RpcCall("add_lora", (other,)))
    assert_same(run(core, llama, PROMPTS[:1], [2]), [llama.expected(PROMPTS[0], 2)])
    core.close()


def _fail(tables: AdapterTables, slot: int, adapter: PackedModelAdapter) -> None:
    raise OverflowError("the weights cannot be written")


def _write_a_part_once(tables: AdapterTables, slot: int, adapter: PackedModelAdapter) -> None:
    some = dict(list(adapter.pieces.items())[:3])
    _WRITE(tables, slot, replace(adapter, pieces=some if not _FAILED else adapter.pieces))
    if not _FAILED:
        _FAILED.append(slot)
        raise OverflowError("the weights cannot be written")


_WRITE, _FAILED = AdapterTables.write, list[int]()


@pytest.mark.one_path(reason="workers are replaced the same way")
def test_new_workers_load_the_adapters_again(llama: Adapted) -> None:
    core = make_core(llama.folder, **OPTIONS)
    adapter = in_memory(1, Path(llama.requests[3].lora_path))
    core.collective_rpc(RpcCall("add_lora", (adapter,)))
    core.collective_rpc(RpcCall("pin_lora", (1,)))
    numbers = [1, 2, 0]
    model = replace(llama, requests=[None, adapter, llama.requests[2]])
    for index, number in enumerate(numbers):
        add(core, f"r{index}", PROMPTS[index], greedy(NUM_TOKENS), parts=parts_of(model.requests[number]))
    results: dict[str, Result] = {}
    for _ in range(30):
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        if len(results.get("r0", Result()).tokens) > 3:
            break
    core._interrupted = "a test"
    finish(core, results)
    core.close()
    for index, number in enumerate((3, 2, 0)):
        assert results[f"r{index}"].tokens == llama.expected(PROMPTS[index], number)[0]

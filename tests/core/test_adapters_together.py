"""LoRA adapters with other features: drafts, structured output, reloads, and cores that are lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams
from penstock.checkpoints.resolve import resolve_model_folder
from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.engine.inputs.prompts import with_parts
from penstock.engine.processes.core_group import CoreGroup
from penstock.engine.session import Session
from penstock.features.lora.request import LoRARequest, parts_of_adapter
from support.adapted_models import OPTIONS, PROMPTS, Adapted, adapted, assert_same, in_memory, masked_greedy, run
from support.adapters import ALL_LINEAR, VARIANTS, make_adapters, parts_of, request_of, with_adapter
from support.checkpoints import save_checkpoint, tiny_checkpoint, tiny_model
from support.constraints import END, encode
from support.draft_heads import eagle3_weights, eagle_weights, write_head, write_mimo
from support.engines import Result, add, finish, make_core
from support.slow_adapters import LOADING
from support.waiting import until

# Adapters of all linear layers, of the LM head with the embedding, and of the embedding.
_VARIANTS = [VARIANTS[1], VARIANTS[6], VARIANTS[4]]
_NUMBERS = [1, 0, 2, 3]
_BOTH = "adapters, and the other features, are tested on both paths each by itself"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """A target with adapters, and drafters beside it."""
    folder = tmp_path_factory.mktemp("target")
    tiny_checkpoint(folder / "draft_model", "qwen3", seed=7, head_dim=32, num_key_value_heads=1)
    write_head(folder / "eagle", eagle_weights())
    write_head(folder / "eagle3", eagle3_weights(), draft_vocab_size=40)
    with adapted(folder, variants=_VARIANTS, num_hidden_layers=5) as made:
        yield made


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """A target with an MTP layer, and its adapters."""
    folder = tmp_path_factory.mktemp("mimo")
    model = tiny_model("qwen2")
    folders = make_adapters(model, folder, _VARIANTS)
    requests = [None, *(request_of(index + 1, path) for index, path in enumerate(folders))]
    return Adapted(write_mimo(folder / "model"), model, requests)


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp", "draft_model"])
@pytest.mark.one_case_quick
@pytest.mark.one_path(reason=_BOTH)
def test_a_drafter_that_is_a_model_has_no_adapter_and_its_target_has(
    method: str, request: pytest.FixtureRequest
) -> None:
    model: Adapted = request.getfixturevalue("mimo" if method == "mtp" else "target")
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method != "mtp":
        drafts["model"] = str(model.folder.parent / method)
    core = make_core(model.folder, **OPTIONS, max_model_len=68, speculative_config=drafts)
    results = run(core, model, PROMPTS[: len(_NUMBERS)], _NUMBERS)
    assert core.scheduler.spec_decode_metrics.num_draft_tokens > 0
    core.close()
    assert_same(results, [model.expected(*pair) for pair in zip(PROMPTS, _NUMBERS, strict=False)])


@pytest.mark.one_path(reason=_BOTH)
def test_reloaded_weights_keep_their_adapters(target: Adapted, tmp_path: Path) -> None:
    other = tiny_model("llama", seed=5, num_hidden_layers=5)
    save_checkpoint(other, tmp_path / "other")
    core = make_core(target.folder, **OPTIONS)
    run(core, target, PROMPTS[:2], [1, 0])
    core.collective_rpc(RpcCall("reload_weights", (str(tmp_path / "other"),)))
    results = run(core, target, PROMPTS[:2], [1, 0])
    core.close()
    reloaded = Adapted(tmp_path / "other", other, target.requests)
    assert_same(results, [reloaded.expected(*pair) for pair in zip(PROMPTS[:2], [1, 0], strict=True)])


@pytest.fixture(scope="module")
def demo() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve_model_folder("demo"), dtype="float32").eval()


@pytest.fixture(scope="module")
def folders(demo: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    variants = [{"r": 4, "target_modules": ALL_LINEAR}, {"r": 8, "target_modules": ["q_proj", "lm_head"]}]
    return make_adapters(demo, tmp_path_factory.mktemp("adapters"), variants)


DEMO: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
GRAMMARS: list[dict[str, Any]] = [{"regex": "[A-Z]{2}-[0-9]{3,5} (yes|no)"}, {"json": {"enum": [["a", 1], "b", None]}}]


@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["no drafts", "ngram"])
@pytest.mark.one_case_quick
@pytest.mark.one_path(reason=_BOTH)
def test_structured_output_is_that_of_the_adapted_model(
    demo: PreTrainedModel, folders: list[Path], drafts: dict[str, Any] | None
) -> None:
    prompt = encode("ROMEO: ROMEO: AB-123")
    cases = [(number, grammar) for number in range(3) for grammar in GRAMMARS[: 1 if drafts is None else None]]
    requests = [None, *(request_of(index + 1, path) for index, path in enumerate(folders))]
    core = make_core("demo", **DEMO, speculative_config=drafts)
    for index, (number, grammar) in enumerate(cases):
        params = SamplingParams(
            temperature=0.0, seed=0, max_tokens=40, structured_outputs=StructuredOutputsParams(**grammar)
        )
        add(core, f"r{index}", prompt, params, parts=parts_of(requests[number]), eos_token_ids=frozenset({END}))
    results: dict[str, Result] = {}
    finish(core, results, max_steps=200_000)
    core.close()
    for number in range(3):
        model = demo if number == 0 else with_adapter(demo, folders[number - 1])
        for index, (of_case, grammar) in enumerate(cases):
            if of_case == number:
                assert results[f"r{index}"].tokens == masked_greedy(model, prompt, grammar)
        if number:
            model.unload()


@pytest.mark.one_path(reason=_BOTH)
def test_a_request_of_a_lost_core_goes_on_with_its_own_adapter_though_another_one_has_its_number(
    target: Adapted,
) -> None:
    first, second = (Path(target.requests[number].lora_path) for number in (1, 2))  # type: ignore[union-attr]
    core = make_core(target.folder, **OPTIONS)
    for folder in (first, second):
        core.collective_rpc(RpcCall("remove_lora", (1,)))
        core.collective_rpc(RpcCall("add_lora", (LoRARequest("adapter1", 1, str(folder)),)))
    so_far, _ = target.expected(PROMPTS[1], 1)
    add(
        core,
        "r",
        PROMPTS[1],
        SamplingParams(temperature=0.0, seed=0, max_tokens=6, ignore_eos=True),
        parts=parts_of(LoRARequest("adapter1", 1, str(first), identity=1)),
        output_token_ids=so_far[:3],
        is_admitted=True,
    )
    results: dict[str, Result] = {}
    finish(core, results)
    core.close()
    assert results["r"].tokens == so_far[3:6]


@pytest.mark.slow
@pytest.mark.one_path(reason="what outlives a core is no matter of how it makes its steps")
def test_adapters_are_loaded_again_in_the_core_that_replaces_a_killed_one(folders: list[Path]) -> None:
    adapters = [request_of(1, folders[0]), in_memory(2, folders[1]), None]
    prompts = ["ROMEO:", "JULIET:", "KING"]
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    options = {**DEMO, "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "32MiB"}
    with LLM("demo", **options) as llm:
        outputs = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        expected = [output.outputs[0].token_ids for output in outputs]
    with closing(Session(EngineConfig.create("demo", enable_multiprocessing=True, **options))) as session:
        core = session._core
        assert isinstance(core, CoreGroup)
        for adapter in (*adapters, request_of(3, folders[1]), request_of(4, folders[1])):
            if adapter is not None:
                session.collective_rpc(RpcCall("add_lora", (adapter,)))
        session.collective_rpc(RpcCall("pin_lora", (2,)))
        session.collective_rpc(RpcCall("remove_lora", (3,)))
        requests = [
            session.accept(with_parts(prompt, parts_of_adapter(adapter and adapter.reference)), params)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        tokens, pids = {}, set(core.process_ids)
        for number, progress in enumerate(session.run(requests)):
            if number in (40, 160):
                pids.update(core.process_ids)
                os.kill(core.process_ids[0], signal.SIGKILL)
            tokens[progress.req_id] = progress.output().outputs[0].token_ids
        assert len(pids | set(core.process_ids)) == 3
        (known,) = session.collective_rpc(RpcCall("known_loras"))
        assert sorted(adapter.lora_int_id for adapter in known) == [1, 2, 4]
    assert [tokens[accepted.request.req_id] for accepted in requests] == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_request", [True, False], ids=["for a request", "by add_lora"])
@pytest.mark.one_path(reason="what outlives a core is no matter of how it makes its steps")
def test_an_adapter_whose_core_is_killed_while_it_loads_is_loaded_by_the_next(
    is_request: bool, folders: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(folders[0], folder)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options = {**DEMO, "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "32MiB"}
    with LLM("demo", **options) as llm:
        outputs = llm.generate(
            ["ROMEO:", "KING"], params, lora_request=[None, request_of(1, folders[0])], use_tqdm=False
        )
        expected = [output.outputs[0].token_ids for output in outputs]

    async def serve() -> list[Sequence[int]]:
        engine = AsyncEngine("demo", worker_extension_cls="support.slow_adapters.SlowLoading", **options)
        core = engine._dispatcher.core
        assert isinstance(core, CoreGroup)
        (first,) = core.process_ids
        adapter = request_of(1, folder)

        async def tokens(prompt: str, of: LoRARequest | None) -> Sequence[int]:
            async for output in engine.generate(prompt, params, lora_request=of):
                found = output.outputs[0].token_ids
            return found

        async def adapted() -> Sequence[int]:
            if not is_request:
                assert await engine.add_lora(adapter)
            return await tokens("KING", adapter if is_request else adapter.reference)

        waiting = asyncio.create_task(adapted())
        await until((folder / LOADING).exists, "the adapter is being loaded")
        others = await tokens("ROMEO:", None)
        assert not waiting.done()
        os.kill(first, signal.SIGKILL)
        found = [others, await asyncio.wait_for(waiting, 120)]
        engine.shutdown()
        return found

    assert asyncio.run(serve()) == expected

"""LoRA adapters beside structured output, drafts, ranks, preemption and cached prefixes, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock import SamplingParams, StructuredOutputsParams
from penstock.checkpoints.resolve import resolve_model_folder
from penstock.contract import RpcCall
from penstock.engine.core.engine_core import EngineCore
from penstock.features.lora.request import LoRARequest
from support.adapted_models import in_memory, masked_greedy
from support.adapters import ALL_LINEAR, make_adapters, parts_of, request_of, with_adapter
from support.checkpoints import oracle_logits
from support.constraints import END, encode
from support.engines import Result, add, finish, make_core

pytestmark = pytest.mark.one_path(reason="adapters, and the other features, are tested on both paths each by itself")

_VARIANTS: list[dict[str, Any]] = [
    {"r": 4, "target_modules": ALL_LINEAR},
    {"r": 8, "target_modules": ["q_proj", "lm_head"]},
    {"r": 3, "target_modules": ["embed_tokens", "down_proj"]},
    {"r": 2, "target_modules": ["k_proj", "up_proj"]},
]
_GRAMMARS: list[dict[str, Any]] = [{"regex": "[A-Z]{2}-[0-9]{3,5} (yes|no)"}, {"json": {"enum": [["a", 1], "b", None]}}]
_PREFIX = "ROMEO: AB-123 yes. JULIET: AB-123 no. ROMEO: AB-123 yes. JULIET: "
DEMO: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "block_size": 8}
# Room for a few requests of the twelve: 180 tokens of one KV head per rank.
_BYTES_PER_LAYER = 180 * 2 * 32 * 4
_NUM_LAYERS = {"ngram": 6, "draft_model": 12}
_DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False},
    "draft_model": {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3, "adaptive": False},
}


@dataclass
class Asked:
    """A request. number: of its adapter; 0 for none."""

    prompt: list[int]
    number: int
    params: SamplingParams
    grammar: dict[str, Any] | None


def asked() -> list[Asked]:
    """Requests of three adapters and of none: free greedy ones, sampled ones, and ones with either grammar."""
    requests = []
    for index in range(12):
        kind = index // 4
        grammar = _GRAMMARS[index % 2] if kind == 0 else None
        params = SamplingParams(
            temperature=1.0 if kind == 1 else 0.0,
            seed=index,
            max_tokens=40,
            ignore_eos=grammar is None,
            structured_outputs=None if grammar is None else StructuredOutputsParams(**grammar),
        )
        requests.append(Asked(encode(_PREFIX + "ABCDEFGHIJKL"[index]), (index + kind) % 4, params, grammar))
    return requests


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve_model_folder("demo"), dtype="float32").eval()


@pytest.fixture(scope="module")
def folders(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_adapters(model, tmp_path_factory.mktemp("adapters"), _VARIANTS)


@pytest.fixture(scope="module")
def adapters(folders: list[Path]) -> list[LoRARequest | None]:
    return [None, *(request_of(index + 1, path) for index, path in enumerate(folders))]


@pytest.fixture(scope="module")
def alone(adapters: list[LoRARequest | None]) -> Iterator[list[list[int]]]:
    """Tokens of each request alone, in an engine with nothing else."""
    core = make_core("demo", **DEMO, enable_prefix_caching=False, fast_paths="auto")
    tokens = []
    for request in asked():
        start(core, "r", request, adapters)
        results: dict[str, Result] = {}
        finish(core, results)
        tokens.append(results["r"].tokens)
    core.close()
    return tokens


def start(core: EngineCore, req_id: str, request: Asked, adapters: list[LoRARequest | None], **fields: Any) -> None:
    eos = frozenset() if request.grammar is None else frozenset({END})
    parts = parts_of(adapters[request.number])
    add(core, req_id, request.prompt, request.params, parts=parts, eos_token_ids=eos, **fields)


@pytest.mark.slow
def test_requests_alone_have_the_tokens_of_peft(
    model: PreTrainedModel, alone: list[list[int]], adapters: list[LoRARequest | None]
) -> None:
    for request, tokens in zip(asked(), alone, strict=True):
        if request.params.temperature:
            continue
        adapter = adapters[request.number]
        adapted = model if adapter is None else with_adapter(model, Path(adapter.lora_path))
        if request.grammar is not None:
            assert tokens == masked_greedy(adapted, request.prompt, request.grammar)
        else:
            rows = oracle_logits(adapted, [*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
            assert tokens == rows.argmax(-1).tolist()
        if adapter is not None:
            adapted.unload()


def change_adapters(core: EngineCore, folders: list[Path]) -> Iterator[None]:
    """Add, pin, replace by itself, remove and evict adapters, a change per step."""
    yield
    core.collective_rpc(RpcCall("add_lora", (in_memory(4, folders[3]),)))
    yield
    core.collective_rpc(RpcCall("add_lora", (request_of(1, folders[0], load_inplace=True),)))
    yield
    core.collective_rpc(RpcCall("pin_lora", (1,)))
    yield
    # Its requests run, and wait.
    assert core.collective_rpc(RpcCall("remove_lora", (2,)))[0]
    yield
    core.collective_rpc(RpcCall("remove_lora", (4,)))
    yield
    core.collective_rpc(RpcCall("prefetch_lora", (request_of(5, folders[3]),)))
    yield
    core.collective_rpc(RpcCall("remove_lora", (1,)))


def nothing(core: EngineCore, folders: list[Path]) -> Iterator[None]:
    yield


@pytest.mark.slow
@pytest.mark.parametrize("change", [nothing, change_adapters], ids=["nothing changes", "adapters change"])
@pytest.mark.parametrize("drafts", _DRAFTS)
def test_every_request_has_its_tokens_alone(
    drafts: str,
    change: Callable[[EngineCore, list[Path]], Iterator[None]],
    alone: list[list[int]],
    adapters: list[LoRARequest | None],
    folders: list[Path],
) -> None:
    tiny = {"kv_cache_memory_bytes": _BYTES_PER_LAYER * _NUM_LAYERS[drafts], "max_model_len": 112}
    core = make_core("demo", **DEMO, **tiny, tensor_parallel_size=2, speculative_config=_DRAFTS[drafts])
    requests = asked()
    for index, request in enumerate(requests):
        start(core, f"r{index}", request, adapters)
    results: dict[str, Result] = {}
    changes = change(core, folders)
    for number in range(5000):
        if not core.has_unfinished_requests():
            break
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        if number % 6 == 0:
            next(changes, None)
        core.wait_for_work()
    assert next(changes, "all were made") == "all were made"
    scheduler = core.scheduler
    num_preemptions, num_drafts = scheduler.num_preemptions, scheduler.spec_decode_metrics.num_draft_tokens
    core.close()
    assert [results[f"r{index}"].error for index in range(len(requests))] == [None] * len(requests)
    assert [results[f"r{index}"].tokens for index in range(len(requests))] == alone
    assert num_preemptions > 0
    assert num_drafts > 0
    assert any(result.num_cached_tokens > 0 for result in results.values())


@pytest.mark.slow
def test_requests_that_wait_for_a_slot_outlive_the_removal_of_their_adapter(
    alone: list[list[int]], adapters: list[LoRARequest | None], folders: list[Path]
) -> None:
    core = make_core("demo", **{**DEMO, "max_loras": 1})
    requests = [request for request in asked() if request.number]
    expected = {request.number: tokens for request, tokens in zip(asked(), alone, strict=True)}
    given = [None, adapters[1], adapters[2], in_memory(3, folders[2])]
    for adapter in given[1:]:
        core.collective_rpc(RpcCall("add_lora", (adapter,)))
    for number in (1, 2, 3):
        last = next(request for request in reversed(requests) if request.number == number)
        start(core, f"r{number}", last, given)
    results: dict[str, Result] = {}
    while not results.get("r1", Result()).tokens:
        for output in core.step():
            results.setdefault(output.req_id, Result()).take(output)
        core.wait_for_work()
    assert set(results) == {"r1"}
    for number in (1, 2, 3):
        assert core.collective_rpc(RpcCall("remove_lora", (number,))) == [True]
    finish(core, results)
    core.close()
    assert [results[f"r{number}"].tokens for number in (1, 2, 3)] == [expected[1], expected[2], expected[3]]


@pytest.mark.slow
def test_priorities_order_the_adapters_that_wait_for_a_slot(
    alone: list[list[int]], adapters: list[LoRARequest | None]
) -> None:
    core = make_core("demo", **{**DEMO, "max_loras": 1, "policy": "priority"})
    for adapter in adapters[1:4]:
        core.collective_rpc(RpcCall("add_lora", (adapter,)))
    requests, order = asked(), [3, 1, 2, 0]
    for index, request in enumerate(requests):
        start(core, f"r{index}", request, adapters, priority=order.index(request.number))
    results: dict[str, Result] = {}
    finish(core, results)
    core.close()
    assert [results[f"r{index}"].tokens for index in range(len(requests))] == alone
    first_of = {requests[int(name[1:])].number: place for place, name in reversed([*enumerate(results)])}
    assert sorted((3, 1, 2), key=first_of.__getitem__) == [3, 1, 2]

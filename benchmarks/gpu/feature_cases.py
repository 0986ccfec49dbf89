"""Cases of the part `features`: model families, and features of the engine, on a device beside the CPU.

Models are those of the tests, small and random, in float32. Most cases run the same requests on both and compare.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

# isort: off
from benchmarks.gpu.feature_checks import DEMO_PROMPTS, PROMPTS, Bench, assert_alike, assert_same_results, graphs_of

# Helpers of the tests, which `feature_checks` made known.
import test_capabilities
from core.plugins import adapter, running_sum, write_checkpoint
from models import test_families_match_transformers
from penstock import AsyncEngine, SamplingParams, StructuredOutputsParams
from penstock.config import EngineConfig
from penstock.contract import Parts, RpcCall
from penstock.errors import ConfigError, PenstockError, UnsupportedArgument, UnsupportedModel
from penstock.worker.capabilities import check_options
from support import arrangements, draft_heads, mxfp4_checkpoints, scaled_caches, transformers_models, tried_features
from support.checkpoints import FAMILIES, save_checkpoint, tiny_checkpoint, tiny_model
from support.disturbed_workers import FailingWorker
from support.engines import Result, add, finish, greedy, run
# isort: on

Case = Callable[[Bench], str | None]


class NotInTransformers(Exception):
    """A class of models that the installed Transformers does not have."""


def _family(bench: Bench, save: Callable[[Path], object], **options: Any) -> str:
    model = bench.folder / "model"
    results, note = [], ""
    try:
        save(model)
        for device in bench.devices:
            with bench.core(model, device, **options) as core:
                results.append(run(core, PROMPTS, greedy(20, logprobs=3)))
                note = note or graphs_of(core)
    except (UnsupportedModel, NotInTransformers) as reason:
        return f"not with this version of Transformers: {str(reason)[:90]}"
    return " ".join(filter(None, [note, assert_same_results(*results)]))


def _narrow(bench: Bench, save: Callable[[Path], object], dtype: str, **options: Any) -> str:
    """Log-probabilities of prompts in a narrow dtype near those in float32."""
    model = bench.folder / "model"
    save(model)
    likely, note = [], ""
    for device, given in zip(bench.devices, ({"dtype": dtype}, {}), strict=True):
        with bench.core(model, device, **given, **options) as core:
            found = run(core, PROMPTS[2:], greedy(12, logprobs=5, prompt_logprobs=0))
            likely.append([value for one in found for row in (one.prompt_logprobs or [])[1:] for value in row.values()])
            note = note or graphs_of(core)
    error = sum(abs(ours - theirs) for ours, theirs in zip(*likely, strict=True)) / len(likely[0])
    assert error < (0.1 if dtype == "bfloat16" else 0.02), f"mean error of log-probabilities: {error}"
    return f"error {error:.4f}, {note}"


def _feature(bench: Bench, attempt: Callable[..., Any], dtype: str = "float32", **options: Any) -> None:
    """A feature of `tried_features`. In a narrow dtype, without the CPU's results: it has checks of its own."""
    model = tried_features.write_model(bench.folder / "model")
    results = []
    for device in bench.devices if dtype == "float32" else bench.devices[:1]:
        folder = bench.folder / f"{len(results)}"
        folder.mkdir()
        given = {**tried_features.arranged({}), **tried_features.options_of_all(folder), **options}
        given |= {"device": device, "dtype": dtype}
        if dtype != "float32":
            given |= {"kv_cache_dtype": dtype, "kv_cache_memory_bytes": given["kv_cache_memory_bytes"] // 2}
        with tried_features.started(model, folder, given) as engine:
            results.append(tried_features.plain(attempt(engine)))
    if dtype == "float32":
        assert_alike(*results)


def _way(bench: Bench, name: str, **others: Any) -> str | None:
    """A feature that needs an engine of its own: the CPU's continuations, or its refusal.

    others: options on the device only. Quantised weights round activations on the CPU, and not on a GPU.
    """
    way, folder = test_capabilities.WAYS[name], bench.folder
    model = way.model(folder / "model")
    model = next(iter(sorted((folder / "model").glob("quantized"))), model)
    tried_features.write_tokenizer(model, tried_features.byte_level_tokenizer())
    options = {
        **tried_features.arranged({}),
        "kv_cache_memory_bytes": "2MiB",
        "dtype": "float32",
        **way.options(folder),
    }
    config = EngineConfig.create(str(model), **options | others | {"device": bench.device})
    try:
        check_options(config, bench.device)
    except UnsupportedArgument as refusal:
        with pytest.raises(UnsupportedArgument), bench.core(model, **options | others | {"device": bench.device}):
            pass
        return f"refused: {str(refusal)[:70]}"
    results = []
    for device in bench.devices:
        given = options | (others if not results else {}) | {"device": device}
        with tried_features.started(model, folder, given) as engine:
            results.append(tried_features.plain(test_capabilities.continuations(engine)))
    if way.off_by > 0 or others or options["dtype"] != "float32":
        error = sum(abs(a - b) for a, b in zip(results[0][1], results[1][1], strict=True)) / len(results[0][1])
        limit = way.off_by + (0.15 if "kv_cache_dtype" in others else 0.05)
        assert error < limit, f"mean error of log-probabilities: {error}"
        return f"error {error:.4f}"
    assert_alike(*results)
    return None


def _float8(bench: Bench, name: str) -> str:
    """A checkpoint with FP8 weights."""
    from loader import test_float8_checkpoints

    def save(folder: Path) -> None:
        config, _ = test_float8_checkpoints.write(folder.parent, name)
        config.folder.rename(folder)

    return _family(bench, save)


def _scaled_cache(bench: Bench) -> str:
    """An FP8 KV cache with a checkpoint's scales: the reference backend's log-probabilities of prompts on the CPU."""
    model, likely, note = bench.folder / "model", [], ""
    scaled_caches.save_scaled(scaled_caches.scaled_model(), model)
    for device in bench.devices:
        backend = "reference" if device == "cpu" else "triton_paged"
        with bench.core(model, device, kv_cache_dtype="fp8", attention_backend=backend) as core:
            found = run(core, PROMPTS[2:], greedy(12, prompt_logprobs=0))
            likely.append([value for one in found for row in (one.prompt_logprobs or [])[1:] for value in row.values()])
            note = note or graphs_of(core)
    error = sum(abs(ours - theirs) for ours, theirs in zip(*likely, strict=True)) / len(likely[0])
    assert error < 0.02, f"mean error of log-probabilities: {error}"
    return f"error {error:.4f}, {note}"


def _mxfp4(bench: Bench) -> str:
    """A checkpoint with MXFP4 experts, whose products on the CPU round activations: the float twin's results there."""
    stored, floats = mxfp4_checkpoints.write_mxfp4(bench.folder)
    results, note = [], ""
    for device, config in zip(bench.devices, (stored, floats), strict=True):
        with bench.core(config.folder, device) as core:
            results.append(run(core, PROMPTS, greedy(20, logprobs=3)))
            note = note or graphs_of(core)
    return " ".join(filter(None, [note, assert_same_results(*results)]))


def _with_drafts(bench: Bench, method: str, rule: str = "exact", **options: Any) -> str:
    """Speculative decoding: the tokens of an engine without, and of both on the CPU."""
    from core import test_model_drafters as drafters

    target = "mimo" if method == "mtp" else "target"
    model = bench.folder / target
    if method == "mtp":
        draft_heads.write_mimo(model)
    else:
        tiny_checkpoint(model, num_hidden_layers=5)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    drafter = bench.folder / method
    if method == "draft_model":
        tiny_checkpoint(drafter, "qwen3", seed=7, head_dim=32, num_key_value_heads=1)
    elif method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    elif method == "eagle":
        draft_heads.write_head(drafter, draft_heads.eagle_weights())
    elif method == "eagle3":
        draft_heads.write_head(drafter, draft_heads.eagle3_weights(), draft_vocab_size=40)
    elif method == "itself":
        config["method"] = "draft_model"
        drafter = model
    if config["method"] not in ("mtp", "ngram"):
        config["model"] = str(drafter)
    if rule != "exact":
        config["rejection_sample_method"] = rule
    if rule == "synthetic":
        config["synthetic_acceptance_rates"] = [1.0, 0.5, 0.2]
    config |= {name: options.pop(name) for name in ("adaptive",) if name in options}
    room = {**drafters.ROOM, **options}
    with bench.core(model, **room, speculative_config=config) as core:
        found = run(core, drafters.PROMPTS, drafters.PARAMS)
        note = graphs_of(core)
    with bench.core(model, "cpu", **drafters.ROOM) as core:
        expected = run(core, drafters.PROMPTS, drafters.PARAMS)
    if rule == "synthetic":
        assert [one.error for one in found] == [None] * len(found)
        return note
    if rule == "standard":
        pairs = list(zip(found, expected, drafters.PARAMS, strict=True))
        assert_same_results(
            [one for one, _, params in pairs if params.temperature == 0],
            [one for _, one, params in pairs if params.temperature == 0],
        )
        return note
    return " ".join(filter(None, [note, assert_same_results(found, expected)]))


def _graphs_of_drafts(bench: Bench, method: str) -> str:
    """Steps of one greedy request with drafts: most verify and draft in graphs, and the tokens are the CPU's."""
    from core import test_graphs

    drafters = bench.folder
    tiny_checkpoint(drafters / "target", num_hidden_layers=5)
    tiny_checkpoint(drafters / "draft_model", "qwen3", seed=7, head_dim=32, num_key_value_heads=1)
    draft_heads.write_head(drafters / "eagle", draft_heads.eagle_weights())
    draft_heads.write_head(drafters / "eagle3", draft_heads.eagle3_weights(), draft_vocab_size=40)
    with bench.core(drafters / "target", **test_graphs._drafting(drafters, method)) as core:
        found, note = run(core, PROMPTS[3:4], greedy(40, logprobs=2)), graphs_of(core)
        (replays,) = core.collective_rpc(RpcCall(lambda worker: getattr(worker.runner.execution, "num_replays", 0)))
    with bench.core(drafters / "target", "cpu", max_model_len=68) as core:
        assert_same_results(found, run(core, PROMPTS[3:4], greedy(40, logprobs=2)))
    assert bench.device == "cpu" or replays >= 10, note
    return note


def _demo(bench: Bench, **options: Any) -> str:
    """The demo model: texts of the CPU without drafts."""
    texts = []
    params = [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=0.8, seed=5, max_tokens=60),
        SamplingParams(temperature=0.0, max_tokens=60, logprobs=1),
    ]
    for device, given in zip(bench.devices, (options, {}), strict=True):
        with bench.llm("demo", device, **given) as llm:
            texts.append([out.outputs[0].text for out in llm.generate(DEMO_PROMPTS, params, use_tqdm=False)])
    assert_alike(*texts)
    return repr(texts[0][0][:24])


_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def _structured(bench: Bench, **options: Any) -> str:
    """Structured outputs of all kinds beside a free request: the texts of the CPU without drafts."""
    forms: list[StructuredOutputsParams | None] = [
        StructuredOutputsParams(json=_SCHEMA),
        StructuredOutputsParams(json=_SCHEMA),
        StructuredOutputsParams(regex="[A-Z]{2}-[0-9]{3,5}"),
        StructuredOutputsParams(choice=["yes", "no", "perhaps tomorrow"]),
        StructuredOutputsParams(grammar='root ::= "<" [0-9]+ ("," [0-9]+)* ">"'),
        None,
    ]
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=90, structured_outputs=form)
        for index, (form, temperature) in enumerate(zip(forms, (0.9, 0.0, 0.9, 0.9, 0.9, 0.0), strict=True))
    ]
    texts = []
    for device, given in zip(bench.devices, (options, {}), strict=True):
        with bench.llm("demo", device, **given) as llm:
            outputs = llm.generate(["Tell me of a cat."] * len(forms), params, use_tqdm=False)
            texts.append([out.outputs[0].text for out in outputs])
            assert outputs[0].outputs[0].finish_reason == "length" or json.loads(texts[-1][0])["age"] <= 120
    assert_alike(*texts)
    return texts[0][0][:40]


def _arranged(bench: Bench, **options: Any) -> str:
    """Requests of all kinds, twice, in a KV cache that is too small for them."""
    is_tight = options.pop("is_tight", True)
    model = bench.folder / "model"
    tiny_checkpoint(model, vocab_size=arrangements.VOCAB_SIZE)
    results, note = [], ""
    if is_tight:
        options = {"kv_cache_memory_bytes": 13 * 8192, "max_model_len": 128, **options}
    for device in bench.devices:
        with bench.core(model, device, **options) as core:
            found = [run(core, arrangements.PROMPTS, arrangements.PARAMS) for _ in range(2)]
            note = note or graphs_of(core)
            if is_tight:
                assert sum(one.num_preemptions for one in found[0]) > 0, "no request was preempted"
            results.append(found[0] + found[1])
    return " ".join(filter(None, [note, assert_same_results(*results)]))


def _plugin(bench: Bench, plugin: Any, **options: Any) -> str:
    """A recurrent layer, or an adapter per request, as plugins bring them."""
    plugin.register()
    model = write_checkpoint(bench.folder / "model", plugin.ARCHITECTURE)
    parts = [Parts.of([adapter.AdapterPart(adapter_id=1 + n)]) if n % 2 else None for n in range(3)]
    results, note = [], ""
    for device in bench.devices:
        with bench.core(model, device, **options) as core:
            for index, prompt in enumerate(PROMPTS):
                fields = {"parts": parts[index % 3]} if plugin is adapter else {}
                add(core, f"r{index}", prompt, greedy(20, logprobs=2), **fields)
            found: dict[str, Result] = {}
            finish(core, found)
            results.append([found[f"r{index}"] for index in range(len(PROMPTS))])
            note = note or graphs_of(core)
    return " ".join(filter(None, [note, assert_same_results(*results)]))


def _lost_worker(bench: Bench) -> None:
    """A worker that fails is replaced, and no request notices."""
    model = bench.folder / "model"
    tiny_checkpoint(model)
    results = []
    for device in bench.devices:
        FailingWorker.fails_at = {("execute", 5), ("sample", 9)} if device == bench.device else set()
        with bench.core(model, device, worker_cls=f"{FailingWorker.__module__}.FailingWorker") as core:
            results.append(run(core, PROMPTS, greedy(20, logprobs=2)))
        assert not FailingWorker.fails_at
    assert_same_results(*results)


def _async_engine(bench: Bench, **options: Any) -> None:
    """An AsyncEngine, whose core has a process of its own: the texts of an LLM on the CPU."""

    async def collect(engine: AsyncEngine, prompt: str, index: int) -> str:
        params = SamplingParams(temperature=0.7, seed=index, max_tokens=40)
        last = None
        async for output in engine.generate(prompt, params, request_id=f"r{index}"):
            last = output
        assert last is not None
        return last.outputs[0].text

    if options.get("data_parallel_size", 1) > max(1, torch.cuda.device_count()) and bench.device == "cuda":
        with pytest.raises(ConfigError, match="needs CUDA device 1"):
            AsyncEngine("demo", device="cuda", **options)
        return

    async def gather() -> list[str]:
        engine = AsyncEngine(
            "demo", device=bench.device, dtype="float32", kv_cache_memory_bytes=16 << 20, num_threads=1, **options
        )
        try:
            return await asyncio.gather(*(collect(engine, prompt, index) for index, prompt in enumerate(DEMO_PROMPTS)))
        finally:
            engine.shutdown()

    found = asyncio.run(gather())
    params = [SamplingParams(temperature=0.7, seed=index, max_tokens=40) for index in range(len(DEMO_PROMPTS))]
    with bench.llm("demo", "cpu") as llm:
        assert_alike(found, [out.outputs[0].text for out in llm.generate(DEMO_PROMPTS, params, use_tqdm=False)])


def _two_engines(bench: Bench) -> None:
    """Two engines in one process, one closed while the other has requests."""
    first, second = bench.folder / "first", bench.folder / "second"
    tiny_checkpoint(first, "llama")
    tiny_checkpoint(second, "gemma2", sliding_window=9)
    results = []
    for device in bench.devices:
        with bench.core(first, device) as one:
            for index, prompt in enumerate(PROMPTS):
                add(one, f"r{index}", prompt, greedy(20, logprobs=2))
            kept: dict[str, Result] = {}
            for _ in range(6):
                for output in one.step():
                    kept.setdefault(output.req_id, Result()).take(output)
            with bench.core(second, device) as other:
                found = run(other, PROMPTS, greedy(20, logprobs=2))
            finish(one, kept)
            results.append([*found, *(kept[f"r{index}"] for index in range(len(PROMPTS)))])
    assert_same_results(*results)


def _refused(bench: Bench, options: dict[str, Any], text: str) -> str:
    if bench.device == "cpu":
        return "not refused on CPUs"
    model = bench.folder / "model"
    tiny_checkpoint(model)
    with pytest.raises(PenstockError, match=text) as caught, bench.core(model, **options):
        pass
    return str(caught.value)[:90]


def _command(bench: Bench) -> str:
    """`penstock generate` with the device's default options."""
    import importlib.util
    import subprocess

    if importlib.util.find_spec("typer") is None:
        return "typer is not installed"
    command = [sys.executable, "-m", "penstock", "generate", "ROMEO:", "--max-tokens", "16", "--temperature", "0"]
    done = subprocess.run([*command, "--device", bench.device], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-400:]
    return done.stdout[-40:].replace("\n", " ")


def _families() -> Iterator[tuple[str, Case]]:
    for family in FAMILIES:
        yield f"family {family}", functools.partial(_family, save=functools.partial(_save_native, family, {}))
        for dtype in ("bfloat16", "float16"):
            save = functools.partial(_save_native, family, {})
            yield f"family {family} {dtype}", functools.partial(_narrow, save=save, dtype=dtype)
    yield "family mimo", functools.partial(_family, save=draft_heads.write_mimo)
    for number, (family, changes) in enumerate(test_families_match_transformers.CONFIGS):
        if changes:
            name = f"config {number} {family} {', '.join(changes)}"[:70]
            yield name, functools.partial(_family, save=functools.partial(_save_native, family, changes))
    for family, changes in (
        ("llama", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("llama", {"head_dim": 320, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("llama", {"head_dim": 48}),
        ("llama", {"head_dim": 8}),
        ("llama", {"num_attention_heads": 16, "num_key_value_heads": 1}),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 96}),
    ):
        name = f"sizes {family} {' '.join(map(str, changes.values()))}"
        yield name, functools.partial(_family, save=functools.partial(_save_native, family, changes))


def _save_native(family: str, changes: dict[str, Any], folder: Path) -> None:
    save_checkpoint(tiny_model(family, **changes), folder)


def _fallbacks() -> Iterator[tuple[str, Case]]:
    known = {**transformers_models.FAMILIES, **transformers_models.PLANNED_BY_BUILDING}
    for name, (class_name, changes) in known.items():
        save = functools.partial(_save_fallback, class_name, changes)
        yield f"transformers {name}", functools.partial(_family, save=save, model_impl="transformers")
    for class_name in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"):
        save = functools.partial(_save_fallback, class_name, None)
        case = functools.partial(_narrow, save=save, dtype="bfloat16", model_impl="transformers")
        yield f"transformers {class_name} bfloat16", case
    for class_name in transformers_models.WIDER:
        save = functools.partial(_save_fallback, class_name, None)
        yield f"transformers {class_name}", functools.partial(_family, save=save, model_impl="transformers")


def _save_fallback(class_name: str, changes: dict[str, Any] | None, folder: Path) -> None:
    if not hasattr(transformers, class_name):
        raise NotInTransformers(class_name)
    given = transformers_models.wider_overrides(class_name) if changes is None else changes
    transformers_models.save_for_fallback(transformers_models.tiny_transformers_model(class_name, **given), folder)


def _features() -> Iterator[tuple[str, Case]]:
    attempts = {attempt.__name__: attempt for attempt in tried_features.TRIED_TOGETHER.values()}
    for name, attempt in attempts.items():
        yield f"feature {name}", functools.partial(_feature, attempt=attempt)
    for name, attempt in attempts.items():
        if name not in ("calls", "profiles", "sharded_state", "new_weights"):
            case = functools.partial(_feature, attempt=attempt, async_scheduling=False)
            yield f"feature {name}, sync", case
        yield f"feature {name}, bfloat16", functools.partial(_feature, attempt=attempt, dtype="bfloat16")
    for name in ("sampling", "penalties"):
        for option, value in (
            ("batch_invariant", True),
            ("cudagraph_mode", "full_and_piecewise"),
            ("cudagraph_mode", "full"),
        ):
            case = functools.partial(_feature, attempt=attempts[name], **{option: value})
            yield f"feature {name}, {option} {value}", case


def _engines() -> Iterator[tuple[str, Case]]:
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}
    eagle3 = {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3, "adaptive": False}}
    for is_async in (True, False):
        of = "" if is_async else ", sync"
        given = {"async_scheduling": is_async}
        for method in ("ngram", "draft_model", "itself", "eagle", "eagle3", "mtp"):
            yield f"drafts {method}{of}", functools.partial(_with_drafts, method=method, **given)
        yield f"demo{of}", functools.partial(_demo, **given)
        yield f"demo eagle3{of}", functools.partial(_demo, **given, **eagle3)
        yield f"structured{of}", functools.partial(_structured, **given)
        yield f"structured ngram{of}", functools.partial(_structured, **given, **ngram)
        yield f"structured eagle3{of}", functools.partial(_structured, **given, **eagle3)
        yield f"preempted{of}", functools.partial(_arranged, **given)
        yield f"preempted chunked{of}", functools.partial(_arranged, max_num_batched_tokens=13, **given)
    for method in ("ngram", "draft_model", "eagle3"):
        yield f"drafts graphs {method}", functools.partial(_graphs_of_drafts, method=method)
        yield f"drafts {method} adaptive", functools.partial(_with_drafts, method=method, adaptive=True)
        yield f"drafts {method} chunked", functools.partial(_with_drafts, method=method, max_num_batched_tokens=9)
    for rule in ("standard", "synthetic"):
        yield f"drafts draft_model {rule}", functools.partial(_with_drafts, method="draft_model", rule=rule)
    for name, options in {
        "roomy": {},
        "without prefix cache": {"enable_prefix_caching": False},
        "without fast paths": {"fast_paths": "off"},
        "reference attention": {"attention_backend": "reference"},
        "blocks of 64": {"block_size": 64},
        "one request at a time": {"max_num_seqs": 1},
        "3 requests, chunks of 7": {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    }.items():
        yield f"engine {name}", functools.partial(_arranged, is_tight=False, **options)
    yield "engine demo eagle3 defaults", functools.partial(_demo, speculative_config={"method": "eagle3"})
    yield "engine two in one process", _two_engines
    yield "engine lost worker", _lost_worker
    yield "engine AsyncEngine", _async_engine
    yield "engine AsyncEngine, 2 engines", functools.partial(_async_engine, data_parallel_size=2)
    yield "engine AsyncEngine, core in a thread", functools.partial(_async_engine, enable_multiprocessing=False)
    yield "engine command line", _command
    for plugin in (running_sum, adapter):
        yield f"plugin {plugin.__name__.rpartition('.')[2]}", functools.partial(_plugin, plugin=plugin)
    yield "plugin running_sum ngram", functools.partial(_plugin, plugin=running_sum, **ngram)


def _refusals() -> Iterator[tuple[str, Case]]:
    for name, options, text in (
        ("blocks of 8", {"block_size": 8, "attention_backend": "triton_paged"}, "block_size"),
        ("cpu_native", {"attention_backend": "cpu_native"}, "cpu_native"),
        ("tensor parallel", {"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ("pipeline parallel", {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ("suffix", {"speculative_config": {"method": "suffix"}}, "suffix"),
    ):
        yield f"refused {name}", functools.partial(_refused, options=options, text=text)


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by name; those that tell most come first."""
    on_gpus = test_capabilities.WAYS_ON_GPUS
    ways = {f"way {name}": functools.partial(_way, name=name) for name in test_capabilities.WAYS if name not in on_gpus}
    for name, options in on_gpus.items():
        for model in ("GPT-2", "n-gram drafts", "EAGLE-3"):
            ways[f"way {name}, {model}"] = functools.partial(_way, name=model, **options)
    for name in ("fp8 tensor", "fp8 blocks", "compressed channel"):
        ways[f"way {name} checkpoints"] = functools.partial(_float8, name=name)
    ways["way MXFP4 checkpoints"] = _mxfp4
    ways["way FP8 KV cache with scales"] = _scaled_cache
    for name in (
        "int8 weights",
        "int4 weights",
        *(one for one in test_capabilities.WAYS if one.endswith("checkpoints")),
    ):
        name = name.removeprefix("way ")
        for dtype in ("bfloat16", "float16"):
            ways[f"way {name} {dtype}"] = functools.partial(_way, name=name, dtype=dtype)
    families = dict(_families())
    plain = {name: case for name, case in families.items() if name.startswith("family")}
    others = {**dict(_features()), **ways, **dict(_refusals())}
    return {**dict(_engines()), **plain, **others, **families, **dict(_fallbacks())}

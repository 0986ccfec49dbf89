"""Features that are tried with each arrangement of workers, which must not change their results."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import (
    LLM,
    AsyncEngine,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StreamingInput,
    StructuredOutputsParams,
)
from penstock.config import EngineConfig
from penstock.contract import RpcCall
from penstock.engine.output.outputs import Logprob
from penstock.runner.sampling import LogitsProcessor, LogitsRows
from penstock.worker import WorkerBase
from support.arrangements import PARAMS, PROMPTS
from support.checkpoints import tiny_checkpoint
from support.engines import SMALL, add, finish, greedy, run
from support.fake_engine import byte_level_tokenizer, write_tokenizer

VOCAB_SIZE = 380
LAYERS = 6
# Of keys and values of a layer, 16 positions and one head.
_LAYER_BYTES = 2 * 16 * 1 * 16 * 4
_LONG = PROMPTS[3]
_FORCED = 9


@dataclasses.dataclass
class Engine:
    """An engine that is tried, with the options that it was started with. folder: where it may write."""

    llm: LLM
    core: Any
    model: Path
    options: dict[str, Any]
    folder: Path

    @property
    def ranks(self) -> list[int]:
        """Whose answers a call brings: those of all engines' workers, or of this process's, which torchrun started."""
        sizes = "tensor_parallel_size", "pipeline_parallel_size"
        world_size = math.prod(self.options.get(name, 1) for name in sizes)
        if self.options.get("distributed_executor_backend") == "external_launcher":
            return [int(os.environ["RANK"]) % world_size]
        return list(range(world_size)) * int(self.options.get("data_parallel_size", 1))

    def generate(self, prompts: Sequence[Sequence[int]], params: Any, **others: Any) -> list[RequestOutput]:
        given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(given, params, use_tqdm=False, **others)

    def tokens(self, prompts: Sequence[Sequence[int]], params: Any, **others: Any) -> list[list[int]]:
        return [list(one.token_ids) for out in self.generate(prompts, params, **others) for one in out.outputs]


@contextmanager
def started(model: Path, folder: Path, options: dict[str, Any]) -> Iterator[Engine]:
    llm = LLM(str(model), **options)
    try:
        yield Engine(llm, llm._session._core, model, options, folder)
    finally:
        llm.close()


def write_model(folder: Path, *, seed: int = 0) -> Path:
    """With one KV head, which two workers both have, and a tokenizer."""
    tiny_checkpoint(
        folder, vocab_size=VOCAB_SIZE, head_dim=16, num_key_value_heads=1, num_hidden_layers=LAYERS, seed=seed
    )
    write_tokenizer(folder, byte_level_tokenizer())
    return folder


def write_hybrid(folder: Path, family: str = "granitemoehybrid", **sizes: Any) -> Path:
    """With recurrent layers, and attention with one KV head in the second and the last of the layers."""
    kinds = ["linear_attention"] * LAYERS
    kinds[1] = kinds[-1] = "full_attention"
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 1,
        "layer_types": kinds,
    } | sizes
    tiny_checkpoint(folder, family, **sizes)
    write_tokenizer(folder, byte_level_tokenizer())
    return folder


def arranged(arrangement: dict[str, Any]) -> dict[str, Any]:
    """Its options, and room for 208 positions whatever it is, which is too little for all requests, or for 160 of each
    of several engines, which is too little for half of them.
    """
    num_engines = arrangement.get("data_parallel_size", 1)
    num_layers = max(arrangement.get("pipeline_layers", (LAYERS,)))
    num_workers = arrangement.get("tensor_parallel_size", 1) * arrangement.get("pipeline_parallel_size", 1)
    turns = arrangement.get("decode_context_parallel_size", 1)
    return {
        **SMALL,
        "num_threads": num_workers * num_engines,
        "max_model_len": 128,
        "kv_cache_memory_bytes": (13 if num_engines == 1 else 10) * _LAYER_BYTES * num_layers // turns,
        "block_size": 16 // turns,
        **arrangement,
    }


class Extension:
    """What `worker_extension_cls` adds."""

    def times(self: Any, number: int) -> int:
        return number * (self.rank + 1)


class Liked(LogitsProcessor):
    """Makes a token likelier."""

    name = "liked"

    def add_request(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> bool:
        return bool((params.extra_args or {}).get(self.name))

    def apply(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        logits[: len(rows.slots_np), _FORCED] += 9.0
        return logits


def sampled(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=12, ignore_eos=True, **fields)


def plain(value: Any) -> Any:
    """Results as lists and dictionaries, to compare."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Logprob):
        return [value.logprob, value.rank, value.decoded_token]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def sampling(engine: Engine) -> Any:
    params = [sampled(1), sampled(2, top_k=20), sampled(3, top_p=0.8), sampled(4, min_p=0.05), greedy(12)]
    return engine.tokens(PROMPTS[:5], params)


def penalties(engine: Engine) -> Any:
    fields = {"presence_penalty": 0.7}, {"frequency_penalty": 0.6}, {"repetition_penalty": 1.3}
    return engine.tokens(PROMPTS[:3], [sampled(seed, **of) for seed, of in enumerate(fields)])


def wanted_and_unwanted_tokens(engine: Engine) -> Any:
    (free,) = engine.tokens(PROMPTS[:1], greedy(12))
    fields = (
        {"bad_words": [engine.llm.get_tokenizer().decode(free[:1])], "bad_words_token_ids": [free[:1], free[2:4]]},
        {"logit_bias": {5: 90.0}},
        {"allowed_token_ids": [4, 5, 6]},
        {"min_tokens": 8, "stop_token_ids": free[:3]},
    )
    found = engine.tokens([PROMPTS[0]] * 4, [SamplingParams(temperature=0, max_tokens=12, **of) for of in fields])
    assert found[0] != free
    assert found[1] == [5] * 12
    assert set(found[2]) <= {4, 5, 6}
    assert len(found[3]) >= 8
    return found


def thinking_budget(engine: Engine) -> Any:
    budget = {"thinking_budget": {"budget": 3, "start_token_ids": [7], "end_token_ids": [8]}}
    found = engine.tokens([[*PROMPTS[0], 7]] * 2, [greedy(12, extra_args=budget), sampled(1, extra_args=budget)])
    assert all(8 in tokens[:4] for tokens in found)
    return found


def logprobs(engine: Engine) -> Any:
    outputs = engine.generate(PROMPTS[:2], [greedy(12, logprobs=3), sampled(1, logprobs=2)])
    return [out.outputs[0].logprobs for out in outputs]


def prompt_logprobs(engine: Engine) -> Any:
    """Of a prompt of several chunks, among others."""
    outputs = engine.generate([_LONG, PROMPTS[2]], [greedy(3, prompt_logprobs=2), sampled(1, prompt_logprobs=0)])
    assert [len(out.prompt_logprobs or []) for out in outputs] == [len(_LONG), len(PROMPTS[2])]
    return [out.prompt_logprobs for out in outputs]


def several_outputs(engine: Engine) -> Any:
    found = engine.tokens(PROMPTS[:2], sampled(4, n=3))
    assert len(set(map(tuple, found))) == 6
    return found


def beams(engine: Engine) -> Any:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    given: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    return [[one.tokens for one in out.sequences] for out in engine.llm.beam_search(given, params)]


def structured_outputs(engine: Engine) -> Any:
    form = StructuredOutputsParams(regex="[ab]{3,6}:[0-9]{2}")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, structured_outputs=form)
    (out,) = engine.generate(PROMPTS[:1], params)
    assert out.outputs[0].text[-3] == ":"
    return out.outputs[0].text


def custom_processors(engine: Engine) -> Any:
    found = engine.tokens(PROMPTS[:2], [sampled(1, extra_args={"liked": True}), sampled(1)])
    assert found[0].count(_FORCED) > found[1].count(_FORCED)
    return found


def cached_and_preempted(engine: Engine) -> Any:
    """All requests at once, which has no room and takes chunks, and once more with what is cached."""
    first, again = (run(engine.core, PROMPTS, PARAMS) for _ in range(2))
    assert sum(result.num_preemptions for result in first) > 0
    assert sum(result.num_cached_tokens for result in again) > 0
    kept = ("tokens", "logprobs", "finish_reason", "error", "prompt_logprobs")
    return [{name: plain(getattr(result, name)) for name in kept} for result in first + again]


def priorities(engine: Engine) -> Any:
    """The last comes first, so it is not what makes room for others."""
    core = engine.core
    for index, prompt in enumerate(PROMPTS):
        add(core, f"r{index}", prompt, greedy(16), priority=-index)
    results: dict[str, Any] = {}
    finish(core, results)
    preempted = [results[f"r{index}"].num_preemptions for index in range(len(PROMPTS))]
    assert preempted[-1] == 0 < sum(preempted)
    return [results[f"r{index}"].tokens for index in range(len(PROMPTS))]


def rank_of(worker: WorkerBase) -> int:
    return worker.rank


def wait_for_all(worker: WorkerBase) -> None:
    worker.parallel.tensor.gather_values(None)


def drafts_of(worker: WorkerBase) -> int:
    return int(worker.num_speculative_tokens)  # type: ignore[attr-defined]


def calls(engine: Engine) -> Any:
    assert engine.llm.collective_rpc(rank_of) == engine.ranks
    assert engine.llm.collective_rpc("times", args=(3,)) == [3 * (rank + 1) for rank in engine.ranks]
    return engine.llm.collective_rpc("check_health")[:1]


def profiles(engine: Engine) -> Any:
    engine.core.collective_rpc(RpcCall("profile", kwargs={"is_start": True}))
    found = engine.tokens(PROMPTS[:2], greedy(4))
    traces = engine.core.collective_rpc(RpcCall("profile", kwargs={"is_start": False}))
    assert len({*traces}) == len(engine.ranks)
    assert all(Path(trace).stat().st_size > 0 for trace in traces)
    return found


def sharded_state(engine: Engine) -> Any:
    """Written by this engine, and read by another one, which is arranged alike."""
    expected = engine.tokens(PROMPTS[:2], greedy(8))
    saved = engine.folder / "saved"
    engine.core.collective_rpc(RpcCall("save_sharded_state", (str(saved),)))
    engine.core.collective_rpc(RpcCall(wait_for_all))
    with started(saved, engine.folder, {**engine.options, "load_format": "sharded_state"}) as other:
        found = other.tokens(PROMPTS[:2], greedy(8))
    assert found == expected
    return found


def new_weights(engine: Engine) -> Any:
    before = engine.tokens(PROMPTS[:2], greedy(8))
    other = engine.folder / f"other_{os.getpid()}"
    shutil.copytree(engine.model, other)
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: weight.flip(0).contiguous() for name, weight in weights.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    engine.core.collective_rpc(RpcCall("reload_weights", (str(other),)))
    found = engine.tokens(PROMPTS[:2], greedy(8))
    engine.core.collective_rpc(RpcCall("reload_weights", (str(engine.model),)))
    assert engine.tokens(PROMPTS[:2], greedy(8)) == before != found
    return found


def prompt_in_parts(engine: Engine) -> Any:
    """Closes the engine at its end."""

    async def parts() -> AsyncGenerator[StreamingInput, None]:
        for prompt in (PROMPTS[1], PROMPTS[0]):
            yield StreamingInput({"prompt_token_ids": prompt})
            await asyncio.sleep(0)

    async def collect(served: AsyncEngine) -> list[int]:
        outputs = [output async for output in served.generate(parts(), greedy(6), request_id="parts")]
        return list(outputs[-1].outputs[0].token_ids)

    config = EngineConfig.create(str(engine.model), **engine.options)
    served = AsyncEngine.from_config(config, load_core=lambda _: engine.core)
    try:
        return asyncio.run(collect(served))
    finally:
        served.shutdown()


# What needs no engine of its own, in an engine with `options_of_all`.
TRIED_TOGETHER: dict[str, Callable[[Engine], Any]] = {
    "sampling": sampling,
    "penalties": penalties,
    "bad words, logit bias, allowed tokens, least numbers of tokens": wanted_and_unwanted_tokens,
    "thinking budgets": thinking_budget,
    "log-probabilities": logprobs,
    "log-probabilities of prompts": prompt_logprobs,
    "several outputs of a prompt": several_outputs,
    "beam search": beams,
    "structured outputs": structured_outputs,
    "custom logits processors": custom_processors,
    "chunked prompts": cached_and_preempted,
    "cached prefixes": cached_and_preempted,
    "preemption": cached_and_preempted,
    "asynchronous scheduling": cached_and_preempted,
    "priorities": priorities,
    "decoders of Penstock": sampling,
    "calls of all workers, extensions": calls,
    "profiles": profiles,
    "sharded state": sharded_state,
    "new weights": new_weights,
    "AsyncEngine": prompt_in_parts,
}


def options_of_all(folder: Path) -> dict[str, Any]:
    """What the features ask for that are tried together."""
    return {
        "profiler_dir": str(folder / "traces"),
        "logits_processors": [f"{__name__}:Liked"],
        "worker_extension_cls": f"{__name__}.Extension",
        "policy": "priority",
        "async_scheduling": True,
    }

"""Decoding over long contexts: bytes read per second, relative to the machine's memory bandwidth.

    python -m benchmarks.long_context [--contexts 8192 16384] [--batches 1 8] [--dtypes float32 bfloat16 int8]
        [--threads 2] [--repeats 7] [--output FOLDER]

Three kinds of rows. "attention": the attention of one layer after the other, so that no CPU cache holds
what is read. "step": a model's whole forward pass and its logits, which read all weights and the KV cache once, over a
cache of random numbers. "engine": steps of a whole engine after a real prefill (batch 1, the first dtype, up to the
first context).
The ceiling is how fast a C program reads memory that no cache holds (`benchmarks/ceilings.c`), measured in turns with
what stands beside it. Both are medians of a quarter of a second: decoding is one step after the other, and the first
one after a pause waits for a CPU that has gone to sleep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ceilings import Ceilings
from benchmarks.machine import described, machine, save
from benchmarks.peers.shapes import SHAPES
from penstock.attention import NO_CONTEXT, AttentionStep, Heads, LayerAttention, StepGeometry
from penstock.attention.cpu_native import CpuNativeBackend
from penstock.config import EngineConfig
from penstock.contract import RpcCall, SamplingParams
from penstock.contract.kv_cache import head_elements
from penstock.device.base import TORCH_DTYPES
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.layers.attention import Attention
from penstock.layers.linear import weights_size_bytes

_SECONDS = 0.25  # of each turn, at least
_ENGINE_STEPS = 1024
# More than any cache holds: the layers' caches together have at least so many.
_COLD_BYTES = 512 << 20
_BLOCK_SIZE = 16
_SHAPES = {
    "60M Llama": LayerAttention("layer", 8, 4, 64, scale=64**-0.5),
    "Qwen3-0.6B": LayerAttention("layer", 16, 8, 128, scale=128**-0.5),
    "DeepSeek-V2-Lite": LayerAttention("layer", 16, 1, 576, scale=192**-0.5, latent_size=512),
    "DeepSeek-V3": LayerAttention("layer", 128, 1, 576, scale=192**-0.5, latent_size=512),
}
_LLAMA_60M = {**SHAPES["llama-60m"].config, "dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Row:
    """gb_per_s: bytes that must be read, by the median seconds. ceiling_gb_per_s: of its own turns."""

    kind: str
    model: str
    dtype: str
    batch: int
    context: int
    ms: float
    gb_per_s: float
    ceiling_gb_per_s: float

    @property
    def share(self) -> float:
        return self.gb_per_s / self.ceiling_gb_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="*", default=[8192, 16384])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--kinds", nargs="*", choices=["attention", "step", "engine"], default=["attention", "step"])
    parser.add_argument("--shapes", nargs="*", choices=list(_SHAPES), default=list(_SHAPES), help="of attention alone")
    parser.add_argument(
        "--cpu-arithmetic", choices=["float32", "bfloat16"], default="float32", help="of attention alone"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        meter = Ceilings(Path(folder), arguments.threads)
        if not meter.is_available:
            parser.error("the ceilings are measured by a C program, and there is no C compiler here: install gcc")
        report(arguments, Turns(meter, arguments.repeats))


def report(arguments: argparse.Namespace, clock: Turns) -> None:
    rows = []
    for dtype in arguments.dtypes:
        for context in arguments.contexts:
            for batch in arguments.batches:
                if "attention" in arguments.kinds:
                    rows += [
                        measure_attention(clock, name, dtype, batch, context, arguments.cpu_arithmetic)
                        for name in _shapes(arguments.shapes, dtype)
                    ]
                if "step" in arguments.kinds:
                    rows.append(measure_step(clock, dtype, batch, context, arguments.threads))
    if "engine" in arguments.kinds:
        rows.append(measure_engine(clock, arguments.dtypes[0], arguments.contexts[0], arguments.threads))
    print(as_markdown(rows, machine(arguments.threads)))
    if arguments.output is not None:
        facts = {"machine": machine(arguments.threads), "rows": [asdict(row) | {"share": row.share} for row in rows]}
        save(arguments.output, "long-context", report=facts, page=as_markdown(rows, facts["machine"]))


class Turns:
    """Times a function in turns with the reading of plain memory, so that both see the same moments of the machine."""

    def __init__(self, meter: Ceilings, repeats: int) -> None:
        self._meter, self._repeats = meter, repeats

    def time(self, run: Callable[[], object]) -> tuple[float, float]:
        """Median seconds of `run`, and median bytes per second of plain reading."""
        taken, speeds = [], []
        for _ in range(self._repeats):
            ceilings = self._meter.measure()
            assert ceilings is not None
            speeds.append(ceilings["memory_gb_s"] * 1e9)
            run()
            taken.append(_median_seconds(run))
        return statistics.median(taken), statistics.median(speeds)


def _median_seconds(run: Callable[[], object]) -> float:
    taken: list[float] = []
    while sum(taken) < _SECONDS:
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _shapes(wanted: list[str], dtype: str) -> list[str]:
    """Names of the shapes that the kernel runs with this KV cache."""
    device = torch.device("cpu")
    return [
        name
        for name in wanted
        if CpuNativeBackend.why_not(_SHAPES[name], TORCH_DTYPES[dtype], device, _BLOCK_SIZE) is None
    ]


def measure_attention(clock: Turns, name: str, dtype: str, batch: int, context: int, arithmetic: str) -> Row:
    layer = replace(_SHAPES[name], cpu_arithmetic=arithmetic)
    backend = CpuNativeBackend(layer)
    geometry = decodes(batch, context)
    num_blocks = int(geometry.block_table.max()) + 1
    spec = Attention(layer).get_kv_cache_spec(_BLOCK_SIZE, dtype)
    layer_bytes = batch * context * spec.page_size_bytes // _BLOCK_SIZE
    num_layers = max(2, -(-_COLD_BYTES // layer_bytes))
    memory = [_memory(num_blocks * spec.page_size_bytes).view(num_blocks, -1) for _ in range(num_layers)]
    caches = [fill(backend.view_pages(pages, spec)) for pages in memory]
    num_kv_heads = layer.num_kv_heads
    all_heads = torch.randn(batch, layer.num_heads + 2 * num_kv_heads, layer.head_size)
    heads = Heads(*all_heads.split([layer.num_heads, num_kv_heads, num_kv_heads], 1))
    metadata = backend.make_metadata(geometry)

    def run() -> None:
        for cache in caches:
            backend.run(AttentionStep(layer, heads, cache, metadata))

    seconds, speed = clock.time(run)
    return _row("attention", name, dtype, batch, context, seconds / num_layers, layer_bytes, speed)


def measure_step(clock: Turns, dtype: str, batch: int, context: int, threads: int) -> Row:
    num_blocks = batch * -(-context // _BLOCK_SIZE) + 1
    with tempfile.TemporaryDirectory() as folder:
        core = _start(folder, dtype, context, threads, num_blocks)
        (runner,) = core.collective_rpc(RpcCall(lambda worker: worker.runner))
        for name in runner.kv_cache.config.groups[0].layer_names:
            fill(runner.kv_cache.layer_memory(name))
        geometry = decodes(batch, context)
        model = runner.model
        input_ids, positions = torch.zeros(batch, dtype=torch.int32), torch.full((batch,), context - 1)

        def run() -> None:
            step = runner.kv_cache.make_context(SimpleNamespace(sequences=geometry, geometry=[geometry]))
            model.compute_logits(model(input_ids, positions, step), NO_CONTEXT)

        with torch.no_grad():
            seconds, speed = clock.time(run)
        num_bytes = _bytes_of_step(model, core, batch, context)
        core.close()
    return _row("step", "60M Llama", dtype, batch, context, seconds, num_bytes, speed)


def measure_engine(clock: Turns, dtype: str, context: int, threads: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        core = _start(folder, dtype, context, threads, -(-context // _BLOCK_SIZE) + 2)
        (runner,) = core.collective_rpc(RpcCall(lambda worker: worker.runner))
        prompt = torch.randint(10, 30_000, (context - _ENGINE_STEPS,)).tolist()
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=_ENGINE_STEPS, ignore_eos=True)
        core.add_request(EngineRequest(req_id="long", prompt_token_ids=prompt, sampling_params=params))
        while not core.step():
            pass
        num_steps = 0

        def run() -> None:
            nonlocal num_steps
            if not core.step():
                raise RuntimeError(f"the request has ended after {_ENGINE_STEPS} tokens: ask for fewer --repeats")
            num_steps += 1

        seconds, speed = clock.time(run)
        num_bytes = _bytes_of_step(runner.model, core, 1, len(prompt) + num_steps // 2)
        core.close()
    return _row("engine", "60M Llama", dtype, 1, context, seconds, num_bytes, speed)


def _start(folder: str, dtype: str, context: int, threads: int, num_blocks: int) -> EngineCore:
    config = {**_LLAMA_60M, "max_position_embeddings": context}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    elements = head_elements(64, dtype) * TORCH_DTYPES[dtype].itemsize
    block_bytes = 2 * _BLOCK_SIZE * _LLAMA_60M["num_key_value_heads"] * elements * _LLAMA_60M["num_hidden_layers"]
    options: dict[str, Any] = {
        "device": "cpu",
        "num_threads": threads,
        "load_format": "dummy",
        "kv_cache_dtype": dtype,
        "block_size": _BLOCK_SIZE,
        "kv_cache_memory_bytes": (num_blocks + 1) * block_bytes,
    }
    return EngineCore(EngineConfig.create(folder, **options))


def _bytes_of_step(model: torch.nn.Module, core: EngineCore, batch: int, context: int) -> int:
    """Bytes read by a step: all weights but the embedding, of which it reads a few rows, and the KV cache."""
    embedding = _LLAMA_60M["vocab_size"] * _LLAMA_60M["hidden_size"] * 4
    config = core.kv_cache_config
    per_position = config.size_bytes / config.pools[0].num_blocks / _BLOCK_SIZE
    return weights_size_bytes(model) - embedding + int(batch * context * per_position)


def decodes(batch: int, context: int) -> StepGeometry:
    """Decode batch: the last token of `context` of each request, over shuffled blocks."""
    blocks = -(-context // _BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(batch * blocks) + 1
    starts = np.arange(batch + 1)
    return StepGeometry(
        query_start_loc=torch.from_numpy(starts).int(),
        query_start_loc_np=starts,
        seq_lens=torch.full((batch,), context, dtype=torch.int32),
        block_table=torch.from_numpy(order.reshape(batch, blocks)).int(),
        slot_mapping=torch.zeros(batch, dtype=torch.int64),
        num_actual_tokens=batch,
        num_actual_reqs=batch,
        max_query_len=1,
        max_seq_len_upper_bound=context,
        block_size=_BLOCK_SIZE,
    )


def _memory(num_bytes: int) -> Tensor:
    """Allocate memory as the engine does for its KV cache: in huge pages if available."""
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


def fill(cache: Tensor) -> Tensor:
    """Fill with random numbers, equal in all blocks; read as int8 scales, the bytes are small finite numbers."""
    if cache.dtype is torch.int8:
        return cache.random_(0, 60)
    return cache.copy_(torch.randn(cache.shape[2:]))


def _row(
    kind: str, model: str, dtype: str, batch: int, context: int, seconds: float, num_bytes: int, speed: float
) -> Row:
    return Row(kind, model, dtype, batch, context, seconds * 1e3, num_bytes / seconds / 1e9, speed / 1e9)


def as_markdown(rows: list[Row], facts: dict[str, object]) -> str:
    lines = [
        "# Decoding over long contexts, CPU",
        "",
        described(facts),
        "",
    ]
    lines += ["| what | shape | KV cache | batch | context | ms | GB/s | plain reading, GB/s | share |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {row.kind} | {row.model} | {row.dtype} | {row.batch} | {row.context} | {row.ms:.2f} "
        f"| {row.gb_per_s:.1f} | {row.ceiling_gb_per_s:.1f} | {row.share:.0%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

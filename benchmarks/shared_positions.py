"""Decode context parallelism (KV cache sharded over two workers) against replicated KV: decoding with one KV head.

    python -m benchmarks.shared_positions [--lengths 2048 8192 16384] [--requests 1] [--steps 40] [--dtype float32]

A step of each arrangement follows one of the others, all of them with equally long contexts. Medians of the steps, and
the median of what part of the first one's time the others take. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import described, machine
from benchmarks.peers.shapes import SHAPES
from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest

CONFIG = {
    **SHAPES["llama-60m"].config,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1 << 16,
}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "TP 2": {},
    "TP 2, DCP 2": {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16},
    "TP 2, DCP 2 in torch": {
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 16,
        "attention_backend": "cpu_paged",
    },
}


def started(folder: str, length: int, num_requests: int, dtype: str, options: dict[str, Any]) -> EngineCore:
    """Start an engine and prefill its requests."""
    core = EngineCore(
        EngineConfig.create(
            folder,
            device="cpu",
            load_format="dummy",
            dtype="float32",
            kv_cache_dtype=dtype,
            tensor_parallel_size=2,
            num_threads=2,
            async_scheduling=False,
            enable_prefix_caching=False,
            max_num_batched_tokens=2048,
            max_model_len=length + 1024,
            kv_cache_memory_bytes=(length + 1024) * num_requests * 2 * 64 * 4 * CONFIG["num_hidden_layers"] + (8 << 20),
            **options,
        )
    )
    numbers = random.Random(0)
    for number in range(num_requests):
        prompt = [numbers.randrange(10, CONFIG["vocab_size"]) for _ in range(length)]
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=1000, ignore_eos=True)
        core.add_request(EngineRequest(req_id=str(number), prompt_token_ids=prompt, sampling_params=params))
    waiting = {str(number) for number in range(num_requests)}
    while waiting and core.has_unfinished_requests():
        waiting -= {output.req_id for output in core.step() if output.new_token_ids}
    return core


def measure(folder: str, length: int, num_requests: int, num_steps: int, dtype: str) -> list[list[float]]:
    """Seconds of every arrangement's steps."""
    cores: list[EngineCore] = []
    try:
        cores += [started(folder, length, num_requests, dtype, options) for options in ARRANGEMENTS.values()]
        seconds: list[list[float]] = [[] for _ in cores]
        for _ in range(num_steps):
            for core, took in zip(cores, seconds, strict=True):
                begin = time.perf_counter()
                core.step()
                took.append(time.perf_counter() - begin)
    finally:
        for core in cores:
            core.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192, 16384])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    print(f"{described(machine(2))}\n\n{arguments.requests} requests, {arguments.dtype} cache\n")
    print("| context | arrangement | a step, ms | of the first one's |\n| ---: | --- | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for length in arguments.lengths:
            seconds = measure(folder, length, arguments.requests, arguments.steps, arguments.dtype)
            for name, took in zip(ARRANGEMENTS, seconds, strict=True):
                ratio = statistics.median(one / first for one, first in zip(took, seconds[0], strict=True))
                print(f"| {length} | {name} | {statistics.median(took) * 1e3:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()

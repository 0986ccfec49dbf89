"""Engine whose steps are full, and a script that measures their resident memory, for a process of its own.

Prints JSON: by kind of step, the largest resident size above the idle engine's; the process's when it is ready, with
its KV cache filled, and its largest; and what the engine plans with.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from penstock.contract import RpcCall, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest

EVERY_STAGE = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "logit_bias": {0: 1.0},
    "logprobs": 20,
}


# Resident sizes, of every run.
peaks: list[int] = []


class Engine:
    def __init__(self, folder: str, **options: Any) -> None:
        from penstock.config import EngineConfig

        self.core = EngineCore(EngineConfig.create(folder, device="cpu", enable_prefix_caching=False, **options))
        self.num_requests = 0
        self.core.collective_rpc(RpcCall(lambda worker: worker.runner.kv_cache.touch()))

    def add(self, num_tokens: int, **params: Any) -> None:
        self.num_requests += 1
        self.core.add_request(
            EngineRequest(
                req_id=str(self.num_requests),
                prompt_token_ids=[3 + (self.num_requests + i) % 50 for i in range(num_tokens)],
                sampling_params=SamplingParams(ignore_eos=True, seed=0, **params),
            )
        )

    def finish(self) -> None:
        while self.core.has_unfinished_requests():
            self.core.step()


def peak_of(run: Callable[[], object]) -> int:
    """Rise of the resident size during a step, after trimming the heap."""
    ctypes.CDLL(None).malloc_trim(0)
    start = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")
    run()
    peaks.append(resident_peak())
    return peaks[-1] - start


def resident_peak() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def measure(engine: Engine) -> dict[str, int]:
    scheduler = engine.core.config.scheduler
    num_tokens, num_rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs

    def prefill(num_prompts: int, **params: Any) -> int:
        for _ in range(num_prompts):
            engine.add(num_tokens // num_prompts, temperature=0.0, max_tokens=1, **params)
        peak = peak_of(engine.core.step)
        engine.finish()
        return peak

    def sample() -> int:
        for _ in range(num_rows):
            engine.add(2, max_tokens=3, **EVERY_STAGE)
        engine.core.step()
        peak = max(peak_of(engine.core.step) for _ in range(2))
        engine.finish()
        return peak

    def life() -> None:
        for number in range(num_rows):
            engine.add(8 + number % 5, max_tokens=3, **EVERY_STAGE)
        for _ in range(3):
            engine.add(num_tokens // 2, max_tokens=2, prompt_logprobs=5, **EVERY_STAGE)
        engine.finish()

    # What is made once: tables for penalties, the libraries' own memory.
    sample()
    return {
        "prefill": max(prefill(count) for count in (1, 4, 2)),
        "sampling": sample(),
        "prompt_logprobs": max(prefill(1, prompt_logprobs=20) for _ in range(2)),
        "life": peak_of(life),
    }


if __name__ == "__main__":
    engine = Engine(sys.argv[1], **json.loads(sys.argv[2]))
    plan = engine.core.memory_plan
    terms = {name: plan[name] for name in ("process", "weights", "activations", "sampling", "runner_state")}
    ready = psutil.Process().memory_info().rss
    print(json.dumps({"ready": ready, "measured": measure(engine), "resident": max(peaks), **terms}))

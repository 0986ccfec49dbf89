"""Throughput with and without a recording of the steps, in turns.

    python -m benchmarks.recording [--rounds 5] [--threads 2] [--tokens 48]

32 requests of a random-weight Llama of 60 million parameters. The exit code is 1 if recording costs more than 1%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers.checkpoints import make
from benchmarks.peers.shapes import SHAPES
from penstock import LLM, SamplingParams

_NUM_REQUESTS, _PROMPT_LEN = 32, 32
_TARGET = 0.99


def tokens_per_s(llm: LLM, num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [[number + 1] * _PROMPT_LEN for number in range(_NUM_REQUESTS)]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return _NUM_REQUESTS * num_tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make(Path(folder), SHAPES["llama-60m"], "float32"))
        file = Path(folder) / "steps.rec"
        options = {"num_threads": arguments.threads, "kv_cache_memory_bytes": "256MiB", "enable_prefix_caching": False}
        with LLM(model, record=file, record_prompts=True, **options) as recorded, LLM(model, **options) as plain:
            ratios = []
            for number in range(arguments.rounds + 1):
                order = (plain, recorded) if number % 2 else (recorded, plain)
                speeds = {llm: tokens_per_s(llm, arguments.tokens) for llm in order}
                if number:
                    ratios.append(speeds[recorded] / speeds[plain])
        size = file.stat().st_size
    median = statistics.median(ratios)
    print(f"recorded / not recorded: {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}); file {size / 1e6:.1f} MB")
    sys.exit(median < _TARGET)


if __name__ == "__main__":
    main()

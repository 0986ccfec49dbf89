"""A minute of mixed load, recorded with two ranks and replayed by one worker and by two.

    python -m benchmarks.replayed_load [--seconds 60] [--method eagle3] [--ranks 2]

Rounds of constrained, greedy and sampled requests of the model `demo`, with draft tokens and too few KV blocks for all
of them. The exit code is 1 if a replay gives other tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.engine.replay import replay

_NUM_REQUESTS = 24
DRAFTS = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False},
    "eagle3": {"num_speculative_tokens": 3, "adaptive": False},
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Romeo", "Juliet"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS: list[dict[str, Any]] = [
    {"structured_outputs": StructuredOutputsParams(json=_SCHEMA)},
    {"structured_outputs": StructuredOutputsParams(regex="([a-z]+ ){30}[a-z]+"), "temperature": 0.8},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "ignore_eos": True},
]


def record(file: Path, seconds: float, method: str, num_ranks: int) -> dict[str, float]:
    """Record rounds of requests for some seconds; returns the engine's counters."""
    options = {
        "num_threads": 1,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": (1536 << 10) // num_ranks,
        # In bfloat16 arithmetic other ranks give other tokens now and then.
        "cpu_arithmetic": "float32",
        "tensor_parallel_size": num_ranks,
        "speculative_config": {"method": method, **DRAFTS[method]},
    }
    with LLM("demo", record=file, record_prompts=True, record_window_s=10 * seconds + 60, **options) as llm:
        end, round_ = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            numbers = range(round_ * _NUM_REQUESTS, (round_ + 1) * _NUM_REQUESTS)
            prompts = [f"ROMEO: {'my love, ' * (number % 7)}{number}" for number in numbers]
            params = [SamplingParams(**KINDS[n % 4], seed=n, max_tokens=60 + n % _NUM_REQUESTS) for n in numbers]
            llm.generate(prompts, params, use_tqdm=False)
            round_ += 1
        counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {"requests": round_ * _NUM_REQUESTS, **counters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--method", choices=DRAFTS, default="eagle3")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.rec"
        found = record(file, arguments.seconds, arguments.method, arguments.ranks)
        print(
            f"{found['requests']:,} requests in {arguments.seconds:.0f} s by {arguments.ranks} ranks: "
            f"{found['penstock:num_preemptions']:,.0f} preemptions, "
            f"{found['penstock:spec_decode_num_accepted_tokens']:,.0f} of "
            f"{found['penstock:spec_decode_num_draft_tokens']:,.0f} drafts accepted, "
            f"{file.stat().st_size / 1e6:.1f} MB",
            flush=True,
        )
        is_equal = True
        for ranks in (1, 2):
            report = replay(file, tensor_parallel_size=ranks)
            is_equal = is_equal and report.is_equal
            print(
                f"replayed by {ranks}: {report.num_steps:,} steps in {sum(report.replayed_s.values()):.0f} s, "
                f"{report.num_compared:,} tokens, {report.num_different:,} results differ",
                flush=True,
            )
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()

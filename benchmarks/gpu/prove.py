"""Runs the GPU's tests and measures the engine beside the GPU's own limits: one script for a bare machine.

    PYTHONPATH=src:. python -m benchmarks.gpu.prove --out FOLDER [--only PART ...] [--skip PART ...] [--seconds 420]

Correctness comes first, figures second. Each part is a process of its own with a time limit: one that fails is
reported, and the rest goes on; without a GPU every part is reported as not run. Results are appended to
FOLDER/results.jsonl as they come, and printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What was never run on a GPU comes first, and alone: batch invariance, verification, latents, experts, FP8 and MXFP4,
# scales of an FP8 KV cache.
_NEW = ("split_attention", "invariant_linear", "latents", "experts", "float8_products", "float8_cache", "quantized")
TESTS = {
    "new": [
        *(f"tests/kernels/triton_kernels/test_triton_{name}.py" for name in _NEW),
        "tests/attention/test_triton_backend.py",
    ],
    "kernels": ["tests/kernels/triton_kernels"],
    "engine": ["tests/gpu"],
}
# Characters of a failed part's log that are printed.
_LOG_TAIL = {"features": 11_000}


@dataclass(frozen=True)
class Part:
    """seconds: time limit. together: runs beside the other parts of this kind, since it measures no time."""

    name: str
    seconds: int
    together: bool = False


PARTS = (
    Part("machine", 40),
    Part("new", 150),
    Part("forms", 90),
    Part("kernels", 150, together=True),
    Part("engine", 150, together=True),
    Part("features", 240),
    Part("attention", 60),
    Part("products", 45),
    Part("qwen3-0.6b:decode", 60),
    Part("llama-8b:decode", 75),
    Part("llama-8b:prefill", 45),
    Part("llama-8b-int4:decode", 75),
    Part("llama-8b-int4:prefill", 60),
    Part("llama-8b-int8:decode", 75),
    Part("llama-8b-fp8-kv:decode", 75),
    Part("llama-8b-invariant:decode", 75),
    Part("llama-8b-invariant:prefill", 60),
    Part("qwen3-0.6b:requests", 60),
    Part("qwen3-0.6b-pieces:requests", 60),
    Part("llama-8b:requests", 75),
    Part("qwen3-0.6b:transformers", 75),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=420.0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.seconds
    chosen = [
        part
        for part in PARTS
        if (not arguments.only or part.name in arguments.only) and part.name not in arguments.skip
    ]
    results = arguments.out / "results.jsonl"
    why_not = _why_no_gpu()
    if why_not is not None:
        for part in chosen:
            _write(results, {"part": part.name, "not run": why_not})
        print(f"{len(chosen)} parts not run: {why_not}")
        return 0
    failures = 0
    for batch in _batches(chosen):
        left = deadline - time.monotonic()
        if left < 15:
            _write(results, {"part": " ".join(part.name for part in batch), "not run": "no time left"})
            continue
        running = [(part, _start(part, arguments.out, min(part.seconds, left))) for part in batch]
        for part, process in running:
            begin, status = time.monotonic(), process.wait()
            if status:
                failures += 1
                log = (arguments.out / f"{_file_name(part.name)}.log").read_text(errors="replace")
                _write(results, {"part": part.name, "failed": status, "waited_s": round(time.monotonic() - begin)})
                print(f"---- {part.name} ended with {status}:\n{log[-_LOG_TAIL.get(part.name, 2500) :]}", flush=True)
    print("\n".join(results.read_text().splitlines()))
    return failures


def _why_no_gpu() -> str | None:
    """Return why no part can run; None with a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} sees no CUDA device"


def _batches(parts: list[Part]) -> list[list[Part]]:
    """Parts that run at the same time."""
    together = [part for part in parts if part.together]
    batches = [[part] for part in parts if not part.together]
    return [*batches[:1], together, *batches[1:]] if together else batches


def _start(part: Part, out: Path, seconds: float) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if part.name in TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=25", "--tb=short"]
        command += ["-n", "6", *TESTS[part.name]]
    elif part.name == "features":
        command = [sys.executable, "-m", "benchmarks.gpu.features", "--seconds", str(int(seconds) - 12)]
        command += ["--out", str(out / "results.jsonl")]
    else:
        command = [sys.executable, "-m", "benchmarks.gpu.parts", part.name, str(out / "results.jsonl")]
    with (out / f"{_file_name(part.name)}.log").open("w") as log:
        limited = ["timeout", "-k", "5", str(int(seconds)), *command]
        return subprocess.Popen(limited, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _file_name(part: str) -> str:
    return part.replace(":", "-")


def _write(results: Path, row: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())

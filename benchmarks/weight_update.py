"""Time of an update of a model's weights in place, beside a plain copy of the bytes, in turns.

python -m benchmarks.weight_update [--shapes llama-60m qwen3-0.6b] [--quantization int8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.shapes import SHAPES
from penstock.config import LoadConfig, ModelConfig
from penstock.loader.live_memory import LiveMemory
from penstock.loader.loader import build_model, load_model
from penstock.loader.weight_source import WeightSource
from penstock.loader.weight_update import WeightUpdate
from penstock.models.causal_lm import CausalLM
from penstock.parallel import ParallelState

_CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["llama-60m", "qwen3-0.6b"])
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for shape in asked.shapes:
        for dtype in (torch.float32, torch.bfloat16):
            _measure(shape, dtype, asked.quantization, asked.rounds)


def _measure(shape: str, dtype: torch.dtype, quantization: str | None, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape].config))
        config = ModelConfig.load(folder, quantization=quantization, quantization_calibration="none")
        times, num_bytes = _times(config, dtype, rounds)
    kind = f"{shape} {str(dtype).removeprefix('torch.')} {quantization or ''}".strip()
    for name, least_or_median in (("median", statistics.median), ("least", min)):
        copy_s, update_s = (least_or_median(times[what]) for what in ("copy", "update"))
        print(
            f"{kind}: {num_bytes / 1e6:.0f} MB, {name} of {rounds}: copy {copy_s * 1e3:.0f} ms, "
            f"update {update_s * 1e3:.0f} ms, ratio {update_s / copy_s:.2f}",
            flush=True,
        )


def _times(config: ModelConfig, dtype: torch.dtype, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of copies and of updates, and the bytes of the weights."""
    parallel, load = ParallelState(), LoadConfig(use_tqdm_on_load=False)
    live = load_model(config, LoadConfig(load_format="dummy"), parallel, _CPU, torch.float32, dtype)
    slots = build_model(config, parallel).checkpoint_slots()
    given = {name: torch.randn(slot.shape).mul_(0.02).to(dtype) for name, slot in slots.items()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in given.items()}

    def run_loader(source: WeightSource) -> CausalLM:
        memory = LiveMemory(live)
        return load_model(config, load, parallel, _CPU, torch.float32, dtype, source=source, memory=memory)

    times: dict[str, list[float]] = {"copy": [], "update": []}
    for _ in range(rounds):
        times["copy"].append(_timed_copy(given, copies))
        begin = time.perf_counter()
        run = WeightUpdate(run_loader, live)
        run.take(given.items())
        run.finish()
        times["update"].append(time.perf_counter() - begin)
    return times, sum(tensor.nbytes for tensor in given.values())


def _timed_copy(given: dict[str, Tensor], copies: dict[str, Tensor]) -> float:
    begin = time.perf_counter()
    for name, tensor in given.items():
        copies[name].copy_(tensor)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

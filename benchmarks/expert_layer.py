"""One layer of experts within a recorded program beside the opaque operation between two of its segments, in turns.

    python -m benchmarks.expert_layer [--rows 1 4 32 512] [--rounds 30] [--threads 2] [--quantization int4]

The layer is that of Qwen3-30B-A3B with a quarter of the experts: hidden 2,048, 32 experts of 768 features, 8 per row,
in bfloat16. The bound is the time to read the weights of one row's experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.machine import described, machine
from penstock.attention import ForwardContext
from penstock.bench.memory_speed import read_speed
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import NativeProgram
from penstock.kernels.native.program_step import StepTokens
from penstock.layers.experts import MoE, Routing
from penstock.layers.linear import LinearLayer, process_weights_after_loading
from penstock.layers.quantization.method import choose_method
from penstock.parallel import ParallelState

HIDDEN, SIZE, EXPERTS, TOP_K = 2048, 768, 32, 8
CONTEXT = ForwardContext({}, [])


def make_layer(quantization: str | None) -> MoE:
    layer = MoE(HIDDEN, SIZE, Routing(EXPERTS, TOP_K), activation="silu", parallel=ParallelState())
    for module in layer.modules():
        if isinstance(module, LinearLayer):
            weight = (torch.randn(module.weight.shape) / 40).to(torch.bfloat16)
            module.weight = nn.Parameter(weight, requires_grad=False)
            module.compute_dtype, module.cpu_arithmetic = torch.float32, "auto"
    process_weights_after_loading(layer, None if quantization is None else choose_method(quantization))
    return layer.requires_grad_(False)


def record(layer: MoE) -> NativeProgram:
    assert NATIVE is not None, "programs are made of the C++ kernels"
    trace = NATIVE.trace()
    result = layer(trace.input("hidden", torch.float32, HIDDEN), CONTEXT)
    return NativeProgram(NATIVE, trace, result.cell)  # type: ignore[attr-defined]


def seconds(program: NativeProgram, num_rows: int) -> float:
    step = StepTokens({"hidden": torch.randn(num_rows, HIDDEN)}, num_rows, num_rows)
    begin = time.perf_counter()
    program.run(step, CONTEXT)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 512])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    layer = make_layer(arguments.quantization)
    with patch.object(MoE, "_recorded", lambda *_: None):
        opaque = record(layer)
    programs = {"opaque": opaque, "in the program": record(layer)}
    print(described(machine(arguments.threads)))
    for num_rows in arguments.rows:
        rounds = [
            {name: seconds(program, num_rows) for name, program in programs.items()}
            for _ in range(arguments.rounds + 1)
        ][1:]
        shown = [f"{name} {statistics.median(one[name] for one in rounds) * 1e3:.2f} ms" for name in programs]
        ratios = [one["opaque"] / one["in the program"] for one in rounds]
        spread = f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{num_rows} rows: {', '.join(shown)}, {spread}", flush=True)
    read_bytes = sum(kept.nbytes for expert in list(layer.experts)[:TOP_K] for kept in _kept(expert))
    print(f"bound of one row: {read_bytes / read_speed(arguments.threads) * 1e3:.2f} ms")


def _kept(expert: nn.Module) -> list[torch.Tensor]:
    layers = [module for module in expert.modules() if isinstance(module, LinearLayer)]
    return [kept for layer in layers for kept in getattr(layer.method, "kept", [])]


if __name__ == "__main__":
    main()

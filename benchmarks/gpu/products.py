"""Products of few rows with a weight: Triton's tilings beside cuBLAS, as the part `products`.

Times are those of a CUDA graph over more weights than the L2 cache holds, as in a decode step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.shapes import SHAPES

if TYPE_CHECKING:
    from benchmarks.gpu.parts import Results
    from penstock.kernels.triton.linear import Tiling

# Bytes of the weights that a graph reads: several times an L2 cache. And the time limit of the measurement.
_BYTES, _SECONDS = 400 << 20, 28.0
NUM_ROWS = (1, 8, 4, 2, 16)


def products(results: Results, bandwidth: float) -> None:
    """Rows of results: one per number of rows, weight and tiling; those that matter most come first.

    bandwidth: bytes per second of a copy. of_bandwidth: what the fastest reads of it. errors: candidates that failed.
    """
    deadline = time.monotonic() + _SECONDS
    cases = [(num_rows, *named) for num_rows in NUM_ROWS for named in _weights()]
    for num_rows, name, num_outputs, num_inputs in cases:
        size = 2 * num_outputs * num_inputs
        weights = torch.randn(-(-_BYTES // size) + 1, num_outputs, num_inputs, dtype=torch.bfloat16, device="cuda")
        x_TI = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device="cuda")
        expected = F.linear(x_TI, weights[0])
        times: dict[str, float] = {}
        errors: dict[str, Any] = {}
        for label, product in _candidates(num_rows, num_outputs, num_inputs):
            if time.monotonic() > deadline:
                break
            try:
                torch.testing.assert_close(product(x_TI, weights[0]), expected, rtol=2e-2, atol=2e-1)
                times[label] = _seconds_per_product(product, x_TI, weights)
            except Exception as error:
                errors[label] = f"{type(error).__name__}: {str(error)[:150]}"
        if times:
            results.add(
                measured="product",
                weight=name,
                shape=[num_outputs, num_inputs],
                num_rows=num_rows,
                us={label: round(value * 1e6, 2) for label, value in sorted(times.items(), key=lambda item: item[1])},
                of_bandwidth=size / min(times.values()) / bandwidth,
                **({"errors": errors} if errors else {}),
            )
        del weights


def _weights() -> Iterator[tuple[str, int, int]]:
    """Name, output features and input features."""
    for model in ("qwen3-0.6b", "llama-8b"):
        config = SHAPES[model].config
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"] * config["head_dim"]
        kv_heads = config["num_key_value_heads"] * config["head_dim"]
        yield f"{model} qkv", heads + 2 * kv_heads, hidden
        yield f"{model} o", hidden, heads
        yield f"{model} gate_up", 2 * intermediate, hidden
        yield f"{model} down", hidden, intermediate
        yield f"{model} lm_head", config["vocab_size"], hidden


def _candidates(
    num_rows: int, num_outputs: int, num_inputs: int
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    from penstock.kernels.triton.linear import choose_tiling, skinny_linear

    yield "cublas", F.linear
    chosen = choose_tiling(num_rows, num_inputs, num_outputs)
    for tiling in dict.fromkeys([*([chosen] if chosen else []), *_tilings(num_rows, num_outputs, num_inputs)]):

        def product(x_TI: Tensor, weight_OI: Tensor, tiling: Tiling = tiling) -> Tensor:
            return skinny_linear(x_TI, weight_OI, tiling=tiling)

        kind = "dot" if tiling.dots else "mul"
        label = f"{kind} {tiling.outputs}x{tiling.inputs} w{tiling.num_warps} s{tiling.num_stages}"
        yield label + (" (chosen)" if tiling == chosen else ""), product


def _tilings(num_rows: int, num_outputs: int, num_inputs: int) -> list[Tiling]:
    from penstock.kernels.triton.linear import Tiling

    if num_rows > 4:
        dots = [Tiling(16, 256, 2, 6, dots=True), Tiling(32, 256, 4, 4, dots=True)]
        if num_outputs > 2048:
            dots.append(Tiling(64, 128, 4, 4, dots=True))
        return [*dots, Tiling(4, 1024, 4)] if num_rows == 8 else dots
    few = num_outputs <= 2048
    found = [Tiling(4, 1024, 4), Tiling(4, 1024, 4, 3), Tiling(8, 512, 2)]
    if num_inputs >= 2048:
        found += [Tiling(4, 2048, 8), *([Tiling(2, 2048, 8), Tiling(4, 4096, 16)] if few else [Tiling(8, 512, 2, 4)])]
    elif num_rows <= 2:
        found += [Tiling(8, 1024, 4), Tiling(4, 1024, 2), Tiling(8, 512, 1)]
    if num_rows == 4:
        found.append(Tiling(16, 256, 2, 6, dots=True))
    return found


def _seconds_per_product(product: Callable[[Tensor, Tensor], Tensor], x_TI: Tensor, weights: Tensor) -> float:
    """Best time of several replays of a graph of a product with each weight."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product(x_TI, weights[0])
        torch.cuda.synchronize()
        # Without the garbage collection of `torch.cuda.graph`, which takes longer than the measurement.
        graph.capture_begin()
        try:
            for weight_OI in weights.unbind():
                product(x_TI, weight_OI)
        finally:
            graph.capture_end()
        graph.replay()
        times: list[float] = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(weights))
    return min(times)

"""Matrix products of the C++ kernels by rows, shapes and weight dtypes, relative to the machine's ceilings.

    python -m benchmarks.kernels [--threads 2] [--rows 1,8,32] [--shapes 512x1536] [--dtypes float32,bfloat16]

Several copies of each weight take turns, so that none is in a cache, as in a model. Every case is timed in rounds that
go over all dtypes, with the ceilings before each round; the best round counts, of the ceilings too, since what else the
machine does can only slow them down. GB/s counts the weight alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ceilings import Ceilings
from benchmarks.machine import machine, save
from penstock.kernels.native import NATIVE

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32, 64, 256)
# Input x output features.
# bfloat16 weights in bfloat16 arithmetic.
_PAIRS = "bfloat16-arithmetic"
SHAPES = ("512x1536", "1024x3072", "512x32000", "1024x151936")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    _PAIRS: torch.bfloat16,
}
# Larger than any cache that could keep a weight between two calls.
_COLD_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """The best round. of_read, of_multiply_add: shares of the ceilings of the same rounds, the latter of the product's
    arithmetic.
    """

    shape: str
    rows: int
    dtype: str
    microseconds: float
    gflops: float
    gbytes: float
    of_read: float
    of_multiply_add: float


class Product:
    """One weight, in as many copies as it takes to be cold, and the time of a pass over them."""

    def __init__(self, inputs: int, outputs: int, dtype: str, most_bytes: int) -> None:
        weight_OI = torch.empty(outputs, inputs).uniform_(-1, 1).to(DTYPES.get(dtype, torch.float32))
        self.inputs, self.outputs = inputs, outputs
        self.num_bytes = weight_OI.numel() * weight_OI.element_size()
        num_copies = max(1, -(-most_bytes // self.num_bytes))
        self._is_torch = dtype == "torch"
        if self._is_torch:
            self._weights = [weight_OI.clone() for _ in range(num_copies)]
        else:
            assert NATIVE is not None
            layout = NATIVE.bfloat16_layout if dtype == _PAIRS else None
            self._weights = [NATIVE.pack_weight(weight_OI, bfloat16=layout) for _ in range(num_copies)]

    def seconds(self, x_TI: Tensor, budget_s: float) -> float:
        """Median of one product: a pass over all copies, or so many as fit into the budget."""
        self._multiply(x_TI, self._weights[0])
        times = []
        for weight in self._weights:
            begin = time.perf_counter()
            self._multiply(x_TI, weight)
            times.append(time.perf_counter() - begin)
            if sum(times) > budget_s:
                break
        return statistics.median(times)

    def _multiply(self, x_TI: Tensor, weight: Tensor) -> None:
        if self._is_torch:
            F.linear(x_TI, weight)
        else:
            assert NATIVE is not None
            NATIVE.linear(x_TI, weight, self.outputs, None)


def measure(shape: str, rows: list[int], dtypes: list[str], rounds: int, meter: Ceilings) -> list[Case]:
    """Every combination for one shape. The weights of all dtypes lie in memory together."""
    inputs, outputs = map(int, shape.split("x"))
    products = {dtype: Product(inputs, outputs, dtype, _COLD_BYTES) for dtype in dtypes}
    cases = []
    for num_rows in rows:
        x_TI = torch.empty(num_rows, inputs).uniform_(-1, 1)
        seconds: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
        ceilings = []
        for _ in range(rounds):
            ceilings.append(_measured(meter))
            for dtype, product in products.items():
                seconds[dtype].append(product.seconds(x_TI, budget_s=0.3))
        cases += [_case(shape, num_rows, dtype, products[dtype], seconds[dtype], ceilings) for dtype in dtypes]
    return cases


def _measured(meter: Ceilings) -> dict[str, float]:
    ceiling = meter.measure()
    assert ceiling is not None, "main refuses a machine without a compiler"
    return ceiling


def _case(
    shape: str, rows: int, dtype: str, product: Product, seconds: list[float], ceilings: list[dict[str, float]]
) -> Case:
    best = min(seconds)
    gflops = 2e-9 * rows * product.inputs * product.outputs / best
    gbytes = 1e-9 * product.num_bytes / best
    of_bfloat16 = ("tile_bfloat16_gflop_s_best", "bfloat16_gflop_s_best") if dtype == _PAIRS else ()
    flops = next((ceiling for ceiling in of_bfloat16 if ceiling in ceilings[0]), "gflop_s_best")
    return Case(
        shape=shape,
        rows=rows,
        dtype=dtype,
        microseconds=round(1e6 * best, 1),
        gflops=round(gflops, 1),
        gbytes=round(gbytes, 1),
        of_read=round(gbytes / max(ceiling["memory_gb_s_best"] for ceiling in ceilings), 3),
        of_multiply_add=round(gflops / max(ceiling[flops] for ceiling in ceilings), 3),
    )


def table(cases: list[Case]) -> str:
    """Markdown, a line per case."""
    lines = [
        "| inputs x outputs | rows | weights | µs | GFLOP/s | of multiply-add | GB/s | of reading |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {case.shape} | {case.rows} | {case.dtype} | {case.microseconds:.0f} | {case.gflops:.0f} "
        f"| {case.of_multiply_add:.0%} | {case.gbytes:.1f} | {case.of_read:.0%} |"
        for case in cases
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument(
        "--dtypes",
        default="float32,bfloat16",
        help=f"also float16; {_PAIRS}: bfloat16 weights in that arithmetic; torch: its own float32 product",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if NATIVE is None:
        parser.error("the C++ kernels were not built")
    torch.set_num_threads(arguments.threads)
    folder = tempfile.TemporaryDirectory()
    meter = Ceilings(Path(folder.name), arguments.threads)
    if not meter.is_available:
        parser.error("there is no C compiler for the ceilings")
    first = _measured(meter)
    cases: list[Case] = []
    for shape in arguments.shapes.split(","):
        rows = [int(number) for number in arguments.rows.split(",")]
        found = measure(shape, rows, arguments.dtypes.split(","), arguments.rounds, meter)
        cases += found
        print(table(found), flush=True)
    last = _measured(meter)
    print(f"ceilings: reading {first['memory_gb_s_best']:.1f} to {last['memory_gb_s_best']:.1f} GB/s, ", end="")
    print(f"multiply-add {first['gflop_s_best']:.1f} to {last['gflop_s_best']:.1f} GFLOP/s")
    if arguments.output is not None:
        report = {
            "machine": machine(arguments.threads),
            "ceilings": [first, last],
            "cases": [asdict(case) for case in cases],
        }
        save(arguments.output, "kernels", report=report, page=table(cases) + "\n")


if __name__ == "__main__":
    main()

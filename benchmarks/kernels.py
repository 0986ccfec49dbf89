"""Matrix products of the C++ kernels by rows, shapes and weight dtypes, relative to the machine's ceilings.

    python -m benchmarks.kernels [--threads 2] [--rows 1,8,32] [--shapes 512x1536] [--dtypes float32,bfloat16]
    python -m benchmarks.kernels --tiles [--shapes 1024x3072,1024x151936]

Several copies of each weight take turns, so that none is in a cache, as in a model. Every case is timed in rounds that
go over all dtypes, with the ceilings before each round; the best round counts, of the ceilings too, since what else the
machine does can only slow them down. GB/s counts the weight alone.

`--tiles`, on a processor with AMX, measures the sizes in `csrc/tile_choices.h` instead, and prints the best ones.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.ceilings import Ceilings
from benchmarks.cold_products import BFLOAT16_ARITHMETIC, Product
from benchmarks.machine import machine, save
from benchmarks.tile_choices import best_choices
from penstock.kernels.native import NATIVE, describe_kernels

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32, 64, 256)
# Input x output features.
SHAPES = ("512x1536", "1024x3072", "512x32000", "1024x151936")
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
    inputs, outputs = map(int, shape.split("x"))
    gflops = 2e-9 * rows * inputs * outputs / best
    gbytes = 1e-9 * product.num_bytes / best
    of_bfloat16 = ("tile_bfloat16_gflop_s_best", "bfloat16_gflop_s_best") if dtype == BFLOAT16_ARITHMETIC else ()
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
        help=f"also float16, int4; {BFLOAT16_ARITHMETIC}: bfloat16 weights in it; torch: its own float32 product",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiles", action="store_true", help="measure the sizes of products by AMX's tiles")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if NATIVE is None:
        parser.error("the C++ kernels were not built")
    torch.set_num_threads(arguments.threads)
    if arguments.tiles:
        if not NATIVE.instruction_set.has_tiles:
            parser.error(f"--tiles needs a processor with AMX, and its kernels, not {describe_kernels()}")
        shapes, sizes = arguments.shapes.split(","), NATIVE.module.set_tile_choices
        best = best_choices(sizes, shapes, arguments.rounds, print, most_bytes=_COLD_BYTES)
        print("\nFor csrc/tile_choices.h: " + ", ".join(f"{name} = {size}" for name, size in best.items()))
        return
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

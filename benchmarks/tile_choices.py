"""Sizes of products by AMX's tiles, measured: `python -m benchmarks.kernels --tiles`.

`csrc/tile_choices.h` has the sizes and what they are. Each is tried at its candidates with the others as they are, in
turns over all candidates of a round, and the best stays for the next one. The result has the same bits for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.cold_products import BY_TILES, Product

# A candidate has to be this much faster than the present size.
_LEAST_GAIN = 1.01
_TURN_S = 0.1


@dataclass(frozen=True, slots=True)
class Choice:
    """A size of `TileChoices`. rows: of the products that it concerns. others: sizes that it is measured with."""

    name: str
    candidates: Sequence[int]
    rows: Sequence[int]
    dtype: str = BY_TILES
    others: dict[str, int] = field(default_factory=dict)


CHOICES = (
    # Where a tile of rows has two panels at once, nothing is prefetched.
    Choice("bytes_ahead", (0, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10), (1, 16), others={"panels_at_once": 1}),
    Choice("panels_at_once", (1, 2), (1, 2, 4, 8, 16)),
    Choice("depth", (4, 8, 16, 32, 64), (32, 128, 512, 2048)),
    Choice("row_bytes", (384 << 10, 768 << 10, 1536 << 10, 3072 << 10), (512, 2048)),
    Choice("products_per_turn", (128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20), (1, 16, 64, 512)),
    Choice("fewest_quantized_rows", (1, 2, 4, 8, 12, 16, 24, 33), (1, 2, 4, 8, 12, 16, 24, 32), "int4"),
)


def best_choices(
    set_choices: Callable[..., dict[str, int]],
    shapes: Sequence[str],
    rounds: int,
    report: Callable[[str], Any],
    *,
    most_bytes: int,
    choices: Sequence[Choice] = CHOICES,
) -> dict[str, int]:
    """The best size of each choice, which is in force afterwards.

    set_choices: of the library: takes all sizes, or none, and returns those in force. most_bytes: of a weight's copies.
    report: is called with each line of the table.
    """
    best = set_choices()
    report("| size | rows | candidates: time beside the present size | best |")
    report("| --- | --- | --- | ---: |")
    for choice in choices:
        candidates = sorted({*choice.candidates, best[choice.name]})
        products = [Product(*map(int, shape.split("x")), choice.dtype, most_bytes) for shape in shapes]
        settings = [best | choice.others | {choice.name: size} for size in candidates]
        fastest = _fastest(set_choices, settings, products, choice.rows, rounds)
        present = fastest[candidates.index(best[choice.name])]
        ratios = {size: _ratio(times, present) for size, times in zip(candidates, fastest, strict=True)}
        size = min(ratios, key=ratios.__getitem__)
        if ratios[size] * _LEAST_GAIN < 1:
            best = best | {choice.name: size}
        found = ", ".join(f"{size}: {ratio:.3f}" for size, ratio in ratios.items())
        report(f"| {choice.name} | {' '.join(map(str, choice.rows))} | {found} | {best[choice.name]} |")
    return set_choices(*best.values())


def _fastest(
    set_choices: Callable[..., Any],
    settings: Sequence[dict[str, int]],
    products: Sequence[Product],
    rows: Sequence[int],
    rounds: int,
) -> list[list[float]]:
    """Seconds of every product of so many rows, for each setting: the best of all rounds.

    What else the machine does can only slow them down.
    """
    cases = [(product, torch.empty(count, product.inputs).uniform_(-1, 1)) for product in products for count in rows]
    turns: list[list[list[float]]] = [[] for _ in settings]
    for _ in range(rounds):
        for setting, times in zip(settings, turns, strict=True):
            set_choices(*setting.values())
            times.append([product.seconds(x_TI, _TURN_S) for product, x_TI in cases])
    return [[min(of_case) for of_case in zip(*times, strict=True)] for times in turns]


def _ratio(times: list[float], present: list[float]) -> float:
    """Geometric mean of the times of all cases beside those of the present size."""
    return math.exp(sum(math.log(a / b) for a, b in zip(times, present, strict=True)) / len(times))

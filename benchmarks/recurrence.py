"""Parts of a recurrent layer's time: products, convolution, recurrence and norm, for decode steps and a prompt.

    python -m benchmarks.recurrence [--threads 2] [--repeats 100] [--drafts 3]

Layers like those of Granite 4's 350M-hybrid (Mamba 2) and Qwen3.5-0.8B (gated delta rule), with their MLP, bfloat16
weights and random numbers. Beside a decode step's recurrence is the memory traffic of its states, which are read and
written once.

With drafts: both ways of going back to the state before a rejected one, in steps that verify as many. Either each
position has a page, or the page is of the last known token, and the next step advances it by those that were accepted
before it computes its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import described, machine
from penstock.kernels.native import NATIVE
from penstock.kernels.native.attention import StepRequests
from penstock.kernels.recurrence import ConvolutionRule, GateRule, ScanParameters, ScanRule, convolve, gated_norm, scan
from penstock.kernels.recurrent_state import StateStep

_TAPS = 4


class Layer(NamedTuple):
    """Sizes of a layer: rows of the first projection are gates of the output, mixed columns, steps and betas."""

    hidden_size: int
    intermediate_size: int
    heads: int
    groups: int
    key_size: int
    value_size: int
    has_delta_rule: bool

    @property
    def inner(self) -> int:
        return self.heads * self.value_size

    @property
    def mixed(self) -> int:
        return self.inner + 2 * self.groups * self.key_size

    @property
    def rule(self) -> ScanRule:
        keys, steps = self.groups * self.key_size, self.inner + self.mixed
        if not self.has_delta_rule:
            places = {"values": 0, "keys": self.inner, "queries": self.inner + keys}
            return ScanRule(num_groups=self.groups, **places, steps=steps, scales_values=True)
        places = {"queries": 0, "keys": keys, "values": 2 * keys}
        betas = steps + self.heads
        return ScanRule(num_groups=self.groups, **places, steps=steps, betas=betas, has_unit_keys=True)


LAYERS = {
    "Granite 4 350M-hybrid": Layer(768, 2048, 48, 1, 128, 32, has_delta_rule=False),
    "Qwen3.5-0.8B": Layer(1024, 3584, 16, 16, 128, 128, has_delta_rule=True),
}
# Requests, and tokens of each.
STEPS = [(1, 1), (32, 1), (1, 512)]
# Channels of LFM2's short convolution (350M).
CHANNELS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--drafts", type=int, help="compare ways of rolling back this many drafts, and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(described(machine(arguments.threads)))
    if arguments.drafts is not None:
        compare_rollbacks(arguments.drafts, arguments.repeats)
        return
    for name, layer in LAYERS.items():
        for num_requests, length in STEPS:
            seconds = measure(layer, num_requests, length, arguments.repeats)
            total_s = sum(seconds.values())
            parts = ", ".join(f"{part} {one / total_s:.0%}" for part, one in seconds.items())
            print(f"{name}, {num_requests} x {length} tokens: {total_s * 1e6:,.0f} us: {parts}")
            if length == 1:
                num_bytes = 2 * 4 * num_requests * layer.heads * layer.key_size * layer.value_size
                print(f"  states at {num_bytes / seconds['recurrence'] / 1e9:.1f} GB/s")


def compare_rollbacks(num_drafts: int, repeats: int) -> None:
    """Print the median of each way, by layer and number of requests."""
    num_tokens = 1 + num_drafts
    ways = {"a page each": (num_tokens, num_tokens)}
    ways |= {f"{known} recomputed": (num_tokens + known, 1) for known in range(1, num_tokens + 1)}
    for name in ("LFM2-350M", *LAYERS):
        for num_requests in (1, 32):
            make = partial(_recurrence, LAYERS[name]) if name in LAYERS else _short_convolution
            parts = {way: make(_step(num_requests, *of_way)) for way, of_way in ways.items()}
            times = _medians(parts, repeats)
            print(f"{name}, {num_requests} x {num_tokens}:", *(f"{way} {s * 1e6:,.0f} us" for way, s in times.items()))


def _recurrence(layer: Layer, step: StateStep) -> Callable[[], object]:
    """Convolution and recurrence of a layer."""
    num_pages, width = int(step.block_table_RB.max()) + 1, layer.inner + layer.mixed + 2 * layer.heads
    inputs_BKC = torch.zeros(num_pages, _TAPS - 1, layer.mixed)
    states_BHNP = torch.zeros(num_pages, layer.heads, layer.key_size, layer.value_size)
    rows_TW = torch.randn(step.num_tokens, width)
    parameters = ScanParameters(torch.randn(layer.heads), torch.randn(layer.heads))
    taps_KC = torch.randn(_TAPS, layer.mixed)
    rule = ConvolutionRule(offset=layer.inner, activation="silu")

    def run() -> object:
        mixed_TC = convolve(rows_TW, inputs_BKC, step, taps_KC, None, rule)
        return scan(mixed_TC, rows_TW, states_BHNP, step, layer.rule, parameters)

    return run


def _short_convolution(step: StateStep) -> Callable[[], object]:
    inputs_BKC = torch.zeros(int(step.block_table_RB.max()) + 1, 2, CHANNELS)
    rows_TW, taps_KC = torch.randn(step.num_tokens, 3 * CHANNELS), torch.randn(3, CHANNELS)
    rule = ConvolutionRule(offset=2 * CHANNELS, gates=(0, CHANNELS))
    return lambda: convolve(rows_TW, inputs_BKC, step, taps_KC, None, rule)


def measure(layer: Layer, num_requests: int, length: int, repeats: int) -> Mapping[str, float]:
    """Median seconds of each part."""
    num_tokens, inner, mixed = num_requests * length, layer.inner, layer.mixed
    width = inner + mixed + 2 * layer.heads
    step = _step(num_requests, length)
    inputs_BKC = torch.zeros(num_requests + 1, _TAPS - 1, mixed)
    states_BHNP = torch.zeros(num_requests + 1, layer.heads, layer.key_size, layer.value_size)
    hidden_TD, rows_TW = torch.randn(num_tokens, layer.hidden_size), torch.randn(num_tokens, width)
    mixed_TC, y_TX = torch.randn(num_tokens, mixed), torch.randn(num_tokens, inner)
    up_TI = torch.randn(num_tokens, layer.intermediate_size)
    parameters = ScanParameters(torch.randn(layer.heads), torch.randn(layer.heads))
    taps_KC, weight_X = torch.randn(_TAPS, mixed), torch.randn(inner)
    first, last = _product(width, layer.hidden_size), _product(layer.hidden_size, inner)
    gate_up = _product(2 * layer.intermediate_size, layer.hidden_size)
    down = _product(layer.hidden_size, layer.intermediate_size)
    convolution = ConvolutionRule(offset=inner, activation="silu")
    gate = GateRule(group_size=inner, gates_first=True)
    parts: dict[str, Callable[[], object]] = {
        "projections": lambda: (first(hidden_TD), last(y_TX)),
        "convolution": lambda: convolve(rows_TW, inputs_BKC, step, taps_KC, None, convolution),
        "recurrence": lambda: scan(mixed_TC, rows_TW, states_BHNP, step, layer.rule, parameters),
        "norm": lambda: gated_norm(y_TX, rows_TW, weight_X, 1e-5, gate),
        "MLP": lambda: (gate_up(hidden_TD), down(up_TI)),
    }
    return _medians(parts, max(3, repeats // length.bit_length()))


def _medians(parts: Mapping[str, Callable[[], object]], repeats: int) -> Mapping[str, float]:
    """Median seconds of each part."""
    seconds: dict[str, list[float]] = {part: [] for part in parts}
    # In turns, so that all parts see the same machine and no cache is warmer than in a layer.
    for _ in range(repeats):
        for part, run in parts.items():
            begin = time.perf_counter()
            run()
            seconds[part].append(time.perf_counter() - begin)
    return {part: statistics.median(of_part) for part, of_part in seconds.items()}


def _step(num_requests: int, length: int, num_own_blocks: int = 1) -> StateStep:
    """Requests that decode after some tokens, or begin with a prompt."""
    starts = torch.arange(num_requests + 1, dtype=torch.int32) * length
    lengths = torch.full((num_requests,), 103 if length < 16 else length, dtype=torch.int32)
    table = torch.zeros(num_requests, 64, dtype=torch.int32)
    pages = 1 + torch.arange(num_requests * num_own_blocks, dtype=torch.int32)
    table[:, :num_own_blocks] = pages.view(num_requests, num_own_blocks)
    return StateStep(
        table,
        starts,
        lengths,
        torch.arange(num_requests * length),
        num_own_blocks=num_own_blocks,
        block_size=16,
        max_query_len=length,
        requests=StepRequests.of(starts, lengths, table, num_requests),
        num_tokens=num_requests * length,
    )


def _product(num_outputs: int, num_inputs: int) -> Callable[[Tensor], Tensor]:
    """A product with a random weight in bfloat16, as layers compute it."""
    assert NATIVE is not None, "the C++ kernels are not built"
    kernels = NATIVE
    layout = kernels.bfloat16_layout if kernels.prefers_bfloat16 else None
    packed = kernels.pack_weight(torch.randn(num_outputs, num_inputs).bfloat16(), bfloat16=layout)
    return lambda x_TI: kernels.linear(x_TI, packed, num_outputs, None)


if __name__ == "__main__":
    main()

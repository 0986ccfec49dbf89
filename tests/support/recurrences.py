"""Steps of requests over pages of recurrent states, as a scheduler makes them, and oracles in numpy and float64.

A plan is a list of steps, each a list of (request, tokens, rejected tokens). Rows that were rejected hold other values
when their positions are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.native.attention import StepRequests
from penstock.kernels.recurrence import (
    ConvolutionRule,
    GateName,
    GateRule,
    ScanParameters,
    ScanRule,
    convolve,
    gated_norm,
    scan,
)
from penstock.kernels.recurrent_state import StateStep

BLOCK_SIZE = 4
Plan = Sequence[Sequence[tuple[int, int, int]]]
# Requests alone, in one chunk; in chunks, with decodes beside them; with drafts, accepted or not, around a border.
WHOLE: Plan = [[(0, 13, 0)], [(1, 6, 0)], [(2, 9, 0)]]
CHUNKS: Plan = [[(1, 1, 0), (0, 3, 0)], [(0, 1, 0), (1, 5, 0), (2, 7, 0)], [(0, 9, 0), (2, 1, 0)], [(2, 1, 0)]]
DRAFTS: Plan = [
    [(0, 4, 0), (1, 3, 1), (2, 6, 0)],
    [(0, 3, 2), (1, 4, 0)],
    [(2, 3, 2), (0, 3, 0)],
    [(2, 2, 0), (0, 5, 0)],
]
LENGTHS = 13, 6, 9
PLANS: list[tuple[Plan, dict[str, Any]]] = [
    (CHUNKS, {}),
    (CHUNKS, {"max_drafts": 0}),
    (CHUNKS, {"num_padding": 3}),
    (CHUNKS, {"from_snapshots": True}),
    (DRAFTS, {}),
    (DRAFTS, {"num_padding": 1, "from_snapshots": True}),
]


def random_plan(lengths: Sequence[int], max_drafts: int, seed: int) -> Plan:
    """Steps of random requests and chunks, some of which end in rejected tokens."""
    random, left, plan = Random(seed), list(lengths), []
    while any(left):
        step = []
        for request in random.sample(range(len(left)), len(left)):
            if not left[request] or (random.random() < 0.4 and step):
                continue
            count = min(left[request], random.choice([1, 1, 1 + random.randrange(5), 1 + random.randrange(100)]))
            # The first token of a step is never a draft.
            rejected = random.randrange(min(max_drafts, count - 1) + 1)
            left[request] -= count - rejected
            step.append((request, count, rejected))
        plan.append(step)
    return plan


def run_plan(
    plan: Plan,
    rows: Sequence[Tensor],
    pages: Tensor,
    compute: Callable[[Tensor, StateStep], Tensor],
    *,
    max_drafts: int = 2,
    num_padding: int = 0,
    from_snapshots: bool = False,
    blocks_without_snapshot: int = 0,
) -> list[Tensor]:
    """Run a plan's steps: outputs of each request's rows. rows: [length, width] of each request.

    pages: [B, ...], which keep states; filled with old values first. compute: a step's outputs from its rows.
    from_snapshots: requests lose their own pages after each step that ends at a border, and begin from the snapshot.
    blocks_without_snapshot: borders between two snapshots.
    """
    pages.copy_(torch.full_like(pages, 7.0))
    num_own = 1 + max_drafts
    columns = num_own + max(map(len, rows)) // BLOCK_SIZE + 1
    table = 1 + torch.arange(len(rows) * columns, dtype=torch.int32).view(len(rows), columns)
    assert len(pages) > len(rows) * columns
    snapshots = table[:, num_own:]
    snapshots[:, torch.arange(snapshots.shape[1]) % (1 + blocks_without_snapshot) < blocks_without_snapshot] = 0
    done = [0] * len(rows)
    outputs = [torch.zeros(0)] * len(rows)
    for step in plan:
        counts = [count for _, count, _ in step] + [num_padding] * (num_padding > 0)
        of_tokens = []
        for request, count, rejected in step:
            begin = done[request]
            taken = rows[request][begin : begin + count].clone()
            taken[count - rejected :] += 1.0
            of_tokens.append(taken)
        of_tokens += [torch.zeros(num_padding, rows[0].shape[1])]
        lengths = [done[request] + count for request, count, _ in step] + [0] * (num_padding > 0)
        block_table = torch.zeros(len(counts), columns, dtype=torch.int32)
        for row, (request, _, _) in enumerate(step):
            block_table[row] = table[request]
            # Its own pages do not matter at a border.
            border = num_own + done[request] // BLOCK_SIZE - 1
            if from_snapshots and done[request] and done[request] % BLOCK_SIZE == 0 and table[request, border]:
                pages[table[request, :num_own].long()] = float("nan")
        num_tokens = sum(count for _, count, _ in step)
        slots = torch.arange(num_tokens + num_padding)
        slots[num_tokens:] = -1
        starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        geometry = state_step(
            block_table, starts, torch.tensor(lengths, dtype=torch.int32), slots, num_own, len(step), num_tokens
        )
        out = compute(torch.cat(of_tokens), geometry)
        assert out.isfinite().all()
        for (request, count, rejected), found in zip(step, out.split(counts)[: len(step)], strict=True):
            kept = found[: count - rejected]
            outputs[request] = torch.cat((outputs[request][: done[request]], kept)) if done[request] else kept
            done[request] += count - rejected
    return outputs


def state_step(
    block_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    num_own_blocks: int,
    num_requests: int,
    num_tokens: int,
) -> StateStep:
    """A step of tensors as `StepGeometry` has them. num_requests, num_tokens: without padding."""
    return StateStep(
        block_table,
        starts,
        lengths,
        slots,
        num_own_blocks=num_own_blocks,
        block_size=BLOCK_SIZE,
        max_query_len=int(starts.diff().max()),
        requests=StepRequests.of(starts, lengths, block_table, num_requests),
        num_tokens=num_tokens,
    )


class Sizes(NamedTuple):
    """Heads, groups of them, and sizes of keys and values."""

    heads: int
    groups: int
    key: int
    value: int

    @property
    def mixed(self) -> int:
        return self.heads * self.value + 2 * self.groups * self.key

    def num_steps(self, rule: ScanRule) -> int:
        return self.heads * {"head": 1, "key": self.key, "value": self.value}[rule.step_size]


SMALL = Sizes(heads=4, groups=2, key=5, value=3)
# Values that fill vectors of every instruction set, in part too.
LARGE = Sizes(heads=2, groups=1, key=18, value=2 * 64 + 32 + 16 + 7)
NUM_GATES = 400
RULES = ["state space", "gated delta", "channel delta", "selective", "selective by head", "constant decay", "gated lru"]


def rule_of(name: str, sizes: Sizes) -> ScanRule:
    values = sizes.heads * sizes.value
    last = sizes.groups * sizes.key
    values_first = ScanRule(num_groups=sizes.groups, values=0, keys=values, queries=values + last)
    values_last = ScanRule(num_groups=sizes.groups, values=2 * last, keys=last, queries=0)
    heads = sizes.heads
    return {
        "state space": replace(values_first, steps=2, step_scale=0.8, scales_values=True, min_step=0.1, max_step=1.5),
        "gated delta": replace(values_last, steps=1, betas=1 + heads, has_unit_keys=True, query_scale=sizes.key**-0.5),
        "channel delta": replace(
            values_first, steps=heads, step_size="key", betas=0, beta_scale=2.0, has_unit_keys=True
        ),
        "selective": replace(values_first, steps=0, step_size="value", scales_values=True),
        "selective by head": replace(values_first, steps=3, scales_values=True),
        "constant decay": values_first,
        "gated lru": ScanRule(
            num_groups=sizes.groups,
            values=3,
            keys=None,
            queries=None,
            steps=5,
            step_size="value",
            step_activation="sigmoid",
            keeps_variance=True,
        ),
    }[name]


def parameters_of(name: str, sizes: Sizes) -> ScanParameters:
    generator, rule = torch.Generator().manual_seed(5), rule_of(name, sizes)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if name == "constant decay":
        return ScanParameters(random(sizes.heads))
    bias = random(sizes.num_steps(rule))
    if name == "gated lru":
        return ScanParameters(random(sizes.heads, sizes.key, sizes.value), bias)
    if name.startswith("selective"):
        skip = random(sizes.heads * sizes.value)
        return ScanParameters(random(sizes.heads, sizes.key, sizes.value), bias if "head" in name else None, skip)
    return ScanParameters(random(sizes.heads), bias, random(sizes.heads) if rule.scales_values else None)


def random_rows(width: int, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, width, generator=generator) for length in lengths]


def brute_force_scan(rows_TX: Tensor, name: str, sizes: Sizes) -> Tensor:
    rows, rule = rows_TX.double().numpy(), rule_of(name, sizes)
    parameters = parameters_of(name, sizes)
    decay_log, bias, skip = (None if one is None else one.double().numpy() for one in parameters)
    state = np.zeros((sizes.heads, sizes.key, sizes.value))
    outputs = []
    for number, row in enumerate(rows):
        mixed, gates = row[: sizes.mixed], row[sizes.mixed :]
        out = np.zeros((sizes.heads, sizes.value))
        for head in range(sizes.heads):
            group = head // (sizes.heads // sizes.groups)
            key, query = (
                np.ones(sizes.key) if first is None else mixed[first + group * sizes.key :][: sizes.key]
                for first in (rule.keys, rule.queries)
            )
            value = mixed[rule.values + head * sizes.value :][: sizes.value]
            if rule.has_unit_keys:
                key, query = (x / np.sqrt((x * x).sum() + 1e-6) for x in (key, query))
            step: Any = 1.0
            if rule.steps is not None:
                size = sizes.num_steps(rule) // sizes.heads
                raw = gates[rule.steps + head * size :][:size] * rule.step_scale
                raw = raw + (0 if bias is None else bias[head * size :][:size])
                active = np.log1p(np.exp(raw)) if rule.step_activation == "softplus" else 1 / (1 + np.exp(-raw))
                step = np.clip(active, rule.min_step, rule.max_step)
                step = step[:, None] if rule.step_size == "key" else step[None, :]
            decay = np.exp(-np.exp(decay_log[head]) * step)
            state[head] *= decay
            added = value
            if rule.betas is not None:
                beta = rule.beta_scale / (1 + np.exp(-gates[rule.betas + head]))
                added = beta * (value - key @ state[head])
            elif rule.scales_values:
                added = (step * value).reshape(-1)
            scale = np.sqrt(1 - decay**2) if rule.keeps_variance and number > 0 else 1.0
            state[head] += scale * np.outer(key, added)
            out[head] = (query * rule.query_scale) @ state[head]
            if skip is not None:
                out[head] += skip.reshape(sizes.heads, -1)[head] * value
        outputs.append(out.reshape(-1))
    return torch.from_numpy(np.array(outputs))


def run_scan(
    name: str,
    plan: Plan,
    dtype: torch.dtype = torch.float32,
    sizes: Sizes = SMALL,
    rows: list[Tensor] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Outputs of each request's rows."""
    rule, parameters = rule_of(name, sizes), parameters_of(name, sizes)
    pages = torch.empty(options.pop("num_pages", 32), sizes.heads, sizes.key, sizes.value, dtype=dtype)

    def compute(rows_TX: Tensor, step: StateStep) -> Tensor:
        mixed_TC, gates_TW = rows_TX[:, : sizes.mixed], rows_TX[:, sizes.mixed :].contiguous()
        return scan(mixed_TC, gates_TW, pages, step, rule, parameters)

    return run_plan(plan, rows or random_rows(sizes.mixed + NUM_GATES), pages, compute, **options)


CHANNELS, TAPS = 70, 4
CONVOLUTIONS = {
    "mixed": ConvolutionRule(offset=2, activation="silu"),
    "gated": ConvolutionRule(offset=2 * CHANNELS, gates=(0, CHANNELS)),
}


def brute_force_convolution(rows_TW: Tensor, weight_KC: Tensor, bias_C: Tensor | None, rule: ConvolutionRule) -> Tensor:
    rows = rows_TW.double().numpy()
    inputs = rows[:, rule.offset :][:, :CHANNELS]
    if rule.gates is not None:
        inputs = inputs * rows[:, rule.gates[0] :][:, :CHANNELS]
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), inputs])
    out = np.array([(padded[t : t + TAPS] * weight_KC.double().numpy()).sum(0) for t in range(len(rows))])
    if bias_C is not None:
        out = out + bias_C.double().numpy()
    if rule.activation == "silu":
        out = out / (1 + np.exp(-out))
    if rule.gates is not None:
        out = out * rows[:, rule.gates[1] :][:, :CHANNELS]
    return torch.from_numpy(out)


def run_convolution(
    name: str,
    parameters: tuple[Tensor, Tensor | None],
    plan: Plan,
    rows: list[Tensor],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[Tensor]:
    """Outputs of each request's rows. parameters: weight and bias."""
    pages = torch.empty(options.pop("num_pages", 150), TAPS - 1, CHANNELS, dtype=dtype)

    def compute(rows_TW: Tensor, step: StateStep) -> Tensor:
        return convolve(rows_TW, pages, step, *parameters, CONVOLUTIONS[name])

    return run_plan(plan, rows, pages, compute, **options)


def convolution_parameters(*, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(4)
    weight_KC = torch.randn(TAPS, CHANNELS, generator=generator)
    return weight_KC, torch.randn(CHANNELS, generator=generator) if has_bias else None


def check_gated_norm(*, gates_first: bool, activation: GateName, group_size: int) -> None:
    """Compare with numpy: with a weight of all channels, one for all groups, and none."""
    generator = torch.Generator().manual_seed(1)
    y_TX, gate_TW = torch.randn(5, 60, generator=generator), torch.randn(5, 70, generator=generator)
    y, gate = y_TX.double().numpy(), gate_TW.double().numpy()[:, 4:64] * 0.7
    factor = 1 / (1 + np.exp(-gate)) * (gate if activation == "silu" else 1)
    for weight in (torch.randn(60, generator=generator), torch.randn(group_size, generator=generator), None):
        if weight is None:
            expected = y * factor
        else:
            x = (y * factor if gates_first else y).reshape(5, -1, group_size)
            weights = weight.double().numpy().reshape(-1, group_size)
            normed = x / np.sqrt((x * x).mean(2, keepdims=True) + 1e-5) * weights
            expected = normed.reshape(5, 60) * (1 if gates_first else factor)
        rule = GateRule(offset=4, group_size=group_size, gates_first=gates_first, activation=activation, scale=0.7)
        found = gated_norm(y_TX, gate_TW, weight, 1e-5, rule)
        torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)

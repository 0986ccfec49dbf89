"""Kernels of one layer on a GPU, beside the copy bandwidth: verification of drafts, latents, experts, FP8, invariance.

Each measurement first compares a result with plain torch, and reports the largest error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.attention import time_in_a_graph
from penstock.kernels.activation import silu_and_mul
from penstock.kernels.experts import GroupedExperts
from penstock.kernels.gpu_float8 import Float8Weight, float8_linear
from penstock.kernels.gpu_quantized import GpuQuantizedProducts, stored_weight
from penstock.kernels.quantized import QuantizedWeight
from penstock.kernels.stored_weight import ExpertWeights, StoredWeight
from penstock.kernels.triton.invariant_linear import invariant_linear
from penstock.kernels.triton.latent_attention import latent_attention
from penstock.kernels.triton.paged_attention import prefill_attention
from penstock.kernels.triton.split_attention import split_attention
from penstock.layers.quantization.quantize import quantize_int4, quantize_int8, round_to_e2m1

Add = Callable[..., None]
_BLOCK_SIZE = 16


def measure(add: Add, bandwidth: float) -> None:
    """Add a row per kernel and shape."""
    _verification(add, bandwidth)
    _latents(add, bandwidth)
    _experts(add, bandwidth)
    _products(add, bandwidth)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _table(num_reqs: int, length: int) -> tuple[Tensor, int]:
    blocks = length // _BLOCK_SIZE
    table = 1 + torch.randperm(num_reqs * blocks, device="cuda").to(torch.int32).view(num_reqs, blocks)
    return table, 1 + num_reqs * blocks


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _verification(add: Add, bandwidth: float) -> None:
    """Four tokens per request: with split positions, with those of fixed size, and as a prefill."""
    heads, kv_heads, size, query_len = 32, 8, 128, 4
    for num_reqs, length in ((1, 1024), (8, 1024), (64, 1024), (1, 8192)):
        table, num_blocks = _table(num_reqs, length)
        cache = _random(num_blocks, 2, kv_heads, _BLOCK_SIZE, size).transpose(0, 1).transpose(2, 3)
        starts = torch.arange(0, num_reqs * query_len + 1, query_len, dtype=torch.int32, device="cuda")
        lengths = torch.full((num_reqs,), length, dtype=torch.int32, device="cuda")
        step = _random(num_reqs * query_len, heads, size), cache[0], cache[1], table, starts, lengths, size**-0.5
        ways = {
            "split": partial(split_attention, *step, max_query_len=query_len),
            "prefill": partial(prefill_attention, *step),
            "invariant": partial(split_attention, *step),
        }
        expected = ways["prefill"]()
        num_bytes = 4 * num_reqs * length * kv_heads * size
        add(
            measured="verification",
            num_reqs=num_reqs,
            length=length,
            us={name: round(time_in_a_graph(way), 2) for name, way in ways.items()},
            bound_us=num_bytes / bandwidth * 1e6,
            error={name: _error(way(), expected) for name, way in ways.items()},
        )


def _latents(add: Add, bandwidth: float) -> None:
    """Decodes of DeepSeek V2-Lite's and V3's shapes."""
    latent, key_size = 512, 576
    for num_reqs, length, heads in ((1, 1024, 16), (64, 1024, 16), (1, 1024, 128), (64, 1024, 128)):
        table, num_blocks = _table(num_reqs, length)
        cache = _random(num_blocks, _BLOCK_SIZE, 1, key_size)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((num_reqs,), length, dtype=torch.int32, device="cuda")
        query = _random(num_reqs, heads, key_size)
        scale = key_size**-0.5
        attend = partial(latent_attention, query, cache, table, starts, lengths, scale, latent)
        keys = cache[table.long()].view(num_reqs, length, key_size)
        weights = (torch.einsum("rhd,rld->rhl", query.float(), keys.float()) * scale).softmax(-1)
        expected = torch.einsum("rhl,rlc->rhc", weights, keys[..., -latent:].float())
        add(
            measured="latents",
            num_reqs=num_reqs,
            length=length,
            heads=heads,
            us=time_in_a_graph(attend),
            invariant_us=time_in_a_graph(partial(attend, is_invariant=True)),
            bound_us=2 * num_reqs * length * key_size / bandwidth * 1e6,
            error=_error(attend(), expected),
        )


def _experts(add: Add, bandwidth: float) -> None:
    """A layer of Qwen3-30B-A3B: 128 experts, of which each token takes 8."""
    num_experts, top_k, hidden, size = 128, 8, 2048, 768
    weights = ExpertWeights.plain(
        [_random(2 * size, hidden) / hidden**0.5 for _ in range(num_experts)],
        [_random(hidden, size) / size**0.5 for _ in range(num_experts)],
    )
    floats = [[one.values for one in of] for of in (weights.gate_up, weights.down)]
    stored = {name: _quantised(weights, quantize) for name, quantize in _QUANTIZERS.items()}
    grouped = {name: GroupedExperts(of, silu_and_mul, is_invariant=False) for name, of in stored.items()}
    grouped["plain"] = GroupedExperts(weights, silu_and_mul, is_invariant=False)
    grouped["invariant"] = GroupedExperts(weights, silu_and_mul, is_invariant=True)
    for num_tokens in (1, 16, 64, 256, 2048):
        hidden_TD = _random(num_tokens, hidden)
        scores, experts_TK = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k)
        experts_TK = experts_TK.sort(-1).values
        step = hidden_TD, experts_TK, scores.float()
        first = sum(
            scores[0, place] * F.linear(silu_and_mul(F.linear(hidden_TD[:1], floats[0][expert])), floats[1][expert])
            for place, expert in enumerate(experts_TK[0].tolist())
        )
        num_read = len(experts_TK.unique())
        add(
            measured="experts",
            num_tokens=num_tokens,
            us={name: round(time_in_a_graph(partial(of.mixture, *step), 10), 2) for name, of in grouped.items()},
            bound_us=num_read * 3 * size * hidden * 2 / bandwidth * 1e6,
            tflop_per_s_at_bound=2 * 3 * size * hidden * num_tokens * top_k / 1e12,
            error={name: _error(of.mixture(*step)[:1], first) for name, of in grouped.items()},  # type: ignore[arg-type]
        )


def _quantised(weights: ExpertWeights, quantize: Callable[[Tensor], StoredWeight]) -> ExpertWeights:
    return ExpertWeights(*([quantize(one.values) for one in of] for of in (weights.gate_up, weights.down)))


def _integers(quantize: Callable[[Tensor], QuantizedWeight], weight_OI: Tensor) -> StoredWeight:
    weight = quantize(weight_OI)
    return stored_weight(GpuQuantizedProducts().pack(weight), weight.shape)


def _powers_of_two(weight_OI: Tensor) -> QuantizedWeight:
    """MXFP4 by the nearest integers that are codes of E2M1, twice the numbers."""
    groups_OGS = weight_OI.float().unflatten(1, (-1, 32))
    scales_OG = groups_OGS.abs().amax(2).div(12).log2().ceil().exp2()
    integers = (groups_OGS / scales_OG.unsqueeze(2)).round()
    integers = torch.where(integers.abs() > 4, (integers / 2).round() * 2, integers)
    integers = torch.where(integers.abs() == 10, integers.sign() * 8, integers)
    return round_to_e2m1((integers * scales_OG.unsqueeze(2)).flatten(1), scales_OG, 32)


def _float8_blocks(weight_OI: Tensor) -> StoredWeight:
    scales_OC = weight_OI.float().unflatten(1, (-1, 128)).abs().amax(2) / 448
    return Float8Weight.of(weight_OI.float(), scales_OC, 128).stored


_QUANTIZERS: dict[str, Callable[[Tensor], StoredWeight]] = {
    "int8": partial(_integers, quantize_int8),
    "int4": partial(_integers, quantize_int4),
    "mxfp4": partial(_integers, _powers_of_two),
    "fp8 blocks": _float8_blocks,
}


def _products(add: Add, bandwidth: float) -> None:
    """The projections of an 8B model: cuBLAS in bfloat16, batch-invariant, FP8 with row scales and with blocks."""
    for num_outputs, num_inputs in ((28672, 4096), (4096, 14336), (6144, 4096)):
        weight_OI = _random(num_outputs, num_inputs) / num_inputs**0.5
        by_rows = weight_OI.float().abs().amax(1, keepdim=True) / 448
        by_blocks = by_rows.expand(-1, num_inputs // 128).contiguous()
        rows = Float8Weight.of(weight_OI.float(), by_rows, num_inputs)
        blocks = Float8Weight.of(weight_OI.float(), by_blocks, 128)
        for num_rows in (1, 16, 64, 256, 2048):
            x_TI = _random(num_rows, num_inputs)
            ways: dict[str, Callable[[], Tensor]] = {
                "cublas": partial(F.linear, x_TI, weight_OI),
                "invariant": partial(invariant_linear, x_TI, weight_OI),
                "fp8 rows": partial(float8_linear, x_TI, rows, None),
                "fp8 blocks": partial(float8_linear, x_TI, blocks, None),
            }
            expected = ways["cublas"]()
            figures: dict[str, Any] = {name: round(time_in_a_graph(way, 10), 2) for name, way in ways.items()}
            add(
                measured="products",
                num_rows=num_rows,
                num_outputs=num_outputs,
                num_inputs=num_inputs,
                us=figures,
                bound_us={"bfloat16": 2 * weight_OI.numel() / bandwidth * 1e6},
                error={name: _error(way(), expected) for name, way in ways.items()},
            )

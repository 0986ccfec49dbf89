"""Attention modules of Transformers that compute attention by themselves, made to call the attention interface.

Their classes are known by name, with what is particular to each; the rest of a model is found out as for others.

Suffixes: T tokens, H query heads, D head size, X all heads, _1… a batch of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

ARCHITECTURES = frozenset({"BloomForCausalLM", "FalconForCausalLM", "MptForCausalLM"})


def call_interface(model: PreTrainedModel) -> None:
    """Replace the forward pass of the model's attention modules."""
    for module in model.modules():
        forward = _FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.forward = partial(forward, module, partial(_attend, model.config, module))


# Attention from query, key and value heads, [1, H, T, D]: [1, T, X].
_Attend = Callable[..., Tensor]


def _attend(
    config: Any,
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    *,
    scale: float,
    slopes: Sequence[float] | None,
) -> Tensor:
    """Attention through the interface."""
    attention: Callable[..., Any] = AttentionInterface()[config._attn_implementation]
    alibi = None if slopes is None else tuple(slopes)
    output_1THD, _ = attention(module, query_1HTD, key_1HTD, value_1HTD, None, scaling=scale, alibi_slopes=alibi)
    output_1TX: Tensor = output_1THD.flatten(2)
    return output_1TX


def _bloom(
    module: Any, attend: _Attend, hidden_1TX: Tensor, residual_1TX: Tensor, *_: Any, **_more: Any
) -> tuple[Tensor, None]:
    heads = module._reshape(module.query_key_value(hidden_1TX))
    slopes = _powers(module.num_heads)
    output_1TX = attend(*heads, scale=module.inv_norm_factor, slopes=slopes)
    return module.dense(output_1TX) + residual_1TX, None


def _falcon(
    module: Any,
    attend: _Attend,
    hidden_1TX: Tensor,
    *_: Any,
    alibi: Tensor | None,
    position_embeddings: Any = None,
    **_more: Any,
) -> tuple[Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    qkv_1TX = module.query_key_value(hidden_1TX)
    if module.new_decoder_architecture:
        # The queries of each KV head, then its key and value.
        by_group = qkv_1TX.unflatten(2, (module.num_kv_heads, -1, module.head_dim))
        heads = by_group[..., :-2, :].flatten(2, 3), by_group[..., -2, :], by_group[..., -1, :]
    else:
        heads = module._split_heads(qkv_1TX)
    query, key, value = (one.transpose(1, 2) for one in heads)
    scale, slopes = module.inv_norm_factor, None
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        # The slopes are rounded, and scaled like scores.
        rounded = torch.tensor(_powers(module.num_heads), device="cpu").bfloat16()
        slopes = [scale * slope for slope in rounded.tolist()]
    return module.dense(attend(query, key, value, scale=scale, slopes=slopes)), None


def _mpt(module: Any, attend: _Attend, hidden_1TX: Tensor, *_: Any, **_more: Any) -> tuple[Tensor, None]:
    qkv_1TX = module.Wqkv(hidden_1TX)
    if module.clip_qkv:
        qkv_1TX = qkv_1TX.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = (one.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for one in qkv_1TX.chunk(3, 2))
    output_1TX = attend(*heads, scale=module.softmax_scale, slopes=_mpt_slopes(module.n_heads))
    return module.out_proj(output_1TX), None


def _powers(num_heads: int) -> list[float]:
    """Slopes of ALiBi: a geometric sequence, with every second of a longer one where heads are left over."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]


def _mpt_slopes(num_heads: int) -> list[float]:
    """Slopes of ALiBi in MPT: every second of a longer sequence first, where the number of heads is no power of 2."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


_FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
}

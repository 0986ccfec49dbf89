"""Partial attention, over a part of the positions, and the merge of parts.

Suffixes: T tokens, Q queries of a request, H query heads, K KV heads, D head size, L positions of the part, N parts,
X queries of all query heads of a KV head.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Maximum number of scores in memory at once, but at least those of one query.
_MAX_SCORES = 1 << 20


def prefill_attention_part(
    query_QHD: Tensor,
    key_LKD: Tensor,
    value_LKD: Tensor,
    first_Q: Tensor,
    end_Q: Tensor,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with one request's queries, each to positions first .. end of the part.

    Returns float32 [Q, H, D], and the log-sum-exp [Q, H]. first_Q, end_Q: int64. A query without visible positions has
    zeros, and -inf.
    """
    num_queries, num_heads, head_size = query_QHD.shape
    num_positions, num_kv_heads = key_LKD.shape[:2]
    key_KDL, value_KLD = key_LKD.float().permute(1, 2, 0), value_LKD.float().transpose(0, 1)
    output_QHD = query_QHD.new_empty(query_QHD.shape, dtype=torch.float32)
    lse_QH = query_QHD.new_empty((num_queries, num_heads), dtype=torch.float32)
    position_L = torch.arange(num_positions)
    tile = max(1, _MAX_SCORES // (num_heads * max(num_positions, 1)))
    for start in range(0, num_queries, tile):
        rows = slice(start, min(start + tile, num_queries))
        visible_QL = (position_L >= first_Q[rows, None]) & (position_L < end_Q[rows, None])
        query_QKGD = (query_QHD[rows].float() * scale).unflatten(1, (num_kv_heads, -1))
        query_KXD = query_QKGD.transpose(0, 1).reshape(num_kv_heads, -1, head_size)
        scores_KXL = torch.matmul(query_KXD, key_KDL)
        if soft_cap is not None:
            scores_KXL.div_(soft_cap).tanh_().mul_(soft_cap)
        per_query = (num_kv_heads, visible_QL.shape[0], -1)
        scores_KXL.view(*per_query, num_positions).masked_fill_(~visible_QL[:, None], float("-inf"))
        lse_KX1 = scores_KXL.logsumexp(dim=-1, keepdim=True)
        weights_KXL = (scores_KXL - lse_KX1.clamp(min=torch.finfo(torch.float32).min)).exp_()
        output_QHD[rows] = (
            torch.matmul(weights_KXL, value_KLD).view(*per_query, head_size).transpose(0, 1).flatten(1, 2)
        )
        lse_QH[rows] = lse_KX1.view(per_query).transpose(0, 1).flatten(1)
    return output_QHD, lse_QH


def weigh_part(output_THD: Tensor, lse_TH: Tensor, lse_NTH: Tensor) -> Tensor:
    """Scale a partial attention by its softmax weight among all N parts; the sum of the parts is full attention.

    Every token must have a visible position in some part. Overwrites the output.
    """
    return output_THD.mul_((lse_TH - lse_NTH.logsumexp(dim=0)).exp_().unsqueeze(-1))

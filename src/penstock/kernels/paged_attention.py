"""Paged attention: the specification in plain torch, two CPU implementations in torch, and partial attention.

Suffixes: T tokens of the step, R requests, H query heads, K KV heads, G query heads per KV head, D head size,
B blocks per request, N blocks read in this step (over all requests) or parts, P positions in a block, L context
positions, Q queries of a request, X queries of all query heads of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Maximum number of scores in memory at once, but at least those of one query.
_MAX_SCORES = 1 << 20

_NEG_INF = float("-inf")

# Step input of a step in which some tokens see later ones, as those of an image do: end of the positions that each
# token sees, int32 [T], which does not fall within a request and is at most its length. Without it a token sees the
# positions up to its own. A window counts from the token's own position.
VISIBLE_ENDS = "visible_ends"


class AttentionSinks(Protocol):
    """Attention sinks: scores, one per query head, of a position without a value that is part of every softmax.

    Xiao et al. 2023, https://arxiv.org/abs/2309.17453; learned as in gpt-oss. A soft cap does not apply to them.
    """

    @property
    def sinks(self) -> Tensor:
        """[H]."""


class DistanceBiases(Protocol):
    """Biases of scores by the distance between a query and a key (Raffel et al. 2019)."""

    @property
    def biases(self) -> Tensor:
        """float32 [H, N]: of each query head and distance; the last is that of all further ones."""


class CacheScales(NamedTuple):
    """Scales of an FP8 KV cache: a key is its stored value times `key`, a value times `value`."""

    key: float = 1.0
    value: float = 1.0


NO_SCALES = CacheScales()
_Integers = TypeVar("_Integers", np.ndarray, Tensor)


def first_visible(positions: _Integers, window: int | None) -> _Integers:
    """First visible position of queries at these positions.

    window: visible last positions, the query's included (sliding window); negative for chunked local attention, where a
    query sees the positions of its chunk of -window; None for all.
    """
    first: _Integers
    if window is None:
        first = positions * 0
    elif window < 0:
        first = positions - positions % -window
    else:
        first = (positions - window + 1) * (positions >= window)
    return first


def paged_attention_reference(
    query_THD: Tensor,
    key_BPKD: Tensor,
    value_BPKD: Tensor,
    block_table_RB: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
    max_query_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
    scales: CacheScales = NO_SCALES,
    slopes_H: Tensor | None = None,
    biases_HN: Tensor | None = None,
    ends_T: Tensor | None = None,
) -> Tensor:
    """Attention of every request's queries to its own positions, causal but for `ends_T`. Pads all requests to the
    longest.

    key_BPKD, value_BPKD: the whole cache, [num_blocks, block_size, K, D], where values may have a size of their own.
    block_table_RB: int32.
    query_start_loc: [R + 1]. seq_lens_R: positions after this step; the queries are the last ones.
    sinks_H: as in `AttentionSinks`. slopes_H: of ALiBi. biases_HN: as in `DistanceBiases`. ends_T: `VISIBLE_ENDS`.
    Returns [T, H, D]. Computes in float32. Reads no tensor on the host, so it works on any device.
    """
    num_reqs = block_table_RB.shape[0]
    num_tokens, num_heads, _ = query_THD.shape
    num_kv_heads, value_size = key_BPKD.shape[2], value_BPKD.shape[3]
    table = block_table_RB.long()
    key_RLKD = key_BPKD[table].flatten(1, 2).float().mul_(scales.key)
    value_RLKD = value_BPKD[table].flatten(1, 2).float().mul_(scales.value)

    offset_Q = torch.arange(max_query_len, device=query_THD.device)
    starts_R = query_start_loc[:num_reqs].long()
    query_len_R = query_start_loc[1 : num_reqs + 1].long() - starts_R
    token_RQ = (starts_R[:, None] + offset_Q).clamp(max=num_tokens - 1)
    query_RQKGD = query_THD[token_RQ].float().unflatten(2, (num_kv_heads, num_heads // num_kv_heads))

    position_RQ = (seq_lens_R.long() - query_len_R)[:, None] + offset_Q
    position_L = torch.arange(key_RLKD.shape[1], device=query_THD.device)
    end_RQ = position_RQ + 1 if ends_T is None else ends_T[token_RQ]
    visible_RQL = position_L < end_RQ[..., None]
    if window is not None:
        visible_RQL &= position_L >= first_visible(position_RQ, window)[..., None]
    scores = torch.einsum("rqkgd,rlkd->rkgql", query_RQKGD, key_RLKD) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if slopes_H is not None:
        distance_RQL = position_RQ[..., None] - position_L
        scores = scores - slopes_H.view(num_kv_heads, -1, 1, 1) * distance_RQL[:, None, None]
    if biases_HN is not None:
        distance_RQL = (position_RQ[..., None] - position_L).clamp(0, biases_HN.shape[1] - 1)
        biases_RQLH = biases_HN.t().float()[distance_RQL]
        scores = scores + biases_RQLH.permute(0, 3, 1, 2).unflatten(1, (num_kv_heads, -1))
    weights = softmax_with_sinks(scores.masked_fill(~visible_RQL[:, None, None], _NEG_INF), sinks_H)
    output_RQHD = torch.einsum("rkgql,rlkd->rqkgd", weights, value_RLKD).flatten(2, 3)

    # Rows beyond a shorter query belong to other requests: mask them out of the scatter.
    output_THD = torch.zeros(num_tokens + 1, num_heads, value_size, device=query_THD.device)
    is_own_RQ = offset_Q < query_len_R[:, None]
    output_THD[torch.where(is_own_RQ, token_RQ, num_tokens)] = output_RQHD
    return output_THD[:num_tokens].to(query_THD.dtype)


def as_stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Convert keys or values to the dtype of the cache. FP8: divided by the scale, saturating at the largest number."""
    if dtype is torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        values = (values.float() / scale).clamp(-most, most)
    return values.to(dtype)


def softmax_with_sinks(scores: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Softmax weights of scores [..., K, H / K, Q, L], with the sinks in the denominator."""
    if sinks_H is None:
        return scores.softmax(dim=-1)
    sinks = sinks_H.to(scores.dtype).view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def write_kv_rows(slot_mapping_T: np.ndarray, block_size: int, num_kv_heads: int) -> np.ndarray:
    """Rows of a head-major cache [num_blocks * 2 * K * P, D] for a step's keys and values: int64 [2, T * K]."""
    # (block * 2 * K + head) * P + offset, with slot = block * P + offset; K heads of values follow those of keys.
    first_T = slot_mapping_T + slot_mapping_T // block_size * ((2 * num_kv_heads - 1) * block_size)
    heads_2K = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads)
    rows_2TK: np.ndarray = first_T[:, None] + heads_2K * block_size
    return rows_2TK.reshape(2, -1)


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """All blocks that a batch of single-token queries reads, concatenated without padding.

    block_ids_N, owner_N: int64, block ids, and request of each. bias_NP: 0, or -inf for an invisible position.
    segment_start_R: int64, first block of each request. blocks_of_R: int64 [R, most blocks], indices into N; padded
    with N.
    """

    block_ids_N: Tensor
    owner_N: Tensor
    bias_NP: Tensor
    segment_start_R: Tensor
    blocks_of_R: Tensor
    index_N: Tensor


def list_blocks_between(
    block_table_RB: np.ndarray, first_visible_R: np.ndarray, seq_lens_R: np.ndarray, block_size: int
) -> DecodeBlocks:
    """List the blocks from each request's first visible position to its length; it has at least one position."""
    first_block_R = first_visible_R // block_size
    num_blocks_R = -(-seq_lens_R // block_size) - first_block_R
    num_reqs, num_blocks = len(seq_lens_R), int(num_blocks_R.sum())

    owner_N = np.repeat(np.arange(num_reqs), num_blocks_R)
    segment_start_R = np.cumsum(num_blocks_R) - num_blocks_R
    index_N = np.arange(num_blocks)
    within_N = index_N - segment_start_R[owner_N]
    column_N = first_block_R[owner_N] + within_N
    # Only a request's first and last blocks can have invisible positions.
    bias_NP = np.zeros((num_blocks, block_size), dtype=np.float32)
    offset_P = np.arange(block_size)
    last_N = segment_start_R + num_blocks_R - 1
    bias_NP[last_N] = np.where(column_N[last_N][:, None] * block_size + offset_P < seq_lens_R[:, None], 0, _NEG_INF)
    if first_visible_R.any():
        is_past_RP = first_block_R[:, None] * block_size + offset_P < first_visible_R[:, None]
        bias_NP[segment_start_R] += np.where(is_past_RP, np.float32(_NEG_INF), np.float32(0))
    blocks_of_R = np.full((num_reqs, int(num_blocks_R.max())), num_blocks)
    blocks_of_R[owner_N, within_N] = index_N
    return DecodeBlocks(
        block_ids_N=torch.from_numpy(block_table_RB[owner_N, column_N].astype(np.int64)),
        owner_N=torch.from_numpy(owner_N),
        bias_NP=torch.from_numpy(bias_NP),
        segment_start_R=torch.from_numpy(segment_start_R),
        blocks_of_R=torch.from_numpy(blocks_of_R),
        index_N=torch.from_numpy(index_N),
    )


def decode_attention_part(
    query_RHD: Tensor,
    key_BKPD: Tensor,
    value_BKPD: Tensor,
    blocks: DecodeBlocks,
    scale: float,
    workspace: tuple[Tensor, Tensor],
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per request over a head-major cache [num_blocks, K, P, D], of these blocks only.

    Returns float32 [R, H, D], and the log-sum-exp of the scores [R, H].

    Every block is a partial attention of its own, merged per request by rescaling (split-KV, as in Flash-Decoding: Dao,
    Haziza, Massa and Sizov, 2023), so a batch of any lengths takes the same few operators.

    workspace: for gathered keys and values, [N or more, K, P, D] each; new allocations would double the cost.
    """
    num_reqs, num_heads, head_size = query_RHD.shape
    num_kv_heads = key_BKPD.shape[1]
    group_size = num_heads // num_kv_heads
    query_NKGD = (query_RHD * scale).view(num_reqs, num_kv_heads, group_size, head_size).index_select(0, blocks.owner_N)
    num_blocks = blocks.block_ids_N.shape[0]
    key_NKPD = torch.index_select(key_BKPD, 0, blocks.block_ids_N, out=workspace[0][:num_blocks]).to(query_RHD.dtype)
    scores_NKGP = _cap(torch.matmul(query_NKGD, key_NKPD.transpose(2, 3)).float(), soft_cap)
    scores_NKGP += blocks.bias_NP[:, None, None, :]

    peak_NH = scores_NKGP.amax(dim=-1).view(-1, num_heads)
    nothing = peak_NH.new_full((1, num_heads), _NEG_INF)
    peak_RBH = torch.cat([peak_NH, nothing]).index_select(0, blocks.blocks_of_R.view(-1))
    peak_RH = peak_RBH.view(num_reqs, -1, num_heads).amax(dim=1)
    peak_NKG1 = peak_RH.index_select(0, blocks.owner_N).view(-1, num_kv_heads, group_size, 1)
    weights_NKGP = scores_NKGP.sub_(peak_NKG1).exp_()

    value_NKPD = torch.index_select(value_BKPD, 0, blocks.block_ids_N, out=workspace[1][:num_blocks])
    value_NKPD = value_NKPD.to(query_RHD.dtype)
    partial_NX = torch.matmul(weights_NKGP.to(value_NKPD.dtype), value_NKPD).float().view(-1, num_heads * head_size)
    mass_NH = weights_NKGP.sum(dim=-1).view(-1, num_heads)
    output_RHD = _sum_segments(partial_NX, blocks).view(num_reqs, num_heads, head_size)
    mass_RH = _sum_segments(mass_NH, blocks)
    return output_RHD / mass_RH.unsqueeze(-1), peak_RH + mass_RH.log()


def _sum_segments(rows_NX: Tensor, blocks: DecodeBlocks) -> Tensor:
    return F.embedding_bag(blocks.index_N, rows_NX, blocks.segment_start_R, mode="sum")


def _cap(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Apply soft_cap * tanh(score / soft_cap) in place."""
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def prefill_attention_cpu(
    query_QHD: Tensor,
    key_LKD: Tensor,
    value_LKD: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
    tile: int = 512,
    *,
    first_position: int = 0,
    end_Q: Tensor | None = None,
) -> Tensor:
    """Attention of one request's last Q positions to L positions, from `first_position` on; returns [Q, H, D].

    end_Q: end of the positions that each query sees, counted from the first of the L; None for causal attention.
    Queries are processed in tiles, which bounds the mask's size.
    """
    num_queries, context = query_QHD.shape[0], key_LKD.shape[0]
    position_Q = torch.arange(context - num_queries, context)
    first_Q = first_visible(position_Q + first_position, window) - first_position
    is_causal = end_Q is None
    end_Q = position_Q + 1 if end_Q is None else end_Q
    if soft_cap is not None or sinks_H is not None:  # torch has no fused attention for these
        part = prefill_attention_part(query_QHD, key_LKD, value_LKD, first_Q, end_Q, scale, soft_cap)
        return weigh_sinks(*part, sinks_H).to(query_QHD.dtype)
    query_1HQD = query_QHD.transpose(0, 1).unsqueeze(0)
    key_1KLD = key_LKD.transpose(0, 1).unsqueeze(0)
    value_1KLD = value_LKD.transpose(0, 1).unsqueeze(0)
    sees_all_before = first_position == 0 and (window is None or context <= abs(window))
    if is_causal and num_queries == context and sees_all_before:
        output = F.scaled_dot_product_attention(
            query_1HQD, key_1KLD, value_1KLD, is_causal=True, scale=scale, enable_gqa=True
        )
        return output.squeeze(0).transpose(0, 1)

    tiles = []
    for start in range(0, num_queries, tile):
        rows = slice(start, min(start + tile, num_queries))
        begin, end = max(0, int(first_Q[start])), int(end_Q[rows.stop - 1])
        position_L = torch.arange(begin, end)
        visible_QL = (position_L < end_Q[rows, None]) & (position_L >= first_Q[rows, None])
        seen = query_1HQD[:, :, rows], key_1KLD[:, :, begin:end], value_1KLD[:, :, begin:end]
        output = F.scaled_dot_product_attention(*seen, attn_mask=visible_QL, scale=scale, enable_gqa=True)
        tiles.append(output.squeeze(0).transpose(0, 1))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


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
    num_kv_heads = key_LKD.shape[1]
    key_KDL, value_KLD = key_LKD.float().permute(1, 2, 0), value_LKD.float().transpose(0, 1)
    output_QHD = query_QHD.new_empty(query_QHD.shape, dtype=torch.float32)
    lse_QH = query_QHD.new_empty((num_queries, num_heads), dtype=torch.float32)
    tile = max(1, _MAX_SCORES // (num_heads * max(key_LKD.shape[0], 1)))
    for start in range(0, num_queries, tile):
        rows = slice(start, min(start + tile, num_queries))
        # Positions that some query of the tile sees; later queries see later ones.
        seen = slice(max(0, int(first_Q[start])), int(end_Q[rows.stop - 1]))
        position_L = torch.arange(seen.start, max(seen.start, seen.stop))
        visible_QL = (position_L >= first_Q[rows, None]) & (position_L < end_Q[rows, None])
        query_QKGD = (query_QHD[rows].float() * scale).unflatten(1, (num_kv_heads, -1))
        query_KXD = query_QKGD.transpose(0, 1).reshape(num_kv_heads, -1, head_size)
        scores_KXL = _cap(torch.matmul(query_KXD, key_KDL[..., seen]), soft_cap)
        per_query = (num_kv_heads, visible_QL.shape[0], num_heads // num_kv_heads)
        scores_KXL.view(*per_query, len(position_L)).masked_fill_(~visible_QL[:, None], _NEG_INF)
        lse_KX1 = scores_KXL.logsumexp(dim=-1, keepdim=True)
        weights_KXL = (scores_KXL - lse_KX1.clamp(min=torch.finfo(torch.float32).min)).exp_()
        mixed_KXD = torch.matmul(weights_KXL, value_KLD[:, seen])
        output_QHD[rows] = mixed_KXD.view(*per_query, head_size).transpose(0, 1).flatten(1, 2)
        lse_QH[rows] = lse_KX1.view(per_query).transpose(0, 1).flatten(1)
    return output_QHD, lse_QH


def weigh_part(output_THD: Tensor, lse_TH: Tensor, lse_NTH: Tensor) -> Tensor:
    """Scale a partial attention by its softmax weight among all N parts; the sum of the parts is full attention.

    Every token must have a visible position in some part. Overwrites the output.
    """
    return output_THD.mul_((lse_TH - lse_NTH.logsumexp(dim=0)).exp_().unsqueeze(-1))


def weigh_sinks(output_RHD: Tensor, lse_RH: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Scale attention by its softmax weight beside the sinks. Overwrites the output."""
    return output_RHD if sinks_H is None else output_RHD.mul_(torch.sigmoid(lse_RH - sinks_H.float()).unsqueeze(-1))

"""Products between heads and latents of multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token's keys and values of all heads are products of one latent vector with a weight for each head. Instead of making
them, queries are multiplied by the weight of the keys, and attended latents by that of the values (the absorbed form).

Suffixes: T tokens, H heads, N dimensions of a query head that do not rotate, R rotated ones, C latent size, V value
size, X concatenated heads, Y a row that ends with a latent and the rotated part of the key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.linear import batch_invariant_head_products
from penstock.kernels.native.latent_shape import LatentShape
from penstock.kernels.norm import rms_norm


def absorb(
    query_TX: Tensor,
    rows_TY: Tensor,
    weight_HNC: Tensor,
    norm_weight_C: Tensor,
    eps: float,
    shape: LatentShape,
    *,
    is_invariant: bool = False,
) -> Tensor:
    """Query heads and the key in latent space, before rotary embedding: [T, (H + 1) * (R + C)].

    query_TX: [T, H * (N + R)] or longer rows. weight_HNC: of the keys. The latent is normalised.
    is_invariant: no row depends on another one, on a GPU too.
    """
    num_tokens = query_TX.shape[0]
    query_THX = query_TX[:, : shape.num_heads * shape.query_size].unflatten(1, (shape.num_heads, shape.query_size))
    nope_THN, rotary_THR = query_THX.split([shape.nope_size, shape.rotary_size], -1)
    latent_TC, rotary_TR = rows_TY[:, -shape.key_size :].split([shape.latent_size, shape.rotary_size], -1)
    heads = query_TX.new_empty(num_tokens, shape.num_heads + 1, shape.key_size)
    rotary_THR = torch.cat((rotary_THR, rotary_TR.unsqueeze(1)), 1)
    heads[..., : shape.rotary_size] = halves(rotary_THR) if shape.is_interleaved else rotary_THR
    weight_HNC = weight_HNC.to(query_TX.dtype)
    if is_invariant:
        absorbed_THC = batch_invariant_head_products(nope_THN, weight_HNC.transpose(1, 2))
    else:
        absorbed_THC = torch.bmm(nope_THN.transpose(0, 1), weight_HNC).transpose(0, 1)
    heads[:, :-1, shape.rotary_size :] = absorbed_THC
    heads[:, -1, shape.rotary_size :] = rms_norm(latent_TC, norm_weight_C, eps)
    return heads.flatten(1)


def expand(latent_TX: Tensor, weight_HVC: Tensor, *, is_invariant: bool = False) -> Tensor:
    """Values of all heads from attended latents, [T, H * C]: [T, H * V]. is_invariant: as of `absorb`."""
    num_heads, _, latent_size = weight_HVC.shape
    if is_invariant:
        latent_THC = latent_TX.unflatten(1, (num_heads, latent_size))
        return batch_invariant_head_products(latent_THC, weight_HVC.to(latent_TX.dtype)).flatten(1)
    latent_HTC = latent_TX.unflatten(1, (num_heads, latent_size)).transpose(0, 1)
    return torch.bmm(latent_HTC, weight_HVC.to(latent_TX.dtype).transpose(1, 2)).transpose(0, 1).flatten(1)


def halves(x: Tensor) -> Tensor:
    """Reorder adjacent pairs of the last dimension: the first ones of all pairs, then the second ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)

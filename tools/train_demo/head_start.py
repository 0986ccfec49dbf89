"""An initialisation from which a small model learns to copy in minutes rather than hours.

Nearly every skill needs induction heads (Olsson et al., "In-context Learning and Induction Heads", 2022): a head that
finds the place where the current token stood before, and copies what followed it. They form late in training, and a
short training ends before they do. So the first two layers start with a rough one, in the spirit of Trockman and
Kolter, "Mimetic Initialization of Self-Attention Layers" (2023), and training makes of it what it needs:

- a direction in which all embeddings are equal lets heads of layer 0 attend by position alone. They read the token one
  or two places back, and write it into a subspace of its own;
- heads of layer 1 compare what stood before a key with the current token (or what stood two before it with the
  previous token, for lists with commas), and write the key's own token into the residual stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .model import Attention, Layer, TrainingLlama

EMBEDDING_STD = 0.05
EQUAL_DIRECTION = 0
EQUAL_VALUE = 0.5
POSITION_SCALE = 0.5
NUM_FAST_FREQUENCIES = 6
FIRST_SLOW_FREQUENCY = 7
WRITE_SCALE = 0.2
MATCH_SCALE = 1.7
COPY_SCALE = 0.4


@torch.no_grad()
def give_head_start(model: TrainingLlama) -> None:
    """Overwrite some of the weights of a freshly initialised model."""
    nn.init.normal_(model.embedding.weight, std=EMBEDDING_STD)
    model.embedding.weight[:, EQUAL_DIRECTION] = EQUAL_VALUE
    first, second = model.layers[0], model.layers[1]
    assert isinstance(first, Layer)
    assert isinstance(second, Layer)
    back_1, back_2 = (_HeadGroup(first.attention, kv_head) for kv_head in (0, 1))
    content = _slow_rows(model)
    from_back_1 = back_1.attend_back_and_write(model, 1, content)
    from_back_2 = back_2.attend_back_and_write(model, 2, content)
    _HeadGroup(second.attention, 0).match_and_copy(query=content, key=from_back_1)
    _HeadGroup(second.attention, 1).match_and_copy(query=from_back_1, key=from_back_2)


def _orthonormal_rows(count: int, size: int) -> Tensor:
    columns: Tensor = torch.linalg.qr(torch.randn(size, count)).Q
    return columns.T.contiguous()


def _slow_rows(model: TrainingLlama) -> Tensor:
    """A projection of the residual stream, [D, E], onto the dimensions of a head that rotary positions turn slowly."""
    half = model.shape.head_dim // 2
    rows = _orthonormal_rows(model.shape.head_dim, model.shape.hidden_size)
    rows[:FIRST_SLOW_FREQUENCY] = 0
    rows[half : half + FIRST_SLOW_FREQUENCY] = 0
    rows[:, EQUAL_DIRECTION] = 0
    return rows


class _HeadGroup:
    """One KV head of an attention layer, and the first of the query heads that share it."""

    def __init__(self, attention: Attention, kv_head: int) -> None:
        num_heads, num_kv_heads, _ = attention.heads
        size = attention.head_dim
        head = kv_head * (num_heads // num_kv_heads)
        rows = attention.qkv.weight.split(size)
        self.q, self.k, self.v = rows[head], rows[num_heads + kv_head], rows[num_heads + num_kv_heads + kv_head]
        self.out = attention.out.weight.split(size, dim=1)[head]

    def attend_back_and_write(self, model: TrainingLlama, distance: int, content: Tensor) -> Tensor:
        """Attend `distance` tokens back and write that token; returns the rows that read what was written, [D, E]."""
        half = model.shape.head_dim // 2
        cos, sin = model.cos_TD[distance, :half], model.sin_TD[distance, :half]
        fast = (torch.arange(half) < NUM_FAST_FREQUENCIES).float() * POSITION_SCALE
        self.q.zero_()
        self.k.zero_()
        self.k[:half, EQUAL_DIRECTION] = fast
        self.q[:half, EQUAL_DIRECTION] = fast * cos
        self.q[half:, EQUAL_DIRECTION] = -fast * sin
        self.v.copy_(content)
        written = _slow_rows(model)
        self.out.copy_(WRITE_SCALE * written.T)
        return written

    def match_and_copy(self, query: Tensor, key: Tensor) -> None:
        """Attend where `key` reads what `query` reads here, and copy the token that is there."""
        self.q.copy_(MATCH_SCALE * query)
        self.k.copy_(MATCH_SCALE * key)
        copied = _orthonormal_rows(*self.v.shape)
        copied[:, EQUAL_DIRECTION] = 0
        self.v.copy_(copied)
        self.out.copy_(COPY_SCALE * copied.T)

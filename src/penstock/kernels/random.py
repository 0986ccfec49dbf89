"""Counter-based random numbers: each depends on (seed, position, token) alone.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): the seed is the key, position and
token the counter. Any draw can be repeated on its own: it does not depend on the batch, on how tokens are split into
steps, or on the order in which parts of the vocabulary are processed.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Layout of tokens over counters for vectorisation: in each group of 64 tokens, four runs of 16 take the four words of
# 16 counters.
TOKENS_PER_GROUP = 64
_COUNTERS_PER_GROUP = 16

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = (1 << 32) - 1


def _times(words: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of 32-bit words, all int64."""
    # A 64-bit product wraps around to a negative number; the masks correct the sign extension.
    product = words * multiplier
    return (product >> 32) & _LOW, product & _LOW


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words from four and a key of two, of any shapes that broadcast: int64 in [0, 2^32)."""
    words, keys = counter, key
    for _ in range(_ROUNDS):
        high_0, low_0 = _times(words[0], _MULTIPLIERS[0])
        high_1, low_1 = _times(words[2], _MULTIPLIERS[1])
        words = (high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0)
        keys = (keys[0] + _KEY_STEPS[0]) & _LOW, (keys[1] + _KEY_STEPS[1]) & _LOW
    return words


def token_bits(seeds_R: Tensor, positions_R: Tensor, first_token: int, num_tokens: int) -> Tensor:
    """32 random bits per token from first_token on: int64 [R, num_tokens].

    first_token: a multiple of TOKENS_PER_GROUP. seeds_R, positions_R: int64.
    """
    num_groups = -(-num_tokens // TOKENS_PER_GROUP)
    first_counter = first_token // TOKENS_PER_GROUP * _COUNTERS_PER_GROUP
    counters_C = first_counter + torch.arange(num_groups * _COUNTERS_PER_GROUP, device=seeds_R.device)
    key = seeds_R.unsqueeze(-1) & _LOW, (seeds_R.unsqueeze(-1) >> 32) & _LOW
    position_R1 = positions_R.unsqueeze(-1)
    counter = counters_C.expand(len(seeds_R), -1), position_R1 & _LOW, position_R1 >> 32, torch.zeros_like(position_R1)
    words_R4C = torch.stack(philox(counter, key), dim=1)
    by_group = words_R4C.view(-1, 4, num_groups, _COUNTERS_PER_GROUP).transpose(1, 2)
    return by_group.reshape(len(seeds_R), -1)[:, :num_tokens]


def gumbel_noise(bits: Tensor) -> Tensor:
    """Standard Gumbel noise from 32 random bits each: float64, between -3.2 and 22.9.

    -log of an exponential number, which uses the end of the range where floating point is finest.
    """
    return (bits.to(torch.float64) + 0.5).mul_(-(2.0**-32)).log1p_().neg_().log_().neg_()

"""A check on the loaded model that tokens reach each other through the paged attention and by no other way.

A trial run without weights sees every call of the attention interface, but not what else a model may mix tokens with:
a convolution, a recurrent state, positions that it counts by itself.

Suffixes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from penstock.attention import LayerAttention
from penstock.models.transformers_fallback.interface import Attends
from penstock.models.transformers_fallback.refusal import CannotRun

# Token and position of each row. (1, 1) and (2, 2) come twice, among other tokens and in other places.
_TOKENS = (0, 1, 2, 3, 4, 2, 1, 5)
_POSITIONS = (0, 1, 2, 3, 0, 2, 1, 3)
_TWINS = ((1, 6), (2, 5))
# Difference of twins, relative to their size: rounding in one product of eight rows is far below this.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class LocalAttention:
    """In place of attention, something that depends on a token's own query, key and value alone; counts its calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def attend(self, layer: LayerAttention, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
        self.calls[layer.name] += 1
        group = layer.num_heads // layer.num_kv_heads
        pattern_D = torch.linspace(0.5, 1.5, layer.head_size, device=query_THD.device)
        query_TH1 = (query_THD.float() * pattern_D).mean(-1, keepdim=True).tanh()
        key_TK1 = (key_TKD.float() * pattern_D).mean(-1, keepdim=True).tanh()
        mixed_TKD = value_TKD.float() * (1 + 0.5 * key_TK1)
        return (mixed_TKD.repeat_interleave(group, 1) * (1 + 0.5 * query_TH1)).to(query_THD.dtype)


def check_locality(
    forward: Callable[[Tensor, Tensor, Attends], Tensor], layers: Iterable[str], vocab_size: int, device: torch.device
) -> None:
    """Raises CannotRun when a token's hidden state depends on other tokens although attention does not mix them, or
    when a layer does not attend exactly once.

    forward: hidden states [T, D] from token ids, positions and what attention layers attend over.
    layers: the names of all attention layers.
    """
    attention = LocalAttention()
    tokens = torch.tensor([token * 7919 % vocab_size for token in _TOKENS], device=device)
    with torch.inference_mode():
        try:
            hidden_TD = forward(tokens, torch.tensor(_POSITIONS, device=device), attention)
        except Exception as error:
            raise CannotRun(f"a run of {len(_TOKENS)} tokens failed ({type(error).__name__}: {error})") from error
        wrong = {name: attention.calls[name] for name in layers if attention.calls[name] != 1}
        if wrong:
            raise CannotRun(f"some layers do not attend exactly once in a forward pass: {wrong}")
        for one, other in _TWINS:
            size = hidden_TD[one].float().abs().max()
            difference = (hidden_TD[one] - hidden_TD[other]).float().abs().max()
            # A comparison that NaN does not fail: what weights of NaN lead to is not this check's concern.
            if bool(difference > _TOLERANCE.get(hidden_TD.dtype, 5e-2) * size):
                raise CannotRun(
                    "its tokens depend on each other, or on their place in a batch, by other ways than attention"
                )

"""Check of the loaded model that tokens interact through paged attention only.

A trial run without weights sees every attention call, but not other ways to mix tokens: a convolution, a recurrent
state, positions counted by the model itself. Nor does it see the position of the first token.

Suffixes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.attention import AttentionRows, ForwardContext, Heads, LayerAttention
from penstock.models.transformers_fallback.interface import CannotRun

# Token and position of each row. (1, 1) and (2, 2) are repeated among other tokens and in other rows.
# The first four are a sequence from position 0.
_TOKENS = (0, 1, 2, 3, 4, 2, 1, 5)
_POSITIONS = (0, 1, 2, 3, 0, 2, 1, 3)
_TWINS = ((1, 6), (2, 5))
_NUM_FROM_BEGINNING = 4
# Rows whose bits are compared: all tokens so often, and some of them by themselves.
_REPEATED = 5
_FEWER_ROWS = (slice(1, 2), slice(3, 6), slice(27, 40))
# Relative difference of repeated rows; rounding errors in one product of eight rows are far below this.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class LocalAttention(ForwardContext):
    """Context in which attention is a function of each token's own query, key and value. calls: by layer."""

    calls: Counter[str] = field(default_factory=Counter, kw_only=True)

    def attend(self, layer: LayerAttention, rows: AttentionRows) -> Tensor:
        assert isinstance(rows, Heads), "modules of Transformers attend with heads"
        query_THD, key_TKD, value_TKD = rows
        self.calls[layer.name] += 1
        group = layer.num_heads // layer.num_kv_heads
        pattern_D = torch.linspace(0.5, 1.5, layer.head_size, device=query_THD.device)
        query_TH1 = (query_THD.float() * pattern_D).mean(-1, keepdim=True).tanh()
        key_TK1 = (key_TKD.float() * pattern_D).mean(-1, keepdim=True).tanh()
        mixed_TKD = value_TKD.float() * (1 + 0.5 * key_TK1)
        return (mixed_TKD.repeat_interleave(group, 1) * (1 + 0.5 * query_TH1)).to(query_THD.dtype)


# The model's forward pass, from tokens and positions to hidden states [T, D]. Without positions the model counts them
# itself.
Forward: TypeAlias = Callable[[Tensor, Tensor | None, ForwardContext], Tensor]


def check_locality(
    forward: Forward, layers: Iterable[str], *, vocab_size: int, pad_token_id: int | None, device: torch.device
) -> None:
    """Raise CannotRun when a token's hidden state depends on other tokens although attention does not mix them, when
    a layer does not attend exactly once, or when positions do not start at 0.

    layers: names of all attention layers.
    """
    attention = LocalAttention()
    tokens_T = _spread_tokens(vocab_size, pad_token_id).to(device)
    positions_T = torch.tensor(_POSITIONS, device=device)
    with torch.inference_mode():
        try:
            hidden_TD = forward(tokens_T, positions_T, attention)
            beginning_TD = forward(tokens_T[:_NUM_FROM_BEGINNING], None, LocalAttention())
        except Exception as error:
            raise CannotRun(f"a run of {len(_TOKENS)} tokens failed ({type(error).__name__}: {error})") from error
        wrong = {name: attention.calls[name] for name in layers if attention.calls[name] != 1}
        if wrong:
            raise CannotRun(f"some layers do not attend exactly once in a forward pass: {wrong}")
        if any(_differ(hidden_TD[one], hidden_TD[other]) for one, other in _TWINS):
            raise CannotRun(
                "its tokens depend on each other, or on their place in a batch, by other ways than attention"
            )
        if _differ(hidden_TD[:_NUM_FROM_BEGINNING], beginning_TD):
            raise CannotRun("its positions do not count from 0, or depend on which tokens a text has")


def are_rows_independent(forward: Forward, *, vocab_size: int, pad_token_id: int | None, device: torch.device) -> bool:
    """Whether the rows of what `forward` returns have the same bits alone and among others."""
    tokens_T = _spread_tokens(vocab_size, pad_token_id).to(device).repeat(_REPEATED)
    positions_T = torch.tensor(_POSITIONS, device=device).repeat(_REPEATED)
    with torch.inference_mode():
        whole_TX = forward(tokens_T, positions_T, LocalAttention())
        return all(
            torch.equal(whole_TX[rows], forward(tokens_T[rows], positions_T[rows], LocalAttention()))
            for rows in _FEWER_ROWS
        )


def run_without_values(forward: Forward, device: torch.device) -> None:
    """Run `forward` on meta tensors, as the checks of a model with values do. Raises what operators on these raise."""
    with torch.no_grad():
        positions_T = torch.tensor(_POSITIONS, device=device)
        forward(torch.zeros_like(positions_T), positions_T, LocalAttention())


def _spread_tokens(vocab_size: int, pad_token_id: int | None) -> Tensor:
    """Distinct tokens spread over the vocabulary, [T]; without padding, which some models treat specially."""
    usable = [token for token in range(min(vocab_size, 4096)) if token != pad_token_id]
    return torch.tensor([usable[token * 7919 % len(usable)] for token in _TOKENS])


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether they differ by more than rounding errors. NaN never differs: its effects are not checked here."""
    difference = (one - other).float().abs().max()
    return bool(difference > _TOLERANCE.get(one.dtype, 5e-2) * one.float().abs().max())

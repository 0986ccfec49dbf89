"""The check on a loaded model finds every way in which tokens could reach each other beside attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.attention import ForwardContext, Heads, LayerAttention
from penstock.models.transformers_fallback.interface import CannotRun
from penstock.models.transformers_fallback.locality import Forward, check_locality

LAYER = LayerAttention("layer.0", num_heads=4, num_kv_heads=2, head_size=8, scale=0.3)
EMBEDDING = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))


def forward(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
    """A layer of attention over embeddings that are scaled by their position."""
    positions = torch.arange(len(tokens)) if positions is None else positions
    hidden_TD = EMBEDDING[tokens] * (1 + 0.1 * positions[:, None])
    heads = hidden_TD.view(-1, 4, 8)
    return hidden_TD + attention.attend(LAYER, Heads(heads, heads[:, :2], heads[:, 2:])).flatten(1)


def check(one: Forward) -> None:
    check_locality(one, [LAYER.name], vocab_size=50, pad_token_id=0, device=torch.device("cpu"))


def test_attention_alone_passes() -> None:
    check(forward)


def convolved(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
    hidden_TD = forward(tokens, positions, attention)
    return hidden_TD + 0.1 * hidden_TD.roll(1, 0)


def scanned(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
    return forward(tokens, positions, attention).cumsum(0)


def counting_positions(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
    return forward(tokens, torch.arange(len(tokens)), attention)


def counting_positions_of_keys(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
    heads = EMBEDDING[tokens].view(-1, 4, 8)
    keys = heads[:, :2] * torch.arange(len(tokens))[:, None, None]
    return attention.attend(LAYER, Heads(heads, keys, heads[:, 2:])).flatten(1)


@pytest.mark.parametrize("other", [convolved, scanned, counting_positions, counting_positions_of_keys])
def test_another_way_is_found(other: Forward) -> None:
    with pytest.raises(CannotRun, match="by other ways than attention"):
        check(other)


def test_positions_that_count_from_elsewhere_are_found() -> None:
    def counting_from_two(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
        return forward(tokens, torch.arange(len(tokens)) + 2 if positions is None else positions, attention)

    with pytest.raises(CannotRun, match="do not count from 0"):
        check(counting_from_two)


def test_a_layer_that_attends_twice_or_never_is_found() -> None:
    def twice(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
        return forward(tokens, positions, attention) + forward(tokens, positions, attention)

    with pytest.raises(CannotRun, match=r"exactly once.*'layer\.0': 2"):
        check(twice)
    with pytest.raises(CannotRun, match=r"exactly once.*'layer\.0': 0"):
        check(lambda tokens, positions, attention: EMBEDDING[tokens])


def test_what_fails_says_how() -> None:
    def failing(tokens: Tensor, positions: Tensor | None, attention: ForwardContext) -> Tensor:
        raise ValueError("no such thing")

    with pytest.raises(CannotRun, match="ValueError: no such thing"):
        check(failing)

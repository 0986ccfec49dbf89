"""Operations of recurrent layers over the tokens of a step, each a call with tensors or traced tensors.

They take the rows of all tokens, also where the context is narrowed to last ones. Suffixes are those of
`kernels.recurrence`.
"""

from __future__ import annotations

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels import recurrence
from penstock.kernels.recurrence import GateName, ScanParameters, ScanRule
from penstock.layers.recurrence.state import RecurrentState


def convolve(
    state: RecurrentState,
    x_TW: Tensor,
    context: ForwardContext,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    *,
    offset: int = 0,
    gates: tuple[int, int] | None = None,
    activation: GateName | None = None,
) -> Tensor:
    """`kernels.recurrence.convolve` with the layer's state: [T, C]."""
    assert state.convolution is not None, "the layer has a convolution"

    def call(context: ForwardContext, x_TW: Tensor) -> list[Tensor]:
        pages_BY, step = context.cache_of(state.name)
        pages_BKC = state.convolution_pages(pages_BY)
        return [
            recurrence.convolve(
                x_TW, pages_BKC, step, weight_KC, bias_C, offset=offset, gates=gates, activation=activation
            )
        ]

    (out_TC,) = context.of_all_tokens().opaque(call, x_TW, widths=[state.convolution[1]])
    return out_TC


def scan(
    state: RecurrentState,
    mixed_TC: Tensor,
    gates_TW: Tensor,
    context: ForwardContext,
    rule: ScanRule,
    parameters: ScanParameters,
) -> Tensor:
    """`kernels.recurrence.scan` with the layer's state: [T, H * P]."""
    assert state.scan is not None, "the layer has a recurrence"

    def call(context: ForwardContext, mixed_TC: Tensor, gates_TW: Tensor) -> list[Tensor]:
        pages_BY, step = context.cache_of(state.name)
        return [recurrence.scan(mixed_TC, gates_TW, state.scan_pages(pages_BY), step, rule, parameters)]

    num_heads, _, value_size = state.scan
    (out_TX,) = context.of_all_tokens().opaque(call, mixed_TC, gates_TW, widths=[num_heads * value_size])
    return out_TX

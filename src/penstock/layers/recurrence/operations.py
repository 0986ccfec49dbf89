"""Operations of recurrent layers over the tokens of a step, each a call with tensors or traced tensors.

They take the rows of all tokens, also where the context is narrowed to last ones. Suffixes are those of
`kernels.recurrence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.kernels import recurrence
from penstock.kernels.native.recurrence import StateRequests
from penstock.kernels.recurrence import ConvolutionRule, ScanParameters, ScanRule, native_recurrence
from penstock.kernels.recurrent_state import StateStep
from penstock.layers.recurrence.state import RecurrentState

# Computes rows from pages of a layer, [B, bytes], a step's requests, and other rows.
_Operation: TypeAlias = Callable[..., Tensor]


def convolve(
    state: RecurrentState,
    x_TW: Tensor,
    context: ForwardContext,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    rule: ConvolutionRule,
) -> Tensor:
    """`kernels.recurrence.convolve` with the layer's state: [T, C]."""
    assert state.convolution is not None, "the layer has a convolution"

    def call(pages_BY: Tensor, step: StateStep | StateRequests, x_TW: Tensor) -> Tensor:
        pages_BKC = state.convolution_pages(pages_BY)
        return recurrence.convolve(x_TW, pages_BKC, step, weight_KC, bias_C, rule)

    return _over_states(state, call, [x_TW], context, [weight_KC, bias_C], state.convolution[1])


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

    def call(pages_BY: Tensor, step: StateStep | StateRequests, mixed_TC: Tensor, gates_TW: Tensor) -> Tensor:
        return recurrence.scan(mixed_TC, gates_TW, state.scan_pages(pages_BY), step, rule, parameters)

    num_heads, _, value_size = state.scan
    return _over_states(state, call, [mixed_TC, gates_TW], context, parameters, num_heads * value_size)


def _over_states(
    state: RecurrentState,
    operation: _Operation,
    rows: Sequence[Tensor],
    context: ForwardContext,
    parameters: Sequence[Tensor | None],
    width: int,
) -> Tensor:
    """Run an operation on the layer's pages and the rows of all tokens, or record it: [T, width]."""

    def call(context: ForwardContext, *rows: Tensor) -> list[Tensor]:
        pages_BY, step = context.cache_of(state.name)
        return [operation(pages_BY, step, *rows)]

    def by_library(context: ForwardContext, *rows: Tensor) -> list[Tensor] | None:
        bound = context.layers[state.name]
        if native_recurrence(rows, None, parameters) is None:
            return None
        requests = bound.backend.of_every_step(context.metadata[bound.group])
        return [operation(bound.kv_cache, requests, *rows)]

    (out,) = context.of_all_tokens().opaque(call, *rows, widths=[width], by_library=by_library)
    return out

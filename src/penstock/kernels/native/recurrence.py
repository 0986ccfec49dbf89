"""C++ kernels of recurrent layers, over pages of states. Suffixes are those of `kernels.recurrence`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.native.attention import StepRequests
from penstock.kernels.native.library import Library
from penstock.kernels.native.operation_types import OperationType
from penstock.kernels.native.operations import NativeOperation, row_width
from penstock.kernels.native.tracing import Argument, TracedRequests, TracedTensor
from penstock.kernels.recurrence_rule import (
    ACTIVATIONS,
    STEP_ACTIVATIONS,
    STEP_SIZES,
    ConvolutionRule,
    GateRule,
    GroupOfRanks,
    ScanParameters,
    ScanRule,
)

_STATE_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_MOST_TAPS = 16


@dataclass(frozen=True, slots=True)
class StateRequests:
    """Requests of a step with recurrent states, as library arguments, or traced ones.

    num_own_blocks, block_size: as of `RecurrentStateSpec`. num_tokens: tokens without padding; 0 of traced requests.
    """

    requests: StepRequests | TracedRequests
    num_own_blocks: int
    block_size: int
    num_tokens: int = 0


class NativeRecurrence:
    """Operations of recurrent layers: float32 rows on the CPU, or traced rows."""

    def __init__(self, module: Library, types: Mapping[str, OperationType], index: int) -> None:
        self._module, self._types, self._index = module, types, index
        self._gated_norm, self._group_squares, self._shared_group_norm = (
            NativeOperation(module.operation, index, types[name])
            for name in ("gated_norm", "group_squares", "shared_group_norm")
        )

    @staticmethod
    def exists(types: Mapping[str, OperationType]) -> bool:
        """Whether the library has these operations."""
        return "shared_group_norm" in types

    @staticmethod
    def takes(rows: Sequence[Tensor], states: Tensor | None, parameters: Sequence[Tensor | None]) -> bool:
        """Whether rows are contiguous, states of a type that the kernels keep, and parameters in float32."""
        return (
            (states is None or states.dtype in _STATE_TYPES)
            and all(type(x) is TracedTensor or x.stride(1) == 1 for x in rows)
            and all(one is None or (one.dtype is torch.float32 and one.is_contiguous()) for one in parameters)
        )

    def convolve(
        self,
        x_TW: Tensor,
        inputs_BKC: Tensor,
        requests: StateRequests,
        weight_KC: Tensor,
        bias_C: Tensor | None,
        rule: ConvolutionRule,
    ) -> Tensor:
        """`kernels.recurrence.convolve`. Output rows of padding are zero."""
        num_taps, channels = weight_KC.shape
        if num_taps > _MOST_TAPS:
            raise ValueError(f"a convolution has {num_taps} taps; allowed are {_MOST_TAPS}.")
        before, after = rule.gates or (-1, -1)
        activation = ACTIVATIONS[rule.activation]
        arguments = rule.offset, before, after, channels, num_taps, activation, weight_KC, bias_C
        return self._run("causal_convolution", x_TW, None, channels, inputs_BKC, requests, arguments)

    def scan(
        self,
        mixed_TC: Tensor,
        gates_TW: Tensor,
        states_BHNP: Tensor,
        requests: StateRequests,
        rule: ScanRule,
        parameters: ScanParameters,
    ) -> Tensor:
        """`kernels.recurrence.scan`. Output rows of padding are zero."""
        decay_log, _, skip = parameters
        _, num_heads, key_size, value_size = states_BHNP.shape
        arguments = (
            num_heads,
            rule.num_groups,
            key_size,
            value_size,
            rule.values,
            *(-1 if first is None else first for first in (rule.keys, rule.queries, rule.steps, rule.betas)),
            STEP_SIZES[rule.step_size],
            STEP_ACTIVATIONS[rule.step_activation],
            int(rule.scales_values),
            int(rule.keeps_variance),
            int(rule.has_unit_keys),
            int(decay_log.dim() == 3),
            int(skip is not None and skip.numel() == num_heads * value_size and value_size > 1),
            rule.step_scale,
            rule.min_step,
            rule.max_step,
            rule.beta_scale,
            rule.query_scale,
            *parameters,
        )
        width = num_heads * value_size
        return self._run("linear_recurrence", mixed_TC, gates_TW, width, states_BHNP, requests, arguments)

    def gated_norm(
        self,
        y_TX: Tensor,
        gate_TW: Tensor,
        weight: Tensor | None,
        eps: float,
        rule: GateRule,
    ) -> Tensor:
        """`kernels.recurrence.gated_norm`."""
        size, group_size = row_width(y_TX), rule.group_size
        stride = group_size if weight is not None and weight.shape[0] == size else 0
        factors = eps, rule.scale, int(rule.gates_first), ACTIVATIONS[rule.activation]
        arguments = rule.offset, group_size, weight, stride, *factors
        return self._gated_norm.rows(y_TX, size, size, *arguments, second=gate_TW)

    def group_squares(self, x_TX: Tensor, group: GroupOfRanks) -> Tensor:
        """`kernels.recurrence.group_squares`."""
        return self._group_squares.rows(x_TX, group.num_groups, *group)

    def shared_group_norm(
        self, x_TX: Tensor, squares_TG: Tensor, weight_X: Tensor, eps: float, group: GroupOfRanks
    ) -> Tensor:
        """`kernels.recurrence.shared_group_norm`."""
        return self._shared_group_norm.rows(x_TX, group.size, *group, weight_X, eps, second=squares_TG)

    def _run(
        self,
        name: str,
        x: Tensor,
        second: Tensor | None,
        width: int,
        states: Tensor,
        of: StateRequests,
        arguments: Sequence[Argument],
    ) -> Tensor:
        """Run an operation over the requests of a step, or record it: [T, width]."""
        page_stride = states.stride(0) * states.element_size()
        of_states = states, page_stride, of.num_own_blocks, of.block_size, _STATE_TYPES[states.dtype]
        if isinstance(of.requests, TracedRequests):
            assert isinstance(x, TracedTensor), "rows of a traced step are traced"
            constants = of.requests.group, *of_states, *arguments
            return x.origin.over_requests(name, x, width, constants, second=second)
        out, rows = torch.empty(x.shape[0], width), [x] if second is None else [x, second]
        self._module.step_operation(
            self._types[name].number,
            self._index,
            x.shape[0],
            of.num_tokens,
            torch.get_num_threads(),
            *(part for one in rows for part in (one, one.stride(0))),
            out,
            width,
            *of.requests.arguments,
            0,
            *of_states,
            *arguments,
        )
        return out

"""Mixtures of experts in C++: routing, and recorded programs that run all experts of a layer.

Suffixes: T tokens, D hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native.operation_types import Scope
from penstock.kernels.native.operations import NativeOperation, row_width
from penstock.kernels.native.tracing import Operation, Trace, TracedTensor, Untraceable

# Experts that the library routes to, at most.
_MAX_EXPERTS = 1024
# Operations of an expert: products with gate and up, activation, product with down.
_NUM_OPERATIONS = 3
# The rule's numbers: experts, experts of a token, scoring, whether weights are normalised, their factor, groups,
# groups of a token, experts whose sum ranks a group, the least divisor of weights, and the jitter.
RuleArguments = tuple[int, int, int, bool, float, int, int, int, float, float]


class NativeExperts:
    """The library's routing, and its operation over all experts of a layer."""

    def __init__(self, module: Any, operation: NativeOperation) -> None:
        self._module = module
        self._operation = operation

    def takes(self, num_experts: int) -> bool:
        return num_experts <= _MAX_EXPERTS

    def route(self, logits_TE: Tensor, rule: RuleArguments, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Experts of each token, ascending, and their weights: int64 [T, K] and float32 [T, K].

        logits_TE: float32, contiguous. bias_E: float32. On ties the first expert wins.
        """
        num_tokens, num_experts = logits_TE.shape
        experts_TK = torch.empty(num_tokens, rule[1], dtype=torch.int32)
        weights_TK = torch.empty(num_tokens, rule[1])
        rows = logits_TE, num_experts, num_tokens, experts_TK, weights_TK, torch.get_num_threads()
        self._module.route(*rows, bias_E, *rule)
        return experts_TK.long(), weights_TK

    def mixture(
        self,
        hidden_TD: Tensor,
        router: Callable[[Tensor, Any], Tensor],
        experts: Sequence[Callable[[Tensor, Any], Tensor]],
        context: object,
        rule: RuleArguments,
        bias_E: Tensor | None,
        load_E: Tensor | None,
    ) -> Tensor | None:
        """Weighted sum of each token's experts, on the traced rows of a program: [T, D].

        context: second argument of router and experts. load_E: int64, to which every run adds the tokens of each
        expert; None counts nothing.

        None for too many experts, and for experts that are something else than products and an activation.
        """
        assert isinstance(hidden_TD, TracedTensor), "only programs have the operation"
        if not self.takes(len(experts)):
            return None
        trace, width = hidden_TD.origin, row_width(hidden_TD)
        try:
            chains = [_chain(trace, expert, context, width) for expert in experts]
            logits_TE = router(hidden_TD, context)
        except Untraceable:
            return None
        gate_up, activation, down = (operation.cells[2] for operation in chains[0])
        assert gate_up is not None, "a chain's operations make rows"
        assert activation is not None, "a chain's operations make rows"
        assert down is not None, "a chain's operations make rows"
        table = self._store(chains)
        arguments = bias_E, *rule, table, gate_up.width, activation.width, load_E
        return self._operation.rows(hidden_TD, down.width, *arguments, second=logits_TE)

    def _store(self, chains: Sequence[Sequence[Operation]]) -> Tensor:
        """Store the experts' operations for the library: uint8."""
        size = self._module.operation_bytes()
        table = torch.empty(len(chains) * _NUM_OPERATIONS * size, dtype=torch.uint8, device="cpu")
        address = table.data_ptr()
        for chain in chains:
            for operation in chain:
                assert operation.type is not None, "a chain's operations are the library's"
                self._module.store_operation(address, operation.type.number, *operation.arguments)
                address += size
        return table


def _chain(trace: Trace, expert: Callable[[Tensor, Any], Tensor], context: object, width: int) -> list[Operation]:
    """Trace an expert: operations of which each reads the rows of the one before. Raises Untraceable for others."""
    of_expert = Trace(trace.types, trace.instruction_set)
    rows = of_expert.input("rows", torch.float32, width)
    before, operations = rows.cell, of_expert.operations
    result = expert(rows, context)
    for operation in operations:
        reads, second, makes = operation.cells
        is_plain = operation.type is not None and operation.type.scope is Scope.ROWS and operation.input < 0
        if not is_plain or reads is not before or second is not None or makes is None or operation.collectives:
            raise Untraceable("an expert has other operations than products and an activation")
        before = makes
    if len(operations) != _NUM_OPERATIONS or getattr(result, "cell", None) is not before:
        raise Untraceable("an expert has other operations than products and an activation")
    trace.keeps_alive += of_expert.keeps_alive
    return operations

"""A model's forward pass as one call into the C++ kernels. Suffixes: T tokens of the step, D hidden size."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.attention import AttentionBackend, BoundLayer, ForwardContext, HiddenTaps, LastTokens
from penstock.kernels.native import NATIVE
from penstock.kernels.native.program import NativeProgram
from penstock.kernels.native.program_step import BoundChoices, StepTokens
from penstock.kernels.native.tracing import Cell, Role, Trace, TracedRequests, Untraceable
from penstock.models.causal_lm import CausalLM
from penstock.models.interface import LanguageModel, ModelInputs

logger = logging.getLogger(__name__)


class ModelPrograms:
    """What is recorded of a model, for a KV cache's layers and for its weights as they are, when it is first run.

    layers: by name. A model that is not all kernels of the C++ library runs layer by layer, as its forward says.
    """

    def __init__(self, layers: Mapping[str, BoundLayer]) -> None:
        self._layers = layers
        self._recorded: dict[tuple[object, ...], NativeProgram | None] = {}

    def run(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """`inputs.run(...)`: [T, D], or the rows that the context asks for.

        Only plain inputs run a program.
        """
        can_run = inputs.is_plain and not _is_scattered(model, inputs.tokens.shape[0])
        program = self._program(model, _Forward.of(inputs, context)) if can_run else None
        if program is None:
            return inputs.run(model, context)
        ids_T = inputs.tokens.to(torch.int32).contiguous()
        step = _step_tokens(inputs.positions.to(torch.int64).contiguous(), context)
        given_TD = None if inputs.hidden is None else inputs.hidden.contiguous()
        hidden_TD, *states = program.run(ids_T, step, given_TD)
        if context.taps is not None:
            context.taps.states += states
        return hidden_TD

    def bind_greedy(
        self,
        model: LanguageModel,
        inputs: ModelInputs,
        context: ForwardContext,
        states_before: Sequence[int] | None = None,
    ) -> BoundChoices | None:
        """`model.compute_greedy` of its hidden states, as long as these tensors and the context stay.

        states_before: given where the hidden states are wanted too, and those before these layers, as of `HiddenTaps`.
        None where the model has no way to do it all at once, or the inputs cannot be read in place, or are not plain.
        """
        tensors = [(inputs.tokens, torch.int32), (inputs.positions, torch.int64)]
        if inputs.hidden is not None:
            tensors.append((inputs.hidden, torch.float32))
        can_read = all(tensor.dtype is dtype and tensor.is_contiguous() for tensor, dtype in tensors)
        if not can_read or not inputs.is_plain:
            return None
        states = None if states_before is None else tuple(sorted(states_before))
        program = self._program(model, _Greedy(_hidden_size(inputs), states))
        if program is None:
            return None
        return program.bind(inputs.tokens, _step_tokens(inputs.positions, context), inputs.hidden)

    def forget(self) -> None:
        """Record anew what is run: models, or their weights, may be others."""
        self._recorded.clear()

    def _program(self, model: LanguageModel, what: _Forward | _Greedy) -> NativeProgram | None:
        key = model, what
        if key not in self._recorded:
            self._recorded[key] = self._record(model, what)
        return self._recorded[key]

    def _record(self, model: LanguageModel, what: _Forward | _Greedy) -> NativeProgram | None:
        if (
            NATIVE is None
            or not self._layers
            or not all(isinstance(bound.backend, AttentionBackend) for bound in self._layers.values())
        ):
            return None
        trace = Trace(NATIVE.instruction_set.index)
        try:
            _refuse_what_is_watched(model)
            outputs = what.trace(trace, model, self._context(trace))
        except Untraceable as reason:
            logger.debug("The model runs piece by piece: %s", reason)
            return None
        return NativeProgram(NATIVE, trace, *outputs)

    def _context(self, trace: Trace) -> ForwardContext:
        groups = range(1 + max((bound.group for bound in self._layers.values()), default=-1))
        metadata_of_last = [TracedRequests(group, is_last=True) for group in groups]
        positions_R = trace.stand_in(Role.POSITIONS)
        last = LastTokens(trace.stand_in(Role.LAST), positions_R, positions_R, positions_R, metadata_of_last)
        return ForwardContext(self._layers, [TracedRequests(group) for group in groups], last)


@dataclass(frozen=True)
class _Forward:
    """From tokens to hidden states. hidden_size: of those that it goes on from, 0 for none. taps: before these layers
    they are wanted too.
    """

    hidden_size: int
    taps: frozenset[int]

    @classmethod
    def of(cls, inputs: ModelInputs, context: ForwardContext) -> _Forward:
        taps: frozenset[int] = frozenset() if context.taps is None else context.taps.layers
        return cls(_hidden_size(inputs), taps)

    def trace(self, trace: Trace, model: LanguageModel, context: ForwardContext) -> tuple[Cell, list[Cell]]:
        """Where the results are. Raises Untraceable."""
        taps = HiddenTaps(sorted(self.taps))
        hidden = _run(trace, model, replace(context, taps=taps), self.hidden_size)
        return trace.result(hidden), _cells(taps)


@dataclass(frozen=True)
class _Greedy:
    """From tokens to tokens. hidden_size: as in `_Forward`. states_before: given where hidden states are wanted too,
    and those before these layers.
    """

    hidden_size: int
    states_before: tuple[int, ...] | None

    def trace(self, trace: Trace, model: LanguageModel, context: ForwardContext) -> tuple[None, list[Cell]]:
        """Where they are. Raises Untraceable."""
        taps = HiddenTaps(self.states_before or ())
        hidden = _run(trace, model, replace(context, taps=taps), self.hidden_size)
        wanted = [] if self.states_before is None else [trace.result(hidden), *_cells(taps)]
        chosen = model.compute_greedy(hidden)
        if [getattr(tensor, "role", None) for tensor in chosen or ()] != [Role.CHOSEN, Role.FAILED]:
            raise Untraceable("tokens are not chosen by a kernel")
        return None, wanted


def _is_scattered(model: LanguageModel, num_tokens: int) -> bool:
    """Whether ranks keep some tokens each between the layers of such a step, which is recorded of none."""
    return isinstance(model, CausalLM) and model.is_scattered(num_tokens)


def _cells(taps: HiddenTaps) -> list[Cell]:
    return [cell for state in taps.states if (cell := getattr(state, "cell", None))]


def _run(trace: Trace, model: LanguageModel, context: ForwardContext, hidden_size: int) -> Tensor:
    given = (trace.give(hidden_size),) if hidden_size else ()
    return model(trace.stand_in(Role.TOKENS), trace.stand_in(Role.POSITIONS), context, *given)


def _hidden_size(inputs: ModelInputs) -> int:
    return 0 if inputs.hidden is None else inputs.hidden.shape[1]


def _refuse_what_is_watched(model: LanguageModel) -> None:
    """Raises Untraceable where something else than the classes' own code is to run in every step."""
    if not isinstance(model, nn.Module):
        raise Untraceable("it is no module of torch")
    for module in model.modules():
        has_methods = any(callable(getattr(type(module), name, None)) for name in vars(module))
        if has_methods or module._forward_hooks or module._forward_pre_hooks:
            raise Untraceable(f"a {type(module).__name__} has a hook, or a method of its own")


def _step_tokens(positions_T: Tensor, context: ForwardContext) -> StepTokens:
    metadata, last = context.metadata, context.last
    return StepTokens(
        positions_T,
        metadata[0].num_tokens,
        [group.requests for group in metadata],
        None if last is None else (last.rows, last.positions, last.query_start_loc, last.seq_lens),
    )

"""Recorded programs: a model's forward pass as one call into the C++ kernels. Suffixes: T tokens, D hidden size."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from penstock.attention import AuxHiddenStates, BoundLayer, ForwardContext, LastTokens
from penstock.contract.rpc import LOAD_WEIGHTS
from penstock.kernels.native import NATIVE
from penstock.kernels.native.attention import NO_REQUESTS
from penstock.kernels.native.program import BoundChoices, NativeProgram
from penstock.kernels.native.program_step import StepTokens
from penstock.kernels.native.tracing import Cell, Role, Trace, TracedRequests, TracedTensor, Untraceable
from penstock.layers.rotary import ROTATION_ROWS
from penstock.models.causal_lm import CausalLM
from penstock.models.interface import LanguageModel, ModelInputs

logger = logging.getLogger(__name__)

# Names of a model's step inputs.
_TOKEN_IDS, _EMBEDDINGS, _POSITIONS, _HIDDEN = "token_ids", "inputs_embeds", "positions", "hidden_states"
# Dtypes that programs read.
_MOST_AUX_SETS = 16
_DTYPES = {_TOKEN_IDS: torch.int32, _POSITIONS: torch.int64}


class AuxSets:
    """Sets of layers whose inputs frames want. Programs are recorded for the first of them alone; frames that want
    others run layer by layer, with the same bits.
    """

    def __init__(self) -> None:
        self._sets: set[frozenset[int]] = set()

    def admits(self, layers: Iterable[int]) -> bool:
        """Whether programs are recorded for a set of layers."""
        wanted = frozenset(layers)
        if len(self._sets) < _MOST_AUX_SETS:
            self._sets.add(wanted)
        return wanted in self._sets


class RecordedPrograms:
    """Recorded programs of models over a KV cache's layers, one for each set of step inputs.

    layers: by name. Models and steps that cannot be recorded run layer by layer.
    refusals: number of refused recordings by reason. has_run_program: whether the last `run` ran a program.
    """

    def __init__(self, layers: Mapping[str, BoundLayer]) -> None:
        self._layers = layers
        self._recorded: dict[tuple[object, ...], NativeProgram | None] = {}
        # Layers whose inputs a program gives: those of a pipeline stage's model are a part of the wanted ones.
        self._noted: dict[NativeProgram, tuple[int, ...]] = {}
        self._aux_sets = AuxSets()
        self.refusals: Counter[str] = Counter()
        self.has_run_program = False

    def run(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """Run `inputs.run(...)`: [T, D], or the rows that the context is narrowed to."""
        named = _by_name(inputs)
        aux: frozenset[int] = frozenset() if context.aux is None else context.aux.layers
        scatters = _is_scattered(model, inputs.tokens.shape[0])
        program = None if scatters else self._program(model, _Forward(_shapes(named), aux))
        self.has_run_program = program is not None
        if program is None:
            return inputs.run(model, context)
        in_place = {name: tensor.to(program.inputs[name].dtype).contiguous() for name, tensor in named.items()}
        hidden_TD, *states = program.run(_step_tokens(in_place, context), context.with_inputs(inputs.named))
        if context.aux is not None:
            context.aux.states.update(zip(self._noted[program], states, strict=True))
        return hidden_TD

    def bind_greedy(
        self,
        model: LanguageModel,
        inputs: ModelInputs,
        context: ForwardContext,
        states_before: tuple[int, ...] | None = None,
    ) -> BoundChoices | None:
        """Bind `model.compute_greedy` of the hidden states to these tensors and this context.

        states_before: layers whose inputs are wanted too, ascending, with the last hidden states (`AuxHiddenStates`).
        None for a model without a greedy kernel, or inputs that cannot be read in place.
        """
        named = _by_name(inputs)
        program = self._program(model, _Greedy(_shapes(named), states_before))
        if program is None:
            return None
        for name, tensor in named.items():
            if tensor.dtype is not program.inputs[name].dtype or not tensor.is_contiguous():
                return None
        return program.bind(_step_tokens(named, context), context.with_inputs(inputs.named))

    def describe(self) -> list[str]:
        """Log lines: number of recorded programs, and reasons of refusals."""
        recorded = [program for program in self._recorded.values() if program is not None]
        lines = [f"Recorded programs: {len(recorded)}"] if recorded else []
        if any(program.num_segments > 1 for program in recorded):
            lines.append(f"  in segments: {max(program.num_segments for program in recorded)} at most")
        return lines + [f"Layer by layer ({count} times): {reason}" for reason, count in self.refusals.items()]

    def forget(self) -> None:
        """Drop all programs: models or their weights have changed."""
        self._recorded.clear()
        self._noted.clear()

    def _program(self, model: LanguageModel, what: _Forward | _Greedy) -> NativeProgram | None:
        key = model, what
        if key not in self._recorded:
            if not self._aux_sets.admits(what.aux or ()):
                return None
            self._recorded[key] = self._record(model, what)
        return self._recorded[key]

    def _record(self, model: LanguageModel, what: _Forward | _Greedy) -> NativeProgram | None:
        if NATIVE is None:
            return None
        trace = NATIVE.trace()
        try:
            _refuse_what_is_watched(model)
            output, further, layers = what.trace(trace, model, self._context(trace))
        except Exception as reason:  # a user's model may fail in any way on tensors without values
            logger.debug("The model runs layer by layer: %s", reason)
            self.refusals[str(reason) if isinstance(reason, Untraceable) else repr(reason)] += 1
            return None
        program = NativeProgram(NATIVE, trace, output, further)
        self._noted[program] = layers
        return program

    def _context(self, trace: Trace) -> ForwardContext:
        groups = range(1 + max((bound.group for bound in self._layers.values()), default=-1))
        metadata_of_last = [TracedRequests(group, is_last=True) for group in groups]
        rows_R = trace.last_rows()
        last = LastTokens(rows_R, rows_R, rows_R, rows_R, metadata_of_last)
        return RecordingContext(self._layers, [TracedRequests(group) for group in groups], last, trace=trace)


@dataclass(frozen=True, slots=True)
class RecordingContext(ForwardContext):
    """Forward context of a recording, with traced metadata and without sequences. Opaque operations are noted."""

    trace: Trace = field(kw_only=True)

    def call_opaque(
        self,
        call: Callable[..., Sequence[Tensor]],
        rows: Sequence[Tensor],
        widths: Sequence[int],
        by_library: Callable[..., Sequence[Tensor] | None] | None,
    ) -> Sequence[Tensor]:
        recorded = None if by_library is None else by_library(self, *rows)
        return recorded if recorded is not None else self.trace.call_opaque(call, rows, widths)


@dataclass(frozen=True)
class _Shape:
    """A step input in a program. size: of each token's row; () for a scalar."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]

    def stand_in(self, trace: Trace) -> TracedTensor:
        """Make the traced tensor. Raises Untraceable for an input that no kernel reads."""
        if self.dtype.is_floating_point and len(self.size) == 1:
            return trace.input(self.name, torch.float32, self.size[0])
        if not self.dtype.is_floating_point and not self.size:
            return trace.input(self.name, _DTYPES.get(self.name, self.dtype))
        raise Untraceable(f"the step input {self.name} is {self.dtype} of {list(self.size)} per token")


@dataclass(frozen=True)
class _Forward:
    """A program from step inputs to hidden states. aux: layers whose inputs are wanted too."""

    shapes: tuple[_Shape, ...]
    aux: frozenset[int]

    def trace(
        self, trace: Trace, model: LanguageModel, context: ForwardContext
    ) -> tuple[Cell, list[Cell], tuple[int, ...]]:
        """Trace; returns cells of the results, and the layers of those after the first. Raises Untraceable."""
        aux = AuxHiddenStates(self.aux)
        hidden, _ = _run(trace, model, replace(context, aux=aux), self.shapes)
        return trace.result(hidden), list(_cells(aux)), tuple(aux.states)


@dataclass(frozen=True)
class _Greedy:
    """A program from step inputs to greedy tokens.

    aux: layers whose inputs are wanted too, ascending, with the last hidden states; None for none.
    """

    shapes: tuple[_Shape, ...]
    aux: tuple[int, ...] | None

    def trace(
        self, trace: Trace, model: LanguageModel, context: ForwardContext
    ) -> tuple[None, list[Cell], tuple[int, ...]]:
        """Trace; returns cells of the hidden states, and the layers of those after the first. Raises Untraceable."""
        aux = AuxHiddenStates(self.aux or ())
        hidden, of_rows = _run(trace, model, replace(context, aux=aux), self.shapes)
        wanted = [] if self.aux is None else [trace.result(hidden), *_cells(aux)]
        chosen = model.compute_greedy(hidden, of_rows)
        if [getattr(tensor, "role", None) for tensor in chosen or ()] != [Role.CHOSEN, Role.FAILED]:
            raise Untraceable("the model has no greedy kernel")
        return None, wanted, tuple(aux.states)


def _is_scattered(model: LanguageModel, num_tokens: int) -> bool:
    """Whether the step is sequence parallel between layers; such steps are not recorded."""
    return isinstance(model, CausalLM) and model.is_scattered(num_tokens)


def _cells(aux: AuxHiddenStates) -> Iterator[Cell]:
    return (cell for state in aux.states.values() if (cell := getattr(state, "cell", None)))


def _run(
    trace: Trace, model: LanguageModel, context: ForwardContext, shapes: Sequence[_Shape]
) -> tuple[Tensor, ForwardContext]:
    """Trace the model; returns its hidden states, and the context of their rows."""
    named: dict[str, Tensor] = {shape.name: shape.stand_in(trace) for shape in shapes}
    tokens = named.pop(_TOKEN_IDS) if _TOKEN_IDS in named else named.pop(_EMBEDDINGS)
    positions, hidden = named.pop(_POSITIONS), named.pop(_HIDDEN, None)
    context = context.with_inputs(named)
    return ModelInputs(tokens, positions, hidden=hidden).run(model, context), context


def _by_name(inputs: ModelInputs) -> dict[str, Tensor]:
    tokens = inputs.tokens
    named = {_TOKEN_IDS if tokens.dim() == 1 else _EMBEDDINGS: tokens, _POSITIONS: inputs.positions, **inputs.named}
    if inputs.hidden is not None:
        named[_HIDDEN] = inputs.hidden
    return named


def _shapes(named: Mapping[str, Tensor]) -> tuple[_Shape, ...]:
    return tuple(
        _Shape(name, _DTYPES.get(name, tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in named.items()
    )


def _refuse_what_is_watched(model: LanguageModel) -> None:
    """Raise Untraceable for a model with hooks or instance methods, which a program would skip."""
    if not isinstance(model, nn.Module):
        raise Untraceable("it is not a torch module")
    for module in model.modules():
        # No step calls `load_weights`, which a model that serves has of its own: it begins an update.
        own = (name for name in vars(module) if name != LOAD_WEIGHTS)
        has_methods = any(callable(getattr(type(module), name, None)) for name in own)
        if has_methods or module._forward_hooks or module._forward_pre_hooks:
            raise Untraceable(f"a {type(module).__name__} has a hook, or a method of its own")


def _step_tokens(named: Mapping[str, Tensor], context: ForwardContext) -> StepTokens:
    metadata, last = context.metadata, context.last
    num_rows, rotated_T = named[_POSITIONS].shape[0], named.get(ROTATION_ROWS)
    # KV-cache groups without attention of the library have no tensors that a kernel reads.
    return StepTokens(
        named,
        num_rows,
        num_rows if context.sequences is None else context.sequences.num_actual_tokens,
        [getattr(group, "requests", NO_REQUESTS) for group in metadata],
        None
        if last is None
        else (
            last.rows,
            last.positions if rotated_T is None else last.select(rotated_T),
            last.query_start_loc,
            last.seq_lens,
        ),
    )

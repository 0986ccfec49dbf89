"""Forward context: KV cache and attention metadata of one step, passed to the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from penstock.attention.base import SequenceGeometry
from penstock.attention.row_inputs import RowInputs
from penstock.attention.step import AttentionMetadata, AttentionRows, AttentionStep, LastRows, LayerAttention
from penstock.kernels.paged_attention import VISIBLE_ENDS
from penstock.kernels.rows import sum_rows
from penstock.parallel.scattered_rows import ScatteredRows

_NO_INPUTS = RowInputs()


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """Cache, KV-cache group and backend of a layer.

    backend: a `CacheBackend` of the layer's kind. kv_cache: the layer's view of its pages.
    """

    group: int
    backend: Any
    kv_cache: Tensor


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each request of a step.

    rows: int64 [R], ascending. positions: int64 [R]. query_start_loc: int32 [R + 1], 0 to R. seq_lens: int32 [R].
    metadata: by KV-cache group, of `StepGeometry.of_last_tokens`.
    """

    rows: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    metadata: Sequence[AttentionMetadata]

    def select(self, per_token: Tensor) -> Tensor:
        """Select the rows of these tokens."""
        return per_token.index_select(0, self.rows)


class AuxHiddenStates:
    """Auxiliary hidden states: the residual stream before given layers, of all tokens.

    Layer number num_layers stands for the output of the last layer, before the final norm. states: [T, D] by layer, in
    their order, after the forward pass.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = frozenset(layers)
        self.states: dict[int, Tensor] = {}


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """KV caches, attention metadata and step inputs of one forward pass, for the rows that a layer gets.

    Every layer of a model takes one: that of all tokens before the last attention, the narrowed one after it, and that
    of its own rows alone where a layer, such as an expert, gets fewer.

    layers: by layer name; the same in every step.
    metadata: by KV-cache group; this step's.
    sequences: the step's, for layers without a KV cache; None while a program is recorded.
    last: narrows the output to these tokens. Everything after the last attention has their rows only, [R, ...], and
    that attention runs with them only.
    aux: records auxiliary hidden states.
    rows: set by a decoder for its layers under sequence parallelism.
    inputs: named step inputs beside token ids and positions, of these rows (`input`).
    """

    layers: Mapping[str, BoundLayer] = field(default_factory=dict)
    metadata: Sequence[AttentionMetadata] = ()
    last: LastTokens | None = None
    aux: AuxHiddenStates | None = None
    rows: ScatteredRows | None = None
    inputs: RowInputs = _NO_INPUTS
    sequences: SequenceGeometry | None = None

    def with_inputs(self, named: Mapping[str, Tensor]) -> ForwardContext:
        """The context with these step inputs, a row per token each."""
        if not named:
            return self
        inputs = RowInputs(named)
        return replace(self, inputs=inputs if self.last is None else inputs.of_rows(self.last.select))

    def input(self, name: str) -> Tensor | None:
        """A named step input of the rows that the layer gets, [rows, ...]; None in a step without it."""
        return self.inputs.get(name)

    def of_rows(self, select: Callable[[Tensor], Tensor]) -> ForwardContext:
        """The context of a layer without attention that gets the rows that `select` takes from a tensor of these."""
        return NO_CONTEXT if self.inputs.is_empty else ForwardContext(inputs=self.inputs.of_rows(select))

    def note_hidden(self, layer: int, hidden_TD: Tensor, residual_TD: Tensor | None) -> None:
        """Record aux hidden states; called before each layer and after the last.

        The layer's input is the sum of both.
        """
        if self.aux is not None and layer in self.aux.layers:
            self.aux.states[layer] = self.whole(sum_rows(hidden_TD, residual_TD))

    def of_all_tokens(self) -> ForwardContext:
        """The context of a layer before the last one, which needs the hidden states of all tokens."""
        return self if self.last is None else replace(self, last=None, inputs=self.inputs.of_all_tokens)

    def by_layer(self, num_layers: int) -> list[ForwardContext]:
        """The context of each layer of a model: only the last one is narrowed."""
        return [self.of_all_tokens()] * (num_layers - 1) + [self]

    def narrowed(self, per_token: Tensor) -> Tensor:
        """Narrow a tensor with a row per token of the step to the rows that this context is narrowed to, if it is."""
        return per_token if self.last is None else self.last.select(self.whole(per_token))

    @property
    def output_rows(self) -> ScatteredRows | None:
        """Sequence-parallel layout of a layer's output rows; None where they are those of last tokens."""
        return self.rows if self.last is None else None

    def whole(self, hidden_TD: Tensor) -> Tensor:
        """Gather the rows of all tokens from all ranks, between layers."""
        return hidden_TD if self.rows is None else self.rows.whole(hidden_TD)

    def opaque(
        self,
        function: Callable[..., Sequence[Tensor]],
        *rows: Tensor,
        widths: Sequence[int],
        by_library: Callable[..., Sequence[Tensor] | None] | None = None,
    ) -> Sequence[Tensor]:
        """Call a declared opaque operation: `function(context, *rows)` returns rows of these widths, [T, width] each.

        A recorded program pauses for the call. Layers whose computation has no kernel in the library use it; a model
        with an undeclared one runs without a program. Raises ValueError without rows, and where results differ from
        the declaration in number, shape or dtype.

        by_library: called likewise, gives the same bits by operations of the C++ library that only programs have; None
        where one of them is missing.
        """
        if not rows:
            raise ValueError(f"opaque operation {function}: pass it at least one tensor of rows, [T, width].")
        call = partial(_call, function, tuple(widths), asks_for_last=self.last is not None)
        return self.call_opaque(call, rows, widths, by_library)

    def call_opaque(
        self,
        call: Callable[..., Sequence[Tensor]],
        rows: Sequence[Tensor],
        widths: Sequence[int],
        by_library: Callable[..., Sequence[Tensor] | None] | None,
    ) -> Sequence[Tensor]:
        """Run a checked opaque operation, `call(context, *rows)`.

        Where a program is recorded, `by_library` is called instead, or the operation is noted.
        """
        return call(self, *rows)

    def cache_of(self, name: str) -> tuple[Tensor, AttentionMetadata]:
        """Return a layer's cache, and its group's metadata of this step."""
        bound = self.layers[name]
        return bound.kv_cache, self.metadata[bound.group]

    def attend(self, layer: LayerAttention, rows: AttentionRows) -> Tensor:
        """Attention of one layer (`AttentionBackend.run`): [T, H, D] from heads, [T, H * D] from a projection.

        R rows where the context is narrowed to last tokens.
        """
        bound, last = self.layers[layer.name], self.last
        narrowed = None if last is None else LastRows(last.rows, last.metadata[bound.group])
        ends = self.input(VISIBLE_ENDS) if last is None else None
        step = AttentionStep(layer, rows, bound.kv_cache, self.metadata[bound.group], narrowed, ends)
        return bound.backend.run(step)  # type: ignore[no-any-return]

    def read_cache(self, layer: LayerAttention, query_TX: Tensor) -> Tensor:
        """Attention of a layer to what the cache holds already (`AttentionBackend.read`): [T, H * D]."""
        bound = self.layers[layer.name]
        step = AttentionStep(layer, None, bound.kv_cache, self.metadata[bound.group])
        return bound.backend.read(step, query_TX)  # type: ignore[no-any-return]

    def recorded_read(self, layer: LayerAttention, query_TX: Tensor) -> Tensor | None:
        """Record `read_cache` in a program; None where the library has no operation for it."""
        bound = self.layers[layer.name]
        step = AttentionStep(layer, None, bound.kv_cache, self.metadata[bound.group])
        return bound.backend.recorded_read(step, query_TX)  # type: ignore[no-any-return]


# Context of rows without a KV cache and step inputs.
NO_CONTEXT = ForwardContext()


def _call(
    function: Callable[..., Sequence[Tensor]],
    widths: tuple[int, ...],
    context: ForwardContext,
    *rows: Tensor,
    asks_for_last: bool,
) -> Sequence[Tensor]:
    """Call an opaque operation of a layer and check its results.

    asks_for_last: the layer is the last one, after which only last tokens go on.
    """
    results = function(context if asks_for_last else context.of_all_tokens(), *rows)
    dtype, expected = rows[0].dtype, [(len(rows[0]), width) for width in widths]
    if [tuple(x.shape) for x in results] != expected or any(x.dtype is not dtype for x in results):
        found = ", ".join(f"{list(x.shape)} {x.dtype}" for x in results) or "nothing"
        wanted = ", ".join(f"{list(shape)} {dtype}" for shape in expected) or "nothing"
        raise ValueError(f"opaque operation {function} returned {found}; declared are {wanted}.")
    return results

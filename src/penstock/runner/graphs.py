"""CUDA graphs of steps: the kernels of a forward pass, launched by one call.

In a uniform step all requests have equally many tokens: one each in a decode step, and one more per draft where drafts
are verified. A graph is captured for a padded number of requests, and its kernels read persistent tensors only, so it
runs every step of that size. Mixed steps are padded to a number of tokens, and run in pieces or as whole graphs, whose
attention takes any lengths. Launching the kernels one by one would take longer than running them.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from penstock.attention import AuxHiddenStates, ForwardContext
from penstock.device import Device
from penstock.kernels.sampling import ChosenTokens, greedy_tokens
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.observability.units import format_bytes
from penstock.runner.batch_layout import BatchPlan
from penstock.runner.executables import (
    FIRST_OF_SIZE,
    LAYERS,
    MIXED,
    PIECES,
    UNIFORM,
    Executable,
    ForwardExecutable,
)
from penstock.runner.frame import Frame
from penstock.runner.pieces import Between, PieceBuffers, PieceContext, Pieces, addresses

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class _Graph:
    """A graph, and the result of its work, in the graph's memory. replay: None until it is captured.

    pieces: state of a graph in pieces; None for others.
    """

    has_run: bool = False
    replay: Callable[[], None] | None = None
    result: Any = None
    pieces: Pieces | None = None


class GraphExecutable(ForwardExecutable):
    """Runs steps as CUDA graphs, and layer by layer where they fit none.

    A graph is captured when its size is met for the second time: the first run compiles kernels. sizes: padded numbers
    of requests, ascending; larger steps run layer by layer. max_query_len: tokens of a request in the longest uniform
    step. max_num_tokens: limit of a padded step. token_sizes: padded numbers of tokens of mixed steps, which run in
    pieces (`runner.pieces`) or, with `most_rows`, as whole graphs; none by default. most_rows: rows of a mixed step's
    whole graph, one more than the requests of a step; None for pieces. is_capturable: whether the KV cache's backends
    are. num_replays: replays of graphs, of the model and of a drafter. num_runs: runs by kind, of the model and of a
    drafter. refusals: number of sizes that could not be captured, by reason.
    """

    def __init__(
        self,
        device: Device,
        sizes: Sequence[int],
        *,
        is_capturable: bool,
        max_query_len: int = 1,
        max_num_tokens: int | None = None,
        token_sizes: Sequence[int] = (),
        most_rows: int | None = None,
    ) -> None:
        self._device = device
        self.sizes: list[int] = sorted(sizes) if is_capturable else []
        self.whole_block_tables = is_capturable
        self._max_query_len = max_query_len
        self._max_num_tokens = max_num_tokens or max(sizes, default=0) * max_query_len
        self._graphs: dict[Hashable, _Graph] = {}
        self.token_sizes: list[int] = sorted(token_sizes)
        self._pieces = PieceBuffers(max(token_sizes, default=0))
        self.most_rows = most_rows
        self.num_replays = 0
        self.num_runs: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Pad a uniform step to the next captured size, and another one to the next number of tokens."""
        plan = self._plan_uniform(num_scheduled_tokens)
        if plan.num_tokens_padded > plan.num_tokens or plan.num_tokens <= plan.num_reqs:
            return plan
        if plan.num_reqs in self.sizes and self._is_uniform(num_scheduled_tokens):
            return plan
        index = bisect.bisect_left(self.token_sizes, plan.num_tokens)
        if index == len(self.token_sizes):
            return plan
        size = self.token_sizes[index]
        if self.most_rows is None:
            return plan._replace(num_tokens_padded=size)
        # More rows than requests, since padding tokens belong to a padding row.
        rows = min(size, self.most_rows)
        return plan._replace(num_tokens_padded=size, num_reqs_padded=rows, most_tokens_of_request=size)

    def _is_uniform(self, num_scheduled_tokens: Mapping[str, int]) -> bool:
        counts = set(num_scheduled_tokens.values())
        return len(counts) == 1 and max(counts) <= self._max_query_len

    def _plan_uniform(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        plan = BatchPlan.without_padding(num_scheduled_tokens)
        query_len = plan.num_tokens // max(1, plan.num_reqs)
        if not 1 <= query_len <= self._max_query_len:
            return plan
        if query_len > 1 and any(count != query_len for count in num_scheduled_tokens.values()):
            return plan
        if query_len == 1 and plan.num_tokens != plan.num_reqs:
            return plan
        size = self.padded_size(plan.num_reqs)
        if size is None or size * query_len > self._max_num_tokens:
            return plan
        return plan._replace(num_tokens_padded=size * query_len, num_reqs_padded=size)

    def padded_size(self, num_reqs: int) -> int | None:
        """Return the captured size for so many requests; None where there is none."""
        index = bisect.bisect_left(self.sizes, num_reqs)
        return None if index == len(self.sizes) else self.sizes[index]

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return inputs.run(model, context)

    def choose(self, frame: Frame) -> Executable:
        """Return the graph of a uniform frame that wants its logits rows."""
        wants, layout = frame.wants, frame.batch.layout
        plan = layout.plan
        is_uniform = 0 < plan.num_tokens == plan.num_reqs * layout.max_query_len
        is_padded = plan.num_tokens_padded == plan.num_reqs_padded * layout.max_query_len
        if not (is_uniform and is_padded and plan.num_reqs_padded in self.sizes):
            return self._choose_mixed(frame)
        if layout.max_query_len > self._max_query_len or frame.context.last is not None:
            return self
        if frame.inputs.hidden is not None or not wants.logits_rows or wants.prompt_rows is not None:
            return self
        shape = plan.num_reqs_padded, plan.num_tokens_padded
        return FrameGraph(self, (shape, wants.greedy, wants.all_rows, tuple(wants.aux_layers), _addresses(frame)))

    def _choose_mixed(self, frame: Frame) -> Executable:
        wants, plan = frame.wants, frame.batch.layout.plan
        if plan.num_tokens_padded not in self.token_sizes or plan.num_tokens <= plan.num_reqs:
            return self
        if frame.inputs.hidden is not None or wants.prompt_rows is not None:
            return self
        if self.most_rows is not None:
            return MixedGraph(self, (plan.num_tokens_padded, tuple(wants.aux_layers), _addresses(frame)))
        inputs = frame.inputs.tokens, frame.inputs.positions, *frame.inputs.named.values()
        return FramePieces(self, (plan.num_tokens_padded, tuple(wants.aux_layers), addresses(inputs)))

    def run_pieces(self, key: Hashable, frame: Frame) -> _Outputs | None:
        """Replay the pieces of a frame's forward pass; None where they are not captured."""
        graph = self._graphs.setdefault(key, _Graph())
        if graph.replay is None:
            if not graph.has_run or not self.token_sizes:
                graph.has_run = True
                return None
            graph.pieces = pieces = Pieces(self._pieces)

            def work(between: Between) -> None:
                pieces.between = between
                graph.result = _hidden(frame, PieceContext.of(frame.context, pieces))

            graph.replay = self._try_to_capture(self._device.capture_pieces, work, self.token_sizes)
            if graph.replay is None:
                return None
        assert graph.pieces is not None, "a graph in pieces has their state"
        graph.pieces.step = frame.context.of_all_tokens()
        graph.replay()
        graph.pieces.step = None
        self.note_replay(PIECES)
        outputs: _Outputs = graph.result
        return outputs

    def repeat(self, key: Hashable, work: Callable[[], T], kind: str = UNIFORM) -> T:
        sizes = self.token_sizes if kind == MIXED else self.sizes
        graph = self._graphs.setdefault(key, _Graph()) if sizes else _Graph()
        if graph.replay is None and graph.has_run:
            graph.replay = self._capture(graph, work, sizes)
        if graph.replay is None:
            graph.has_run = True
            self.note_run(FIRST_OF_SIZE if sizes else LAYERS)
            return work()
        graph.replay()
        self.note_replay(kind)
        result: T = graph.result
        return result

    def note_run(self, kind: str) -> None:
        self.num_runs[kind] += 1

    def note_replay(self, kind: str) -> None:
        """Count a replay of a graph."""
        self.num_replays += 1
        self.num_runs[kind] += 1

    def run(self, frame: Frame, kind: str = LAYERS) -> None:
        if frame.step_id >= 0:
            self.note_run(kind)
        super().run(frame)

    def describe(self) -> list[str]:
        """Log lines: runs by kind, the memory of the graphs, and reasons of refusals."""
        runs = ", ".join(f"{count} {kind}" for kind, count in sorted(self.num_runs.items()))
        captured = sum(graph.replay is not None for graph in self._graphs.values())
        size = format_bytes(self._device.graph_bytes() + self._pieces.size_bytes)
        lines = [f"Runs: {runs or 'none'}", f"CUDA graphs: {captured}, {size} with the buffers between their pieces"]
        return lines + [f"Not captured ({count} sizes): {reason}" for reason, count in self.refusals.items()]

    def rehearse_pieces(self, frame: Frame) -> int:
        """Run a frame in pieces without a capture. Returns the bytes of the buffers that it leaves."""
        pieces = Pieces(self._pieces)
        pieces.step = frame.context.of_all_tokens()

        def run_at_once(call: Callable[[], object]) -> None:
            call()

        pieces.between = run_at_once
        _hidden(frame, PieceContext.of(frame.context, pieces))
        return self._pieces.size_bytes

    def forget(self) -> None:
        self._graphs.clear()

    def _capture(self, graph: _Graph, work: Callable[[], object], sizes: list[int]) -> Callable[[], None] | None:
        """Capture a graph; None where the model cannot be captured."""

        def keep_result() -> None:
            graph.result = work()

        return self._try_to_capture(self._device.capture, keep_result, sizes)

    def _try_to_capture(
        self, capture: Callable[[T], Callable[[], None]], work: T, sizes: list[int]
    ) -> Callable[[], None] | None:
        try:
            return capture(work)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self.refusals[reason] += 1
            steps = "Decode steps" if sizes is self.sizes else "Mixed steps"
            logger.warning("%s run layer by layer: they cannot be captured in a CUDA graph: %s", steps, reason)
            # The next size would fail as well.
            sizes.clear()
            return None


@dataclass(slots=True)
class _Outputs:
    """Results of a forward pass, of all tokens with padding. hidden: None where only greedy tokens are wanted."""

    hidden: Tensor | None = None
    chosen: ChosenTokens | None = None
    aux: Sequence[Tensor] = field(default_factory=list)


class FrameGraph(Executable):
    """The graph of a frame's sizes, outputs and tensors, from token ids to hidden states or greedy tokens."""

    kind = "CUDA graph"

    def __init__(self, graphs: GraphExecutable, key: Hashable) -> None:
        self._graphs = graphs
        self._key = key

    def run(self, frame: Frame) -> None:
        layout, outputs = frame.batch.layout, self._graphs.repeat(self._key, lambda: _forward(frame))
        frame.aux = [*frame.aux_received, *outputs.aux]
        frame.all_hidden = outputs.hidden if frame.wants.all_rows else None
        frame.hidden = frame.chosen = None
        if outputs.chosen is not None:
            token_ids, has_failed = outputs.chosen
            frame.chosen = ChosenTokens(layout.of_logits_rows(token_ids), layout.of_logits_rows(has_failed))
        elif outputs.hidden is not None:
            frame.hidden = layout.of_logits_rows(outputs.hidden)


class MixedGraph(Executable):
    """The whole graph of a mixed frame's padded sizes; logits rows and greedy tokens are computed after it."""

    kind = "CUDA graph of a mixed step"

    def __init__(self, graphs: GraphExecutable, key: Hashable) -> None:
        self._graphs = graphs
        self._key = key

    def run(self, frame: Frame) -> None:
        outputs = self._graphs.repeat(self._key, lambda: _hidden(frame, frame.context.of_all_tokens()), MIXED)
        assert outputs.hidden is not None, "a mixed frame's graph gives hidden states"
        self._graphs.take_outputs(frame, outputs.hidden, outputs.aux)


class FramePieces(Executable):
    """The pieces of a frame's number of tokens; logits rows and greedy tokens are computed after them."""

    kind = "CUDA graphs in pieces"

    def __init__(self, graphs: GraphExecutable, key: Hashable) -> None:
        self._graphs = graphs
        self._key = key

    def run(self, frame: Frame) -> None:
        outputs = self._graphs.run_pieces(self._key, frame)
        if outputs is None or outputs.hidden is None:
            self._graphs.run(frame, FIRST_OF_SIZE if self._graphs.token_sizes else LAYERS)
        else:
            self._graphs.take_outputs(frame, outputs.hidden, outputs.aux)


def _hidden(frame: Frame, context: ForwardContext) -> _Outputs:
    """Run the forward pass of a frame in this context."""
    outputs = _Outputs()
    if frame.wants.aux_layers:
        aux = AuxHiddenStates(frame.wants.aux_layers)
        context, outputs.aux = replace(context, aux=aux), aux.states
    outputs.hidden = frame.inputs.run(frame.model, context)
    return outputs


def _forward(frame: Frame) -> _Outputs:
    """Run a frame from token ids to greedy tokens or hidden states, or both."""
    model, wants, outputs = frame.model, frame.wants, _hidden(frame, frame.context)
    assert outputs.hidden is not None, "the forward pass gives hidden states"
    if wants.greedy:
        chosen = model.compute_greedy(outputs.hidden)
        outputs.chosen = greedy_tokens(model.compute_logits(outputs.hidden)) if chosen is None else chosen
        if not wants.all_rows:
            outputs.hidden = None
    return outputs


def _addresses(frame: Frame) -> tuple[int, ...]:
    """Addresses of the tensors that the kernels read."""
    inputs = frame.inputs
    tensors = [inputs.tokens, inputs.positions, *inputs.named.values()]
    for geometry in frame.batch.geometry:
        tensors += [geometry.seq_lens, geometry.block_table, geometry.slot_mapping, geometry.query_start_loc]
    return addresses(tensors)

"""CUDA graphs of uniform steps: the kernels of a forward pass, launched by one call.

In a uniform step all requests have equally many tokens: one each in a decode step, and one more per draft where drafts
are verified. A graph is captured for a padded number of requests, and its kernels read persistent tensors only, so it
runs every step of that size. Launching the kernels one by one would take longer than running them.
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
from penstock.runner.batch_layout import BatchPlan
from penstock.runner.executables import Executable, ForwardExecutable
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
    """Runs uniform steps as CUDA graphs, and others layer by layer.

    A graph is captured when its size is met for the second time: the first run compiles kernels. sizes: padded numbers
    of requests, ascending; larger steps run layer by layer. max_query_len: tokens of a request in the longest uniform
    step. max_num_tokens: limit of a padded step. token_sizes: padded numbers of tokens of other steps that run in
    pieces (`runner.pieces`); none by default. is_capturable: whether the KV cache's backends are. num_replays:
    replays of graphs, of the model and of a drafter. refusals: number of sizes that could not be captured, by reason.
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
    ) -> None:
        self._device = device
        self.sizes: list[int] = sorted(sizes) if is_capturable else []
        self.whole_block_tables = is_capturable
        self._max_query_len = max_query_len
        self._max_num_tokens = max_num_tokens or max(sizes, default=0) * max_query_len
        self._graphs: dict[Hashable, _Graph] = {}
        self.token_sizes: list[int] = sorted(token_sizes)
        self._pieces = PieceBuffers(max(token_sizes, default=0))
        self.num_replays = 0
        self.refusals: Counter[str] = Counter()

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Pad a uniform step to the next captured size, and another one to the next number of tokens."""
        plan = self._plan_uniform(num_scheduled_tokens)
        if plan.num_tokens_padded > plan.num_tokens or plan.num_tokens <= plan.num_reqs:
            return plan
        if plan.num_reqs in self.sizes and self._is_uniform(num_scheduled_tokens):
            return plan
        index = bisect.bisect_left(self.token_sizes, plan.num_tokens)
        return plan if index == len(self.token_sizes) else plan._replace(num_tokens_padded=self.token_sizes[index])

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
            return self._choose_pieces(frame)
        if layout.max_query_len > self._max_query_len or frame.context.last is not None:
            return self
        if frame.inputs.hidden is not None or not wants.logits_rows or wants.prompt_rows is not None:
            return self
        shape = plan.num_reqs_padded, plan.num_tokens_padded
        return FrameGraph(self, (shape, wants.greedy, wants.all_rows, tuple(wants.aux_layers), _addresses(frame)))

    def _choose_pieces(self, frame: Frame) -> Executable:
        wants, plan = frame.wants, frame.batch.layout.plan
        if plan.num_tokens_padded not in self.token_sizes or plan.num_tokens <= plan.num_reqs:
            return self
        if frame.inputs.hidden is not None or wants.prompt_rows is not None:
            return self
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
                graph.result = _hidden_in_pieces(frame, pieces)

            graph.replay = self._try_to_capture(self._device.capture_pieces, work, self.token_sizes)
            if graph.replay is None:
                return None
        assert graph.pieces is not None, "a graph in pieces has their state"
        graph.pieces.step = frame.context.of_all_tokens()
        graph.replay()
        graph.pieces.step = None
        self.num_replays += 1
        outputs: _Outputs = graph.result
        return outputs

    def repeat(self, key: Hashable, work: Callable[[], T]) -> T:
        if not self.sizes:
            return work()
        graph = self._graphs.setdefault(key, _Graph())
        if graph.replay is None:
            if not graph.has_run:
                graph.has_run = True
                return work()
            graph.replay = self._capture(graph, work)
            if graph.replay is None:
                return work()
        graph.replay()
        self.num_replays += 1
        result: T = graph.result
        return result

    def forget(self) -> None:
        self._graphs.clear()

    def _capture(self, graph: _Graph, work: Callable[[], object]) -> Callable[[], None] | None:
        """Capture a graph; None where the model cannot be captured."""

        def keep_result() -> None:
            graph.result = work()

        return self._try_to_capture(self._device.capture, keep_result, self.sizes)

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


class FramePieces(Executable):
    """The pieces of a frame's number of tokens; logits rows and greedy tokens are computed after them."""

    kind = "CUDA graphs in pieces"

    def __init__(self, graphs: GraphExecutable, key: Hashable) -> None:
        self._graphs = graphs
        self._key = key

    def run(self, frame: Frame) -> None:
        outputs = self._graphs.run_pieces(self._key, frame)
        if outputs is None or outputs.hidden is None:
            self._graphs.run(frame)
        else:
            self._graphs.take_outputs(frame, outputs.hidden, outputs.aux)


def _hidden_in_pieces(frame: Frame, pieces: Pieces) -> _Outputs:
    outputs, context = _Outputs(), PieceContext.of(frame.context, pieces)
    if frame.wants.aux_layers:
        aux = AuxHiddenStates(frame.wants.aux_layers)
        context, outputs.aux = replace(context, aux=aux), aux.states
    outputs.hidden = frame.inputs.run(frame.model, context)
    return outputs


def _forward(frame: Frame) -> _Outputs:
    model, wants, outputs = frame.model, frame.wants, _Outputs()
    context = frame.context
    if wants.aux_layers:
        aux = AuxHiddenStates(wants.aux_layers)
        context, outputs.aux = replace(context, aux=aux), aux.states
    hidden = frame.inputs.run(model, context)
    if wants.greedy:
        chosen = model.compute_greedy(hidden)
        outputs.chosen = greedy_tokens(model.compute_logits(hidden)) if chosen is None else chosen
    if wants.all_rows or not wants.greedy:
        outputs.hidden = hidden
    return outputs


def _addresses(frame: Frame) -> tuple[int, ...]:
    """Addresses of the tensors that the kernels read."""
    inputs = frame.inputs
    tensors = [inputs.tokens, inputs.positions, *inputs.named.values()]
    for geometry in frame.batch.geometry:
        tensors += [geometry.seq_lens, geometry.block_table, geometry.slot_mapping, geometry.query_start_loc]
    return addresses(tensors)

"""Execution by CUDA graphs: the kernels of a forward pass, launched by one call.

In a uniform step all requests have equally many tokens: one each in a decode step, and one more per draft where drafts
are verified. A graph is captured for a padded number of requests, and its kernels read persistent tensors only, so it
runs every step of that size. Mixed steps are padded to a number of tokens, and run in pieces or as whole graphs, whose
attention takes any lengths. Launching the kernels one by one would take longer than running them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from penstock.attention import AuxHiddenStates, ForwardContext
from penstock.device import Device
from penstock.kernels.sampling import ChosenTokens
from penstock.models.interface import LanguageModel, ModelInputs, choose_greedy
from penstock.observability.units import format_bytes
from penstock.runner.build.padding import Padding
from penstock.runner.execute.execution import (
    DRAFTS,
    FIRST_OF_SIZE,
    LAYERS,
    MIXED,
    PIECES,
    UNIFORM,
    Description,
    Execution,
    run_forward,
    take_outputs,
    take_rows,
)
from penstock.runner.execute.pieces import Between, PieceBuffers, PieceContext, Pieces, addresses
from penstock.step.frame import Frame, RowOutput

logger = logging.getLogger(__name__)
T = TypeVar("T")

_STEPS = {UNIFORM: "Decode steps", DRAFTS: "Draft steps"}


@dataclass(slots=True)
class _Graph:
    """A graph, and the result of its work, in the graph's memory.

    replay: None until it is captured. is_refused: it cannot be captured. pieces: state of a graph in pieces; None for
    others.
    """

    has_run: bool = False
    is_refused: bool = False
    replay: Callable[[], None] | None = None
    result: Any = None
    pieces: Pieces | None = None


class GraphExecution(Execution):
    """Runs steps as CUDA graphs, and layer by layer where they fit none.

    A graph is captured when its key, a step's sizes, tensors and wanted outputs, is met for the second time: the first
    run compiles kernels. A key whose capture is refused runs layer by layer from then on, and so do frames that want
    the inputs of other layers than `aux_layers`: a graph keeps its outputs, and the memory plan has no others.
    padding: the sizes that steps are padded to. num_replays: replays of graphs. num_runs: runs by kind. refusals:
    number of graphs that could not be captured, by reason. All are of the model and of a drafter.
    """

    def __init__(self, device: Device, padding: Padding, aux_layers: Sequence[int] = ()) -> None:
        self._device = device
        self._padding = padding
        self._uniform_sizes, self._token_sizes = frozenset(padding.sizes), frozenset(padding.token_sizes)
        self._graphs: dict[Hashable, _Graph] = {}
        self._aux_layers = tuple(aux_layers)
        self._buffers = PieceBuffers(max(padding.token_sizes, default=0))
        self.num_replays = 0
        self.num_runs: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def run(self, frame: Frame) -> str:
        way = frame.way
        if way is None:
            way = frame.way = self._choose(frame)
        return way(frame)

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return inputs.run(model, context)

    def compute(self, work: Callable[[], T], kind: str | None = None, key: Hashable = None) -> T:
        if kind is None or key is None:
            if kind is not None:
                self.num_runs[kind] += 1
            return work()
        graph = self._graphs.setdefault(key, _Graph())
        if graph.has_run and graph.replay is None and not graph.is_refused:
            self._capture(graph, self._device.capture, partial(_keep_result, graph, work), kind)
        if graph.replay is None:
            self._count_layers(graph)
            return work()
        graph.replay()
        self._count_replay(kind)
        result: T = graph.result
        return result

    def describe(self) -> Description:
        """Describe the runs by kind, the memory of the graphs, and reasons of refusals."""
        runs = ", ".join(f"{count} {kind}" for kind, count in sorted(self.num_runs.items()))
        captured = sum(graph.replay is not None for graph in self._graphs.values())
        size = format_bytes(self._device.graph_bytes() + self._buffers.size_bytes)
        lines = [f"Runs: {runs or 'none'}", f"CUDA graphs: {captured}, {size} with the buffers between their pieces"]
        lines += [f"Not captured ({count} graphs): {reason}" for reason, count in self.refusals.items()]
        return Description(lines, Counter(self.num_runs))

    def forget(self) -> None:
        self._graphs.clear()

    def _choose(self, frame: Frame) -> Callable[[Frame], str]:
        """The graph of the frame's padded sizes, outputs and tensors, if it has one."""
        wants, layout, inputs = frame.wants, frame.batch.layout, frame.inputs
        plan = layout.plan
        has_others = tuple(wants.aux_layers) != self._aux_layers
        if inputs.hidden is not None or wants.prompt_rows is not None or has_others:
            return self._run_layers
        is_uniform = 0 < plan.num_tokens == plan.num_reqs * layout.max_query_len
        is_padded = plan.num_tokens_padded == plan.num_reqs_padded * layout.max_query_len
        if is_uniform and is_padded and plan.num_reqs_padded in self._uniform_sizes:
            if frame.context.last is not None or wants.row_output is None:
                return self._run_layers
            shape = plan.num_reqs_padded, plan.num_tokens_padded
            is_greedy = wants.row_output is RowOutput.GREEDY
            return partial(self._run_uniform, (shape, is_greedy, wants.all_rows, _addresses(frame)))
        if plan.num_tokens_padded not in self._token_sizes or plan.num_tokens <= plan.num_reqs:
            return self._run_layers
        if self._padding.most_rows is not None:
            return partial(self._run_mixed, (plan.num_tokens_padded, _addresses(frame)))
        tensors = addresses((inputs.tokens, inputs.positions, *inputs.named.values()))
        return partial(self._run_pieces, (plan.num_tokens_padded, tensors))

    def _run_layers(self, frame: Frame, kind: str = LAYERS) -> str:
        if frame.step_id >= 0:
            self.num_runs[kind] += 1
        run_forward(frame, self.forward)
        return "eager"

    def _run_uniform(self, key: Hashable, frame: Frame) -> str:
        """Run from token ids to greedy tokens, or to hidden states, whose logits are computed after the graph."""
        layout, outputs = frame.batch.layout, self.compute(partial(_forward, frame), UNIFORM, key)
        frame.aux = {**frame.aux_received, **outputs.aux}
        frame.all_hidden = outputs.hidden if frame.wants.all_rows else None
        if outputs.chosen is not None:
            token_ids, has_failed = outputs.chosen
            frame.chosen = ChosenTokens(layout.of_logits_rows(token_ids), layout.of_logits_rows(has_failed))
        elif outputs.hidden is not None:
            take_rows(frame, layout.of_logits_rows(outputs.hidden))
        return "CUDA graph"

    def _run_mixed(self, key: Hashable, frame: Frame) -> str:
        """Run to hidden states; logits rows and greedy tokens are computed after the graph."""
        outputs = self.compute(lambda: _hidden(frame, frame.context.of_all_tokens()), MIXED, key)
        assert outputs.hidden is not None, "a mixed frame's graph gives hidden states"
        take_outputs(frame, outputs.hidden, outputs.aux)
        return "CUDA graph of a mixed step"

    def _run_pieces(self, key: Hashable, frame: Frame) -> str:
        """Run to hidden states in pieces; logits rows and greedy tokens are computed after them."""
        graph = self._graphs.setdefault(key, _Graph())
        if graph.has_run and graph.replay is None and not graph.is_refused:
            graph.pieces = pieces = Pieces(self._buffers)
            work = partial(_run_in_pieces, frame, pieces)
            self._capture(graph, self._device.capture_pieces, partial(_keep_result, graph, work), PIECES)
        if graph.replay is None:
            kind = LAYERS if graph.is_refused else FIRST_OF_SIZE
            graph.has_run = True
            return self._run_layers(frame, kind)
        assert graph.pieces is not None, "a graph in pieces has their state"
        graph.pieces.step = _step_of_pieces(frame)
        graph.replay()
        graph.pieces.step = None
        self._count_replay(PIECES)
        take_outputs(frame, graph.result.hidden, graph.result.aux)
        return "CUDA graphs in pieces"

    def _count_layers(self, graph: _Graph) -> None:
        self.num_runs[LAYERS if graph.is_refused else FIRST_OF_SIZE] += 1
        graph.has_run = True

    def _count_replay(self, kind: str) -> None:
        self.num_replays += 1
        self.num_runs[kind] += 1

    def _capture(
        self, graph: _Graph, capture: Callable[[Callable[..., None]], Callable[[], None]], work: Any, kind: str
    ) -> None:
        """Capture a graph, or mark it as refused."""
        try:
            graph.replay = capture(work)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            graph.is_refused = True
            if not self.refusals[reason]:
                steps = _STEPS.get(kind, "Mixed steps")
                logger.warning(
                    "%s of some sizes run layer by layer: they cannot be captured in a CUDA graph: %s", steps, reason
                )
            self.refusals[reason] += 1


def rehearse_pieces(frame: Frame, num_tokens: int) -> int:
    """Run a frame in pieces without a capture. Returns the bytes of the buffers between them, of so many tokens."""
    pieces = Pieces(PieceBuffers(num_tokens))
    pieces.step = _step_of_pieces(frame)

    def run_at_once(call: Callable[[], object]) -> None:
        call()

    _run_in_pieces(frame, pieces, run_at_once)
    return pieces.buffers.size_bytes


@dataclass(slots=True)
class _Outputs:
    """Results of a forward pass, of all tokens with padding. hidden: None where only greedy tokens are wanted."""

    hidden: Tensor | None = None
    chosen: ChosenTokens | None = None
    aux: Mapping[int, Tensor] = field(default_factory=dict)


def _keep_result(graph: _Graph, work: Callable[..., object], *arguments: object) -> None:
    graph.result = work(*arguments)


def _step_of_pieces(frame: Frame) -> ForwardContext:
    """Context of attention between pieces: of all tokens, with the step's inputs."""
    return frame.context.of_all_tokens().with_inputs(frame.inputs.named)


def _run_in_pieces(frame: Frame, pieces: Pieces, between: Between) -> _Outputs:
    pieces.between = between
    return _hidden(frame, PieceContext.of(frame.context, pieces))


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
    if wants.row_output is RowOutput.GREEDY:
        # All tokens of a uniform step are logits rows.
        outputs.chosen = choose_greedy(model, outputs.hidden, frame.inputs.head_context)
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

"""CUDA graphs of decode steps: the kernels of a forward pass, launched by one call.

A graph is captured for a padded number of requests, and its kernels read persistent tensors only, so it runs every
decode step of that size. Launching the kernels one by one would take longer than running them.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.attention import ForwardContext
from penstock.device import Device
from penstock.kernels.sampling import ChosenTokens, greedy_tokens
from penstock.models.interface import LanguageModel, ModelInputs
from penstock.runner.batch_layout import BatchPlan
from penstock.runner.executables import Executable, ForwardExecutable
from penstock.runner.frame import Frame

logger = logging.getLogger(__name__)


def default_capture_sizes(max_num_reqs: int) -> list[int]:
    """Padded numbers of requests: 1, 2, 4, then multiples of 8 to 256, then of 16, up to `max_num_reqs`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_reqs + 1, 16), max_num_reqs]
    return sorted({size for size in sizes if size <= max_num_reqs})


class GraphExecutable(ForwardExecutable):
    """Runs decode steps as CUDA graphs, and others layer by layer.

    A graph is captured when its size is met for the second time: the first run compiles kernels. sizes: padded numbers
    of requests, ascending; larger steps run layer by layer. is_capturable: whether the KV cache's backends are.
    num_replays: steps that ran as graphs. refusals: number of sizes that could not be captured, by reason.
    """

    def __init__(self, device: Device, sizes: Sequence[int], *, is_capturable: bool) -> None:
        self._device = device
        self.sizes: list[int] = sorted(sizes) if is_capturable else []
        self.whole_block_tables = is_capturable
        self._graphs: dict[tuple[object, ...], DecodeGraph] = {}
        self.num_replays = 0
        self.refusals: Counter[str] = Counter()

    def plan(self, num_scheduled_tokens: Mapping[str, int]) -> BatchPlan:
        """Pad a decode step to the next captured size."""
        plan = BatchPlan.without_padding(num_scheduled_tokens)
        if plan.num_tokens != plan.num_reqs:
            return plan
        index = bisect.bisect_left(self.sizes, plan.num_reqs)
        if index == len(self.sizes):
            return plan
        size = self.sizes[index]
        return plan._replace(num_tokens_padded=size, num_reqs_padded=size)

    def forward(self, model: LanguageModel, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return inputs.run(model, context)

    def choose(self, frame: Frame) -> Executable:
        """Return the graph of a decode frame that wants its logits rows only."""
        wants, plan = frame.wants, frame.batch.layout.plan
        is_decode = frame.batch.layout.is_all_decodes and plan.num_reqs > 0
        if not is_decode or wants.all_rows or wants.aux_layers or plan.num_reqs_padded not in self.sizes:
            return self
        if frame.inputs.hidden is not None or not wants.logits_rows:
            return self
        key = plan.num_reqs_padded, wants.greedy, _addresses(frame)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = DecodeGraph(self)
        return graph

    def forget(self) -> None:
        self._graphs.clear()

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """Capture a graph; None where the model cannot be captured."""
        if not self.sizes:
            return None
        try:
            return self._device.capture(work)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self.refusals[reason] += 1
            logger.warning("Decode steps run layer by layer: they cannot be captured in a CUDA graph: %s", reason)
            # The next size would fail as well.
            self.sizes.clear()
            return None


@dataclass(slots=True)
class _Outputs:
    """Results of a captured forward pass, in the graph's memory."""

    hidden: Tensor | None = None
    chosen: ChosenTokens | None = None


class DecodeGraph(Executable):
    """The graph of decode steps of one size, from token ids to hidden states or greedy tokens."""

    def __init__(self, captures: GraphExecutable) -> None:
        self._captures = captures
        self._has_run = False
        self._replay: Callable[[], None] | None = None
        self._outputs = _Outputs()

    def run(self, frame: Frame) -> None:
        if self._replay is None:
            if not self._has_run:
                self._captures.run(frame)
                self._has_run = True
                return
            self._replay = self._capture(frame)
            if self._replay is None:
                self._captures.run(frame)
                return
        self._replay()
        self._captures.num_replays += 1
        outputs, num_reqs = self._outputs, frame.batch.layout.plan.num_reqs
        frame.aux, frame.all_hidden = frame.aux_received, None
        frame.hidden = None if outputs.hidden is None else outputs.hidden[:num_reqs]
        if outputs.chosen is not None:
            token_ids, has_failed = outputs.chosen
            frame.chosen = ChosenTokens(token_ids[:num_reqs], has_failed[:num_reqs])
        else:
            frame.chosen = None

    def _capture(self, frame: Frame) -> Callable[[], None] | None:
        outputs, model = self._outputs, frame.model

        def work() -> None:
            hidden = frame.inputs.run(model, frame.context)
            if frame.wants.greedy:
                chosen = model.compute_greedy(hidden)
                outputs.chosen = greedy_tokens(model.compute_logits(hidden)) if chosen is None else chosen
            else:
                outputs.hidden = hidden

        return self._captures.capture(work)


def _addresses(frame: Frame) -> tuple[int, ...]:
    """Addresses of the tensors that the kernels read."""
    inputs = frame.inputs
    tensors = [inputs.tokens, inputs.positions, *inputs.named.values()]
    for geometry in frame.batch.geometry:
        tensors += [geometry.seq_lens, geometry.block_table, geometry.slot_mapping, geometry.query_start_loc]
    return tuple(tensor.data_ptr() for tensor in tensors)

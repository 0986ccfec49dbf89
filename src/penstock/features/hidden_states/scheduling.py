"""Scheduler side of hidden states: sizes are counted before a request runs, and outputs get those of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.contract import ModelRunnerOutput, SampledOutput, SchedulerOutput, part_of
from penstock.errors import InvalidParameter, UnsupportedParameter
from penstock.features.hidden_states import FEATURE, HiddenStatesOptions
from penstock.features.hidden_states.memory import BYTES_PER_NUMBER, step_bytes
from penstock.features.hidden_states.messages import HiddenStatesPart, OutputHiddenStates, StepHiddenStates
from penstock.observability.units import format_bytes
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices


@dataclass(slots=True)
class _Asked:
    """A request for hidden states. numbers: of its layers. num_bytes: at most.

    position: of its next row in the results; None until a step that begins it is read.
    start: position of the first row in `pieces`, the rows since its last output.
    """

    part: HiddenStatesPart
    numbers: frozenset[int]
    num_bytes: int
    position: int | None = None
    start: int = 0
    num_rows: int = 0
    pieces: list[bytes] = field(default_factory=list)
    dtype: str = ""
    row_bytes: int = 1

    def begin(self, position: int) -> None:
        """Begin again at a position: the request is new to the workers. Rows that no output has are lost."""
        self.position, self.num_rows = position, 0
        self.pieces.clear()

    def take(self, step: StepHiddenStates, req_id: str, num_scheduled: int, num_drafts: int, num_sampled: int) -> None:
        """Take the rows of accepted tokens from a step."""
        if self.position is None:
            return
        data, num_rows = step.data[req_id], step.num_rows[req_id]
        self.dtype, self.row_bytes = step.dtype, len(data) // num_rows
        first = self.position + num_scheduled - num_rows
        self.position += num_scheduled - num_drafts + max(0, num_sampled - 1)
        if not self.part.has_all:
            if not num_sampled:
                return
            self.start, self.num_rows = first, 0
            self.pieces.clear()
        known = max(0, self.start + self.num_rows - first)
        rows = data[known * self.row_bytes : (self.position - first) * self.row_bytes]
        if rows:
            self.pieces.append(rows)
            self.num_rows += len(rows) // self.row_bytes

    def output(self) -> OutputHiddenStates:
        """The rows since the last output."""
        pieces, start = self.pieces, self.start
        self.pieces, self.start, self.num_rows = [], self.start + self.num_rows, 0
        return OutputHiddenStates(
            asked=self.part, dtype=self.dtype, row_bytes=self.row_bytes, start=start, pieces=pieces
        )


class HiddenStatesScheduling(SchedulerFeature):
    """Follows requests for hidden states. Only the core's thread calls the methods."""

    def __init__(self, services: SchedulerServices) -> None:
        config = services.config
        self._options: HiddenStatesOptions = FEATURE.options_of(config)
        self._config = config
        self._asked: dict[str, _Asked] = {}
        # Requests that have ended with the step whose results are taken in.
        self._ended: dict[str, _Asked] = {}
        self._running_bytes = 0
        self._running_numbers: frozenset[int] = frozenset()
        self._running_ids: set[str] = set()

    def request_added(self, request: Request) -> None:
        part = part_of(request.parts, HiddenStatesPart)
        if part is None:
            return
        model = self._config.model
        numbers = part.numbers(model.num_layers)
        if self._config.parallel.pipeline_parallel_size > 1 and set(numbers) != {model.num_layers}:
            raise UnsupportedParameter(
                f"hidden_states_layers={list(part.layers)} with pipeline_parallel_size="
                f"{self._config.parallel.pipeline_parallel_size}: only the last stage returns hidden states, and other "
                "stages have these layers. Leave hidden_states_layers out, or start the engine without pipeline stages."
            )
        num_rows = request.length_limit - 1 if part.has_all else 1
        num_bytes = num_rows * len(numbers) * model.hidden_size * BYTES_PER_NUMBER
        sizes = f"{num_rows:,} tokens, {len(numbers)} layers and hidden size {model.hidden_size:,}"
        for option in ("max_output_bytes", "max_bytes"):
            self._check(num_bytes, option, f"return_hidden_states={part.tokens!r} gives {sizes}")
        num_tokens = self._config.scheduler.max_num_batched_tokens
        sizes = f"up to {num_tokens:,} tokens, {len(set(numbers))} layers and hidden size {model.hidden_size:,}"
        num_step_bytes = step_bytes(self._config, numbers)
        self._check(num_step_bytes, "max_step_bytes", f"hidden_states_layers: a step has {sizes}, noted and copied")
        self._ended.pop(request.req_id, None)
        self._asked[request.req_id] = _Asked(part, frozenset(numbers), num_bytes)

    def begin_admission(self, running: Sequence[Request]) -> None:
        self._running_ids.clear()
        self._running_bytes, self._running_numbers = 0, frozenset()
        if self._asked:
            self._note_running(running)

    def admits(self, request: Request, in_step: Sequence[Request]) -> bool:
        asked = self._asked.get(request.req_id)
        if asked is None:
            return True
        self._note_running(in_step)
        if self._running_bytes + asked.num_bytes > self._options.max_bytes:
            return False
        return step_bytes(self._config, self._running_numbers | asked.numbers) <= self._options.max_step_bytes

    def request_ended(self, request: Request) -> None:
        asked = self._asked.pop(request.req_id, None)
        if asked is not None:
            self._ended[request.req_id] = asked

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:
        self._ended.clear()
        for new in message.scheduled_new_reqs:
            if new.req_id in self._asked:
                self._asked[new.req_id].begin(new.num_computed_tokens)
        step = part_of(results.parts, StepHiddenStates)
        if step is None or not isinstance(results, SampledOutput):
            return
        num_sampled = dict(zip(results.req_ids, map(len, results.sampled_token_ids), strict=False))
        for req_id in step.data.keys() & self._asked.keys():
            num_drafts = len(message.scheduled_spec_decode_tokens.get(req_id, ()))
            num_scheduled = message.num_scheduled_tokens[req_id]
            self._asked[req_id].take(step, req_id, num_scheduled, num_drafts, num_sampled.get(req_id, 0))

    def parts_of_outputs(self, outputs: Sequence[EngineCoreOutput]) -> Mapping[str, OutputHiddenStates]:
        parts = {}
        for output in outputs:
            asked = self._asked.get(output.req_id) or self._ended.get(output.req_id)
            if asked is not None and asked.pieces:
                parts[output.req_id] = asked.output()
        self._ended.clear()
        return parts

    def _note_running(self, requests: Iterable[Request]) -> None:
        """Count the requests that run."""
        for request in requests:
            asked = self._asked.get(request.req_id)
            if asked is not None and request.req_id not in self._running_ids:
                self._running_ids.add(request.req_id)
                self._running_bytes += asked.num_bytes
                self._running_numbers |= asked.numbers

    def _check(self, num_bytes: int, option: str, what: str) -> None:
        """Raise InvalidParameter for more bytes than the option allows."""
        most: int = getattr(self._options, option)
        if num_bytes > most:
            raise InvalidParameter(
                f"{what}, {format_bytes(num_bytes)} in float32. Allowed: {format_bytes(most)} ({option}). Ask for "
                "fewer tokens or layers, or start the engine with additional_config="
                f'{{"{FEATURE.name}": {{"{option}": {num_bytes}}}}}.'
            )

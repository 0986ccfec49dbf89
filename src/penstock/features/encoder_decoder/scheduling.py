"""Scheduler side of encoder-decoder models: sources are checked, and a step encodes a limited number of positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.contract import CrossAttentionSpec, ModelRunnerOutput, SchedulerOutput, part_of
from penstock.errors import ContextTooLong, InvalidRequest
from penstock.features.encoder_decoder.messages import SourcePart, SpeechResult, StepSpeech
from penstock.scheduler.feature import SchedulerFeature
from penstock.scheduler.outputs import EngineCoreOutput
from penstock.scheduler.request import Request
from penstock.scheduler.services import SchedulerServices


class SourceScheduling(SchedulerFeature):
    """Admits requests as long as a step encodes no more positions than it runs tokens at most, or one source."""

    def __init__(self, services: SchedulerServices) -> None:
        self._services = services
        self._running: frozenset[str] = frozenset()
        # Results of speech of the step that is settled, by request.
        self._results: dict[str, SpeechResult] = {}

    @property
    def _longest(self) -> int:
        """Positions of the longest source, by the KV cache."""
        specs = (group.spec for group in self._services.scheduler.kv_cache.groups)
        return max(spec.max_source_positions for spec in specs if isinstance(spec, CrossAttentionSpec))

    def request_added(self, request: Request) -> None:
        part = part_of(request.parts, SourcePart)
        if part is None or part.length < 1:
            raise InvalidRequest(
                f"Request {request.req_id!r} has no input for the encoder. Give this model a prompt, or a dictionary "
                "with encoder_prompt."
            )
        if part.length > self._longest:
            raise ContextTooLong(
                f"The encoder's input has {part.length:,} positions, but this model's encoder takes {self._longest:,}. "
                "Shorten it."
            )

    def begin_admission(self, running: Sequence[Request]) -> None:
        self._running = frozenset(request.req_id for request in running)

    def admits(self, request: Request, in_step: Sequence[Request]) -> bool:
        """Whether the step's encoder has room for the request's source."""
        begun = sum(one.source_length for one in in_step if one.req_id not in self._running)
        config = self._services.config
        budget = config.multimodal.max_num_encoder_input_tokens or config.scheduler.max_num_batched_tokens
        return not begun or begun + request.source_length <= budget

    def take_results(self, message: SchedulerOutput, results: ModelRunnerOutput) -> None:
        step = part_of(results.parts, StepSpeech)
        self._results = {} if step is None else step.results

    def parts_of_outputs(self, outputs: Sequence[EngineCoreOutput]) -> Mapping[str, SpeechResult]:
        return self._results

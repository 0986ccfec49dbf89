"""Dispatcher between callers and the core: submits requests and delivers their outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from penstock.config import EngineConfig
from penstock.contract.feature import features_of
from penstock.engine.core.core_client import CoreClient
from penstock.engine.inputs.input_processor import InputProcessor
from penstock.engine.messages import EngineRequest
from penstock.engine.output.output_processor import FollowUp, OutputProcessor
from penstock.engine.output.progress import Inbox, Progress
from penstock.engine.statistics.metric_totals import RequestTotals
from penstock.engine.statistics.metrics import EngineMetrics, Metric
from penstock.errors import InvalidRequest
from penstock.features.multimodal.inputs.request_media import request_media
from penstock.media.loader import MediaLoader
from penstock.scheduler.outputs import EngineCoreOutput, FinishReason
from penstock.text.tokenizer import Tokenizer
from penstock.worker.capabilities import check_options


def start_core(config: EngineConfig, meanwhile: Callable[[], object] = lambda: None) -> CoreClient:
    """Start the engine core of this configuration, in this process, or the client of cores in other processes.

    meanwhile: called while those start, or before the model is loaded into this process.

    Raises what loading the model raises, and what `meanwhile` does.
    """
    check_options(config)
    # Raises for options of media.
    MediaLoader.of(config.multimodal)
    if config.parallel.has_core_process:
        from penstock.engine.processes.core_group import CoreGroup

        return CoreGroup(config, meanwhile=meanwhile)
    meanwhile()
    from penstock.engine.core.engine_core import EngineCore

    return EngineCore(config)


def output_processor_for(config: EngineConfig, tokenizer: Tokenizer) -> OutputProcessor:
    """Output processor of an engine. Samples of one prompt share its KV blocks if the prefix cache is enabled and the
    prompt is longer than one block.
    """
    can_share = config.cache.enable_prefix_caching
    return OutputProcessor(
        tokenizer,
        EngineMetrics(config.model.model, has_prefix_cache=can_share),
        shared_prompt_length=config.cache.block_size + 1 if can_share else None,
        reasoning=config.constraints_wait_for,
    )


def input_processor_for(
    config: EngineConfig, tokenizer: Tokenizer, core: CoreClient, front_end: int = 0
) -> InputProcessor:
    """Input processor of an engine, with the limits of its core. front_end: its number among those of one broker."""
    media = request_media(config, tokenizer)
    if media is not None:
        tokenizer.media_markers = media.markers
    return InputProcessor(
        config.model,
        tokenizer,
        max_model_len=core.max_model_len,
        vocab_size=core.vocab_size,
        sampling=config.sampling,
        structured=config.structured,
        limits=config.limits,
        policy=config.scheduler.policy,
        engine=config.parallel.data_parallel_rank or 0,
        front_end=front_end,
        features={feature.name for feature in features_of(config)},
        media=media,
        loader=MediaLoader.of(config.multimodal),
    )


class Dispatcher:
    """Submits requests to a core and updates their progress from its outputs. One thread at a time may call it.

    lock: held while progress changes, for consumers in other threads; never during a step of the core.
    """

    def __init__(
        self, core: CoreClient, processor: OutputProcessor, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self.core = core
        self._processor = processor
        self._lock = threading.RLock() if lock is None else lock

    def admit(self, request: EngineRequest, prompt: str | None, inbox: Inbox) -> Progress:
        """Submit a request to the core, and track its progress.

        Raises ContextTooLong or InvalidRequest when the core refuses it, which leaves no trace of the request.
        """
        with self._lock:
            progress, first = self._processor.add(request, prompt, inbox)
        try:
            for core_request in first:
                self.core.add_request(core_request)
        except BaseException as error:
            self.abandon([request.req_id], error)
            raise
        return progress

    def step(self) -> None:
        """Run one step of the core, and deliver its outputs to the inboxes of their requests."""
        self._take(self.core.step())

    def abort(self, req_ids: Iterable[str]) -> None:
        """Abort requests; their consumers get a last output. Unknown ids are ignored."""
        core_ids = self._processor.core_ids(req_ids)
        outputs = {output.req_id: output for output in self.core.abort_requests(core_ids)}
        # Samples that wait for their prompt are unknown to the core.
        unknown = [EngineCoreOutput(req_id=core_id, finish_reason=FinishReason.ABORT) for core_id in core_ids]
        self._take([outputs.get(output.req_id, output) for output in unknown])

    def abandon(self, req_ids: Iterable[str], refusal: BaseException | None = None) -> None:
        """Abort requests whose consumers are gone, or that no core admitted, with the error."""
        with self._lock:
            core_ids = self._processor.forget(req_ids, refusal)
        self.core.abort_requests(core_ids)

    def count_media(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Take the counts of media items into the metrics; see `EngineMetrics.media_counts`."""
        self._processor.count_media(counts)

    def metrics(self) -> list[Metric]:
        """Current metrics of the core and its requests."""
        stats = self.core.stats()
        with self._lock:
            return self._processor.metrics(stats)

    def totals(self) -> RequestTotals:
        """Counters and histograms of the requests so far; any thread may ask, and waits for no step."""
        with self._lock:
            return self._processor.totals()

    def _take(self, outputs: Iterable[EngineCoreOutput]) -> None:
        with self._lock:
            follow_up = self._processor.process(outputs)
        if follow_up is not None:
            self._follow(follow_up)

    def _follow(self, follow_up: FollowUp) -> None:
        if follow_up.req_ids_to_abort:
            self.core.abort_requests(follow_up.req_ids_to_abort)
        refused = []
        for request in follow_up.requests_to_add:
            try:
                self.core.add_request(request)
            except InvalidRequest as error:
                refused.append(
                    EngineCoreOutput(req_id=request.req_id, finish_reason=FinishReason.INVALID, error=str(error))
                )
        if refused:
            self._take(refused)
